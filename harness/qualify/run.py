# SPDX-License-Identifier: Apache-2.0
"""The qualification: boots in the profile's order, probes in each, evidence on disk, a receipt at the end.

Nothing is judged here. Whatever happens, the evidence collected so far is kept and a receipt is derived from it;
a run that failed or was interrupted says so in evidence/run.json, and its claims without evidence are `notRun`.
"""

from __future__ import annotations

import contextlib
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

from qualify import models
from qualify.claims.derive import derive
from qualify.errors import Interrupted, PreflightError, QualifyError, TargetError
from qualify.evidence import EvidenceWriter, compress
from qualify.host import observe_harness, observe_host
from qualify.http import Client
from qualify.probes import moments, workers
from qualify.probes.table import PROBES
from qualify.profiles import Boot, Probe, Profile, Storage
from qualify.receipt.build import build
from qualify.receipt.model import Receipt
from qualify.records import (
    CONTRACT,
    ENGINE,
    HOST,
    MODEL,
    RUN,
    Failure,
    Outcome,
    Phase,
    Run,
    boot_folder,
)
from qualify.report.progress import Progress
from qualify.session import Session
from qualify.targets import Launch, Running, Target

LOGS = ("engine.log", "cache.log")

DEATH_POLLS, DEATH_POLL_SECONDS = 12, 0.25
"""How long a failed call waits for the death that explains it."""

URL_PROBES = frozenset({Probe.SERVE, Probe.THROUGHPUT})
"""What can be asked of a server that somebody else started."""


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass
class _Ledger:
    """What run.json will say. Times are seconds since `began`."""

    target: str
    progress: Progress
    began: float = field(default_factory=time.monotonic)
    started_at: str = field(default_factory=_now)
    phases: list[Phase] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    outcome: Outcome = Outcome.COMPLETED
    failure: Failure | None = None
    failed: str | None = None

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.progress.phase(name)
        at = time.monotonic()
        outcome = Outcome.FAILED
        try:
            yield
            outcome = Outcome.COMPLETED
        except BaseException as error:
            if isinstance(error, Interrupted):
                outcome = Outcome.INTERRUPTED
            # The first phase that failed is where the run failed; stopping comes after it.
            self.failed = self.failed or name
            raise
        finally:
            seconds = round(time.monotonic() - at, 3)
            self.phases.append(Phase(name=name, began=round(at - self.began, 3), seconds=seconds, outcome=outcome))
            self.progress.done(outcome)

    def fail(self, error: QualifyError) -> None:
        self.outcome = Outcome.INTERRUPTED if isinstance(error, Interrupted) else Outcome.FAILED
        self.failure = Failure(phase=self.failed or "start", message=error.what, remedy=error.remedy, tail=error.tail)

    def record(self) -> Run:
        return Run(
            harness=observe_harness(),
            target=self.target,
            started_at=self.started_at,
            finished_at=_now(),
            outcome=self.outcome,
            failure=self.failure,
            phases=tuple(self.phases),
            leftovers=tuple(self.leftovers),
        )


def qualify(
    profile: Profile, target: Target, model: Path | None, bundle: Path, work_parent: Path, progress: Progress
) -> tuple[Receipt, QualifyError | None]:
    """Run the whole qualification into the new folder `bundle`; the receipt, and the error that ended it early.

    Raises PreflightError if the folder is taken; anything that fails later is in the receipt and the returned error.
    """
    try:
        bundle.mkdir(parents=True)
    except OSError as error:
        raise PreflightError(f"{bundle} cannot be made: {error.strerror}", remedy="choose another --out") from None
    evidence = EvidenceWriter(bundle / "evidence")
    ledger = _Ledger(target=target.label, progress=progress)
    failure: QualifyError | None = None
    with _signals_interrupt() as shield:
        try:
            _collect(profile, target, model, evidence, work_parent, ledger)
        except QualifyError as error:
            failure = error
        except Exception as error:  # a defect of the harness must not cost the evidence collected so far
            traceback.print_exc()
            failure = QualifyError(
                f"the harness failed: {type(error).__name__}: {error}", remedy="file a bug with the traceback above"
            )
        if failure is not None:
            ledger.fail(failure)
        # A second Ctrl-C must not cost the receipt of what was collected.
        shield()
        evidence.record(RUN, ledger.record())
        receipt = build(bundle, profile, derive=derive)
    return receipt, failure


