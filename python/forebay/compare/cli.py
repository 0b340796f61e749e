"""The command: options, progress, files, exit status.

Exit status: 0 when the comparison was made, 1 with a reason when it was not, 2 for wrong options, 130 for Ctrl-C.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from forebay.compare import measure
from forebay.compare.endpoint import Endpoint, Model, Url
from forebay.compare.failure import CompareError
from forebay.compare.plot import plot
from forebay.compare.report import BASELINE, ENDPOINT, Report
from forebay.compare.text import render
from forebay.compare.workload import DEMO_CONVERSATIONS, DEMO_DOCUMENTS, Conversations, Documents, Workload, longest

DESCRIPTION = """\
Sends the same seeded requests with shared prefixes to an OpenAI-compatible endpoint with Forebay and to one without,
in turns, and prints time to first token, throughput, hit tokens and what was saved. With one endpoint it compares the
first and the second sight of the same prompts."""
EXAMPLES = """\
examples:
  forebay-compare http://localhost:8000 --baseline http://localhost:8001
  forebay-compare http://localhost:8000 --demo --plot first-and-second.svg
  forebay-compare http://localhost:8000 --workload documents --capacity-tokens 200000 --plot cliff.svg

exit status: 0 when the comparison was made, 1 with a reason when it was not, 2 for wrong options"""

MAX_SECONDS = 86_400
MAX_MULTIPLE = 1000

# A flag for each of these fields of the workloads.
SIZES = {
    "conversations": "conversations that are held at once",
    "turns": "turns of each conversation",
    "system_tokens": "tokens of the system prompt, which all conversations share",
    "turn_tokens": "tokens that each turn adds",
    "capacity_tokens": "tokens that fit into the cache that is tried; working sets are multiples of it",
    "document_tokens": "tokens of each document",
    "question_tokens": "tokens of each question",
    "rounds": "rounds of questions, the first sight included",
    "max_tokens": "tokens of each answer",
}
WORKING_SETS = "working_sets"


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    progress = _Progress()
    try:
        report = compare(options, progress)
        progress.clear()
        sys.stdout.write(render(report))
        _write(options.json, lambda: json.dumps(report.as_json(), indent=1) + "\n")
        _write(options.plot, lambda: plot(report))
    except CompareError as error:
        progress.clear()
        print(f"error: {error}" + (f"\nhint: {error.hint}" if error.hint else ""), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        progress.clear()
        print("error: interrupted", file=sys.stderr)
        return 130
    return 0


def compare(options: argparse.Namespace, progress: _Progress) -> Report:
    """Looks at everything that can be wrong before the first request is sent."""
    workload = _workload(options)
    _check_files(options.json, options.plot)
    phases = workload.phases()
    found = [(endpoint, endpoint.find_model(wanted)) for endpoint, wanted in _endpoints(options)]
    needed = longest(phases).tokens + workload.max_tokens
    for endpoint, model in found:
        _check_length(endpoint, model, needed)
    sides = [measure.warm_up(*pair, phases, options.concurrency, progress.say) for pair in found]
    # Another one each time, because a cache that survives restarts knows what the last one drew.
    seed = secrets.randbelow(1 << 32) if options.seed is None else options.seed
    runs = measure.run(sides, phases, seed, options.concurrency, progress.say)
    return Report(workload, seed, options.concurrency, sides, runs)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="forebay-compare",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("url", metavar="URL", help="the endpoint with Forebay, such as `http://localhost:8000`")
    add("--baseline", metavar="URL", help="the same model without Forebay")
    add("--workload", choices=("conversations", "documents"), default="conversations")
    add("--demo", action="store_true", help="sizes for a small model on a CPU: a minute or two")
    for name, meaning in SIZES.items():
        add(_flag(name), type=_count, metavar="N", help=f"{meaning} ({_defaults(name)})")
    sets = f"multiples of the capacity that are tried ({_sets(Documents(0))}, demo {_sets(DEMO_DOCUMENTS)})"
    add(_flag(WORKING_SETS), type=_multiples, metavar="X,X,...", help=sets)
    add("--concurrency", type=_count, default=1, metavar="N", help="requests sent at once (1)")
    add("--seed", type=int, metavar="N", help="chooses the prompts; by default a new seed each time")
    add("--deadline", type=_seconds, default=120.0, metavar="SECONDS", help="for each request (120)")
    add("--model", metavar="NAME", help="by default the only one of `/v1/models`")
    add("--baseline-model", metavar="NAME", help="the model's name at the baseline, if it differs")
    add("--api-key-file", type=Path, metavar="FILE", help="the key for both endpoints; by default `OPENAI_API_KEY`")
    add("--json", type=Path, metavar="FILE", help="writes all figures and those of each request")
    add("--plot", type=_svg, metavar="FILE.svg", help="draws the curves, or the distribution of times")
    return parser


def _workload(options: argparse.Namespace) -> Workload:
    """The workload's defaults, and over them the sizes that were given."""
    given = {name: size for name in (*SIZES, WORKING_SETS) if (size := getattr(options, name)) is not None}
    kind = Conversations if options.workload == "conversations" else Documents
    for name in given:
        if name not in _fields(kind):
            raise CompareError(f"`{_flag(name)}` is not a size of `{options.workload}`", _workload_hint(name))
    if kind is Conversations:
        return dataclasses.replace(DEMO_CONVERSATIONS if options.demo else Conversations(), **given)
    if options.demo:
        return _checked(dataclasses.replace(DEMO_DOCUMENTS, **given))
    if "capacity_tokens" not in given:
        raise CompareError(
            "the working sets are multiples of a capacity, and none is given",
            "`--capacity-tokens N`: vLLM's log has the engine's own as `KV cache size`; `--demo` has one of 4,096",
        )
    return _checked(Documents(**given))


