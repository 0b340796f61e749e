"""Options: what can be used is used, what cannot is named, and nothing raises."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from fake import FakeDaemon
from forebay.vllm import metrics
from forebay.vllm.settings import (
    TIERING_OPTIONS,
    VLLM_OPTIONS,
    Settings,
    bounded_engine_id,
    passed_on,
    refusal,
)
from harness import Engine, Shape, prompt
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler
from vllm.v1.kv_offload import base

PAGE = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text()


def test_no_options_are_fine() -> None:
    settings, warnings = Settings.parse({"socket": "/run/x"})
    assert settings == Settings(socket="/run/x")
    assert warnings == []


@pytest.mark.parametrize(
    ("given", "meant"), [("tennant", "tenant"), ("step_budget", "step_budget_ms"), ("Socket", "socket")]
)
def test_an_unknown_option_is_not_passed_on_and_names_the_nearest_known_one(given: str, meant: str) -> None:
    passed, warnings = passed_on({"socket": "/run/x", given: "1"})
    assert passed == {"socket": "/run/x"}
    assert warnings == [f"unknown option `{given}` is ignored, did you mean `{meant}`?"]


def test_below_vllms_host_tier_its_options_are_known_too() -> None:
    _, warnings = passed_on({"cpu_bytes_to_us": 1}, TIERING_OPTIONS)
    assert warnings == ["unknown option `cpu_bytes_to_us` is ignored, did you mean `cpu_bytes_to_use`?"]


def test_an_option_like_no_other_lists_what_there_is() -> None:
    (warning,) = passed_on({"socket": "/x", "zzzzzzzz": 1})[1]
    assert "known are gpu_copies, gpu_method, gpu_multiprocessors, log_requests, lookup_deadline_ms" in warning


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
        ("lookup_deadline_ms", float("nan")),
        ("stock_blocks", float("inf")),
        ("stock_blocks", 1e30),
        ("gpu_method", "kernels"),
        ("gpu_method", 1),
        ("gpu_multiprocessors", 1025),
    ],
)
def test_a_value_that_does_not_fit_is_replaced_by_the_default(key: str, value: Any) -> None:
    settings, (warning,) = Settings.parse({"socket": "/run/x", key: value})
    assert settings == Settings(socket="/run/x")
    assert f"`{key}` cannot be {value!r}" in warning


@pytest.mark.parametrize(("key", "largest"), [("threads", 1024), ("stock_blocks", 65536)])
def test_a_number_out_of_range_is_refused_with_the_range(key: str, largest: int) -> None:
    assert getattr(Settings.parse({"socket": "/run/x", key: largest})[0], key) == largest
    for value in (largest + 1, 1e9, -1):
        settings, (warning,) = Settings.parse({"socket": "/run/x", key: value})
        assert settings == Settings(socket="/run/x")
        assert warning == f"`{key}` cannot be {value!r}: it is from 0 to {largest}; 0 is used"


@pytest.mark.parametrize(
    "options",
    [
        {"tenant": 42},
        {"tenant": None},
        {"Tenant": "a"},
        {"TENANT": ""},
        {"tennant": "a"},
        {"kv_cache_tenant": "a"},
        {"customer_tenant": "a"},
        {"--multi-tenant-id": "a"},
        {"tenant": "a", "tenantId": "b"},
        {"forebay": {"tenant": "a"}},
        {"kv_connector_extra_config": {"Tennant": "a"}},
        {"options": [{"deep": {"our_tenant": "a"}}]},
    ],
)
def test_a_tenant_that_cannot_be_used_switches_forebay_off(
    options: dict[str, Any], daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(daemon, monkeypatch, Shape(extra=options))
    reason = engine.connector.breaker.reason
    assert reason is not None and "tenant" in reason and "hint" in reason
    engine.generate("cold", prompt(1, 100))
    assert daemon.lookups == 0 and daemon.ready() == 0 and not daemon.sessions


@pytest.mark.parametrize("options", [{}, {"tenant": ""}, {"tenant": "a"}, {"x": {"content": 1}, "threads": 2}])
def test_a_tenant_that_can_be_used_does_not(options: dict[str, Any]) -> None:
    assert refusal(options) is None


def test_numbers_may_be_written_either_way() -> None:
    settings, warnings = Settings.parse({"socket": "/x", "step_budget_ms": 5, "stock_blocks": 8.0})
    assert (settings.step_budget_ms, settings.stock_blocks) == (5.0, 8)
    assert isinstance(settings.stock_blocks, int)
    assert warnings == []


def test_options_of_vllm_pass_or_are_named_with_the_reason() -> None:
    extra = {"socket": "/x", "offload_prompt_only": False, "blocks_per_chunk": 4}
    assert passed_on(extra) == (extra, [])
    for name in ("sync_load_budget_bytes", "self_describing_kv_events", "cpu_bytes_to_use", "spec_name"):
        passed, (warning,) = passed_on(extra | {name: 1})
        assert passed == extra
        assert warning == f"`{name}` is ignored: {VLLM_OPTIONS[name]}"


def test_every_option_that_the_installed_vllm_reads_has_its_fate() -> None:
    """Its sources are searched for what they take out of `kv_connector_extra_config`, but for each tier's own options."""
    offloading = Path(inspect.getsourcefile(scheduler) or "").parent
    specs = Path(inspect.getsourcefile(base) or "").parent
    files = [*offloading.glob("*.py"), offloading.parent / "offloading_connector.py", *specs.glob("*.py")]
    files += [*specs.glob("cpu/**/*.py"), *specs.glob("tiering/*.py")]
    read = {name for file in files for name in _options_read(ast.parse(file.read_text()))}
    assert {"spec_name", "block_size", "offload_prompt_only", "cpu_bytes_to_use", "secondary_tiers"} <= read
    assert read <= VLLM_OPTIONS.keys()