def _collect(
    profile: Profile, target: Target, model: Path | None, evidence: EvidenceWriter, work_parent: Path, ledger: _Ledger
) -> None:
    with ledger.phase("look at host, engine and model"):
        evidence.record(HOST, observe_host())
        engine = target.environment()
        if engine is not None:
            evidence.record(ENGINE, engine)
        if model is not None:
            evidence.record(MODEL, models.describe(model))
    with ledger.phase("operator contract"):
        if (report := target.contract()) is not None:
            evidence.bytes(CONTRACT, report)
    work_parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="run-", dir=work_parent) as work:
        for index, boot in enumerate(_boots(profile, target), 1):
            launch = Launch(
                profile=profile,
                boot=boot,
                index=index,
                model=model,
                work=Path(work),
                evidence=evidence.below(boot_folder(index, boot.name)),
            )
            _boot(target, launch, ledger)


def _boots(profile: Profile, target: Target) -> tuple[Boot, ...]:
    """All boots of the profile; of a server that already runs, one visit with what can be asked from outside."""
    if not target.label.startswith("url:"):
        return profile.boots
    plain = next((boot for boot in profile.boots if boot.cache is Storage.NONE and not boot.speculation), None)
    if plain is None:
        raise PreflightError(
            f"profile {profile.name} has no boot that a url: target can serve", remedy="use --target local"
        )
    return (plain.model_copy(update={"probes": tuple(probe for probe in plain.probes if probe in URL_PROBES)}),)


def _boot(target: Target, launch: Launch, ledger: _Ledger) -> None:
    """One boot: start, workers, probes, stop. The engine is stopped and its record written whatever happens."""
    name = f"boot {launch.boot.name}"
    with ledger.phase(f"{name}: start"):
        running = target.boot(launch)
    try:
        _probe(launch, running, ledger)
    except TargetError as error:
        # A process that died explains the failed call better than the call does; it may need a moment to be gone.
        for _ in range(DEATH_POLLS):
            if died := running.died():
                raise TargetError(f"{died} during {error.phase}", phase=error.phase, tail=error.tail) from error
            time.sleep(DEATH_POLL_SECONDS)
        raise
    finally:
        with ledger.phase(f"{name}: stop"):
            record = running.stop()
            launch.evidence.record("boot.json", record)
            ledger.leftovers.extend(record.leftovers)
            for log in LOGS:
                _compress(launch.evidence.path(log))


def _probe(launch: Launch, running: Running, ledger: _Ledger) -> None:
    with contextlib.ExitStack() as stack:
        requests = launch.evidence.path("requests.jsonl")
        timeout = launch.profile.timeouts.request_seconds
        session = Session(
            profile=launch.profile,
            boot=launch.boot,
            engine=stack.enter_context(Client(running.engine_url, requests, launch.boot.name, timeout=timeout)),
            cache=stack.enter_context(Client(running.cache_url, requests, launch.boot.name, timeout=timeout))
            if running.cache_url
            else None,
            storage=running.storage,
            model=running.model,
            extension=running.extension,
            evidence=launch.evidence,
            progress=ledger.progress.note,
            gpus=running.gpus,
        )
        steps: list[tuple[str, Callable[[Session], None]]] = []
        if running.extension:
            steps.append(("workers", _before_load))
        steps.extend((probe.value, PROBES[probe]) for probe in launch.boot.probes)
        if running.extension:
            steps.append(("memory", lambda session: moments.collect(session, moments.LOADED)))
        for name, function in steps:
            with ledger.phase(f"boot {launch.boot.name}: {name}"):
                session.engine.phase = name
                if session.cache is not None:
                    session.cache.phase = name
                function(session)
                if died := running.died():
                    raise TargetError(f"{died} during {name}", phase=name)


def _before_load(session: Session) -> None:
    workers.collect(session)
    moments.collect(session, moments.READY)


def _compress(log: Path) -> None:
    if log.is_file():
        log.with_name(log.name + ".gz").write_bytes(compress(log.read_bytes()))
        log.unlink()


@contextlib.contextmanager
def _signals_interrupt() -> Iterator[Callable[[], None]]:
    """SIGINT, SIGTERM and SIGHUP raise Interrupted once; later ones are ignored while the run winds down.

    Yields a function after which no signal raises any more.
    """
    wanted = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    armed = True

    def disarm() -> None:
        nonlocal armed
        armed = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        if armed:
            disarm()
            raise Interrupted(f"stopped by {signal.Signals(number).name}", remedy="run again for a whole receipt")

    before = {number: signal.signal(number, interrupt) for number in wanted}
    try:
        yield disarm
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
