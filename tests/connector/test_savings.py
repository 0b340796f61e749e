"""What loads save is counted as vLLM counts it, never more: failed and useless loads save nothing."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from fake import FakeDaemon
from forebay.vllm import account, manager, metrics, savings
from forebay.vllm.pace import LEAST_STEPS, LEAST_TOKENS, Pace
from forebay.vllm.patience import WINDOW_STEPS, Patience
from forebay.vllm.savings import Savings
from harness import Engine, Shape, prompt

LONG = 10 * 16


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(savings, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def asked_again(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, shape: Shape | None = None) -> Engine:
    """An engine whose prompt 1 is in the pool, and in the pool alone."""
    engine = Engine(daemon, monkeypatch, shape)
    engine.generate("first", prompt(1, LONG))
    engine.forget()
    return engine


def assert_saved(engine: Engine, tokens: int) -> None:
    """The manager, the session and vLLM's metrics say the same."""
    assert engine.connector.manager.savings.tokens == tokens
    assert engine.session.saved_tokens == tokens
    assert engine.session.saved_seconds == pytest.approx(engine.connector.manager.savings.seconds)
    assert engine.stats[metrics.SAVED_TOKENS] == tokens
    engine.assert_no_faults()
    engine.assert_nothing_is_held()


@pytest.mark.parametrize("groups", ["full", "hybrid", "mixed"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_was_loaded_is_saved_as_vllm_counts_it(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, groups: str, ranks: int
) -> None:
    engine = asked_again(daemon, monkeypatch, Shape(groups=groups, ranks=ranks))
    engine.generate("again", prompt(1, LONG) + prompt(2, 40))
    assert engine.external_tokens > LONG // 2
    assert_saved(engine, engine.external_tokens)
    engine.generate("its own", prompt(1, LONG))  # the engine has it by now
    assert_saved(engine, engine.external_tokens)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_failed_load_saves_nothing(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    engine = asked_again(daemon, monkeypatch, Shape(ranks=ranks))
    engine.workers[-1].engine.fail_loads = 1
    engine.generate("again", prompt(1, LONG) + prompt(2, 40))
    assert engine.external_tokens > 0
    assert_saved(engine, 0)


def test_an_aborted_request_saves_nothing(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = asked_again(daemon, monkeypatch)
    copies = engine.workers[0].engine
    copies.is_holding = True
    request = engine.add("again", prompt(1, LONG) + prompt(2, 40))
    for _ in range(3):
        engine.step()
    assert engine.connector.manager._jobs, "its load is under way"
    engine.abort(request)
    copies.is_holding = False
    engine.run(request)
    assert_saved(engine, 0)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_no_more_is_saved_than_vllm_counts(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    chosen = random.Random(seed)
    engine = Engine(daemon, monkeypatch, Shape(blocks=40, ranks=chosen.choice([1, 2]), max_requests=6))
    under_way = []
    for number in range(60):
        under_way.append(engine.add(f"{number}", prompt(chosen.randrange(4), chosen.randrange(40, 200)), 6))
        engine.workers[-1].engine.fail_loads = int(chosen.random() < 0.2)
        for _ in range(chosen.randrange(4)):
            engine.step()
        if chosen.random() < 0.2:
            engine.abort(chosen.choice(under_way))
        if chosen.random() < 0.1 and not engine.scheduler.has_requests():
            engine.forget()
    engine.workers[-1].engine.fail_loads = 0
    engine.run(*under_way)
    engine.assert_nothing_is_held()
    saved = engine.connector.manager.savings.tokens
    assert 0 < saved <= engine.external_tokens, f"seed {seed}"
    assert engine.session.saved_tokens == saved


def test_a_daemon_that_cannot_be_told_keeps_no_lease(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = asked_again(daemon, monkeypatch)
    monkeypatch.delenv("FOREBAY_STRICT", raising=False)
    engine.session.faults["saved"] = RuntimeError("on purpose")
    engine.generate("again", prompt(1, LONG) + prompt(2, 40))
    engine.assert_nothing_is_held()
    assert engine.connector.breaker.faults + engine.connector.manager.breaker.faults > 0


def test_no_time_is_claimed_before_a_speed_was_measured() -> None:
    saved = Savings()
    assert (saved.loaded(1000, 0.0), saved.seconds) == (0.0, 0.0)
    assert saved.loaded(1000, 100.0) == 20.0  # all so far
    assert saved.loaded(500, 1000.0) == 0.0  # it was never so much
    assert saved.loaded(28_000, 1000.0) == pytest.approx(10.5)
    assert saved.seconds == pytest.approx(30.5)


class Timed(Engine):
    """An engine whose steps take a time of their own: some for a step, and some for each token."""

    STEP_SECONDS, TOKEN_SECONDS = 0.05, 0.001

    def __init__(self, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(daemon, monkeypatch, Shape(blocks=256, max_tokens_per_step=2048))
        self.now = 1000.0
        monkeypatch.setattr(manager, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=time.sleep))

    def _work(self, worker: Any, output: Any) -> Any:
        if tokens := output.total_num_scheduled_tokens:
            self.now += self.STEP_SECONDS + tokens * self.TOKEN_SECONDS
        return super()._work(worker, output)

    def ask(self, name: str, prompts: Iterable[int], max_tokens: int) -> float:
        """Long prompts one after another; how long computing took."""
        began = self.now
        for at in prompts:
            self.generate(f"{name}-{at}", prompt(at, 640), max_tokens)
        return self.now - began


@pytest.mark.parametrize("max_tokens", [1, 16])
def test_no_more_time_is_claimed_than_the_same_tokens_took(monkeypatch: pytest.MonkeyPatch, max_tokens: int) -> None:
    daemon = FakeDaemon(1024)
    cold_seconds = Timed(daemon, monkeypatch).ask("cold", range(6), max_tokens)
    engine = Timed(daemon, monkeypatch)
    engine.ask("hit", range(6), max_tokens)
    saved = engine.connector.manager.savings
    assert (saved.tokens, saved.seconds) == (6 * 640, 0.0), "it has computed nothing but remainders and answers"
    engine.ask("new", range(10, 14), max_tokens)
    assert 0.9 * 6 * 640 * engine.TOKEN_SECONDS < saved.seconds < cold_seconds + 1e-6
    assert_saved(engine, 6 * 640)


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("seed", range(5))
def test_an_engine_is_never_taken_for_slower_than_it_was(ahead: int, seed: int) -> None:
    """Step n is scheduled when the output of step n - 1 - ahead was seen, which may be late."""
    chance, pace = random.Random(seed), Pace()
    computed, seen = [0.0], [0.0]
    for step in range(200):
        scheduled = seen[max(0, step - ahead)]
        pace.scheduled(scheduled, 2000, 2000)
        computed.append(max(computed[-1], scheduled) + 0.1 * chance.uniform(1, 1.5))
        seen.append(max(seen[-1], computed[-1] + chance.choice([0, 0, 0, 0.1])))
        if step >= ahead:
            pace.computed(seen[step - ahead + 1])
    fastest = 2000 / min(after - before for before, after in itertools.pairwise(computed))
    assert 0.8 * fastest <= pace.tokens_per_second <= (1 + ahead) * 20_000 * 1.001, f"seed {seed}"


def test_steps_of_few_new_tokens_say_nothing_of_prefill() -> None:
    pace = Pace()
    for tokens, new in [(256, 0), (LEAST_TOKENS, LEAST_TOKENS - 1), (8192, 0)]:
        pace.scheduled(0.0, tokens, new)
        pace.computed(1.0)
    assert pace.tokens_per_second == 0
    for step in range(LEAST_STEPS):
        assert pace.tokens_per_second == 0, "the first steps of an engine are slow"
        pace.scheduled(10.0 * step, 1000 + LEAST_TOKENS, LEAST_TOKENS)
        pace.computed(10.0 * step + LEAST_STEPS - step)
        pace.computed(10.0 * step + 5)  # nothing is under way
    assert pace.tokens_per_second == 1000 + LEAST_TOKENS


def test_generated_tokens_are_no_prefill() -> None:
    patience = Patience(0.25)
    for step in range(4 * WINDOW_STEPS):
        patience.stepped(step * 0.01, 256, 256)
    assert patience.tokens_per_second == 0
    for step in range(WINDOW_STEPS):
        patience.stepped(1 + step, 1100, 100)
    patience.stepped(1 + WINDOW_STEPS, 0)
    assert patience.tokens_per_second == pytest.approx(1000 * (WINDOW_STEPS - 1) / WINDOW_STEPS)


def test_a_long_answer_makes_the_measured_speed_not_unknown() -> None:
    patience = Patience(0.25)
    for step in range(2 * WINDOW_STEPS):
        patience.stepped(float(step), 1000)
    measured = patience.tokens_per_second
    for step in range(10_000):
        patience.stepped(100.0 + step, 1, 1)
    assert patience.tokens_per_second == measured > 0


def test_what_was_saved_is_said_each_minute_that_has_news(
    clock: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    saved, said_at = Savings(), []
    with caplog.at_level("INFO", "vllm.forebay"):
        for at, tokens, speed in [(0, 0, 0), (1, 1792, 0), (2, 208, 100), (60, 0, 100), (61, 0, 100), (500, 0, 100)]:
            clock.now = 1000.0 + at
            saved.loaded(tokens, speed)
            before = len(caplog.messages)
            saved.say()
            said_at += [at] * (len(caplog.messages) - before)
        assert said_at == [1, 61]
        saved.loaded(1_000_000, 100.0)
        saved.say(is_last=True)
        saved.say(is_last=True)
    assert caplog.messages == [
        "forebay: 1,792 more tokens were loaded and not computed; since the start 1,792",
        "forebay: 208 more tokens were loaded and not computed; since the start 2,000, at least 20.0 s of prefill",
        "forebay: 1,000,000 more tokens were loaded and not computed; since the start 1,002,000, at least 167 min of prefill",
    ]


def test_an_engine_says_what_was_saved_without_another_request(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = asked_again(daemon, monkeypatch)
    with caplog.at_level("INFO", "vllm.forebay"):
        engine.generate("again", prompt(1, LONG) + prompt(2, 40))
        engine.connector.manager.say_how_it_is()  # as the thread does
    assert f"forebay: {LONG} more tokens were loaded and not computed; since the start {LONG}" in "\n".join(
        caplog.messages
    )


# ---- a line for each request
# -------------------------------------------------------------------------------------------


def lines(caplog: pytest.LogCaptureFixture) -> dict[str, dict[str, float]]:
    """By request."""
    told = {}
    for message in caplog.messages:
        if message.startswith("forebay request "):
            name, _, facts = message.removeprefix("forebay request ").partition(": ")
            assert name not in told, "one line a request"
            told[name] = {key: float(value) for key, value in (fact.split("=") for fact in facts.split())}
    return told


def test_each_request_can_say_where_its_tokens_came_from(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(daemon, monkeypatch, Shape(extra={"log_requests": True}))
    with caplog.at_level("INFO", "vllm.forebay"):
        engine.generate("first", prompt(1, LONG))
        engine.generate("engine", prompt(1, LONG) + prompt(2, 40))
        engine.forget()
        engine.generate("pool", prompt(1, LONG) + prompt(3, 40))
        engine.forget()
        daemon.promotions = 1
        engine.generate("tier", prompt(1, LONG) + prompt(4, 40))
        engine.forget()
        engine.workers[0].engine.fail_loads = 1
        engine.generate("failed", prompt(1, LONG) + prompt(5, 40))
    told = lines(caplog)
    assert all(facts.pop("ms") > 0 for facts in told.values())
    whole = {"blocks": 12, "tokens": LONG + 40, "hit_engine": 0, "hit_pool": 0, "hit_tier": 0, "computed": 40}
    assert told == {
        "first": whole | {"blocks": 10, "tokens": LONG, "computed": LONG},
        "engine": whole | {"hit_engine": LONG},
        "pool": whole | {"hit_pool": LONG},
        "tier": whole | {"hit_tier": LONG},
        "failed": whole | {"computed": LONG + 40},
    }
    engine.assert_no_faults()


def test_requests_are_not_logged_unless_asked_for(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("DEBUG", "vllm.forebay"):
        asked_again(daemon, monkeypatch).generate("again", prompt(1, LONG) + prompt(2, 40))
    assert lines(caplog) == {}


def test_an_account_adds_up_to_the_prompt(caplog: pytest.LogCaptureFixture) -> None:
    one = account.Account()
    one.engine_tokens, one.load_tokens, one.share_of_tiers = 32, 100, 1 / 3
    with caplog.at_level("INFO", "vllm.forebay"):
        one.tell("r", 150, 16, is_loaded=True)
        one.tell("r", 150, 16, is_loaded=False)
    facts = lines(caplog)["r"]
    assert facts["hit_engine"] + facts["hit_pool"] + facts["hit_tier"] + facts["computed"] == facts["tokens"] == 150
    assert (facts["hit_tier"], facts["blocks"]) == (33, 9)
