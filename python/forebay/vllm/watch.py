"""Notices that the workers compute with other weights than before.

Holds true: every call from outside that can reach the workers' weights ends with a look at them, so that a step after it
never runs under the old name. What writes into them without such a call is seen at the next reset of the engine's prefix
cache, and not before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from forebay.vllm import compat
from forebay.vllm.guard import logger
from forebay.vllm.probe import Weight, weigh

# All of them run while no step does.
_DOORS = ("collective_rpc", "wake_up", "reset_prefix_cache")


class WeightsWatch:
    """Stands in the doors of one engine core, and calls `moved(is_first)` after each call that brought other weights.

    `is_first` says that they are again what the engine began with. A look reads all weights once where they are, on a CPU at
    about 3 GB/s a core.
    """

    def __init__(self, core: Any, moved: Callable[[bool], None]):
        self._core = core
        self._moved = moved
        self._first = self._seen = self._weigh()
        for door in _DOORS:
            setattr(core, door, self._looking(getattr(core, door)))

    def _looking(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def then_look(*args: Any, **kwargs: Any) -> Any:
            try:
                answer = call(*args, **kwargs)
            except BaseException:
                # Of workers that failed vLLM may still have answers on their way: they are not asked now.
                self._seen = None
                self._moved(False)
                raise
            method = args[0] if args else kwargs.get("method")
            self._look(method if isinstance(method, str) else "")
            return answer

        return then_look

    def _look(self, method: str) -> None:
        seen = None if method in compat.WEIGHTS_UNDER_WAY else self._weigh()
        is_blind = seen is None or (method in compat.WEIGHTS_LOADED and not all(weight.is_whole for weight in seen))
        if is_blind or seen != self._seen:
            self._moved(not is_blind and seen == self._first)
        self._seen = seen

    def _weigh(self) -> tuple[Weight, ...] | None:
        """None where the weights cannot be told, so that they count as others at each look."""
        try:
            if compat.weights_are_asleep(self._core):
                return None
            weights = tuple(compat.on_workers(self._core, weigh))
            return None if None in weights else weights
        except Exception:  # noqa: BLE001 - no exception reaches the engine
            logger.exception("forebay cannot ask the workers for their weights")
            return None
