# SPDX-License-Identifier: Apache-2.0
"""Faults of a running server: the stand-in misbehaves, and the real probes and the url: target look at it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, Faults
from fake_engine.bench import make_bench, patience
from fake_engine.engine import SOUND
from fake_engine.server import _Handler
from qualify import profiles
from qualify.claims.model import ClaimId
from qualify.errors import TargetError
from qualify.profiles import Boot, Probe
from qualify.reasons import ReasonCode
from qualify.receipt.model import Receipt
from qualify.records import Outcome
from qualify.report.progress import Progress
from qualify.run import qualify
from qualify.targets.endpoint import EndpointTarget
from qualify.targets.process import free_ports

from faults.lab import Lab
from faults.model import Fault, Group, Verdict, Verdicts, error, failed, inconclusive, invalid, not_run, verdicts

CODE = ReasonCode
SERVE, LOAD, ERRORS = ClaimId.SERVE_TP, ClaimId.THROUGHPUT_SUSTAINED, ClaimId.SERVICE_ERRORS
PLAIN = Boot(name="control", probes=(Probe.THROUGHPUT,))
SPECULATIVE = Boot(name="speculative", speculation=True, probes=(Probe.THROUGHPUT,))
ASKED = Boot(name="control", probes=(Probe.SERVE,))
BLIND = inconclusive(CODE.NOT_PERMITTED)
"""What `service.errors` says of any server that somebody else started."""


@dataclass(frozen=True)
class Burst:
    """Generation requests `first` to `last` (from 1) are answered with this status."""

    status: int
    first: int
    last: int


@dataclass(frozen=True)
class Repeat:
    """The third event of the stream that is generation request `number` is sent twice."""

    number: int


class _Tampered(_Handler):
    """The stand-in's own handler, and faults that it does not have. It also answers for the workers' memory."""

    tamper: Burst | Repeat | None = None
    seen = 0
    chunk = 0

    def do_POST(self) -> None:
        if self.path == "/collective_rpc":
            return self._rpc()
        kind = type(self)
        if self.path.startswith("/v1/"):
            kind.seen += 1
        self.chunk = 0
        tamper = self.tamper
        if isinstance(tamper, Burst) and self.path.startswith("/v1/") and tamper.first <= kind.seen <= tamper.last:
            self._body()
            return self._json(tamper.status, {"error": {"message": "a burst"}})
        return super().do_POST()

    def _rpc(self) -> None:
        body = self._body()
        fake = self.server.fake
        unread = dict.fromkeys(("resident_bytes", "resident_peak_bytes", "control_group_bytes", "allocator", "driver"))
        memory = [{"rank": w["rank"], **unread, "budget_bytes": None, "unknown": {}} for w in fake.workers()]
        self._json(200, {"results": memory if b"qualify_memory" in body else fake.workers()})

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _chunks(self, data: bytes, size: int) -> None:
        super()._chunks(data, size)
        self.chunk += 1
        if isinstance(self.tamper, Repeat) and type(self).seen == self.tamper.number and self.chunk == 3:
            super()._chunks(data, size)


@contextlib.contextmanager
def server(faults: Faults, tamper: Burst | Repeat | None) -> Iterator[str]:
    with FakeEngine(step_seconds=0.0002, faults=faults) as engine:
        engine._server.RequestHandlerClass = type("Handler", (_Tampered,), {"tamper": tamper})
        yield engine.url


def from_outside(
    faults: Faults = SOUND, tamper: Burst | Repeat | None = None, url: str | None = None
) -> Callable[[Lab], Verdicts]:
    """`qualify run --target url:` with the serve probe; the run itself is in the answer unless it completed."""

    def act(lab: Lab) -> Verdicts:
        with server(faults, tamper) as running, Path(os.devnull).open("w") as nowhere:
            target = EndpointTarget(url or running, lambda text: None)
            bundle = lab.folder() / "bundle"
            receipt, _ = qualify(_outside_profile(), target, None, bundle, lab.folder(), Progress(nowhere))
        return _said(receipt)

    return act


def _outside_profile() -> profiles.Profile:
    base = profiles.load("cpu-smoke")
    return base.model_copy(
        update={
            "boots": (ASKED,),
            "claims": base.claims.model_copy(update={"required": (SERVE, ERRORS)}),
            "timeouts": base.timeouts.model_copy(update={"request_seconds": 2.0}),
        }
    )


def _said(receipt: Receipt) -> Verdicts:
    """Without what is always unknown of a server that somebody else started."""
    predicate = receipt.predicate
    found = {name: verdict for name, verdict in verdicts(predicate.claims).items() if verdict != BLIND}
    if predicate.outcome is not Outcome.COMPLETED:
        codes = {reason.reason_code for reason in predicate.result_reasons if reason.claim is None}
        found["run"] = Verdict(predicate.outcome, frozenset(codes - {CODE.DIRTY_HARNESS}))
    return found


def under_load(boot: Boot, faults: Faults) -> Callable[[Lab], Verdicts]:
    """The throughput probe against the stand-in, as in a boot of our own."""

    def act(lab: Lab) -> Verdicts:
        with pytest.MonkeyPatch.context() as patch:
            bench = make_bench(lab.folder(), patch)(boot, step_seconds=0.002, stall_seconds=patience(faults))
            with contextlib.suppress(TargetError):
                bench.visit(boot.name, faults)
            return verdicts([bench.claim(LOAD)])

    return act


def nobody() -> str:
    (port,) = free_ports(1)
    return f"http://127.0.0.1:{port}"


FELT = failed(CODE.SERVICE_ERROR, CODE.NOT_PERMITTED)
"""`service.errors` where the client felt it; the engine's log stays unknown."""
MALFORMED = error(CODE.CLIENT_ERROR, CODE.NOT_PERMITTED)
GONE = Verdict(Outcome.FAILED, frozenset({CODE.CRASHED}))
REQUEST = failed(CODE.REQUEST_FAILED)
BROKEN = failed(CODE.STREAM_BROKEN)
USAGE = failed(CODE.USAGE_MISMATCH)

