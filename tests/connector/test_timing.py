"""The histograms tell the truth to within a sixteenth, and the report survives whatever ends the engine."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from forebay.vllm.timing import Histogram, Timings, timed


@pytest.mark.parametrize("seed", range(5))
def test_a_quantile_is_at_most_a_sixteenth_too_high(seed: int) -> None:
    chance = random.Random(seed)
    values = sorted(int(10 ** chance.uniform(0, 10)) for _ in range(1000))
    histogram = Histogram()
    for value in values:
        histogram.record(value)
    for share in (0.01, 0.5, 0.9, 0.99, 1.0):
        true = values[int(share * 1000) - 1]
        assert true <= histogram.quantile_ns(share) <= true * 17 / 16 + 1, f"seed {seed}, share {share}"
    assert histogram.max_ns == values[-1]
    assert histogram.total_ns == sum(values)


def test_an_empty_histogram_is_all_zero() -> None:
    assert Histogram().summary() == {"count": 0, "p50_ms": 0, "p99_ms": 0, "max_ms": 0, "total_ms": 0}


class Hooks:
    def __init__(self) -> None:
        self.timings = Timings()

    @timed
    def fine(self) -> int:
        return 1

    @timed
    def _fails(self) -> None:
        raise ValueError


def test_calls_are_timed_even_where_they_raise() -> None:
    hooks = Hooks()
    assert hooks.fine() == 1
    with pytest.raises(ValueError):
        hooks._fails()
    assert {name: histogram.count for name, histogram in hooks.timings.calls.items()} == {"fine": 1, "fails": 1}


def test_a_step_is_the_sum_of_its_calls() -> None:
    timings = Timings()
    timings.called("a", 1_000_000)
    timings.called("b", 2_000_000)
    timings.waited(500_000)
    assert timings.end_step() == 0.003
    assert timings.end_step() == 0
    assert (timings.steps.max_ns, timings.steps.count, timings.waits.max_ns) == (3_000_000, 2, 500_000)


def test_the_report_is_written_where_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    monkeypatch.setenv("FOREBAY_STEP_STATS", str(path))
    timings = Timings()
    for count in (1, 2):
        timings.end_step()
        timings.report(faults=3)
        report = json.loads(path.read_text())
        assert (report["step"]["count"], report["calls"], report["faults"]) == (count, {}, 3)
    assert list(tmp_path.iterdir()) == [path]


def test_no_report_is_written_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Timings().report()
    assert not list(tmp_path.iterdir())
