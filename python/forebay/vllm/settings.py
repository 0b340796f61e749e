"""What users may write into `kv_connector_extra_config`.

Holds true: parsing never raises; what cannot be used is named in a warning, with the nearest known key, and the default
stands in. vLLM's part of the connector sees only options that Forebay knows and can serve. The same mapping gives
the same settings in the scheduler and in every worker.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from forebay._native import find_sockets

# No option means anything beyond it; of two, each costs memory or a thread.
MAX_NUMBER = 1e9
MAX_NUMBERS = {"threads": 1024, "stock_blocks": 65_536, "gpu_multiprocessors": 1024}
GpuMethod = Literal["auto", "kernel", "batch", "loop", "pitched"]
CHOICES = {"gpu_method": get_args(GpuMethod)}

# What becomes of each option that vLLM's offloading connector and its own specs read: None is passed on to vLLM's part
# of the connector, all else is why it is not.
_FILLED_IN = "Forebay fills it in itself"
_NO_EVENTS = "Forebay names no tokens in events, and vLLM would keep the tokens of every block for ever"
_FOREIGN = "it belongs to vLLM's own offloading and has no effect on Forebay"
VLLM_OPTIONS: Mapping[str, str | None] = {
    "block_size": None,
    "blocks_per_chunk": None,
    "offload_prompt_only": None,
    "spec_name": _FILLED_IN,
    "spec_module_path": _FILLED_IN,
    "sync_load_budget_bytes": "all loads of Forebay are asynchronous, so that a failed load is computed instead",
    "self_describing_kv_events": _NO_EVENTS,
    "canonical_layout": "Forebay stores the layout of the engine",
    "cpu_bytes_to_use": _FOREIGN,
    "eviction_policy": _FOREIGN,
    "cache_policy_module_path": _FOREIGN,
    "store_threshold": _FOREIGN,
    "max_tracker_size": _FOREIGN,
    "secondary_tiers": _FOREIGN,
    "backpressure": _FOREIGN,
    "tier_poll_interval_s": _FOREIGN,
}
# And below vLLM's own host tier, which is that offloading.
TIERING_OPTIONS: Mapping[str, str | None] = {**VLLM_OPTIONS} | dict.fromkeys(
    ("cpu_bytes_to_use", "eviction_policy", "cache_policy_module_path", "secondary_tiers", "backpressure")
    + ("tier_poll_interval_s", "sync_load_budget_bytes", "self_describing_kv_events", "spec_name", "spec_module_path")
)


@dataclass(frozen=True)
class Settings:
    """Forebay's own options; each default is the value that suits a serving host."""

    socket: str = ""
    """Directory of the daemon's sockets, or the path of its `forebay.sock`. Found by `find_sockets` if empty."""
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
    verify_loads: bool = True
    """Whether each block is compared with its checksum while it is loaded; see `docs/tiers/pool.md` for what it costs."""
    reset_moves_namespace: bool = True
    """Whether a reset of the connector's cache moves this engine to a private namespace, as a weight swap needs.

    Set to false for fleets that only put engines to sleep.
    """
    gpu_copies: bool = False
    """Whether this engine's KV is copied from and to an NVIDIA GPU. Off, because that was never run on a GPU."""
    gpu_method: GpuMethod = "auto"
    """How these copies are made, if the GPU can: see `GpuMethod`, and `docs/vllm.md#gpus`."""
    gpu_multiprocessors: int = 0
    """The most multiprocessors of the GPU that the kernel for loads takes. 0: chosen by the copy engine."""
    log_requests: bool = False
    """Whether a line in the engine's log says for each request where the KV of its prompt came from."""

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> tuple[Settings, list[str]]:
        """The settings, and which values of them cannot be used."""
        values: dict[str, Any] = {}
        warnings = []
        for name, default in _own().items():
            if name not in extra:
                continue
            largest = MAX_NUMBERS.get(name, MAX_NUMBER)
            choices = CHOICES.get(name)
            if (fitting := _fit(extra[name], default, largest)) is None or (choices and fitting not in choices):
                span = f": it is from 0 to {largest}" if name in MAX_NUMBERS else ""
                span = f": it is one of {', '.join(choices)}" if choices else span
                warnings.append(f"`{name}` cannot be {extra[name]!r}{span}; {default!r} is used")
            else:
                values[name] = fitting
        values["socket"] = find_sockets(values.get("socket") or None)
        return cls(**values), warnings


