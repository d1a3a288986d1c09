# SPDX-License-Identifier: Apache-2.0
"""Identities between figures of a receipt, checked again by the reviewer's own arithmetic, not by the judges'."""

from __future__ import annotations

from collections.abc import Iterator

from qualify.claims.model import Claim, ClaimId, Status
from qualify.receipt.model import Qualification


def broken_identity(predicate: Qualification) -> tuple[str | None, int]:
    """The first identity that does not hold, or None; and how many were checked."""
    checked = 0
    for problem in _identities(predicate):
        checked += 1
        if problem is not None:
            return problem, checked
    return None, checked


def _identities(predicate: Qualification) -> Iterator[str | None]:
    """One item an identity: None where it holds, else what is wrong."""
    for claim in predicate.claims:
        yield from _within_intervals(claim)
        yield from _checks_explain(claim)
        if claim.id is ClaimId.KV_RESTORE:
            yield from _restores(claim)


def _within_intervals(claim: Claim) -> Iterator[str | None]:
    for figure in claim.estimates:
        if figure.low is not None and figure.high is not None:
            holds = figure.low <= figure.point <= figure.high
            yield None if holds else f"{claim.id}: {figure.name} ({figure.scope}) lies outside its own interval"


def _checks_explain(claim: Claim) -> Iterator[str | None]:
    """Reason codes of a judged claim are those of its checks, no more and no fewer."""
    if claim.checks:
        codes = {check.reason_code for check in claim.checks if check.reason_code is not None}
        yield None if codes == set(claim.reason_codes) else f"{claim.id}: its reason codes are not those of its checks"


def _restores(claim: Claim) -> Iterator[str | None]:
    """Bytes of a restore are those of its groups; a passed one supplied whole chunks, but never the last token."""
    observed = claim.observed or {}
    chunk = observed.get("chunkTokens")
    for row in observed.get("restores", ()):
        where = f"{claim.id}: {row['arm']} of {row['promptTokens']} tokens"
        total = sum(group["bytes"] for group in row["groups"])
        yield None if total == row["bytes"] else f"{where}: its bytes are not the sum over ranks and groups"
        if claim.status is Status.PASSED:
            tokens = row["promptTokens"]
            supplied = min(tokens - tokens % chunk, tokens - 1)
            yield None if row["externalTokens"] == supplied else f"{where}: not {supplied} external tokens"
            empty = not row["groups"] or any(group["blocks"] < 1 or group["bytes"] < 1 for group in row["groups"])
            yield None if not empty else f"{where}: a rank and group without a compared block"
