# SPDX-License-Identifier: Apache-2.0
"""What changed between two receipts: identities first, then claims, then figures with their intervals.

Both receipts are reviewed first; a comparison of figures that nobody derived again would prove nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import computed_field

from qualify.claims.model import OBSERVED, Claim, ClaimId, Estimate, Status
from qualify.errors import EvidenceError, ExitCode
from qualify.model import Record
from qualify.receipt.build import Derive, derive_claims
from qualify.receipt.model import Qualification, Receipt
from qualify.receipt.verify import StepStatus, review

MARGIN = 0.02
"""Ratios within 1 ± this count as the same [proposal]; CPU engines vary by more between boots, GPUs by less."""

LOWER_IS_BETTER = frozenset({"s", "ms", "W", "Cel"})
"""Units of figures that improve by falling; all other figures improve by rising."""

STEPS_PER_SECOND, TOKENS_PER_SECOND = "{step}/s", "{token}/s"


class Change(StrEnum):
    SAME = "SAME"
    BETTER = "BETTER"
    WORSE = "WORSE"
    UNRESOLVED = "UNRESOLVED"
    INCOMPARABLE = "INCOMPARABLE"


class Fact(Record):
    """An identity or an observed value that differs."""

    name: str
    left: Any
    right: Any


class ClaimChange(Record):
    claim: ClaimId
    change: Change
    left: Status
    right: Status
    facts: tuple[Fact, ...]
    """Observed scalars that differ; no verdict hangs on them."""


class FigureChange(Record):
    """`low` and `high` bound the ratio right/left; null where one side has no interval."""

    claim: ClaimId
    name: str
    scope: str
    unit: str
    change: Change
    left: float
    right: float
    low: float | None
    high: float | None
    reason: str = ""


class Difference(Record):
    comparable: bool
    """Whether speed may be compared: same profile, model and hardware."""
    identities: tuple[Fact, ...]
    claims: tuple[ClaimChange, ...]
    figures: tuple[FigureChange, ...]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def change(self) -> Change:
        """WORSE if anything is worse, else UNRESOLVED, else BETTER, else SAME; incomparable figures have no say."""
        found = {claim.change for claim in self.claims} | {figure.change for figure in self.figures}
        order = (Change.WORSE, Change.UNRESOLVED, Change.BETTER, Change.SAME)
        return next((change for change in order if change in found), Change.INCOMPARABLE)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def exit_code(self) -> int:
        return ExitCode.FAILED if self.change is Change.WORSE else ExitCode.PASSED


def diff(left: Path, right: Path, *, derive: Derive = derive_claims) -> Difference:
    """What changed from the receipt at `left` to the one at `right`. Raises EvidenceError if one is not verified."""
    return compare(_verified(left, derive), _verified(right, derive))


def _verified(path: Path, derive: Derive) -> Receipt:
    reviewed = review(path, derive=derive)
    if reviewed.receipt is None:
        failed = next(step for step in reviewed.steps if step.status is StepStatus.FAILED)
        raise EvidenceError(
            f"{path} is not verified: step {failed.number} ({failed.name}): {failed.detail}",
            remedy="only verified receipts are compared",
        )
    return reviewed.receipt


def compare(left: Receipt, right: Receipt) -> Difference:
    """The pure part of `diff`."""
    identities = tuple(_differences(_identity(left), _identity(right)))
    speed = ("profile", "model", "host.", "target")
    comparable = not any(fact.name.startswith(speed) for fact in identities)
    pairs = list(zip(left.predicate.claims, right.predicate.claims, strict=True))
    figures = [change for one, other in pairs for change in _figures(one, other, comparable)]
    return Difference(
        comparable=comparable,
        identities=identities,
        claims=tuple(_claim(one, other) for one, other in pairs),
        figures=_explained_by_acceptance(figures),
    )


def _identity(receipt: Receipt) -> dict[str, Any]:
    """What must be equal for two receipts to speak of the same thing, flat."""
    predicate: Qualification = receipt.predicate
    host = predicate.host
    engine = predicate.engine
    return {
        "subject": f"{receipt.subject[0].name}@sha256:{receipt.subject[0].digest.sha256}",
        "profile": predicate.profile.digest.sha256,
        "model": predicate.model.digest.sha256 if predicate.model else None,
        "target": predicate.target.split(":")[0],
        "harness": f"{predicate.harness.version} {predicate.harness.git_commit}",
        "lock": engine.lock_digest if engine else None,
        "python": engine.python if engine else None,
        **{f"package {package.name}": package.version for package in (engine.packages if engine else ())},
        "host.cpu": f"{host.cpu_model}, {host.cores} cores" if host else None,
        "host.memory": host.memory_bytes if host else None,
        "host.gpus": [f"{gpu.uuid_hash} {gpu.name} {gpu.driver}" for gpu in host.gpus] if host else None,
    }


def _differences(left: dict[str, Any], right: dict[str, Any]) -> Iterator[Fact]:
    for name in sorted(set(left) | set(right)):
        if left.get(name) != right.get(name):
            yield Fact(name=name, left=left.get(name), right=right.get(name))


def _claim(left: Claim, right: Claim) -> ClaimChange:
    return ClaimChange(
        claim=left.id,
        change=_status_change(left.status, right.status),
        left=left.status,
        right=right.status,
        facts=tuple(_differences(_scalars(left.observed), _scalars(right.observed))),
    )


def _status_change(left: Status, right: Status) -> Change:
    """A claim that passed and no longer does is worse, also when it was not measured: the proof is gone."""
    if left is right:
        return Change.SAME
    if left is Status.PASSED:
        return Change.UNRESOLVED if right is Status.INCONCLUSIVE else Change.WORSE
    if right is Status.PASSED:
        return Change.BETTER
    return Change.UNRESOLVED if {left, right} <= OBSERVED else Change.INCOMPARABLE


def _scalars(value: Any, name: str = "") -> dict[str, Any]:
    """The scalars of nested objects by dotted name; lists are left out, they hold evidence, not headlines."""
    if isinstance(value, dict):
        found: dict[str, Any] = {}
        for key, inner in value.items():
            found |= _scalars(inner, f"{name}.{key}" if name else str(key))
        return found
    return {name: value} if isinstance(value, str | int | float) else {}


def _figures(left: Claim, right: Claim, comparable: bool) -> Iterator[FigureChange]:
    """Figures that both claims have; one that only one side has shows in the claim's status or its facts."""
    others = {(figure.name, figure.scope, figure.unit): figure for figure in right.estimates}
    for one in left.estimates:
        other = others.get((one.name, one.scope, one.unit))
        if other is not None:
            yield _figure(left.id, one, other, comparable)


