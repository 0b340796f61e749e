"""Forebay for vLLM 0.32 and newer: the KV cache of every engine on the host, kept by `forebay serve`.

Users write `--kv-transfer-config '{"kv_connector":"ForebayConnector","kv_role":"kv_both"}'` and nothing else.

Read in the order of a request: `connector` (vLLM's hooks), `manager` (the scheduler's side) with `lookup` and `stores`,
`slots` (what travels to the workers), `worker` (the copies). Around them: `identity` (who may share with whom), `settings`
(what users set), `session` (the way to the daemon), `guard` (no exception reaches the engine), `timing` (what it costs),
`compat` (all that depends on vLLM's version).
"""

from forebay.vllm.names import CONNECTOR, CONNECTOR_MODULE, SPEC, SPEC_MODULE

__all__ = ["CONNECTOR", "CONNECTOR_MODULE", "SPEC", "SPEC_MODULE", "register"]


def register() -> None:
    """The `vllm.general_plugins` entry point: makes the connector known by name in this process.

    vLLM calls it in the front end, the engine core and every worker, perhaps more than once. Never raises: an engine that
    does not use Forebay must start even where it cannot work.
    """
    try:
        from forebay.vllm import compat

        compat.register(CONNECTOR, CONNECTOR_MODULE, SPEC, SPEC_MODULE)
    except Exception:
        import logging

        logging.getLogger("vllm.forebay").exception("forebay cannot register with this vllm")