def _options_read(tree: ast.AST) -> Iterator[str]:
    """The strings by which anything called `...extra_config` is indexed, searched, or asked for an entry."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                func=ast.Attribute(value=source, attr="get" | "pop"), args=[ast.Constant(value=str(key)), *_]
            ):
                pass
            case ast.Call(func=ast.Attribute(value=_, attr="get_from_extra_config"), args=[ast.Constant(str(key)), *_]):
                source = ast.Name("extra_config")
            case ast.Subscript(value=source, slice=ast.Constant(value=str(key))):
                pass
            case ast.Compare(left=ast.Constant(value=str(key)), ops=[ast.In() | ast.NotIn()], comparators=[source]):
                pass
            case _:
                continue
        if ast.unparse(source).endswith("extra_config"):
            yield key


def test_the_socket_is_a_directory_or_the_file_in_it() -> None:
    assert Settings.parse({"socket": "/run/x"})[0].socket == "/run/x"
    assert Settings.parse({"socket": "/run/x/forebay.sock"})[0].socket == "/run/x"


def test_the_socket_may_lie_in_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/users/me")
    assert Settings.parse({"socket": "~/run/forebay.sock"})[0].socket == "/users/me/run"


def test_the_variable_names_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_SOCKET_DIRECTORY", "/run/theirs")
    assert Settings.parse({})[0].socket == "/run/theirs"
    monkeypatch.setenv("FOREBAY_SOCKET", "/run/ours/forebay.sock")
    assert Settings.parse({})[0].socket == "/run/ours"
    assert Settings.parse({"socket": "/run/written"})[0].socket == "/run/written"


def test_a_long_engine_id_is_bounded_and_stays_distinct() -> None:
    assert bounded_engine_id("engine_dp0") == "engine_dp0"
    long = [bounded_engine_id("x" * 70 + end) for end in ("a", "b")]
    assert all(len(name) == 32 for name in long) and long[0] != long[1]
    assert 0 < len(bounded_engine_id("")) <= 64


def test_the_page_lists_all_options_with_their_defaults_and_all_metrics() -> None:
    rows = dict(re.findall(r"^\| `([a-z_]+)` \| ([^|]+) \| [^|]+ \|$", PAGE, re.MULTILINE))
    defaults = {field.name: str(field.default) for field in fields(Settings)}
    defaults |= {"socket": "found", "tenant": "none", "reset_moves_namespace": "true", "verify_loads": "true"}
    defaults |= {"log_requests": "false", "gpu_copies": "false"}
    assert rows == defaults
    served = {name + "_total" * (name in metrics.COUNTERS) for name in metrics.DEFINITIONS}
    assert set(re.findall(r"^\| `(forebay:[a-z_]+)`", PAGE, re.MULTILINE)) == served
    fates = dict(re.findall(r"^\| `([a-z_]+)` \| (as in vLLM|ignored)[^|]* \|$", PAGE, re.MULTILINE))
    assert fates == {key: "as in vLLM" if why is None else "ignored" for key, why in VLLM_OPTIONS.items()}


def test_the_page_on_tiering_names_every_option_of_vllm() -> None:
    page = (Path(__file__).parents[2] / "docs/engines/vllm-tiering.md").read_text()
    assert [name for name in TIERING_OPTIONS if f"`{name}`" not in page] == []
    assert {name for name, why in TIERING_OPTIONS.items() if why is not None} == {
        "canonical_layout",
        "store_threshold",
        "max_tracker_size",
    }
