# SPDX-License-Identifier: Apache-2.0
"""What token counts and outputs of a KV restore prove, and what they leave open."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from qualify.observe.codes import EvidenceCode
from qualify.observe.facts import Phase
from qualify.observe.triage import Finding, Side, Verdict

_C = EvidenceCode


@dataclass(frozen=True, slots=True)
class RestoreFacts:
    """One restore as counted. None: not known.

    `hit_tokens` is the increase of the external hits of one request of `prompt_tokens`. `tries` restores were
    compared with the cold output, `wrong_tries` of them differ, the first at token `first_difference`.
    """

    prompt_tokens: int
    chunk_tokens: int
    hit_tokens: int | None
    stored_tokens: int | None = None
    tries: int = 0
    wrong_tries: int | None = None
    first_difference: int | None = None
    drafter: bool = False
    other_process: bool = False

    @property
    def whole_chunks(self) -> int:
        return self.prompt_tokens // self.chunk_tokens


def expected_restored(prompt_tokens: int, chunk_tokens: int) -> int | None:
    """Tokens that a full restore supplies; None when the prompt is a multiple of the chunk.

    In that case connectors differ: one leaves one token to compute, another the whole last chunk.
    """
    whole, rest = divmod(prompt_tokens, chunk_tokens)
    return whole * chunk_tokens if rest else None


def judge_restore(facts: RestoreFacts) -> tuple[Finding, ...]:
    """Counts first, then content: a full hit is no proof of content, and content needs enough tries."""
    return (*_counts(facts), *_content(facts))


def _counts(facts: RestoreFacts) -> Iterator[Finding]:
    expected = expected_restored(facts.prompt_tokens, facts.chunk_tokens)
    if facts.hit_tokens is None:
        yield _finding(_C.RESTORE_PARTIAL, Verdict.INCONCLUSIVE, "external hits are not known")
    elif facts.hit_tokens == 0 and facts.stored_tokens:
        yield _finding(_C.RESTORE_ZERO_HITS, Verdict.FAIL, f"{facts.stored_tokens:,} tokens stored, none hit")
    elif expected is None:
        detail = f"{facts.prompt_tokens:,} is a multiple of the chunk of {facts.chunk_tokens:,}: no expected value"
        yield _finding(_C.RESTORE_PARTIAL, Verdict.INCONCLUSIVE, detail)
    elif facts.hit_tokens != expected:
        detail = f"{facts.hit_tokens:,} of {expected:,} tokens restored"
        yield _finding(_C.RESTORE_PARTIAL, Verdict.FAIL, detail)


def _content(facts: RestoreFacts) -> Iterator[Finding]:
    wrong = facts.wrong_tries
    if wrong is None or facts.tries == 0:
        yield _finding(_C.NO_OUTPUT_TO_COMPARE, Verdict.INCONCLUSIVE, "no output of cold and restored run to compare")
    elif wrong == 0:
        if facts.drafter and (facts.whole_chunks < 2 or facts.tries < 2):
            detail = f"{facts.whole_chunks} chunks, {facts.tries} tries with a drafter prove nothing"
            yield _finding(_C.RESTORE_MULTI_CHUNK_DRAFTER, Verdict.INCONCLUSIVE, detail)
    else:
        where = "" if facts.first_difference is None else f", first at token {facts.first_difference}"
        yield _finding(_wrong(facts), Verdict.FAIL, f"{wrong} of {facts.tries} outputs differ{where}")


def _wrong(facts: RestoreFacts) -> EvidenceCode:
    if facts.drafter and facts.whole_chunks > 1:
        return _C.RESTORE_MULTI_CHUNK_DRAFTER
    return _C.RESTORE_CONTENT_WRONG if facts.other_process else _C.RESTORE_DIVERGES


def _finding(code: EvidenceCode, verdict: Verdict, detail: str) -> Finding:
    return Finding(code, Phase.SERVE, Side.ENGINE, verdict, None, detail)
