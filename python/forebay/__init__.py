"""Forebay keeps the KV cache of LLM engines on the host: shared between engines, alive across restarts.

`Client` is for any program. Engines use `forebay.vllm`. The daemon is the command `forebay serve`.
"""

from forebay._native import Client, ForebayError, __version__

__all__ = ["Client", "ForebayError", "__version__"]
