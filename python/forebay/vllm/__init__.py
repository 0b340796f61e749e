"""Forebay for vLLM 0.32 and newer: the KV cache of every engine on the host, kept by `forebay serve`.

Users write `--kv-transfer-config '{"kv_connector":"ForebayConnector","kv_role":"kv_both"}'` and nothing else.

Read in the order of a request: `connector` (vLLM's hooks), `manager` (the scheduler's side) with `lookup`, `patience`,
`stores`, `savings` and `pace`, `slots` (what travels to the workers), `worker` (the copies). Around them: `identity` (who may share with whom) with
`loaded`, `fingerprint` and `signature` (weights on disk), `hub` (where a model's files are), `processor` (its code, and its
processor of images), `elsewhere` (models that read more), `probe` (pages and weights in
the workers) and `watch` (weights that change), `adapters` (the same for requests of LoRA adapters), `settings` (what users
set), `session` (the way to the daemon), `tier` (the same pool below
vLLM's own host tier) with `tiering` (its connector), `guard` (no exception reaches the engine), `health` and `timing` (how it does and what
it costs), `compat` (all that depends on vLLM's version).
"""

import time

from forebay.vllm.names import (
    CONNECTOR,
    CONNECTOR_MODULE,
    SPEC,
    SPEC_MODULE,
    TIERING_CONNECTOR,
    TIERING_CONNECTOR_MODULE,
)

IMPORTED_NS = time.time_ns()
# When vLLM first loaded its plugins in this process, before it read anything of a model: by the clock of this host, and
# by one that nobody can step. `None` where vLLM was told to load no plugins.
registered_ns: tuple[int, int] | None = None

__all__ = ["CONNECTOR", "CONNECTOR_MODULE", "SPEC", "SPEC_MODULE", "register"]


def register() -> None:
    """The `vllm.general_plugins` entry point: tells vLLM's factories where the classes are, and imports none of them.

    vLLM calls it in the front end, the engine core and every worker, perhaps more than once. Never raises: an engine that
    does not use Forebay must start even where it cannot work.
    """
    global registered_ns
    registered_ns = registered_ns or (time.time_ns(), time.clock_gettime_ns(time.CLOCK_BOOTTIME))
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.v1.kv_offload.factory import OffloadingSpecFactory

        for add, name, module in (
            (KVConnectorFactory.register_connector, CONNECTOR, CONNECTOR_MODULE),
            (KVConnectorFactory.register_connector, TIERING_CONNECTOR, TIERING_CONNECTOR_MODULE),
            (OffloadingSpecFactory.register_spec, SPEC, SPEC_MODULE),
        ):
            try:
                add(name, module, name)
            except ValueError:  # registered before
                pass
    except Exception:
        import logging

        logging.getLogger("vllm.forebay").exception("forebay cannot register with this vllm")