def refusal(extra: Mapping[str, Any], around: Iterable[Mapping[str, Any]] = ()) -> str | None:
    """Why an engine with these options may share nothing: it was meant to have a tenant, and nobody can tell which.

    `around`: the options of the connectors that hold this one, which would not reach it.
    """
    hint = 'hint: write `"tenant": "NAME"` into the `kv_connector_extra_config` of Forebay itself, or leave it out'
    if not isinstance(tenant := extra.get("tenant", ""), str):
        return f"`tenant` cannot be {tenant!r}: it must be text; {hint}"
    near = [(key,) for key in extra if key not in {*_own(), *VLLM_OPTIONS} and _closest(key.lower()) == "tenant"]
    inner = [key for key in _keys(extra) if key != ("tenant",)]
    outer = [key for options in around for key in _keys(options) if key[0] != "connectors"]
    if (key := next(iter((*near, *filter(_means_tenant, inner + outer))), None)) is not None:
        return f"option `{'.'.join(key)}` may be meant as `tenant`, and has no effect there; {hint}"
    return None


def passed_on(
    extra: Mapping[str, Any], options: Mapping[str, str | None] = VLLM_OPTIONS
) -> tuple[dict[str, Any], list[str]]:
    """What vLLM's part of the connector may see, and what is to be warned of. `options` are vLLM's.

    An option that nobody here knows is left out as well: a newer vLLM may act on it in ways that Forebay cannot serve.
    """
    known: dict[str, str | None] = {**dict.fromkeys(_own()), **options}
    passed = {key: value for key, value in extra.items() if known.get(key, "") is None}
    warnings = [
        f"`{key}` is ignored: {known[key]}"
        if key in known
        else f"unknown option `{key}` is ignored{_nearest(key, options)}"
        for key in extra
        if key not in passed
    ]
    return passed, warnings


def own(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Forebay's options among these."""
    return {key: value for key, value in extra.items() if key in _own()}


def bounded_engine_id(engine_id: str) -> str:
    """The engine's name for the daemon, which takes 1 to 64 bytes."""
    if 0 < len(engine_id.encode()) <= 64:
        return engine_id
    return hashlib.sha256(engine_id.encode()).hexdigest()[:32]


def incarnation(extra: Mapping[str, Any]) -> bytes:
    """Which start of the engine this is, for the daemon: 16 bytes, the same in the scheduler and in every worker."""
    return hashlib.sha256(str(extra["incarnation"]).encode()).digest()[:16]


def _own() -> dict[str, Any]:
    return {field.name: field.default for field in fields(Settings)}


def _keys(options: Any) -> Iterator[tuple[str, ...]]:
    """Each key, behind those on the way to it."""
    if isinstance(options, Mapping):
        for key, value in options.items():
            yield (str(key),)
            yield from ((str(key), *inner) for inner in _keys(value))
    elif isinstance(options, list | tuple):
        for value in options:
            yield from _keys(value)


def _means_tenant(key: Sequence[str]) -> bool:
    """More narrowly than among the names of our own options: other keys may be anything."""
    name = key[-1].casefold()
    return "tenant" in name or bool(difflib.get_close_matches(name, ["tenant"], cutoff=0.8))


def _nearest(key: str, options: Mapping[str, str | None]) -> str:
    close = _closest(key, options)
    return f", did you mean `{close}`?" if close else f"; known are {', '.join(sorted(_own()))}"


def _closest(key: str, options: Mapping[str, str | None] = VLLM_OPTIONS) -> str | None:
    passed = [name for name, reason in options.items() if reason is None]
    return next(iter(difflib.get_close_matches(key, [*_own(), *passed], n=1)), None)


def _fit(value: Any, default: Any, largest: float) -> Any:
    """The value in the type of the default, None if it does not fit."""
    if isinstance(default, bool) or isinstance(value, bool):
        return value if type(value) is type(default) else None
    if isinstance(default, str):
        return value if isinstance(value, str) else None
    if not isinstance(value, int | float) or not 0 <= value <= largest:
        return None
    if isinstance(default, int) and value != int(value):
        return None
    return type(default)(value)
