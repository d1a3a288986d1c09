# SPDX-License-Identifier: Apache-2.0
"""Evidence that is not of one probe: the run, the host, the engine's environment, the model, and each boot."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import Field

from qualify.model import Record

RUN = "run.json"
HOST = "host.json"
ENGINE = "engine.json"
MODEL = "model.json"
CONTRACT = "contract.json"


def boot_folder(index: int, name: str) -> str:
    """Where the evidence of a boot lies, e.g. boots/01-control."""
    return f"boots/{index:02d}-{name}"


class Outcome(StrEnum):
    COMPLETED = "completed"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


class Phase(Record):
    """One step of the run; times are seconds since the run began, on a monotonic clock."""

    name: str
    began: float
    seconds: float
    outcome: Outcome


class Failure(Record):
    """Why a run ended early: where, what, what to do, and the last lines of the process that failed."""

    phase: str
    message: str
    remedy: str = ""
    tail: tuple[str, ...] = ()


class Harness(Record):
    version: str
    git_commit: str | None
    clean: bool | None
    """True only for a committed revision without local changes; None where that cannot be told."""


class Run(Record):
    """evidence/run.json: written last, also for a run that failed or was interrupted."""

    harness: Harness
    target: str
    started_at: str
    finished_at: str
    outcome: Outcome
    failure: Failure | None = None
    phases: tuple[Phase, ...]
    leftovers: tuple[str, ...] = ()
    """Processes, ports and shared-memory segments that outlived the run and had to be removed."""


class Gpu(Record):
    uuid_hash: str
    name: str
    memory_bytes: int
    driver: str
    mig: str | None = None
    """Enabled or Disabled."""
    power_limit_watts: float | None = None
    max_sm_mhz: float | None = None
    max_memory_mhz: float | None = None
    pcie: str | None = None


class GpuLink(Record):
    """How two GPUs are linked, as the driver names it: NV18, PIX, SYS."""

    one: int
    other: int
    link: str


class GpuSample(Record):
    """One GPU at one moment, on the clock of the throughput cell; what the driver does not report is null."""

    at: float
    uuid_hash: str
    sm_mhz: float | None
    memory_mhz: float | None
    power_watts: float | None
    celsius: float | None
    busy_percent: float | None
    throttles: tuple[str, ...] | None
    """What slowed it down, by name."""


class Host(Record):
    """evidence/host.json; no host name, address or user."""

    kernel: str
    cpu_model: str
    cores: int
    memory_bytes: int
    python: str
    gpus: tuple[Gpu, ...] = ()
    gpu_links: tuple[GpuLink, ...] | None = None
    """Between every two GPUs; null where the driver does not tell."""
    gpu_users: int | None = None
    """Processes on the GPUs before the run, as far as the driver shows them."""


class Distribution(Record):
    """An installed package; `files_digest` is over the hashes that its RECORD lists, paths sorted."""

    name: str
    version: str
    files_digest: str


class EngineEnvironment(Record):
    """evidence/engine.json: what is installed in the engine's environment, and whether its files are intact."""

    python: str
    distributions: tuple[Distribution, ...]
    digest: str
    """sha256 over all (name, version, files digest): the identity of an engine that is not an image."""
    lock_digest: str | None
    lock_mismatches: tuple[str, ...]
    files_checked: int
    files_modified: tuple[str, ...]
    files_pruned: tuple[str, ...] = ()
    """Files of the packages that the offline bundle left out on purpose."""
    variables: dict[str, str]
    """PYTHONPATH and LD_PRELOAD as the engine gets them; both change which code runs."""


class ModelFile(Record):
    path: str
    size: int
    sha256: str


class ModelFiles(Record):
    """evidence/model.json: the identity of the model that was served."""

    name: str
    recipe: str | None
    seed: int | None
    files: tuple[ModelFile, ...]


class BootOutcome(StrEnum):
    STOPPED = "stopped"
    """Ended by the harness, on request, in time."""
    KILLED = "killed"
    """Ended by the harness with SIGKILL, after SIGTERM did not suffice."""
    DIED = "died"
    """Ended by itself."""
    NOT_READY = "notReady"


class Process(Record):
    """One process the harness started in a boot; `exit_status` is negative for a signal."""

    role: str
    argv: tuple[str, ...]
    environment: dict[str, str]
    pid: int
    exit_status: int | None
    outcome: BootOutcome
    log_lines: int
    """Line ends in its log once it had ended: a log with fewer was cut afterwards."""


class BootRecord(Record):
    """boots/NN-name/boot.json: one start of the engine until its stop. Times are seconds since the boot began."""

    index: int
    name: str
    started_at: str
    ready_seconds: float | None
    stop_requested_seconds: float | None
    stopped_seconds: float
    outcome: BootOutcome
    processes: tuple[Process, ...]
    leftovers: tuple[str, ...] = ()
    facts: dict[str, Any] = Field(default_factory=dict)
