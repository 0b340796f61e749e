"""Every claim of the README is in docs/claims.md, with a command that exists; the README's own lines run."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from rig.engine import clean_env, engine_env

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


@dataclass(frozen=True)
class Claim:
    words: str
    command: str
    refuted_by: str
    last_run: str


def plain(text: str) -> str:
    """Without the marks of the page: what a reader sees, in one line."""
    text = re.sub(r"\[shown\]\(docs/claims\.md#[\w-]+\)|\*\*|^> ?", "", text, flags=re.MULTILINE)
    return re.sub(r"\s+", " ", text)


def read_claims() -> dict[str, Claim]:
    page = (ROOT / "docs/claims.md").read_text()
    found = {}
    for section in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        name, _, body = section.partition("\n")
        entry = re.fullmatch(
            r"\s*((?:^> [^\n]*\n)+)\n```\n(.+)\n```\n\n- refuted by: (.+?)\n- last run: (.+?)\s*",
            body,
            re.DOTALL | re.MULTILINE,
        )
        assert entry, f"{name} has no words, command, refutation and last run, in this order"
        words, command, refuted_by, last_run = entry.groups()
        found[name] = Claim(plain(words).strip(), command, refuted_by, re.sub(r"\s+", " ", last_run))
    return found


CLAIMS = read_claims()


def test_every_mark_of_the_readme_has_an_entry_and_every_entry_a_mark() -> None:
    marks = re.findall(r"\[shown\]\(docs/claims\.md#([\w-]+)\)", README)
    assert set(marks) == set(CLAIMS)


def test_an_entry_says_what_the_readme_says() -> None:
    page = plain(README)
    for name, claim in CLAIMS.items():
        assert claim.words in page, f"the README does not say: {name}"


@pytest.mark.parametrize("promise", re.findall(r"^\d\. (.+(?:\n   .+)*)", README, re.MULTILINE))
def test_a_promise_without_a_mark_is_none(promise: str) -> None:
    assert promise.rstrip().endswith("))."), f"the promise ends without a mark: {promise}"


def test_a_part_that_works_says_what_shows_it() -> None:
    rows = re.findall(r"^\| (.+) \| (.+) \|$", README.partition("## Status")[2], re.MULTILINE)
    states = [state for part, state in rows if part != "part"]
    assert len(states) >= 8
    assert all("not yet" in state or "[shown]" in state for state in states)


@pytest.mark.parametrize("name", CLAIMS)
def test_what_a_command_names_exists(name: str) -> None:
    program, *words = shlex.split(CLAIMS[name].command)
    match program:
        case ".venv/bin/python":
            files = [word for word in words if word.startswith("tests/")]
            assert files and all((ROOT / file).is_file() for file in files), files
        case "cargo":
            crate = words[words.index("-p") + 1].removeprefix("forebay-")
            tests = [words[at + 1] for at, word in enumerate(words) if word == "--test"]
            assert (ROOT / "crates" / crate).is_dir()
            for test in tests:
                places = [ROOT / "crates" / crate / "tests" / f"{test}{end}" for end in (".rs", "/main.rs")]
                assert any(place.is_file() for place in places), test
        case "make":
            assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        case "target/release/forebay":
            assert re.search(rf"^\$ forebay {' '.join(words)} --help$", golden_help(), re.MULTILINE)
        case _:
            pytest.fail(f"nobody knows how to run `{program}`")


def golden_help() -> str:
    return (ROOT / "crates/cli/tests/golden/help.txt").read_text()


@pytest.mark.parametrize("name", CLAIMS)
def test_a_last_run_is_dated_with_its_outcome_or_was_never(name: str) -> None:
    last_run = CLAIMS[name].last_run
    dated = re.fullmatch(r"20\d\d-\d\d-\d\d, (commit [0-9a-f]{7,}|\[report\]\((.+)\)): .+", last_run)
    assert dated or last_run == "never since this list was made", last_run
    if dated and dated[2]:
        assert (ROOT / "docs" / dated[2]).is_file()


def test_any_program_can_run_what_the_page_shows(sockets: Path) -> None:
    [example] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    check = (
        'import sys\nassert client.get(blocks, 0, [b"hash of block 1"]) == [bytes(65536)]\n'
        'assert "torch" not in sys.modules'
    )
    env = clean_env() | {"FOREBAY_SOCKET_DIRECTORY": str(sockets)}
    done = subprocess.run(
        [sys.executable, "-c", example + check], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    [said] = re.findall(r"^print\(.*\)  # (.*)$", example, re.MULTILINE)
    assert done.stdout == f"{said}\n"


def test_the_server_of_the_page_starts_with_the_vllm_that_is_installed() -> None:
    [line] = re.findall(r"^ *(python -m vllm\S+ .*)$", README, re.MULTILINE)
    argv = shlex.split(line)
    ask = [sys.executable, *argv[1:3], "--help=all"]
    done = subprocess.run(ask, env=engine_env(), capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    flags = [word for word in argv if word.startswith("--")]
    assert flags and all(flag in done.stdout for flag in flags), flags
