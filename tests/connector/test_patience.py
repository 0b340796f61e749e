"""Waiting for promotions is worth it as long as they keep ahead of computing: what a tier costs and what it brings."""

from __future__ import annotations

import random

import pytest
from fake import FakeDaemon
from forebay.vllm.patience import GENERATION, LEAST_SECONDS, WINDOW_STEPS, Patience
from harness import Engine, Shape, prompt

SPEED = 20_000.0  # tokens a second
LAG = 0.25


def measured(speed: float = SPEED) -> Patience:
    """Of an engine that has computed some prompts, and schedules a step ahead, as vLLM does by default."""
    patience = Patience(LAG)
    for step in range(2 * WINDOW_STEPS):
        patience.stepped(max(0, step - 1) * 2048 / speed, 2048)
    return patience


def served_after(patience: Patience, prompt_tokens: int, tier: float, waiting: int = 1) -> tuple[float, float]:
    """When one of `waiting` equal requests goes on, of which a tier brings so many tokens a second in all, looked at every
    millisecond; and what has come by then."""
    for millisecond in range(1_000_000):
        now = millisecond / 1e3
        came = min(prompt_tokens, now * tier / waiting)
        if came >= prompt_tokens or patience.is_over(now, came, prompt_tokens, waiting):
            return now, came
    raise AssertionError("it waits for ever")


@pytest.mark.parametrize("seed", range(50))
def test_a_slow_tier_costs_a_share_of_computing_and_a_fast_one_is_waited_for(seed: int) -> None:
    chance = random.Random(seed)
    speed, tokens, waiting = 10 ** chance.uniform(3, 5.5), int(10 ** chance.uniform(1, 5)), chance.randint(1, 20)
    tier = speed * 10 ** chance.uniform(-4, 3)
    patience = measured(speed)
    waited, came = served_after(patience, tokens, tier, waiting)
    compute = waiting * tokens / speed
    done = waited + waiting * (tokens - came) / speed
    where = f"seed {seed}: {tokens} tokens, {waiting} waiting, engine {speed:.0f}/s, tier {tier:.0f}/s"
    assert done <= (1 + LAG) * compute + LEAST_SECONDS + 0.002, where
    if tier >= speed:
        assert came >= tokens, where
    elif tier < speed * 0.5 and compute > 10 * LEAST_SECONDS:
        assert came < tokens, where


def test_nothing_is_given_up_while_the_engines_speed_is_unknown() -> None:
    patience = Patience(LAG)
    assert patience.tokens_per_second == 0
    assert not patience.is_over(1e6, 0, 8000, 1)


def test_two_looks_are_always_waited_for() -> None:
    assert not measured().is_over(LEAST_SECONDS * 0.99, 0, 1, 1)
    assert measured().is_over(LEAST_SECONDS * 1.01, 0, 1, 1)


def test_the_speed_is_that_of_the_fastest_steps_and_not_of_decoding_or_pauses() -> None:
    patience, now = Patience(LAG), 0.0
    for _ in range(20):
        for tokens, seconds in [(4096, 0.2), (4096, 0.2)] + 20 * [(8, 0.01)]:
            patience.stepped(now, tokens)
            now += seconds
        patience.stepped(now, 0)
        now += 5.0  # nothing to do
    # Two steps of prefill, two of decoding, and one that is not counted but waited for.
    assert patience.tokens_per_second == pytest.approx((2 * 4096 + 16) / 0.43)


@pytest.mark.parametrize("ahead", [0, 1])
def test_an_engine_that_schedules_a_step_ahead_is_not_taken_for_a_faster_one(ahead: int) -> None:
    """Step n is scheduled when step n - 1 - ahead is computed."""
    patience = Patience(LAG)
    for step in range(100):
        patience.stepped(max(0, step - ahead) * 0.1, 2000)
    assert 0.75 * 20_000 <= patience.tokens_per_second <= 20_000 * 1.001


def test_a_speed_of_the_past_is_forgotten() -> None:
    patience, now = Patience(LAG), 0.0
    for seconds in [0.01] * 50 + [0.1] * (3 * GENERATION):
        patience.stepped(now, 1000)
        now += seconds
    assert patience.tokens_per_second == pytest.approx(8000)


def busy_engine(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> tuple[Engine, list[int]]:
    """With its speed measured, and a prompt in the pool alone; and what follows that prompt."""
    engine = Engine(daemon, monkeypatch, Shape(extra={"promotion_lag": LAG}))
    engine.generate("warm up", prompt(3, 100), max_tokens=2 * WINDOW_STEPS)
    cold = engine.generate("cold", prompt(1, 100))
    engine.forget()
    assert engine.connector.manager._patience.tokens_per_second > 0
    return engine, cold


def test_promotions_slower_than_computing_are_given_up(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, cold = busy_engine(daemon, monkeypatch)
    daemon.promotions = 10**9
    assert engine.generate("slow", prompt(1, 100)) == cold  # in the time of the test: its deadline is a minute
    assert engine.hits["slow"] == 0
    assert engine.stats["forebay:slow_promotions"] == 1
    assert engine.stats["forebay:late_lookups"] == 0
    engine.assert_nothing_is_held()


def test_what_had_come_up_by_then_is_used(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, cold = busy_engine(daemon, monkeypatch)
    first = engine.add("which", prompt(1, 100))
    daemon.promoted = set(first.block_hashes[3:])
    engine.run(first)
    engine.forget()
    daemon.promotions = 10**9
    assert engine.generate("slow", prompt(1, 100)) == cold
    assert engine.hits["slow"] == 48
    assert engine.stats["forebay:slow_promotions"] == 1
    engine.assert_nothing_is_held()
