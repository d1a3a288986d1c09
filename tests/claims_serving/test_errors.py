# SPDX-License-Identifier: Apache-2.0
"""service.errors: by phase and side, with a canary for every log."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from fake_engine.bench import judged, run_record
from qualify import profiles
from qualify.claims.model import Claim, ClaimId, Status
from qualify.evidence import EvidenceWriter, compress
from qualify.http import Exchange
from qualify.profiles import Boot, Probe, Storage
from qualify.reasons import ReasonCode
from qualify.records import RUN, BootOutcome, BootRecord, Process

CODE = ReasonCode
PID = 100
START = f"""\
(APIServer pid={PID}) INFO 11-30 {{hour}}:00:05 [api_utils.py:286] non-default args: {{{{}}}}
(EngineCore pid=101) INFO 11-30 {{hour}}:00:10 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: x
INFO:     Started server process [{PID}]
INFO:     Waiting for application startup.
INFO:     Application startup complete.
INFO:     127.0.0.1:4 - "GET /health HTTP/1.1" 200 OK
INFO:     127.0.0.1:4 - "POST /v1/completions HTTP/1.1" 200 OK
"""
STOP = f"(APIServer pid={PID}) INFO 11-30 06:01:00 [launcher.py:254] [shutdown] API server: shutdown triggered\n"
FATAL = "(EngineCore pid=101) ERROR 11-30 {time} [core.py:1] EngineCore encountered a fatal error.\n"
CACHE = f"""\
| |   |  \\/  |  / ___|__ _  ___| |__   ___      LMCache v0.5.6 (g3e11e108)
INFO:     Started server process [{PID}]
"""


@dataclass(frozen=True)
class Left:
    """What a boot left behind; by default all is well."""

    log: str | None = START.format(hour="06") + STOP
    cache_log: str | None = None
    exchanges: tuple[Exchange, ...] = field(default_factory=lambda: (exchange(),))
    outcome: BootOutcome = BootOutcome.STOPPED
    leftovers: tuple[str, ...] = ()
    storage: Storage = Storage.NONE
    target: str = "local"
    ready: float | None = 20.0
    stopped: float = 62.0
    lost_lines: int = 0
    """Lines that each log had when its process ended, and has not any more."""


def exchange(
    status: int | None = 200, error: str | None = None, phase: str = "serve", method: str = "POST", boot: str = "only"
) -> Exchange:
    return Exchange(
        boot=boot, phase=phase, method=method, path="/v1/x", at=1.0, seconds=0.1, status=status, error=error
    )


def judge(root: Path, left: Left) -> Claim:
    boot = Boot(name="only", cache=left.storage, probes=(Probe.SERVE,))
    evidence = EvidenceWriter(root)
    evidence.record(RUN, run_record(left.target))
    folder = evidence.below("boots/01-only")
    logs = {"engine": left.log, "cache": left.cache_log}
    processes = tuple(
        Process(
            role=role,
            argv=(),
            environment={},
            pid=PID,
            exit_status=0,
            outcome=left.outcome,
            log_lines=text.count("\n") + left.lost_lines,
        )
        for role, text in logs.items()
        if text is not None
    )
    folder.record(
        "boot.json",
        BootRecord(
            index=1,
            name="only",
            started_at="2026-11-30T06:00:00+00:00",
            ready_seconds=left.ready,
            stop_requested_seconds=60.0,
            stopped_seconds=left.stopped,
            outcome=left.outcome,
            processes=processes,
            leftovers=left.leftovers,
        ),
    )
    folder.text("requests.jsonl", "".join(f"{one.model_dump_json()}\n" for one in left.exchanges))
    for role, text in logs.items():
        if text is not None:
            folder.bytes(f"{role}.log.gz", compress(text.encode()))
    profile = profiles.load("cpu-smoke").model_copy(update={"boots": (boot,)})
    return judged(root, profile, ClaimId.SERVICE_ERRORS)


def verdict(claim: Claim) -> tuple[Status, set[ReasonCode]]:
    return claim.status, set(claim.reason_codes)


def log(*lines: str, hour: str = "06", stop: str = STOP) -> str:
    return START.format(hour=hour) + "".join(lines) + stop


PASSED: tuple[Status, set[ReasonCode]] = (Status.PASSED, set())
FAILED = (Status.FAILED, {CODE.SERVICE_ERROR})

CASES: dict[str, tuple[Left, tuple[Status, set[ReasonCode]]]] = {
    "all is well": (Left(), PASSED),
    # the log, by phase
    "fatal while serving": (Left(log(FATAL.format(time="06:00:30"))), FAILED),
    "fatal after the shutdown record": (Left(log(stop=STOP + FATAL.format(time="06:01:01"))), PASSED),
    "fatal after the stop, before the record": (Left(log(FATAL.format(time="06:01:00"))), PASSED),
    "fatal after it, log two hours ahead": (
        Left(log(FATAL.format(time="08:01:00"), hour="08", stop=STOP.replace(" 06:", " 08:"))),
        PASSED,
    ),
    "fatal before it, log two hours ahead": (
        Left(log(FATAL.format(time="08:00:30"), hour="08", stop=STOP.replace(" 06:", " 08:"))),
        FAILED,
    ),
    "fatal before it, log five hours behind": (
        Left(log(FATAL.format(time="01:00:59"), hour="01", stop=STOP.replace(" 06:", " 01:"))),
        FAILED,
    ),
    "a second start in one log": (Left(START.format(hour="06") + log()), FAILED),
    # the log, whose
    "log of another process": (Left(log().replace(f"[{PID}]", "[7]")), (Status.INVALID, {CODE.EVIDENCE_MISSING})),
    "log without its ready line": (
        Left(log().replace("Application startup complete", "x")),
        (Status.INVALID, {CODE.EVIDENCE_MISSING}),
    ),
    "log cut behind its ready line": (Left(log(stop="")), (Status.INVALID, {CODE.EVIDENCE_MISSING})),
    "never ready in time": (
        Left("Loading weights\n", outcome=BootOutcome.NOT_READY, ready=None, stopped=300.0),
        (Status.FAILED, {CODE.START_TIMEOUT}),
    ),
    "list of requests without those of the probe": (
        Left(exchanges=(exchange(phase="workers"),)),
        (Status.INVALID, {CODE.EVIDENCE_MISSING}),
    ),
    "log that lost a line": (Left(lost_lines=1), (Status.INVALID, {CODE.EVIDENCE_MISSING})),
    "log with a line too many": (Left(lost_lines=-1), (Status.INVALID, {CODE.EVIDENCE_MISSING})),
    "list of requests of another boot": (
        Left(exchanges=(exchange(), exchange(boot="other"))),
        (Status.ERROR, {CODE.EVIDENCE_MISSING}),
    ),
    "empty log": (Left(""), (Status.INVALID, {CODE.EVIDENCE_MISSING})),
    "no log": (Left(None), (Status.ERROR, {CODE.EVIDENCE_MISSING})),
    "no cache log": (Left(storage=Storage.EMPTY), (Status.ERROR, {CODE.EVIDENCE_MISSING})),
    "cache log": (Left(storage=Storage.EMPTY, cache_log=CACHE), PASSED),
    "cache log of another": (
        Left(storage=Storage.EMPTY, cache_log=CACHE.replace(f"[{PID}]", "[7]")),
        (Status.INVALID, {CODE.EVIDENCE_MISSING}),
    ),
    "error in the cache log": (
        Left(storage=Storage.EMPTY, cache_log=CACHE + "[2026-11-30 06:00:30,100] LMCache ERROR: boom\n"),
        FAILED,
    ),
    # the client
    "no answer": (Left(exchanges=(exchange(), exchange(None, "ConnectError"))), FAILED),
    "a 500": (Left(exchanges=(exchange(500, "x"),)), FAILED),
    "an error inside a stream of status 200": (Left(exchanges=(exchange(200, "without its end mark"),)), FAILED),
    "a 400": (Left(exchanges=(exchange(400, "x"),)), (Status.ERROR, {CODE.CLIENT_ERROR})),
    "waiting for the start": (Left(exchanges=(exchange(503, "x", "start", "GET"), exchange())), PASSED),
    "no request at all": (Left(exchanges=()), (Status.INVALID, {CODE.EVIDENCE_MISSING})),
    # the end
    "died": (Left(outcome=BootOutcome.DIED), (Status.FAILED, {CODE.CRASHED})),
    "died with a word": (
        Left(log(FATAL.format(time="06:00:30"), stop=""), outcome=BootOutcome.DIED),
        (Status.FAILED, {CODE.CRASHED, CODE.SERVICE_ERROR}),
    ),
    "never ready": (
        Left("RuntimeError: Engine core initialization failed.\n", outcome=BootOutcome.NOT_READY, ready=None),
        (Status.FAILED, {CODE.CRASHED}),
    ),
    "killed": (Left(outcome=BootOutcome.KILLED), (Status.FAILED, {CODE.UNCLEAN_STOP})),
    "a process left": (Left(leftovers=("process x (pid 7)",)), (Status.FAILED, {CODE.LEFTOVER})),
    "shared memory left and removed": (Left(leftovers=("shared memory psm_1",)), PASSED),
    # from outside
    "url target": (Left(None, target="url:http://h"), (Status.INCONCLUSIVE, {CODE.NOT_PERMITTED})),
    "url target with a 500": (
        Left(None, target="url:http://h", exchanges=(exchange(500),)),
        (Status.FAILED, {CODE.SERVICE_ERROR, CODE.NOT_PERMITTED}),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_each_case_has_its_verdict(tmp_path: Path, name: str) -> None:
    """Each way in which a boot can go wrong has its code; what is no error passes and is reported."""
    left, expected = CASES[name]
    assert verdict(judge(tmp_path, left)) == expected


def test_errors_after_the_stop_are_reported(tmp_path: Path) -> None:
    """What is not judged is still in the claim, with log, line, phase and side."""
    claim = judge(tmp_path, Left(log(stop=STOP + FATAL.format(time="06:01:01")), leftovers=("shared memory psm_1",)))
    assert claim.observed is not None
    left, after = claim.observed["boots"]["boots/01-only"]
    assert left["detail"] == "left and removed: shared memory psm_1"
    assert (after["code"], after["phase"], after["line"]) == ("error_after_requested_stop", "stopping", 9)


def test_a_failure_names_phase_line_and_request(tmp_path: Path) -> None:
    """The first thing a reader needs: where it happened."""
    claim = judge(tmp_path, Left(log(FATAL.format(time="06:00:30")), exchanges=(exchange(500, "boom"),)))
    observed = [check.observed for check in claim.checks if check.status is Status.FAILED]
    assert observed[0] == ["serve: POST /v1/x at 1.0 s: boom"]
    assert (observed[1][0]["phase"], observed[1][0]["line"]) == ("serve", 8)


@pytest.mark.parametrize("value", ["no time", "9999-12-31T23:59:59Z", ""])
def test_a_start_that_is_no_time_hides_nothing(tmp_path: Path, value: str) -> None:
    """Without a usable clock the shutdown record in the log decides alone."""
    judge(tmp_path, Left(log(FATAL.format(time="06:00:30"))))
    path = tmp_path / "boots/01-only/boot.json"
    path.write_text(path.read_text().replace("2026-11-30T06:00:00+00:00", value))
    profile = profiles.load("cpu-smoke").model_copy(update={"boots": (Boot(name="only", probes=(Probe.SERVE,)),)})
    assert verdict(judged(tmp_path, profile, ClaimId.SERVICE_ERRORS)) == FAILED


def test_a_damaged_record_of_requests_is_an_error(tmp_path: Path) -> None:
    """Half a line in requests.jsonl is evidence that cannot be read, not evidence of calm."""
    judge(tmp_path, Left())
    path = tmp_path / "boots/01-only/requests.jsonl"
    path.write_text(path.read_text()[:-20])
    profile = profiles.load("cpu-smoke").model_copy(update={"boots": (Boot(name="only", probes=(Probe.SERVE,)),)})
    assert verdict(judged(tmp_path, profile, ClaimId.SERVICE_ERRORS)) == (Status.ERROR, {CODE.PARSE_FAILED})
