"""Forebay keeps the KV cache of LLM engines on the host: shared between engines, preserved across restarts.

`Client` is for any program: it copies blocks through the daemon. An engine that maps the pool has an
`EngineSession` in its scheduler and a `WorkerEngine` in each worker; `forebay.vllm` is one. The daemon is the
command `forebay serve`. A `Store` accesses Redis, Valkey or a shared directory directly, with the same block names
as daemons.
"""

from forebay._native import Client, EngineSession, ForebayError, Ticket, WorkerEngine, __version__, find_sockets
from forebay.store import Store

__all__ = ["Client", "EngineSession", "ForebayError", "Store", "Ticket", "WorkerEngine", "__version__", "find_sockets"]
