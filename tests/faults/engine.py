# SPDX-License-Identifier: Apache-2.0
"""Faults on the real CPU engine, through `qualify run` as a user calls it. Minutes each; only with --engine."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable

from faults_real.test_kill import Run
from qualify.reasons import ReasonCode
from qualify.receipt.model import STATEMENT

from faults.lab import Lab
from faults.model import Fault, Group, Verdict, Verdicts

WAIT_SECONDS = 240.0


def killed(who: str, stage: str, with_signal: signal.Signals = signal.SIGKILL) -> Callable[[Lab], Verdicts]:
    """Run, wait for a random moment of the stage, kill one process, and read what the receipt says."""

    def act(lab: Lab) -> Verdicts:
        run = Run(lab.folder())
        try:
            run.reach(stage)
            os.kill(run.victim(who), with_signal)
            status = run.process.wait(timeout=WAIT_SECONDS)
        finally:
            run.process.kill()
            run.process.wait()
        predicate = json.loads((run.out / STATEMENT).read_bytes())["predicate"]
        if status == 0 or predicate["result"] in ("PASSED", "WARNED"):
            return {}
        codes = {reason["reasonCode"] for reason in predicate["resultReasons"] if reason["claim"] is None}
        return {"run": Verdict(f"exit {status}", frozenset(codes - {ReasonCode.DIRTY_HARNESS}))}

    return act


CRASHED = Verdict("exit 5", frozenset({ReasonCode.CRASHED}))

FAULTS: tuple[Fault, ...] = (
    Fault(Group.ENGINE, "real engine: the engine is killed at its start", killed("vllm", "boot"), {"run": CRASHED}),
    Fault(Group.ENGINE, "real engine: a worker is killed under load", killed("worker", "load"), {"run": CRASHED}),
    Fault(Group.KV, "real engine: LMCache is killed under load", killed("lmcache", "load"), {"run": CRASHED}),
    Fault(
        Group.ENGINE,
        "real engine: the run is interrupted under load",
        killed("harness", "load", signal.SIGTERM),
        {"run": Verdict("exit 130", frozenset({ReasonCode.INTERRUPTED}))},
    ),
)
