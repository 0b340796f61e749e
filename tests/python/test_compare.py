"""`forebay-compare` against servers that answer as vLLM does: what it asks, what it prints, and how it fails."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from fake_openai import BLOCK, Fake
from forebay.compare import chart, cli, report
from forebay.compare.workload import DEMO_CONVERSATIONS, DEMO_DOCUMENTS
from rig.engine import clean_env

ROOT = Path(__file__).parents[2]
# 2 conversations of 2 turns: 4 requests, sent twice.
SMALL = ["--conversations", "2", "--turns", "2", "--system-tokens", "64", "--turn-tokens", "32", "--max-tokens", "3"]
DOCUMENTS = ["--workload", "documents", "--demo", "--max-tokens", "2"]
CAPACITY = 4096
SVG = "{http://www.w3.org/2000/svg}"


def facts(tmp_path: Path, *argv: str) -> dict[str, Any]:
    """What `--json` says after a comparison that went well."""
    path = tmp_path / "facts.json"
    assert cli.main([*argv, "--json", str(path)]) == 0
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def prompts(fake: Fake) -> list[list[int]]:
    """Of the measured requests: neither warm-ups nor those that settle."""
    return [body["prompt"] for body in fake.requests if len(body["prompt"]) > 8][2:]


def rows(found: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["group"], row["side"]): row for row in found["rows"]}


def test_both_endpoints_get_the_same_requests_and_take_turns_in_being_first(tmp_path: Path) -> None:
    log: list[tuple[str, list[int]]] = []
    with Fake("a", log=log) as a, Fake("b", log=log, has_forebay=False) as b:
        found = facts(tmp_path, a.url, "--baseline", b.url, *SMALL)
    assert prompts(a) == prompts(b)
    assert len(found["samples"]) == 2 * 8
    measured = [(name, prompt) for name, prompt in log if len(prompt) > 8][4:]
    pairs = [measured[at : at + 2] for at in range(0, len(measured), 2)]
    assert all(first[1] == second[1] for first, second in pairs)
    assert ["".join(name for name, _ in pair) for pair in pairs] == ["ab", "ba"] * 4


def test_prompts_share_their_prefixes_and_have_the_lengths_that_were_asked_for(tmp_path: Path) -> None:
    with Fake() as fake:
        facts(tmp_path, fake.url, *SMALL)
    asked = prompts(fake)
    assert [len(prompt) for prompt in asked] == [96, 96, 128, 128] * 2
    assert asked[:4] == asked[4:], "the second sight is of the same requests"
    assert len({tuple(prompt[:64]) for prompt in asked}) == 1, "one system prompt"
    assert asked[2][:96] == asked[0], "a turn goes on where the one before it ended"
    assert asked[0] != asked[1], "conversations differ"
    assert all(1024 <= token < 2048 for prompt in asked for token in prompt)


def test_no_prompt_of_the_demo_ends_with_a_block() -> None:
    phases = [*DEMO_CONVERSATIONS.phases(), *DEMO_DOCUMENTS.phases()]
    for block in (16, 32, 64, 128, 256):
        whole = [request.id for phase in phases for request in phase.requests if request.tokens % block == 0]
        assert not whole, f"blocks of {block} tokens"


def test_the_last_token_of_a_prompt_is_never_a_hit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Fake(tells_whole_prompts=True) as told, Fake(tells_whole_prompts=True, has_details=False) as counted:
        found = [facts(tmp_path, fake.url, *SMALL) for fake in (told, counted)]
    for each in found:
        row = rows(each)["second sight", "endpoint"]
        assert row["hit_tokens"] == row["prompt_tokens"] - row["requests"], "the prompts are of whole blocks"
    assert "100%" not in capsys.readouterr().out


def test_a_seed_can_be_repeated_and_without_one_each_comparison_has_another(tmp_path: Path) -> None:
    asked = []
    for seed in (["--seed", "7"], ["--seed", "7"], ["--seed", "8"], [], []):
        with Fake() as fake:
            facts(tmp_path, fake.url, *SMALL, *seed)
        asked.append(prompts(fake))
    assert asked[0] == asked[1]
    assert len({str(each) for each in asked}) == 4


def test_the_second_sight_hits_all_that_the_first_computed(tmp_path: Path) -> None:
    with Fake() as fake:
        found = facts(tmp_path, fake.url, *SMALL)
    first, second = rows(found)["first sight", "endpoint"], rows(found)["second sight", "endpoint"]
    # The system prompt three times and two turns; of a prompt that is known whole, vLLM computes the last block.
    assert first["hit_tokens"] == 64 + 96 + 96
    assert second["hit_tokens"] == 4 * (64 + 32 - BLOCK) + 2 * 32
    assert second["loaded_tokens"] == second["hit_tokens"]
    [saving] = found["savings"]
    assert saving["saved_tokens"] == second["hit_tokens"] - first["hit_tokens"]
    assert saving["same_text"] == saving["pairs"] == 4


def test_hits_that_the_baseline_has_too_are_not_saved(tmp_path: Path) -> None:
    with Fake() as fake, Fake(has_forebay=False, capacity_blocks=0) as forgets, Fake() as knows:
        beside_none = facts(tmp_path, fake.url, "--baseline", forgets.url, *SMALL)
        beside_all = facts(tmp_path, fake.url, "--baseline", knows.url, *SMALL)
    for saving in beside_none["savings"]:
        assert saving["saved_tokens"] == rows(beside_none)[saving["group"], "endpoint"]["hit_tokens"] > 0
    assert [saving["saved_tokens"] for saving in beside_all["savings"]] == [0, 0]
    assert "the baseline runs Forebay too" in beside_all["notes"]


def test_without_usage_details_hits_are_those_of_the_metrics_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Fake() as told, Fake(has_details=False) as counted, Fake(has_details=False, has_metrics=False) as silent:
        found = [facts(tmp_path, fake.url, *SMALL) for fake in (told, counted, silent)]
    hits = [[row["hit_tokens"] for row in each["rows"]] for each in found]
    assert hits[0] == hits[1]
    assert hits[2] == [None, None]
    assert any("from its metrics page" in note for note in found[1]["notes"])
    assert any("--enable-prompt-tokens-details" in note for note in found[2]["notes"])
    assert "unknown" in capsys.readouterr().out.split("saved")[-1]
    assert found[2]["savings"][0]["saved_tokens"] is None


def test_a_seed_that_the_endpoint_knew_is_said_to_be_no_first_sight(tmp_path: Path) -> None:
    with Fake() as fake:
        first, again = (facts(tmp_path, fake.url, *SMALL, "--seed", "3") for _ in range(2))
    assert not any("another `--seed`" in note for note in first["notes"])
    assert any("another `--seed`" in note for note in again["notes"])


def test_an_endpoint_is_measured_once_forebay_is_ready_in_it(tmp_path: Path) -> None:
    with Fake(ready_after=4) as fake:
        found = facts(tmp_path, fake.url, *SMALL)
    sent = [len(body["prompt"]) for body in fake.requests]
    # Two warm-ups, what makes the engine step until it is ready, the measured ones, each phase's end.
    assert sent == [128, 128, 8, 8, 8, 96, 96, 128, 128, 8, 96, 96, 128, 128, 8]
    assert not any("not ready" in note for note in found["notes"])


def test_what_fits_into_the_engines_own_cache_is_said_to_be_there_without_forebay(tmp_path: Path) -> None:
    distinct = 64 + 2 * 2 * 32
    with Fake(capacity_blocks=distinct // BLOCK) as fits, Fake(capacity_blocks=distinct // BLOCK - 1) as overflows:
        found = [facts(tmp_path, fake.url, *SMALL) for fake in (fits, overflows)]
    assert [any("own cache" in note for note in each["notes"]) for each in found] == [True, False]


def test_documents_asked_in_order_fall_off_the_cliff_at_the_capacity(tmp_path: Path) -> None:
    with Fake() as fake, Fake(has_forebay=False, capacity_blocks=(CAPACITY + 512) // BLOCK) as baseline:
        found = facts(tmp_path, fake.url, "--baseline", baseline.url, *DOCUMENTS)
    later = [place for place in found["curve"] if place["rounds"] == "later rounds"]
    rates = {(p["order"], p["side"], p["working_set"]): p["hit_ratio"] for p in later}
    assert {working_set for _, _, working_set in rates} == {0.5, 1.0, 1.5, 2.0, 3.0}
    whole = 1024 / (1024 + 40)
    assert all(rate == pytest.approx(whole) for (_, side, _), rate in rates.items() if side == "endpoint")
    for order in ("in order", "shuffled", "random"):
        curve = [rates[order, "baseline", working_set] for working_set in (0.5, 1.0, 1.5, 3.0)]
        assert curve[:2] == pytest.approx([whole] * 2), "what fits is found"
        if order == "in order":
            assert curve[2:] == [0, 0], "each document is evicted before it is asked for again"
        else:
            assert whole > curve[2] > curve[3] > 0, "chance finds some"


def test_the_points_of_the_curve_can_be_chosen(tmp_path: Path) -> None:
    with Fake() as fake:
        found = facts(tmp_path, fake.url, *DOCUMENTS, "--working-sets", "1.5,0.5")
    assert {place["working_set"] for place in found["curve"]} == {0.5, 1.5}
    assert found["settings"]["working_sets"] == [1.5, 0.5]


def test_documents_against_one_endpoint_compare_later_rounds_with_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Fake() as fake:
        found = facts(tmp_path, fake.url, *DOCUMENTS)
    assert rows(found)["first sight", "endpoint"]["hit_tokens"] == 0
    for saving in found["savings"]:
        assert saving["saved_tokens"] == rows(found)[saving["group"], "endpoint"]["hit_tokens"] > 0
    assert re.search(r"^x 3\.00 +12( +[\d.]+){2} +96%$", capsys.readouterr().out, re.MULTILINE)


def test_requests_that_are_sent_at_once_go_to_one_endpoint(tmp_path: Path) -> None:
    log: list[tuple[str, list[int]]] = []
    with Fake("a", log=log, hold_seconds=0.05) as a, Fake("b", log=log, hold_seconds=0.05) as b:
        facts(tmp_path, a.url, "--baseline", b.url, *SMALL, "--concurrency", "2")
    assert max(a.in_flight) == max(b.in_flight) == 2
    measured = [name for name, prompt in log if len(prompt) > 8][4:]
    assert "".join(measured) == "aabbbbaa" * 1 + "aabbbbaa"


def test_json_has_a_sample_for_each_request(tmp_path: Path) -> None:
    with Fake() as fake:
        found = facts(tmp_path, fake.url, *SMALL, "--seed", "5")
    assert (found["seed"], found["settings"]["turns"], found["workload"]) == (5, 2, "conversations")
    for sample in found["samples"]:
        assert sample["total_ms"] >= sample["ttft_ms"] > 0
        assert sample["output_tokens"] == 3 == len(sample["text"].split())
    assert [sample["prompt_tokens"] for sample in found["samples"]] == [96, 96, 128, 128] * 2


@pytest.mark.parametrize("workload", [SMALL, DOCUMENTS], ids=["conversations", "documents"])
@pytest.mark.parametrize("sides", [1, 2])
def test_the_plot_is_drawn_inside_its_frame_and_no_text_lies_on_another(
    tmp_path: Path, workload: Sequence[str], sides: int
) -> None:
    path = tmp_path / "plot.svg"
    with Fake() as fake, Fake() as other:
        baseline = ["--baseline", other.url] if sides == 2 else []
        assert cli.main([fake.url, *baseline, *workload, "--plot", str(path)]) == 0
    check_figure(path.read_text(), 2 * sides)


def test_ticks_of_long_times_and_prompts_are_not_cut_off() -> None:
    line = chart.Line("a", 0, ((0.0, 0.0), (1_048_576.0, 99_000.0)))
    panel = chart.Panel("long", chart.Axis("tokens", 1_048_576), chart.Axis("ms", 99_000), (line,))
    check_figure(chart.draw("long", [[panel, panel]]), 2)


def test_a_legend_that_is_wider_than_the_figure_goes_on_in_a_new_line() -> None:
    lines = tuple(chart.Line(f"the line with number {number}", number, ((0.0, 1.0), (1.0, 1.0))) for number in range(5))
    panel = chart.Panel("many", chart.Axis("x", 1), chart.Axis("y", 1), lines)
    check_figure(chart.draw("many", [[panel]]), 5)


def check_figure(text: str, least_lines: int) -> None:
    figure = ElementTree.fromstring(text)
    width, height = (float(figure.attrib[name]) for name in ("width", "height"))
    lines = figure.findall(f"{SVG}polyline")
    assert len(lines) >= least_lines
    for x, y in (map(float, place.split(",")) for line in lines for place in line.attrib["points"].split()):
        assert 0 <= x <= width and 0 <= y <= height
    boxes = [box(text) for text in figure.findall(f"{SVG}text") if "rotate" not in text.attrib.get("transform", "")]
    for number, (left, right, y) in enumerate(boxes):
        assert 0 <= left and right <= width and 0 < y < height
        overlapping = [b for b in boxes[:number] if abs(b[2] - y) < 9 and b[0] < right and left < b[1]]
        assert not overlapping


def box(text: ElementTree.Element) -> tuple[float, float, float]:
    """A text's ends and its base line; letters are taken for wider than they are."""
    wide = len(text.text or "") * 6.2 * float(text.attrib.get("font-size", 11)) / 11
    left = float(text.attrib["x"]) - wide * {"start": 0, "middle": 0.5, "end": 1}[text.attrib["text-anchor"]]
    return left, left + wide, float(text.attrib["y"])