# Generation requests in order: 1 asks whether the server serves, 2 to 17 are the serve probe's.
SERVING: tuple[tuple[str, Callable[[Lab], Verdicts], Verdicts], ...] = (
    (
        "the server refuses connections",
        lambda lab: from_outside(url=nobody())(lab),
        {SERVE: not_run(CODE.NOT_PERMITTED), ERRORS: not_run(CODE.NOT_PERMITTED), "run": GONE},
    ),
    (
        "the server dies while serving",
        from_outside(Faults(die_at_step=60)),
        {SERVE: REQUEST, ERRORS: FELT, "run": GONE},
    ),
    ("a request hangs", from_outside(Faults(hang=6)), {SERVE: REQUEST, ERRORS: FELT}),
    ("one request is answered 400", from_outside(Faults(refuse=6)), {SERVE: REQUEST, ERRORS: MALFORMED}),
    ("one request is answered 500", from_outside(Faults(fail=6)), {SERVE: REQUEST, ERRORS: FELT}),
    ("a burst of 429", from_outside(tamper=Burst(429, 4, 8)), {SERVE: REQUEST, ERRORS: MALFORMED}),
    ("a burst of 503", from_outside(tamper=Burst(503, 4, 8)), {SERVE: REQUEST, ERRORS: FELT}),
    ("the connection closes within an answer", from_outside(Faults(drop=3)), {SERVE: REQUEST, ERRORS: FELT}),
    ("a stream ends without its end", from_outside(Faults(cut_stream=4)), {SERVE: BROKEN, ERRORS: FELT}),
    ("a stream holds an error and status 200", from_outside(Faults(error_event=4)), {SERVE: BROKEN, ERRORS: FELT}),
    ("streams lose text", from_outside(Faults(lose_text=True)), {SERVE: BROKEN}),
    ("a stream repeats a chunk", from_outside(tamper=Repeat(7)), {SERVE: USAGE}),
    ("usage counts one token more", from_outside(Faults(usage_off=1)), {SERVE: USAGE}),
    ("usage counts one token less", from_outside(Faults(usage_off=-1)), {SERVE: USAGE}),
    ("no answer has usage", from_outside(Faults(no_usage=True)), {SERVE: USAGE}),
    (
        "an answer ends half way",
        from_outside(Faults(early_stop=5)),
        {SERVE: failed(CODE.REQUEST_FAILED, CODE.USAGE_MISMATCH)},
    ),
    ("answers come from another model", from_outside(Faults(answer_model="other")), {SERVE: failed(CODE.WRONG_MODEL)}),
    (
        "one rank serves where two were promised",
        from_outside(Faults(ranks=1)),
        {SERVE: failed(CODE.WORLD_SIZE_MISMATCH, CODE.RANK_MISSING)},
    ),
    ("both ranks run on one core", from_outside(Faults(shared_core=True)), {SERVE: failed(CODE.DEVICE_SHARED)}),
    (
        "greedy answers change",
        from_outside(Faults(moody=True)),
        {SERVE: inconclusive(CODE.OUTPUT_NOT_REPRODUCED)},
    ),
    ("answers repeat one token", from_outside(Faults(degenerate=True)), {SERVE: inconclusive(CODE.OUTPUT_DEGENERATE)}),
)

LOADED: tuple[tuple[str, Boot, Faults, Verdict], ...] = (
    ("the server dies under load", PLAIN, Faults(die_at_step=100), invalid(CODE.REQUEST_FAILED)),
    ("the server restarts behind our back", PLAIN, Faults(restart_at_step=80), invalid(CODE.COUNTER_RESET)),
    ("the server stalls under load", PLAIN, Faults(stall_at_step=70, stall_seconds=1.5), failed(CODE.STALLED)),
    ("usage lies under load", PLAIN, Faults(usage_off=1), invalid(CODE.USAGE_MISMATCH)),
    ("a stream is cut under load", PLAIN, Faults(cut_stream=4), invalid(CODE.REQUEST_FAILED)),
    ("another client uses the server", PLAIN, Faults(other_client=1), invalid(CODE.TOKEN_COUNT_MISMATCH)),
    ("the step counter counts twice", PLAIN, Faults(double_steps=True), invalid(CODE.IDENTITY_BROKEN)),
    ("the drafter boasts", SPECULATIVE, Faults(accepted_off=1), invalid(CODE.IDENTITY_BROKEN)),
    (
        "the token counter is not exposed",
        PLAIN,
        Faults(absent=("vllm:generation_tokens_total",)),
        error(CODE.METRIC_MISSING),
    ),
)

FAULTS: tuple[Fault, ...] = (
    *(Fault(Group.ENGINE, f"live: {name}", act, expected) for name, act, expected in SERVING),
    *(
        Fault(Group.THROUGHPUT, f"live: {name}", under_load(boot, faults), {LOAD: verdict})
        for name, boot, faults, verdict in LOADED
    ),
)
GOOD: dict[str, Callable[[Lab], Any]] = {
    "a good server from outside": from_outside(),
    "a good server under load": under_load(PLAIN, SOUND),
    "a good server with a drafter under load": under_load(SPECULATIVE, SOUND),
}
