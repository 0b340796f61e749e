"""Judges answers, and judges whether the judgement means anything.

Holds true: token equality is never claimed of answers that could not have differed. Each guard fails with a class of
its own, and `test_guards.py` provokes each of them.

Ties: two candidates closer than `TIE_GAP` in log-probability may swap when a sum is formed in another order, as it is
behind a loaded prefix. A first mismatch on such a token is no mismatch; the rest of that answer is then not compared.
If more than `TIE_SHARE` of the answers end so, the comparison failed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rig.engine import Answer

TIE_GAP = 2e-3
TIE_SHARE = 0.25


class Failed(AssertionError):
    """A comparison failed, or proved nothing."""


class DifferentTokens(Failed):
    """An answer has another token than the baseline's, and it was no tie."""


class Unfinished(Failed):
    """An answer ended for another reason than its length."""


class TooManyTies(Failed):
    """So many answers were cut short by a tie that the rest proves little."""


class Insensitive(Failed):
    """Another prefix gave the same output: wrong KV would not show."""


class NotBatchInvariant(Failed):
    """The baseline itself answers otherwise in company: token equality would prove nothing."""


class TooFewHits(Failed):
    """Fewer prompt tokens came from the cache than must have."""


class TooFewPreemptions(Failed):
    """The engine was not short of blocks: nothing was preempted."""


class DifferentPages(Failed):
    """A loaded block does not hold the bytes that were computed."""


@dataclass(frozen=True)
class Verdict:
    """How much was compared."""

    answers: int
    tokens: int
    ties: int


def same_tokens(baseline: Mapping[str, Answer], answers: Mapping[str, Answer]) -> Verdict:
    """Every answer equals the baseline's of the same id, token for token."""
    if not answers:
        raise Failed("there is nothing to compare")
    compared = 0
    ties = 0
    for name, answer in answers.items():
        equal, is_tie = _compare(baseline[name], answer)
        compared += equal
        ties += is_tie
    if ties > TIE_SHARE * len(answers):
        raise TooManyTies(f"{ties} of {len(answers)} answers were cut short by a tie")
    return Verdict(len(answers), compared, ties)


def _compare(wanted: Answer, got: Answer) -> tuple[int, bool]:
    """How many tokens are equal, and whether a tie ended the comparison."""
    if got.finish_reason != "length":
        raise Unfinished(f"`{got.id}` ended with `{got.finish_reason}` after {len(got.tokens)} tokens")
    if len(wanted.gaps) != len(wanted.tokens):
        raise Failed(f"the baseline of `{wanted.id}` has no gaps, so a tie cannot be told from an error")
    for at, (want, have) in enumerate(zip(wanted.tokens, got.tokens, strict=True)):
        if want == have:
            continue
        if wanted.gaps[at] < TIE_GAP:
            return at, True
        raise DifferentTokens(
            f"`{got.id}` differs from the baseline at token {at} of {len(wanted.tokens)}: {have} instead of {want}, "
            f"which led by {wanted.gaps[at]:.4f}; {got.hit_tokens} of {got.prompt_tokens} prompt tokens were hits\n"
            f"  baseline {list(wanted.tokens)}\n  answer   {list(got.tokens)}"
        )
    return len(wanted.tokens), False


def sensitive(answers: Mapping[str, Answer], same_tail: Iterable[Sequence[str]]) -> None:
    """Prompts that differ only in their prefix got different outputs."""
    for names in same_tail:
        outputs = {answers[name].tokens for name in names}
        if len(outputs) < len(names):
            raise Insensitive(
                f"the same tail behind {len(names)} prefixes gave {len(outputs)} outputs: {', '.join(names)}"
            )


def batch_invariant(answers: Mapping[str, Answer], same_prompt: Iterable[tuple[str, str]]) -> None:
    """A prompt has the same answer alone as in company, ties apart."""
    for alone, together in same_prompt:
        try:
            _compare(answers[alone], answers[together])
        except DifferentTokens as error:
            raise NotBatchInvariant(f"`{alone}` in company is another answer: {error}") from None


def enough_hits(answers: Iterable[Answer], block_size: int, share: float) -> float:
    """At least this share of what could come from the cache did; returns the share.

    Whole blocks can come from it, and the last token is always computed.
    """
    listed = list(answers)
    reachable = sum((answer.prompt_tokens - 1) // block_size * block_size for answer in listed)
    hits = sum(min(answer.hit_tokens, answer.prompt_tokens) for answer in listed)
    if reachable == 0 or hits < share * reachable:
        raise TooFewHits(f"{hits} of {reachable} reachable prompt tokens were hits, wanted at least {share:.0%}")
    return hits / reachable


def enough_preemptions(count: float, least: int) -> None:
    if count < least:
        raise TooFewPreemptions(f"{count:g} preemptions, wanted at least {least}")


def same_pages(computed: Answer, loaded: Answer, block_size: int) -> int:
    """The blocks that `loaded` got as hits hold the bytes `computed` has; returns how many were compared."""
    blocks = loaded.hit_tokens // block_size
    compared = 0
    for group, (want, have) in enumerate(zip(computed.pages, loaded.pages, strict=True)):
        for at in range(blocks):
            if want[at] is None or have[at] is None:
                continue
            if want[at] != have[at]:
                raise DifferentPages(f"block {at} of group {group} of `{loaded.id}` has other bytes than were computed")
            compared += 1
    if compared == 0:
        raise TooFewHits(f"`{loaded.id}` has no loaded block to compare, {loaded.hit_tokens} hit tokens")
    return compared
