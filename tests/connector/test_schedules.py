"""Random schedules below vLLM's host tier: no row is wrong, no request is lost, nothing stays held.

A failure prints its seed and what was done. `SCHEDULES=400` runs so many (`make long` does); one of them again:
`SCHEDULES=400 pytest tests/connector/test_schedules.py -k seed-76-`.
"""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
from fake import FakeDaemon
from schedules import Schedule
from tiered import Engine

COUNT = int(os.environ.get("SCHEDULES", "16"))
ACTIONS = 120
SHAPES: list[dict[str, Any]] = [
    {},
    {"groups": "hybrid"},
    {"groups": "mixed"},
    {"ranks": 2},
    {"extra": {"blocks_per_chunk": 2}},
    {"prefix_caching": False},
    {"blocks": 24, "prefix_caching": False, "max_tokens_per_step": 64},
    {"extra": {"reset_moves_namespace": False}},
    {"groups": "hybrid", "blocks": 44, "extra": {"reset_moves_namespace": False}},
]


class Harms:
    """What happens to a `FakeDaemon` and to the copies of the engines on it."""

    def __init__(self, daemon: FakeDaemon, engines: list[Engine], chance: random.Random):
        self._daemon, self._engines, self._chance = daemon, engines, chance

    def all(self) -> list[Callable[[], None]]:
        daemon_s = [self.freeze, self.end, self.promote, self.replace, self.evict, self.fill]
        return [*daemon_s, self.hold, self.hold, self.let_go, self.fail_loads, self.fail_stores]

    def heal(self) -> None:
        self._daemon.is_frozen, self._daemon.is_up, self._daemon.promotions = False, True, 0
        for copies in self._copies():
            copies.is_holding, copies.fail_loads, copies.fail_stores = False, 0, 0
        for session in self._daemon.sessions:
            session.is_refilling = not session.is_closed

    def freeze(self) -> None:
        self._daemon.is_frozen = True

    def end(self) -> None:
        self._daemon.is_up = False

    def promote(self) -> None:
        keys = list(self._daemon.index)
        self._daemon.promotions = self._chance.randint(1, 20)
        self._daemon.promoted = {key[2] for key in self._chance.sample(keys, len(keys) // 2)}

    def replace(self) -> None:
        self._daemon.replace_pool()

    def evict(self) -> None:
        self._daemon.evict_all()

    def fill(self) -> None:
        for session in self._daemon.sessions:
            session.is_refilling = False

    def hold(self) -> None:
        for copies in self._copies():
            copies.is_holding = True

    def let_go(self) -> None:
        for copies in self._copies():
            copies.is_holding = False

    def fail_loads(self) -> None:
        for copies in self._copies():
            copies.fail_loads = self._chance.randint(1, 2)

    def fail_stores(self) -> None:
        for copies in self._copies():
            copies.fail_stores = self._chance.randint(1, 3)

    def _copies(self) -> list[Any]:
        """An engine that has ended has none."""
        return [engine.copies for engine in self._engines if hasattr(engine.copies, "is_holding")]


@pytest.mark.parametrize("seed", range(COUNT), ids=lambda seed: f"seed-{seed}-")
def test_whatever_happens_no_row_is_wrong_and_no_request_is_lost(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(f"shape {seed}")
    shape = SHAPES[seed % len(SHAPES)]
    daemon, rows, engines = FakeDaemon(chance.choice((64, 256, 512))), chance.choice((12, 24, 64)), []

    def start() -> Engine:
        engines.append(Engine(monkeypatch, daemon, rows=rows, **copy.deepcopy(shape)))
        return engines[-1]

    harms = Harms(daemon, engines, chance)
    schedule = Schedule(seed, start, chance.choice((1, 2)), harms.all(), harms.heal)
    try:
        schedule.run(ACTIONS)
    finally:
        for engine in schedule.engines:
            engine.stop()
    assert schedule.known.compared
