# SPDX-License-Identifier: Apache-2.0
"""The table of claims and the verdict line, for a terminal or a plain file."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from pathlib import Path

from qualify.claims.model import Claim, ClaimId, Estimate, Status
from qualify.receipt.model import Caveat, Identity, Qualification, Receipt, Result
from qualify.receipt.verdict import in_profile
from qualify.receipt.verify import Review, StepStatus
from qualify.report.terminal import paint, printable, wants_colour

STATUS_STYLE = {Status.PASSED: "green", Status.FAILED: "red", Status.ERROR: "red", Status.NOT_RUN: "dim"}
RESULT_STYLE = {Result.PASSED: "green", Result.WARNED: "yellow", Result.FAILED: "red", Result.INVALID: "red"}
STEP_MARK = {
    StepStatus.PASSED: ("ok", "green"),
    StepStatus.FAILED: ("FAILED", "red"),
    StepStatus.NOT_REACHED: ("-", "dim"),
    StepStatus.NOT_APPLICABLE: ("-", "dim"),
}
MAX_CHECKS_SHOWN = 3


def render_receipt(receipt: Receipt, bundle: Path | str) -> str:
    """Claims with their figures and open checks, caveats, and the verdict as the last line."""
    colour = wants_colour(sys.stdout)
    predicate = receipt.predicate
    lines = [line for claim in predicate.claims for line in _claim(claim, colour)]
    caveats = (*predicate.limitations, *predicate.not_for)
    lines += ["", *(line for caveat in caveats for line in _wrap(caveat_line(caveat), ""))] if caveats else [""]
    if predicate.failure:
        lines += _wrap(f"ended early: {predicate.failure}", "")
    return "\n".join([*lines, verdict_line(receipt, bundle, colour)])


def render_review(review: Review, path: Path | str) -> str:
    """One line a step; then, if all passed, the receipt itself."""
    colour = wants_colour(sys.stdout)
    lines = []
    for step in review.steps:
        mark, style = STEP_MARK[step.status]
        status = paint(f"{mark:<6}", style, colour)
        lines.append(f"{step.number:>2} {step.name:<10} {status} {printable(step.detail)}".rstrip())
    if review.receipt is None:
        failed = next(step for step in review.steps if step.status is StepStatus.FAILED)
        verdict = paint("NOT VERIFIED", "red", colour)
        return "\n".join([*lines, f"{verdict} at step {failed.number} ({failed.name}): {printable(failed.detail)}"])
    return "\n".join([*lines, "", render_receipt(review.receipt, path)])


def verdict_line(receipt: Receipt, bundle: Path | str, colour: bool) -> str:
    """One sentence: result, how many required claims passed, of what, and where the receipt is."""
    predicate = receipt.predicate
    required = [claim for claim in predicate.claims if claim.required]
    passed = sum(claim.status is Status.PASSED for claim in required)
    subject = receipt.subject[0]
    what = printable(subject.name) + (", software unverified" if predicate.identity is Identity.UNVERIFIED else "")
    return (
        f"{paint(predicate.result, RESULT_STYLE[predicate.result], colour)}"
        f" {passed} of {len(required)} required claims, coverage {predicate.coverage},"
        f" for {what} sha256:{subject.digest.sha256[:12]}{_because(predicate)} → {bundle}"
    )


def _because(predicate: Qualification) -> str:
    """The reasons that no line of the table shows: those of the whole run."""
    codes = [reason.reason_code for reason in predicate.result_reasons if reason.claim is None]
    return f" ({', '.join(codes)})" if codes else ""


def _claim(claim: Claim, colour: bool) -> list[str]:
    status = paint(f"{claim.status:<12}", STATUS_STYLE.get(claim.status, "yellow"), colour)
    kind = "required" if claim.required else "optional" if in_profile(claim) else ""
    codes = f" [{', '.join(claim.reason_codes)}]" if claim.reason_codes else ""
    first, *more = _wrap(claim.summary + codes, " " * 44) or [""]
    lines = [f"{claim.id:<21} {status} {kind:<9}{first.lstrip()}", *more]
    for scope, estimates in figures_by_scope(claim.estimates).items():
        text = ", ".join(f"{label(estimate)} {figure(estimate)}" for estimate in estimates)
        lines += _wrap(f"{scope}: {text}" if scope else text, " " * 35)
    unmet = [check for check in claim.checks if check.status is not Status.PASSED]
    for check in unmet[:MAX_CHECKS_SHOWN]:
        where = f" at {check.where}" if check.where else ""
        values = f"observed {brief(check.observed)}, expected {brief(check.expected)}"
        lines += _wrap(f"{check.status}: {check.name}{where}: {values}", " " * 35)
    if len(unmet) > MAX_CHECKS_SHOWN:
        lines.append(f"{'':<35}and {len(unmet) - MAX_CHECKS_SHOWN} more checks that did not pass")
    return lines


def caveat_line(caveat: Caveat) -> str:
    affected = "" if len(caveat.affects) == len(ClaimId) else f" ({', '.join(caveat.affects)})"
    return f"note: {caveat.text}{affected}"


def figures_by_scope(estimates: tuple[Estimate, ...]) -> dict[str, list[Estimate]]:
    """The figures of one scope belong together: tokens a second mean nothing without steps and acceptance."""
    scopes: dict[str, list[Estimate]] = {}
    for estimate in estimates:
        scopes.setdefault(estimate.scope, []).append(estimate)
    return scopes


def figure(estimate: Estimate) -> str:
    """Point and interval, with no more digits than the interval supports, e.g. 103.4 [101.6, 105.2]."""
    if estimate.low is None or estimate.high is None:
        return f"{estimate.point:.3g} (no interval: {estimate.reason or 'not given'})"
    digits = decimals((estimate.high - estimate.low) / 2)
    low, point, high = (f"{value:.{digits}f}" for value in (estimate.low, estimate.point, estimate.high))
    return f"{point} [{low}, {high}]"


def label(estimate: Estimate) -> str:
    """The figure's name in words, e.g. output tokens per second."""
    return re.sub(r"(?<=[a-z0-9])([A-Z])", lambda match: f" {match[1].lower()}", printable(estimate.name))


def decimals(half_width: float) -> int:
    """Decimal places that show two digits of the half-width; a width of 0 (nothing varied) shows three."""
    if half_width <= 0:
        return 3
    places = 0
    while half_width < 10 and places < 6:
        half_width *= 10
        places += 1
    return places


def brief(value: object, limit: int = 60) -> str:
    """A value on one line, shortened."""
    text = "unknown" if value is None else printable(str(value))
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _wrap(text: str, indent: str) -> list[str]:
    width = max(60, shutil.get_terminal_size((110, 24)).columns) if sys.stdout.isatty() else 10_000
    return textwrap.wrap(printable(text), width, initial_indent=indent, subsequent_indent=indent + "  " * (not indent))