@pytest.mark.parametrize("largest", [0.0003, 0.7, 1.0, 9.99, 10.0, 1234.5])
def test_the_last_tick_is_at_or_above_the_largest_value(largest: float) -> None:
    ticks = chart.Axis("", largest).ticks
    assert ticks[0] == 0 and ticks[-2] < largest <= ticks[-1] * (1 + 1e-9)
    assert 2 <= len(ticks) <= 7


def test_a_percentile_is_a_value_that_was_measured() -> None:
    values = [float(number) for number in range(1, 101)]
    assert [report.percentile(values, share) for share in (0.0, 0.5, 0.9, 0.99, 1.0)] == [1, 50, 90, 99, 100]
    assert report.percentile([3.0], 0.99) == 3.0


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What a comparison that cannot be made says."""
    assert cli.main(argv) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and "Traceback" not in err
    return err


@pytest.mark.parametrize(
    ("wrong", "message", "hint"),
    [
        ("no list of models", "no `/v1/models`", "`vllm serve`"),
        ("a page of HTML", "no list of models", "`vllm serve`"),
        ("a redirect", "answered 307", ""),
        ("chat only", "answered 404", "`/v1/completions`"),
        ("busy", "answered 503: no room", "`--concurrency`"),
        ("no stream", "does not stream", "a proxy in between"),
        ("no token", "without a token", ""),
        ("ends early", "ended an answer early", "its log"),
        ("breaks off", "EngineCore died", ""),
        ("no JSON", "something else than JSON", "`vllm serve`"),
        ("strange objects", "other objects", "`vllm serve`"),
    ],
)
def test_an_endpoint_that_answers_otherwise_is_named_with_what_to_do(
    capsys: pytest.CaptureFixture[str], wrong: str, message: str, hint: str
) -> None:
    with Fake(wrong=wrong) as fake:
        said = refused(capsys, fake.url, *SMALL)
    assert fake.url in said and message in said
    assert hint in said.partition("hint: ")[2]


def test_an_answer_that_never_ends_is_given_up_at_the_deadline(capsys: pytest.CaptureFixture[str]) -> None:
    with Fake(wrong="never ends") as fake:
        start = time.monotonic()
        said = refused(capsys, fake.url, *SMALL, "--deadline", "0.5")
        assert time.monotonic() - start < 30
    assert "did not answer within 0.5 s" in said and "hint: " in said


def test_where_nobody_listens_the_hint_asks_for_the_port(capsys: pytest.CaptureFixture[str]) -> None:
    with Fake() as fake:
        url = fake.url
    said = refused(capsys, url, *SMALL)
    assert f"nobody listens at {url}" in said and "hint: is the server up" in said


@pytest.mark.parametrize(
    "address", ["localhost:8000", "http://", "ftp://host", "http://host:port", "http://user:secret@host", "http://h/?a"]
)
def test_what_is_no_address_is_told_before_anything_is_asked(capsys: pytest.CaptureFixture[str], address: str) -> None:
    said = refused(capsys, address)
    assert "address" in said or "more than host" in said
    assert "hint: " in said and "secret" not in said


def test_an_address_may_end_in_v1(tmp_path: Path) -> None:
    with Fake() as fake:
        assert facts(tmp_path, f"{fake.url}/v1/", *SMALL)["endpoints"][0]["url"] == fake.url


def test_the_key_comes_from_the_environment_or_a_file_and_is_never_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "key"
    file.write_text("right-key\n")
    monkeypatch.setenv("OPENAI_API_KEY", "wrong-key")
    with Fake(key="right-key") as fake:
        wrong = refused(capsys, fake.url, *SMALL)
        assert cli.main([fake.url, *SMALL, "--api-key-file", str(file)]) == 0
        monkeypatch.setenv("OPENAI_API_KEY", "right-key")
        assert cli.main([fake.url, *SMALL]) == 0
        shown = capsys.readouterr().out
        monkeypatch.delenv("OPENAI_API_KEY")
        none = refused(capsys, fake.url, *SMALL)
    assert "refuses the key" in wrong and "`OPENAI_API_KEY`" in wrong and "--api-key-file" in wrong
    assert "wants a key" in none
    assert "-key" not in shown + wrong.replace("--api-key-file", "")


@pytest.mark.parametrize("content", ["", "two\nlines", "schlüssel"])
def test_a_file_without_a_key_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str) -> None:
    file = tmp_path / "key"
    file.write_text(content)
    assert str(file) in refused(capsys, "http://localhost:1", "--api-key-file", str(file))


def test_one_of_several_models_has_to_be_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Fake(models=("small", "large")) as fake:
        assert "hint: choose with `--model`: `small`, `large`" in refused(capsys, fake.url, *SMALL)
        assert "hint: it has `small`, `large`" in refused(capsys, fake.url, *SMALL, "--model", "medium")
        assert facts(tmp_path, fake.url, *SMALL, "--model", "large")["endpoints"][0]["model"] == "large"


def test_endpoints_with_different_models_are_said_to_have_them(tmp_path: Path) -> None:
    with Fake(models=("one",)) as one, Fake(models=("two",)) as two:
        found = facts(tmp_path, one.url, "--baseline", two.url, *SMALL)
        with pytest.raises(AssertionError):
            facts(tmp_path, one.url, "--baseline", two.url, *SMALL, "--model", "one")
        facts(tmp_path, one.url, "--baseline", two.url, *SMALL, "--model", "one", "--baseline-model", "two")
    assert "the endpoints serve different models: `/models/one` and `/models/two`" in found["notes"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--turn-tokens", "9000"], "takes 8,192"),
        (["--rounds", "3"], "is not a size of `conversations`"),
        (["--workload", "documents"], "`--capacity-tokens N`"),
        (["--workload", "documents", "--capacity-tokens", "100"], "does not fit"),
        (["--workload", "documents", "--demo", "--rounds", "1"], "at least 2"),
        (["--workload", "documents", "--demo", "--turns", "3"], "`--workload conversations`"),
        (["--working-sets", "0.5"], "is not a size of `conversations`"),
        (["--json", "nowhere/facts.json"], "no folder `nowhere`"),
    ],
)
def test_what_cannot_be_measured_is_told_before_the_first_request(
    capsys: pytest.CaptureFixture[str], options: Sequence[str], message: str
) -> None:
    with Fake() as fake:
        assert message in refused(capsys, fake.url, *options)
        assert fake.requests == []


def test_an_endpoint_is_not_its_own_baseline(capsys: pytest.CaptureFixture[str]) -> None:
    assert "both endpoints are the same" in refused(capsys, "http://h:80", "--baseline", "http://h/v1")


@pytest.mark.parametrize(
    "option",
    [
        ["--turns", "0"],
        ["--deadline", "inf"],
        ["--deadline", "-1"],
        ["--turn", "3"],
        ["--plot", "a.png"],
        ["--working-sets", "0.9,0"],
        ["--working-sets", "nan"],
        ["--working-sets", "0.9;1.1"],
    ],
)
def test_a_wrong_option_ends_with_status_2(option: Sequence[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["http://localhost:1", *option])
    assert ended.value.code == 2


def test_the_module_and_the_command_of_the_wheel_are_the_same_program() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert "forebay" not in scripts, "that is the binary"
    module, _, name = scripts["forebay-compare"].partition(":")
    assert getattr(import_module(module), name) is cli.main
    with Fake() as fake:
        argv = [sys.executable, "-m", "forebay.compare", fake.url, *SMALL]
        done = subprocess.run(argv, env=clean_env(), capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "second sight" in done.stdout