def _checked(documents: Documents) -> Documents:
    if documents.rounds < 2:
        raise CompareError("one round has no second sight", "give `--rounds` at least 2")
    if documents.document_tokens > documents.capacity_tokens:
        raise CompareError(
            f"a document of {documents.document_tokens:,} tokens does not fit into {documents.capacity_tokens:,}",
            "give smaller `--document-tokens`, or a larger `--capacity-tokens`",
        )
    return documents


def _workload_hint(name: str) -> str:
    other = "documents" if name in _fields(Documents) else "conversations"
    return f"it belongs to `--workload {other}`"


def _endpoints(options: argparse.Namespace) -> list[tuple[Endpoint, str | None]]:
    """Each endpoint with the name of the model that is wanted there."""
    key = _key(options.api_key_file)
    endpoints = [(Endpoint(ENDPOINT, Url.parse(options.url), key, options.deadline), options.model)]
    if options.baseline is not None:
        url = Url.parse(options.baseline)
        wanted = options.baseline_model or options.model
        endpoints.append((Endpoint(BASELINE, url, key, options.deadline), wanted))
        if url == endpoints[0][0].url:
            raise CompareError(
                "both endpoints are the same", "leave `--baseline` out to compare first and second sight"
            )
    return endpoints


def _key(path: Path | None) -> str | None:
    if path is None:
        source, key = "`OPENAI_API_KEY`", os.environ.get("OPENAI_API_KEY", "").strip()
    else:
        source = f"`{path}`"
        try:
            key = path.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise CompareError(f"cannot read the key from {source}: {error}") from None
        if not key:
            raise CompareError(f"{source} is empty", "put the key into it, and nothing else")
    if not (key.isascii() and key.isprintable()):
        raise CompareError(f"{source} does not contain a key: one line of ASCII")
    return key or None


def _check_length(endpoint: Endpoint, model: Model, needed: int) -> None:
    if model.max_tokens is not None and needed > model.max_tokens:
        raise CompareError(
            f"the longest request needs {needed:,} tokens; `{model.name}` at {endpoint.url} takes {model.max_tokens:,}",
            "ask for less, for example with `--demo`, or raise vLLM's `--max-model-len`",
        )


def _check_files(*paths: Path | None) -> None:
    """A comparison takes minutes; whether its files can be written is known before."""
    for path in paths:
        if path is not None and not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
            raise CompareError(f"cannot write `{path}`: no folder `{path.parent}` that this user can write to")


def _write(path: Path | None, text: Callable[[], str]) -> None:
    if path is None:
        return
    try:
        path.write_text(text())
    except OSError as error:
        raise CompareError(f"cannot write `{path}`: {error.strerror}") from None


def _fields(kind: type[Conversations | Documents]) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _defaults(name: str) -> str:
    """A size's default, and the demo's behind it."""
    sizes: list[Workload] = [Conversations(), DEMO_CONVERSATIONS]
    if name not in _fields(Conversations):
        sizes = [Documents(capacity_tokens=0), DEMO_DOCUMENTS]
    values = dict.fromkeys(f"{getattr(size, name):,}" if getattr(size, name) else "none" for size in sizes)
    return ", demo ".join(values)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"`{text}` is not a number above zero")
    return int(text)


def _multiples(text: str) -> tuple[float, ...]:
    try:
        multiples = tuple(float(part) for part in text.split(","))
    except ValueError:
        multiples = (0.0,)
    if not all(0 < multiple <= MAX_MULTIPLE for multiple in multiples):
        raise argparse.ArgumentTypeError(
            f"`{text}` is not a list of numbers from 0 to {MAX_MULTIPLE} such as `0.9,1.5`"
        )
    return multiples


def _sets(documents: Documents) -> str:
    return ",".join(f"{multiple:g}" for multiple in documents.working_sets)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_SECONDS:
        raise argparse.ArgumentTypeError(f"`{text}` is not a time in seconds of at most {MAX_SECONDS:,}")
    return seconds


def _svg(text: str) -> Path:
    if not text.endswith(".svg"):
        raise argparse.ArgumentTypeError(f"`{text}` does not end in `.svg`, and the plot is SVG")
    return Path(text)


class _Progress:
    """One line on standard error that tells what is going on; only on a terminal, and gone when the table comes."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._is_terminal = sys.stderr.isatty()

    def say(self, what: str) -> None:
        if self._is_terminal:
            print(f"\r\x1b[2K[{time.monotonic() - self._start:3.0f} s] {what}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._is_terminal:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
