"""`forebay-compare` against the real vLLM, with and without Forebay: what is counted, never how long it took."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forebay.compare import cli
from rig import models
from rig.daemon import Daemon
from rig.engine import EngineConfig
from rig.server import Server

BLOCK = 128
# The engine's own cache keeps 20 blocks; the conversations below have 4 + 4 x 3 x 2 = 28.
CONFIG = EngineConfig(models.LLAMA, block_size=BLOCK, blocks=20, max_model_len=2048, max_batched_tokens=2048)
SIZES = {"conversations": 4, "turns": 3, "system_tokens": 512, "turn_tokens": 256, "max_tokens": 4}
REQUESTS = 4 * 3
PROMPT_TOKENS = 4 * (768 + 1024 + 1280)


def test_the_saving_is_what_forebay_loaded_where_the_engine_had_forgotten(
    tmp_path: Path, start_daemon: Callable[..., Daemon], capsys: pytest.CaptureFixture[str]
) -> None:
    connector = start_daemon().patient_connector()
    with Server(CONFIG, tmp_path, connector, "with") as server, Server(CONFIG, tmp_path, None, "without") as baseline:
        urls = [f"http://127.0.0.1:{each.ready().port}" for each in (server, baseline)]
        both = compare(tmp_path, urls[0], "--baseline", urls[1])
        alone = compare(tmp_path, urls[0])
    check_both(both)
    check_alone(alone)
    assert "second sight" in capsys.readouterr().out


def compare(tmp_path: Path, *argv: str) -> dict[str, Any]:
    files = {name: tmp_path / name for name in ("facts.json", "plot.svg")}
    sizes = [text for name, size in SIZES.items() for text in (f"--{name.replace('_', '-')}", str(size))]
    argv = (*argv, *sizes, "--json", str(files["facts.json"]), "--plot", str(files["plot.svg"]))
    assert cli.main(argv) == 0
    assert files["plot.svg"].read_text().endswith("</svg>\n")
    facts: dict[str, Any] = json.loads(files["facts.json"].read_text())
    return facts


def check_both(facts: dict[str, Any]) -> None:
    rows = {(row["group"], row["side"]): row for row in facts["rows"]}
    assert all((row["requests"], row["prompt_tokens"]) == (REQUESTS, PROMPT_TOKENS) for row in rows.values())
    second, without = rows["second sight", "endpoint"], rows["second sight", "baseline"]
    # All of a prompt but its last block at least: vLLM computes a token of it.
    assert second["hit_tokens"] >= PROMPT_TOKENS - REQUESTS * BLOCK
    assert second["loaded_tokens"] > 0 == without["loaded_tokens"]
    assert without["hit_tokens"] < second["hit_tokens"]
    [_, saving] = facts["savings"]
    assert saving["saved_tokens"] == second["hit_tokens"] - without["hit_tokens"]
    assert saving["same_text"] == saving["pairs"] == REQUESTS, "hits gave other answers"
    assert len(facts["samples"]) == 2 * 2 * REQUESTS
    # Every fact was there, the models are the same, and the engine's own cache is too small: nothing to be said.
    assert facts["notes"] == []


def check_alone(facts: dict[str, Any]) -> None:
    first, second = facts["rows"]
    assert first["hit_tokens"] < second["hit_tokens"]
    [saving] = facts["savings"]
    assert saving["saved_tokens"] == second["hit_tokens"] - first["hit_tokens"]
    assert [note.partition(":")[0] for note in facts["notes"]] == ["one endpoint"]
