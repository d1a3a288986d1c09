# SPDX-License-Identifier: Apache-2.0
"""service.errors: nothing went wrong that a user would feel, by phase (start, serve, stopping) and side.

A log without an error proves nothing unless it is known to be the log of that boot, so each needs a canary: the
process that the harness started says in it that it serves. Errors after the requested stop are reported, not judged.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from pydantic import ValidationError

from qualify.claims.boots import is_outside, require_boot, visited
from qualify.claims.model import Check, Judgement, Status, check
from qualify.errors import EvidenceError
from qualify.evidence import Evidence, MissingEvidence
from qualify.http import Exchange
from qualify.observe.codes import EvidenceCode
from qualify.observe.facts import LogFacts, Phase, Readiness
from qualify.observe.log import read
from qualify.observe.triage import Finding, Side, Verdict, triage
from qualify.probes.kv_records import Arm
from qualify.profiles import Boot, Probe, Profile, Storage
from qualify.reasons import ReasonCode
from qualify.records import RUN, BootOutcome, BootRecord, Run

DECISIVE_WHEN_UNSURE = frozenset(
    {
        EvidenceCode.READY_LINE_MISSING,
        EvidenceCode.NOT_READY_AT_END,
        EvidenceCode.ENGINE_RESTARTED,
        EvidenceCode.STALL_ZERO_THROUGHPUT,
        EvidenceCode.PLUGIN_FAILED,
        EvidenceCode.PROCESS_DIED_SILENTLY,
    }
)
"""Inconclusive findings that matter here; the others belong to other claims, such as graph capture."""
REPORTED = frozenset(
    {
        EvidenceCode.ERROR_AFTER_REQUESTED_STOP,
        EvidenceCode.CLIENT_ERROR_ONLY,
        EvidenceCode.HEARTBEAT_BENIGN,
        EvidenceCode.WARNING_TRACEBACK,
    }
)
"""Findings that look like errors and are none."""
STOP_RECORDED_FROM = (0, 32)
"""The vLLM version from which on we have seen the log record a requested stop."""
ORDERLY = "shared memory "
"""Segments that an engine with a cache leaves at every orderly stop, and that the target removes: reported only."""
REQUEST_PHASE = {Probe.KV_CONTROLS: f"kv.{Arm.NEGATIVE}"}
"""The phase of a probe's requests where it is not the probe's name."""
ZONE_STEP = timedelta(minutes=15)
LOG_TIME = re.compile(rb"(?:\b(?:INFO|WARNING|ERROR) |\[\d{4}-)(\d\d-\d\d \d\d:\d\d:\d\d)[ ,]")
"""The time in a record of the engine (no year) or of the cache server."""


@dataclass(frozen=True)
class Account:
    """What one boot left: checks, and what is reported without being judged."""

    checks: list[Check]
    exchanges: int
    reported: list[dict[str, Any]]


def judge(evidence: Evidence, profile: Profile) -> Judgement:
    outside = is_outside(evidence)
    accounts = {
        folder: _outside(evidence, boot, folder) if outside else _boot(evidence, profile, boot, folder)
        for boot, folder in visited(evidence, profile)
    }
    checks = [item for account in accounts.values() for item in account.checks]
    wrong = [item for item in checks if item.status is not Status.PASSED]
    requests = sum(account.exchanges for account in accounts.values())
    side = "client side only" if outside else "logs and client"
    calm = f"no error in {len(accounts)} boots and {requests} requests ({side})"
    return Judgement(
        checks=tuple(checks),
        summary=f"{wrong[0].where}: not true that {wrong[0].name}" if wrong and not _only_blind(wrong) else calm,
        observed={
            "requests": requests,
            "boots": {folder: account.reported for folder, account in accounts.items()},
            "covered": side,
        },
        expected={"errors": 0},
    )


def _only_blind(wrong: list[Check]) -> bool:
    return all(item.reason_code is ReasonCode.NOT_PERMITTED for item in wrong)


def _outside(evidence: Evidence, boot: Boot, folder: str) -> Account:
    exchanges = _exchanges(evidence, boot, folder)
    blind = Check(
        name="the engine's log shows no error",
        status=Status.INCONCLUSIVE,
        reason_code=ReasonCode.NOT_PERMITTED,
        where=f"{folder}: a url: target shows no log, exit status or leftovers",
    )
    return Account([*_client_side(exchanges, folder), blind], len(exchanges), [])


def _boot(evidence: Evidence, profile: Profile, boot: Boot, folder: str) -> Account:
    record = evidence.record(f"{folder}/boot.json", BootRecord)
    exchanges = _exchanges(evidence, boot, folder)
    ending = list(_ending(record, profile.timeouts.start_seconds, folder))
    checks = [*ending, *_client_side(exchanges, folder)]
    if all(item.status is Status.PASSED for item in ending):
        checks.append(_each_probe_asked(exchanges, boot, folder))
    local = evidence.record(RUN, Run).target == "local"
    logs = ["engine.log"] if boot.cache is Storage.NONE else ["engine.log", "cache.log"]
    reported: list[dict[str, Any]] = [
        {"phase": Phase.STOPPING, "side": Side.ENGINE, "detail": f"left and removed: {item}"}
        for item in record.leftovers
        if item.startswith(ORDERLY)
    ]
    for name in logs:
        content = _log(evidence, f"{folder}/{name}")
        facts = read([content], name)
        findings = triage(
            facts, stop_requested_at=_stop_on_log_clock(record, content), exit_status=_own_exit(record, facts)
        )
        decisive = [finding for finding in findings if _decides(finding, name)]
        if record.ready_seconds is None:  # such a log has no canary; the end of the boot has failed already
            reported.extend(_as_json(finding, name) for finding in decisive)
            continue
        canary = _canary(facts, record, name, folder, local)
        checks.extend((canary, _whole(record, content, name, folder)))
        if name == "engine.log" and canary.status is Status.PASSED and record.outcome is BootOutcome.STOPPED:
            checks.append(_reaches_stop(facts, folder))
        if canary.status is Status.PASSED:  # else it speaks of something else
            checks.extend(_log_side(decisive, name, folder))
        reported.extend(_as_json(finding, name) for finding in findings if finding.code in REPORTED)
    return Account(checks, len(exchanges), reported)


def _exchanges(evidence: Evidence, boot: Boot, folder: str) -> list[Exchange]:
    """Every request of the harness in this boot. Raises MissingEvidence, EvidenceError."""
    path = f"{folder}/requests.jsonl"
    lines = evidence.text(path).splitlines()
    try:
        exchanges = [Exchange.model_validate_json(line) for line in lines]
    except ValidationError as error:
        raise EvidenceError(f"evidence {path} is not a list of exchanges: {error.errors()[0]['msg']}") from None
    require_boot(path, (one.boot for one in exchanges), boot)
    return exchanges


def _log(evidence: Evidence, path: str) -> bytes:
    """A log, compressed or not."""
    for candidate in (f"{path}.gz", path):
        if evidence.exists(candidate):
            return evidence.bytes(candidate)
    raise MissingEvidence(path)


def _ending(record: BootRecord, patience: float, where: str) -> Iterator[Check]:
    """Every process became ready, ran until it was asked to stop, and stopped by itself without leaving anything."""
    outcomes = {process.role: process.outcome for process in record.processes}
    ends = {record.outcome, *outcomes.values()}
    if record.ready_seconds is None and BootOutcome.DIED not in ends and record.stopped_seconds >= patience:
        yield check(
            "the engine is ready in time",
            False,
            ReasonCode.START_TIMEOUT,
            where=where,
            observed=record.stopped_seconds,
            expected=patience,
        )
        return
    died = bool(ends & {BootOutcome.DIED, BootOutcome.NOT_READY}) or record.ready_seconds is None
    yield check(
        "every process runs until it is asked to stop",
        not died,
        ReasonCode.CRASHED,
        where=where,
        observed=outcomes,
    )
    if died:
        return
    yield check(
        "every process stops when asked",
        BootOutcome.KILLED not in ends,
        ReasonCode.UNCLEAN_STOP,
        where=where,
        observed=outcomes,
    )
    left = [item for item in record.leftovers if not item.startswith(ORDERLY)]
    yield check("no process outlives the boot", not left, ReasonCode.LEFTOVER, where=where, observed=left)


def _client_side(exchanges: list[Exchange], where: str) -> Iterator[Check]:
    """A 4xx is a defect of the harness; no answer, a 5xx or a broken stream is one of the service."""
    waiting = [one for one in exchanges if one.phase == "start" and one.method == "GET"]
    asked = [one for one in exchanges if one not in waiting]
    refused = [one for one in asked if one.status is not None and 400 <= one.status < 500]
    failed = [one for one in asked if one not in refused and (one.error is not None or one.status != 200)]
    yield check("requests were made", bool(asked), ReasonCode.EVIDENCE_MISSING, where=where, otherwise=Status.INVALID)
    yield check(
        "no request of the harness is malformed",
        not refused,
        ReasonCode.CLIENT_ERROR,
        where=where,
        observed=[_brief(one) for one in refused[:5]],
        otherwise=Status.ERROR,
    )
    yield check(
        "every request is answered without error",
        not failed,
        ReasonCode.SERVICE_ERROR,
        where=where,
        observed=[_brief(one) for one in failed[:5]],
    )


def _each_probe_asked(exchanges: list[Exchange], boot: Boot, where: str) -> Check:
    """A list of requests that ends early would hide what came behind its end."""
    phases = {one.phase for one in exchanges}
    silent = [probe.value for probe in boot.probes if REQUEST_PHASE.get(probe, probe.value) not in phases]
    return check(
        "the requests of every probe are listed",
        not silent,
        ReasonCode.EVIDENCE_MISSING,
        where=where,
        observed=silent,
        otherwise=Status.INVALID,
    )


def _brief(one: Exchange) -> str:
    return f"{one.phase}: {one.method} {one.path} at {one.at:.1f} s: {one.error or one.status}"


def _canary(facts: LogFacts, record: BootRecord, name: str, where: str, local: bool) -> Check:
    """The log says that it serves, in a process that the harness started (pids of a container are its own)."""
    serving = {fact.value for fact in facts.server_started}
    pids = {process.pid for process in record.processes}
    engine = facts.version is not None and facts.ready is Readiness.YES
    spoke = engine if name == "engine.log" else facts.cache_server is not None
    return check(
        f"{name} is the log of this boot",
        spoke and bool(serving & pids if local else serving),
        ReasonCode.EVIDENCE_MISSING,
        where=where,
        observed={"serving": sorted(serving), "started": sorted(pids)},
        otherwise=Status.INVALID,
    )


def _whole(record: BootRecord, content: bytes, name: str, where: str) -> Check:
    """The log has the lines that its process had written when it had ended: one that was cut hides what it lost."""
    written = [process.log_lines for process in record.processes if f"{process.role}.log" == name]
    lines = content.count(b"\n")
    return check(
        f"{name} has every line that was written",
        written == [lines],
        ReasonCode.EVIDENCE_MISSING,
        where=where,
        observed=lines,
        expected=written[0] if written else None,
        otherwise=Status.INVALID,
    )


def _reaches_stop(facts: LogFacts, where: str) -> Check:
    """A log that ends before the requested stop hides what came behind its end. Older engines do not record a stop."""
    version = facts.version.value if facts.version else ""
    records = tuple(int(part) for part in re.findall(r"\d+", version)[:2]) >= STOP_RECORDED_FROM
    return check(
        "engine.log reaches the requested stop",
        not records or facts.shutdown_requested is not None,
        ReasonCode.EVIDENCE_MISSING,
        where=where,
        otherwise=Status.INVALID,
    )


def _stop_on_log_clock(record: BootRecord, log: bytes) -> datetime | None:
    """The requested stop in the log's own clock, which names no zone.

    The zone is the difference between the boot's start (UTC) and the first time in the log, in quarters of an hour:
    an engine speaks within minutes of its start.
    """
    first = LOG_TIME.search(log)
    if record.stop_requested_seconds is None or first is None:
        return None
    try:
        started = datetime.fromisoformat(record.started_at).replace(tzinfo=None)
        spoke = datetime.strptime(f"{started.year}-{first[1].decode()}", "%Y-%m-%d %H:%M:%S")
        zone = round((spoke - started) / ZONE_STEP) * ZONE_STEP
        return started + timedelta(seconds=record.stop_requested_seconds) + zone
    except (ValueError, OverflowError):
        return None


def _own_exit(record: BootRecord, facts: LogFacts) -> int | None:
    """The exit status of the process that wrote the log, if it ended by itself."""
    serving = {fact.value for fact in facts.server_started}
    for process in record.processes:
        if process.pid in serving and process.outcome is BootOutcome.DIED:
            return process.exit_status
    return None


def _decides(finding: Finding, log: str) -> bool:
    if log == "cache.log" and finding.code in (EvidenceCode.READY_LINE_MISSING, EvidenceCode.NOT_READY_AT_END):
        return False  # they speak of an engine's ready line
    if finding.verdict is Verdict.INCONCLUSIVE:
        return finding.code in DECISIVE_WHEN_UNSURE
    return finding.verdict is Verdict.FAIL


def _log_side(findings: list[Finding], log: str, where: str) -> Iterator[Check]:
    ours = [finding for finding in findings if finding.side in (Side.CLIENT, Side.HARNESS)]
    theirs = [finding for finding in findings if finding not in ours]
    sure = any(finding.verdict is Verdict.FAIL for finding in theirs)
    yield check(
        f"{log} shows no error",
        not theirs,
        ReasonCode.SERVICE_ERROR,
        where=where,
        observed=[_as_json(finding, log) for finding in theirs],
        otherwise=Status.FAILED if sure else Status.INCONCLUSIVE,
    )
    if ours:
        yield Check(
            name=f"{log} shows no refused request",
            status=Status.ERROR,
            reason_code=ReasonCode.CLIENT_ERROR,
            where=where,
            observed=[_as_json(finding, log) for finding in ours],
        )


def _as_json(finding: Finding, log: str) -> dict[str, Any]:
    return {
        "log": log,
        "line": finding.line,
        "code": finding.code,
        "phase": finding.phase,
        "side": finding.side,
        "rank": finding.rank,
        "detail": finding.detail[:300],
    }
