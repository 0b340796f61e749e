"""What users may write into `kv_connector_extra_config`.

Holds true: parsing never raises; what cannot be used is named in a warning, with the nearest known key, and the default
stands in. The same mapping gives the same settings in the scheduler and in every worker.
"""

from __future__ import annotations

import difflib
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

SOCKET_FILE = "forebay.sock"
# The second is the daemon's own name for it: whoever sets it for `forebay serve` means the engines too.
SOCKET_VARIABLES = ("FOREBAY_SOCKET", "FOREBAY_SOCKET_DIRECTORY")

# Read by vLLM's own part of the connector, or filled in by Forebay.
UPSTREAM_KEYS = frozenset(
    {
        "spec_name",
        "spec_module_path",
        "offload_prompt_only",
        "block_size",
        "blocks_per_chunk",
        "self_describing_kv_events",
    }
)
# Belong to vLLM's own offloading and mean nothing here.
FOREIGN_KEYS = frozenset(
    {
        "cpu_bytes_to_use",
        "eviction_policy",
        "cache_policy_module_path",
        "store_threshold",
        "max_tracker_size",
        "canonical_layout",
        "secondary_tiers",
        "backpressure",
    }
)


@dataclass(frozen=True)
class Settings:
    """Forebay's own options; each default is the value that suits a serving host."""

    socket: str = ""
    """Directory of the daemon's sockets, or the path of its `forebay.sock`. Found by `default_socket` if empty."""
    tenant: str = ""
    """Engines of different tenants share nothing."""
    step_budget_ms: float = 2.0
    """Longest wait for the daemon in one scheduler step, over all requests: about a tenth of a short decode step."""
    lookup_deadline_ms: float = 1000.0
    """Longest time a request waits for an answer and for promotions; then it is computed. See `promotion_lag`."""
    promotion_lag: float = 0.25
    """How far promotions may fall behind computing, as a share of the time that computing what is missing would take; then
    the request goes on with what has come up. What a tier that is slower than the engine costs is about this share.
    """
    restock_ms: float = 20.0
    """Longest time a request with blocks to store waits for a low stock of empty slots; then some are not stored."""
    stock_blocks: int = 0
    """Empty slots of each group kept at hand for stores. 0: what one step can fill."""
    max_leased_requests: int = 256
    """Requests that may hold leases at once; over it requests miss. vLLM's usual bound on running requests."""
    threads: int = 0
    """Copy threads of each worker. 0: chosen by the copy engine."""
    reset_moves_namespace: bool = True
    """Whether a reset of the connector's cache moves this engine to a private namespace, as a weight swap needs.

    Set to false for fleets that only put engines to sleep.
    """

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> tuple[Settings, list[str]]:
        """The settings, and what is to be warned of."""
        known = {field.name: field.default for field in fields(cls)}
        values: dict[str, Any] = {}
        warnings = []
        for key, value in extra.items():
            if key in FOREIGN_KEYS:
                warnings.append(f"`{key}` belongs to vLLM's own offloading and has no effect on Forebay")
            elif key in UPSTREAM_KEYS:
                continue
            elif key not in known:
                warnings.append(f"unknown option `{key}` in kv_connector_extra_config{_nearest(key, known)}")
            elif (fitting := _fit(value, known[key])) is None:
                warnings.append(f"`{key}` cannot be {value!r}; {known[key]!r} is used")
            else:
                values[key] = fitting
        values["socket"] = _directory(values.get("socket") or default_socket())
        return cls(**values), warnings


def default_socket() -> str:
    """`FOREBAY_SOCKET`, else the first of the daemon's usual directories that is there, else the most usual one."""
    for variable in SOCKET_VARIABLES:
        if named := os.environ.get(variable):
            return named
    user = os.getuid()
    usual = [Path("/run/forebay")]
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        usual.append(Path(runtime) / "forebay")
    usual.append(Path(f"/tmp/forebay-{user}"))
    # Others may make directories in /tmp: theirs are not trusted.
    trusted = (path for path in usual if path.is_dir() and path.stat().st_uid in (0, user))
    return str(next(trusted, usual[0] if user == 0 else usual[1]))


def bounded_engine_id(engine_id: str) -> str:
    """The engine's name for the daemon, which takes 1 to 64 bytes."""
    if 0 < len(engine_id.encode()) <= 64:
        return engine_id
    return hashlib.sha256(engine_id.encode()).hexdigest()[:32]


def _directory(path: str) -> str:
    return os.path.dirname(path) if path.endswith(f"/{SOCKET_FILE}") else path


def _nearest(key: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(key, [*known, *UPSTREAM_KEYS], n=1)
    return f", did you mean `{close[0]}`?" if close else f"; known are {', '.join(sorted(known))}"


def _fit(value: Any, default: Any) -> Any:
    """The value in the type of the default, None if it does not fit."""
    if isinstance(default, bool) or isinstance(value, bool):
        return value if type(value) is type(default) else None
    if isinstance(default, str):
        return value if isinstance(value, str) else None
    if not isinstance(value, int | float) or value < 0 or (isinstance(default, int) and value != int(value)):
        return None
    return type(default)(value)
