"""Options: what can be used is used, what cannot is named, and nothing raises."""

from __future__ import annotations

import os
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from forebay.vllm import metrics
from forebay.vllm.settings import UPSTREAM_KEYS, Settings, bounded_engine_id, default_socket

PAGE = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text()


def test_no_options_are_fine() -> None:
    settings, warnings = Settings.parse({"socket": "/run/x"})
    assert settings == Settings(socket="/run/x")
    assert warnings == []


@pytest.mark.parametrize(
    ("given", "meant"), [("tennant", "tenant"), ("step_budget", "step_budget_ms"), ("Socket", "socket")]
)
def test_an_unknown_option_names_the_nearest_known_one(given: str, meant: str) -> None:
    settings, warnings = Settings.parse({"socket": "/run/x", given: "1"})
    assert settings == Settings(socket="/run/x")
    assert warnings == [f"unknown option `{given}` in kv_connector_extra_config, did you mean `{meant}`?"]


def test_an_option_like_no_other_lists_what_there_is() -> None:
    (warning,) = Settings.parse({"socket": "/x", "zzzzzzzz": 1})[1]
    assert "known are lookup_deadline_ms, max_leased_requests" in warning


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("step_budget_ms", "fast"),
        ("step_budget_ms", -1),
        ("stock_blocks", 1.5),
        ("stock_blocks", True),
        ("reset_moves_namespace", "no"),
        ("tenant", 7),
        ("threads", None),
    ],
)
def test_a_value_that_does_not_fit_is_replaced_by_the_default(key: str, value: Any) -> None:
    settings, (warning,) = Settings.parse({"socket": "/run/x", key: value})
    assert settings == Settings(socket="/run/x")
    assert f"`{key}` cannot be {value!r}" in warning


def test_numbers_may_be_written_either_way() -> None:
    settings, warnings = Settings.parse({"socket": "/x", "step_budget_ms": 5, "stock_blocks": 8.0})
    assert (settings.step_budget_ms, settings.stock_blocks) == (5.0, 8)
    assert isinstance(settings.stock_blocks, int)
    assert warnings == []


def test_vllms_own_options_pass() -> None:
    extra = {"socket": "/x", "spec_name": "ForebaySpec", "offload_prompt_only": False, "blocks_per_chunk": 4}
    assert Settings.parse(extra)[1] == []


def test_the_socket_is_a_directory_or_the_file_in_it() -> None:
    assert Settings.parse({"socket": "/run/x"})[0].socket == "/run/x"
    assert Settings.parse({"socket": "/run/x/forebay.sock"})[0].socket == "/run/x"


def test_the_variable_names_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_SOCKET_DIRECTORY", "/run/theirs")
    assert Settings.parse({})[0].socket == "/run/theirs"
    monkeypatch.setenv("FOREBAY_SOCKET", "/run/ours/forebay.sock")
    assert Settings.parse({})[0].socket == "/run/ours"
    assert Settings.parse({"socket": "/run/written"})[0].socket == "/run/written"


def test_the_usual_directory_that_is_there_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if os.path.isdir("/run/forebay"):
        pytest.fail("this machine runs a daemon at /run/forebay, which hides what is tested here")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "forebay").mkdir()
    assert default_socket() == str(tmp_path / "forebay")


def test_a_long_engine_id_is_bounded_and_stays_distinct() -> None:
    assert bounded_engine_id("engine_dp0") == "engine_dp0"
    long = [bounded_engine_id("x" * 70 + end) for end in ("a", "b")]
    assert all(len(name) == 32 for name in long) and long[0] != long[1]
    assert 0 < len(bounded_engine_id("")) <= 64


def test_the_page_lists_all_options_with_their_defaults_and_all_metrics() -> None:
    rows = dict(re.findall(r"^\| `([a-z_]+)` \| ([^|]+) \|", PAGE, re.MULTILINE))
    defaults = {field.name: str(field.default) for field in fields(Settings)}
    defaults |= {"socket": "found", "tenant": "none", "reset_moves_namespace": "true"}
    assert rows == defaults
    assert set(re.findall(r"^\| `(forebay:[a-z_]+)`", PAGE, re.MULTILINE)) == set(metrics.DEFINITIONS)
    for key in UPSTREAM_KEYS - {"spec_name", "spec_module_path"}:
        assert f"`{key}`" in PAGE
