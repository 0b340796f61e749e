"""The judgement is judged: every way in which a comparison can fail, or prove nothing, is provoked once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rig import compare
from rig.engine import Answer

GOOD = Answer(
    id="a",
    tokens=(5, 6, 7, 8),
    finish_reason="length",
    prompt_tokens=100,
    hit_tokens=96,
    ttft_ms=1.0,
    gaps=(0.5, 0.4, 0.3, 0.2),
    pages=(("p0", "p1", "p2", "p3"),),
)


def test_equal_answers_are_equal() -> None:
    assert compare.same_tokens({"a": GOOD}, {"a": GOOD}) == compare.Verdict(answers=1, tokens=4, ties=0)


def test_one_other_token_is_an_error() -> None:
    with pytest.raises(compare.DifferentTokens, match="at token 2 of 4: 9 instead of 7"):
        compare.same_tokens({"a": GOOD}, {"a": replace(GOOD, tokens=(5, 6, 9, 8))})


def test_an_answer_that_was_cut_short_is_an_error() -> None:
    with pytest.raises(compare.Unfinished, match="`error`"):
        compare.same_tokens({"a": GOOD}, {"a": replace(GOOD, finish_reason="error", tokens=(5, 6))})


def test_a_tie_ends_the_comparison_of_that_answer_alone() -> None:
    close = replace(GOOD, gaps=(0.5, 0.001, 0.3, 0.2))
    others = {name: replace(GOOD, id=name) for name in "bcde"}
    answers = others | {"a": replace(GOOD, tokens=(5, 9, 9, 9))}
    assert compare.same_tokens(others | {"a": close}, answers) == compare.Verdict(answers=5, tokens=17, ties=1)


def test_a_mismatch_before_a_tie_is_an_error() -> None:
    close = replace(GOOD, gaps=(0.5, 0.001, 0.3, 0.2))
    with pytest.raises(compare.DifferentTokens, match="at token 0"):
        compare.same_tokens({"a": close}, {"a": replace(GOOD, tokens=(9, 9, 7, 8))})


def test_many_ties_prove_nothing() -> None:
    close = replace(GOOD, gaps=(0.5, 0.001, 0.3, 0.2))
    with pytest.raises(compare.TooManyTies):
        compare.same_tokens({"a": close}, {"a": replace(GOOD, tokens=(5, 9, 9, 9))})


def test_a_baseline_without_gaps_is_refused() -> None:
    with pytest.raises(compare.Failed, match="no gaps"):
        compare.same_tokens({"a": replace(GOOD, gaps=())}, {"a": GOOD})


def test_no_answers_prove_nothing() -> None:
    with pytest.raises(compare.Failed, match="nothing to compare"):
        compare.same_tokens({"a": GOOD}, {})


def test_the_same_output_behind_another_prefix_proves_nothing() -> None:
    with pytest.raises(compare.Insensitive, match="a, b"):
        compare.sensitive({"a": GOOD, "b": replace(GOOD, id="b")}, [("a", "b")])


def test_another_output_behind_another_prefix_is_what_we_want() -> None:
    compare.sensitive({"a": GOOD, "b": replace(GOOD, tokens=(1, 2, 3, 4))}, [("a", "b")])


def test_a_baseline_that_depends_on_company_proves_nothing() -> None:
    with pytest.raises(compare.NotBatchInvariant, match="`a` in company"):
        compare.batch_invariant({"a": GOOD, "b": replace(GOOD, id="b", tokens=(1, 2, 3, 4))}, [("a", "b")])


def test_hits_are_counted_in_whole_blocks_without_the_last_token() -> None:
    assert compare.enough_hits([GOOD], block_size=32, share=1.0) == 1.0


def test_a_missing_block_of_hits_is_noticed() -> None:
    with pytest.raises(compare.TooFewHits, match="64 of 96"):
        compare.enough_hits([replace(GOOD, hit_tokens=64)], block_size=32, share=0.95)


def test_prompts_too_short_to_hit_prove_nothing() -> None:
    with pytest.raises(compare.TooFewHits, match="0 of 0"):
        compare.enough_hits([replace(GOOD, prompt_tokens=20, hit_tokens=0)], block_size=32, share=0.0)


def test_an_engine_without_preemptions_proves_nothing_about_preemption() -> None:
    compare.enough_preemptions(3, 3)
    with pytest.raises(compare.TooFewPreemptions):
        compare.enough_preemptions(2, 3)


def test_only_loaded_blocks_are_compared() -> None:
    loaded = replace(GOOD, hit_tokens=64, pages=(("p0", "p1", "other", "other"),))
    assert compare.same_pages(GOOD, loaded, block_size=32) == 2


def test_one_other_page_is_an_error() -> None:
    with pytest.raises(compare.DifferentPages, match="block 1 of group 0"):
        compare.same_pages(GOOD, replace(GOOD, pages=(("p0", "other", "p2", "p3"),)), block_size=32)


def test_pages_without_a_hit_prove_nothing() -> None:
    with pytest.raises(compare.TooFewHits, match="no loaded block"):
        compare.same_pages(GOOD, replace(GOOD, hit_tokens=0), block_size=32)


def test_a_page_that_either_side_no_longer_holds_is_not_counted() -> None:
    gone = replace(GOOD, pages=((None, None, "p2", "p3"),))
    assert compare.same_pages(GOOD, gone, block_size=32) == 1
