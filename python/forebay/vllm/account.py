"""Where the tokens of one request's prompt came from, and the line in the log that says so (`log_requests`).

Invariants: what the engine had, what was loaded and what is computed add up to the prompt. A request has at most one
line: when its KV is there, after a load if there was one. One that ends before has none.
"""

from __future__ import annotations

import time

from forebay.vllm.guard import logger


class Account:
    """Of one request, from its arrival on."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._is_told = False
        self.engine_tokens = 0  # that the engine's own cache had at the last match
        self.load_tokens = 0  # of the load that vLLM asked for last
        self.share_of_tiers = 0.0  # of the blocks of that load: tiers brought them up, and this is their first hit

    def tell(self, request_id: str, prompt_tokens: int, block_tokens: int, *, is_loaded: bool) -> None:
        """The request's KV is there, with its load or, where that failed or there was none, without."""
        if self._is_told:
            return
        self._is_told = True
        loaded = self.load_tokens if is_loaded else 0
        from_tier = round(loaded * self.share_of_tiers)
        logger.info(
            "forebay request %s: blocks=%d tokens=%d hit_engine=%d hit_pool=%d hit_tier=%d computed=%d ms=%.1f",
            request_id,
            prompt_tokens // block_tokens,
            prompt_tokens,
            self.engine_tokens,
            loaded - from_tier,
            from_tier,
            prompt_tokens - self.engine_tokens - loaded,
            (time.monotonic() - self._began) * 1e3,
        )
