"""Fixtures of the end-to-end tests, and the table of scheduler times at the end of a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import pytest
from rig.daemon import Daemon
from rig.engine import Duration, Engine, EngineConfig
from rig.paths import CACHE

StartEngine = Callable[..., Engine]

# What the scheduler waits for: all of the connector's calls in one engine step.
IN_STEP = "connector in a step"

# The name under which a test's report carries its times, also from another process.
TIMES = "scheduler times"


@pytest.fixture(scope="module")
def stack() -> Iterator[ExitStack]:
    """What a module started, ended in reverse order."""
    with ExitStack() as started:
        yield started


@pytest.fixture(scope="module")
def start_engine(stack: ExitStack, tmp_path_factory: pytest.TempPathFactory) -> StartEngine:
    """Starts an engine with Forebay, killed when the module ends. Its first command waits until it is ready, so that
    engines started one after another get ready at the same time."""

    def start(config: EngineConfig, connector: Mapping[str, Any], name: str) -> Engine:
        run_dir = tmp_path_factory.mktemp(name)
        return stack.enter_context(Engine(config, run_dir, connector=connector, name=name))

    return start


@pytest.fixture(scope="module")
def start_daemon(stack: ExitStack) -> Callable[..., Daemon]:
    """Starts a daemon of its own directories; killed when the module ends."""

    def start(**settings: Any) -> Daemon:
        return stack.enter_context(Daemon(**settings)).start()

    return start


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Callable[[Engine], Duration]:
    """Notes an engine's scheduler times under the test's name; returns those of the connector in a step."""

    def note(engine: Engine) -> Duration:
        durations = engine.durations()
        request.node.user_properties.append((TIMES, {name: vars(d) for name, d in durations.items()}))
        return durations[IN_STEP]

    return note


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    ended = [report for reports in terminalreporter.stats.values() for report in reports]
    calls = [report for report in ended if getattr(report, "when", None) == "call"]
    # A test's name, and the times it noted last.
    times = {
        report.nodeid.rpartition("::")[2]: {name: Duration(**d) for name, d in durations.items()}
        for report in calls
        for kind, durations in report.user_properties
        if kind == TIMES
    }
    if not times:
        return
    terminalreporter.section("time the scheduler spent in the connector, ms")
    width = max(len(test) for test in times)
    terminalreporter.line(f"{'test':<{width}} {'steps':>7} {'p50':>8} {'p99':>8} {'max':>8}  longest call")
    for test, durations in times.items():
        step = durations[IN_STEP]
        longest_calls = {name: d.max_ms for name, d in durations.items() if name.startswith("connector.")}
        longest = max(longest_calls, key=lambda name: longest_calls[name], default="none")
        figures = f"{step.calls:>7} {step.p50_ms:>8.3f} {step.p99_ms:>8.3f} {step.max_ms:>8.3f}"
        terminalreporter.line(
            f"{test:<{width}} {figures}  {longest.removeprefix('connector.')} {longest_calls.get(longest, 0):.3f}"
        )
    path = CACHE / "e2e" / "durations.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    as_json = {test: {name: vars(d) for name, d in durations.items()} for test, durations in times.items()}
    path.write_text(json.dumps(as_json, indent=1) + "\n")
