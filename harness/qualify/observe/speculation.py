# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding from counters: acceptance length, acceptance by position, and when they are unknown."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from qualify.observe.codes import EvidenceCode
from qualify.observe.facts import LogFacts, Phase, Source
from qualify.observe.metrics import Delta, Scrape
from qualify.observe.triage import Finding, Side, Verdict

_C = EvidenceCode
_FAMILY = "vllm:spec_decode_num_"
COLLAPSE_RATIO = 0.1
"""A position that keeps less than a tenth of the acceptance of the one before it: a published case fell from
0.60 to 0.01. A healthy drafter loses a third or so per position."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Counts of a window, summed over engines. None: the family does not exist or the window is invalid."""

    drafts: float | None
    draft_tokens: float | None
    accepted: float | None
    per_position: tuple[float, ...]

    @property
    def length(self) -> float | None:
        """Tokens per sequence step, including the verifier's own: 1 + accepted / drafts."""
        if self.drafts is None or self.accepted is None or self.drafts <= 0:
            return None
        return 1 + self.accepted / self.drafts


def acceptance(page: Scrape | Delta) -> Acceptance:
    """Counters of a page (since start) or of the window between two pages."""
    over = {"engine", "model_name"}
    scrape = page.after if isinstance(page, Delta) else page
    name = f"{_FAMILY}accepted_tokens_per_pos_total"
    positions = {dict(labels).get("position", "") for labels in scrape.series(name)}
    ordered = sorted((position for position in positions if position.isdigit()), key=int)
    values = [page.total(name, over, position=position).value for position in ordered]
    return Acceptance(
        page.total(f"{_FAMILY}drafts_total", over).value,
        page.total(f"{_FAMILY}draft_tokens_total", over).value,
        page.total(f"{_FAMILY}accepted_tokens_total", over).value,
        tuple(value for value in values if value is not None) if None not in values else (),
    )


def judge_acceptance(found: Acceptance, floor: float | None = None) -> tuple[Finding, ...]:
    """Findings about a window: absent family, collapse at a position, length below `floor`."""
    return tuple(_findings(found, floor))


def _findings(found: Acceptance, floor: float | None) -> Iterator[Finding]:
    if found.drafts is None:
        verdict = Verdict.FACT if floor is None else Verdict.INCONCLUSIVE
        yield _finding(_C.METRIC_FAMILY_ABSENT, verdict, "no speculative-decoding counters: acceptance is unknown")
        return
    previous = found.drafts
    for position, count in enumerate(found.per_position):
        if position > 0 and previous > 0 and count < previous * COLLAPSE_RATIO:
            detail = f"accepted {count:g} at position {position}, {previous:g} at the position before"
            yield _finding(_C.ACCEPTANCE_COLLAPSE, Verdict.PASS, detail)
            break
        previous = count
    if floor is not None:
        below = judge_length(found.length, floor)
        if below is not None:
            yield below


def judge_length(length: float | None, floor: float, source: Source | None = None) -> Finding | None:
    """A finding when the acceptance length is below its floor or unknown; None when it suffices."""
    if length is None:
        return _finding(_C.ACCEPTANCE_BELOW_FLOOR, Verdict.INCONCLUSIVE, "the acceptance length is unknown", source)
    if length >= floor:
        return None
    return _finding(
        _C.ACCEPTANCE_BELOW_FLOOR, Verdict.FAIL, f"acceptance length {length:g}, at least {floor:g}", source
    )


def judge_log_lengths(facts: LogFacts, floor: float) -> tuple[Finding, ...]:
    """The logged windows that stay below a floor. The log keeps no totals, so this can fail but not pass."""
    lines = facts.spec_decode.last if facts.spec_decode else ()
    known = [(fact.value.acceptance_length, fact.source) for fact in lines if fact.value.acceptance_length is not None]
    found = [judge_length(length, floor, source) for length, source in known]
    return tuple(finding for finding in found if finding is not None)


def _finding(code: EvidenceCode, verdict: Verdict, detail: str, source: Source | None = None) -> Finding:
    return Finding(code, Phase.SERVE, Side.ENGINE, verdict, source, detail)