def _figure(claim: ClaimId, left: Estimate, right: Estimate, comparable: bool) -> FigureChange:
    bounds = ratio_interval(left, right) if comparable else None
    change, reason = _judge(bounds, left.unit) if comparable else (Change.INCOMPARABLE, "profile, model or host differ")
    if left == right:
        change, reason = Change.SAME, ""
    low, high = bounds or (None, None)
    return FigureChange(
        claim=claim,
        name=left.name,
        scope=left.scope,
        unit=left.unit,
        change=change,
        left=left.point,
        right=right.point,
        low=low,
        high=high,
        reason=reason,
    )


def ratio_interval(left: Estimate, right: Estimate) -> tuple[float, float] | None:
    """Interval of right/left for independent figures: relative half-widths add in quadrature on the log scale.

    None where a side has no interval or is not positive, since then there is no ratio to speak of.
    """
    halves = []
    for figure in (left, right):
        if figure.low is None or figure.high is None or figure.low <= 0:
            return None
        halves.append((math.log(figure.high) - math.log(figure.low)) / 2)
    centre, half = math.log(right.point / left.point), math.hypot(*halves)
    return round(math.exp(centre - half), 6), round(math.exp(centre + half), 6)


def _judge(bounds: tuple[float, float] | None, unit: str) -> tuple[Change, str]:
    if bounds is None:
        return Change.UNRESOLVED, "no interval on both sides"
    low, high = bounds
    if low >= 1 - MARGIN and high <= 1 + MARGIN:
        return Change.SAME, ""
    if low > 1 + MARGIN or high < 1 - MARGIN:
        rose = low > 1
        return (Change.WORSE if rose == (unit in LOWER_IS_BETTER) else Change.BETTER), ""
    return Change.UNRESOLVED, f"the ratio's interval reaches across 1 ± {MARGIN:g}"


def _explained_by_acceptance(figures: list[FigureChange]) -> tuple[FigureChange, ...]:
    """Tokens a second that moved while steps a second stand still move with the acceptance length only.

    Acceptance belongs to prompts and drafter; unless its own interval shows a change, the change is unresolved.
    """
    moved = {Change.BETTER, Change.WORSE}

    def resolved(figure: FigureChange) -> FigureChange:
        peers = [peer for peer in figures if peer.scope == figure.scope and peer is not figure]
        steps = [peer for peer in peers if peer.unit == STEPS_PER_SECOND]
        if figure.unit != TOKENS_PER_SECOND or figure.change not in moved or not steps:
            return figure
        if any(peer.change in moved for peer in peers):
            return figure
        reason = "steps/s did not move; acceptance may explain it"
        return figure.model_copy(update={"change": Change.UNRESOLVED, "reason": reason})

    return tuple(resolved(figure) for figure in figures)


def render(difference: Difference) -> str:
    """Plain text: differing identities, claims, figures; the last line is the whole in one word."""
    lines = [f"{fact.name}: {fact.left} → {fact.right}" for fact in difference.identities] or ["identities: all equal"]
    for claim in difference.claims:
        lines.append(f"{claim.change:<13} {claim.claim:<21} {claim.left} → {claim.right}")
        lines += [f"{'':<13}   {fact.name}: {_moved(fact)}" for fact in claim.facts]
    for figure in difference.figures:
        bounds = f", ratio [{figure.low:.4f}, {figure.high:.4f}]" if figure.low is not None else ""
        scope = f" ({figure.scope})" if figure.scope else ""
        why = f": {figure.reason}" if figure.reason else ""
        values = f"{figure.left:.5g} → {figure.right:.5g} {figure.unit}"
        lines.append(f"{figure.change:<13} {figure.name}{scope} {values}{bounds}{why}")
    return "\n".join([*lines, difference.change])


def _moved(fact: Fact) -> str:
    text = f"{fact.left} → {fact.right}"
    numbers = (fact.left, fact.right)
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in numbers) and fact.left:
        text += f" ({(fact.right - fact.left) / abs(fact.left):+.2%})"
    return text
