# SPDX-License-Identifier: Apache-2.0
"""What each worker says about itself, and its memory at named moments. One record per rank, in rank order."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import Field, ValidationError

from qualify.errors import TargetError
from qualify.model import Record
from qualify.session import Session

R = TypeVar("R", bound=Record)

WORKERS = "workers.json"
ADMISSION = "admission.prom"


def memory_file(label: str) -> str:
    return f"memory-{label}.json"


class ProcessIdentity(Record):
    """`started` is in clock ticks since the host's boot; with it a repeated pid is not the same process."""

    pid: int
    started: int


class Device(Record):
    """A CPU rank has cores and threads, a CUDA rank an index and a hashed UUID."""

    type: str | None
    cores: tuple[int, ...] | None = None
    threads: int | None = None
    index: int | None = None
    uuid_hash: str | None = None
    name: str | None = None
    memory_bytes: int | None = None
    capability: str | None = None
    unknown: dict[str, str]


class Versions(Record):
    python: str | None
    torch: str | None
    vllm: str | None
    lmcache: str | None
    cuda: str | None
    nccl: str | None
    unknown: dict[str, str]


class KvTensor(Record):
    """One part of one layer's cache on one rank. `block_bytes` is the view of one block, without padding."""

    group: int
    layer: str
    part: int
    spec: str
    tokens_per_block: int = Field(gt=0)
    window: int | None
    cacheable: bool | None
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    block_bytes: int = Field(gt=0)


class KvCache(Record):
    """KV admission of one rank: `bytes` is what its storages take, `tokens` and `concurrency` the engine's own rule."""

    blocks: int | None
    bytes: int | None
    tokens: int | None
    concurrency: float | None
    max_model_len: int | None
    dtype: str | None
    utilization: float | None
    tensors: tuple[KvTensor, ...] | None
    unknown: dict[str, str]


class WorkerReport(Record):
    """A value that could not be read is null, and `unknown` names the reason."""

    rank: int
    local_rank: int | None
    world_size: int | None
    tensor_parallel: int | None
    process: ProcessIdentity | None
    device: Device | None
    versions: Versions | None
    runner: str | None
    model_class: str | None
    kv_cache: KvCache | None
    plugin: dict[str, Any] | None
    unknown: dict[str, str]


class Allocator(Record):
    """CUDA caching allocator of one rank, in bytes and counts."""

    allocated_current: int = Field(alias="allocated_bytes.all.current")
    allocated_peak: int = Field(alias="allocated_bytes.all.peak")
    reserved_current: int = Field(alias="reserved_bytes.all.current")
    reserved_peak: int = Field(alias="reserved_bytes.all.peak")
    retries: int = Field(alias="num_alloc_retries")
    out_of_memory: int = Field(alias="num_ooms")


class DriverMemory(Record):
    used: int
    total: int


class AdmissionFigures(Record):
    """The engine's own memory profile in bytes: available = budget - consumed - activation.

    `activation` is the transient peak with the estimate of the graphs, of which `graphs` is known apart; `before` was
    used on the device when the engine began to measure, by itself or by others.
    """

    before: int
    consumed: int
    activation: int
    graphs: int
    available: int


class MemoryReport(Record):
    """Bytes of one rank. `control_group_bytes` is shared by all processes of the group."""

    rank: int
    resident_bytes: int | None
    resident_peak_bytes: int | None
    control_group_bytes: int | None
    allocator: Allocator | None
    driver: DriverMemory | None
    budget_bytes: int | None
    admission: AdmissionFigures | None = None
    graph_pool_bytes: int | None = None
    """Memory in which CUDA graphs work and which no tensor holds."""
    unknown: dict[str, str]


def ask(session: Session, method: str, kind: type[R], **options: Any) -> tuple[R, ...]:
    """The answers of a worker method, one per rank. Raises TargetError naming the rank that could not answer."""
    return tuple(_answer(session, method, kind, result) for result in session.engine.rpc(method, **options))


def tell(session: Session, method: str, **options: Any) -> None:
    """Call a worker method for its effect. Raises TargetError naming the rank that could not do it."""
    for result in session.engine.rpc(method, **options):
        _raise_refusal(session, method, result)


def collect(session: Session) -> None:
    """Write workers.json and admission.prom. To be called once, when the boot is ready."""
    session.engine.phase = "workers"
    session.evidence.records(WORKERS, ask(session, "qualify_describe", WorkerReport))
    page = session.engine.get("/metrics")
    lines = [line for line in page.splitlines() if "vllm:cache_config_info" in line]
    session.evidence.text(ADMISSION, "".join(f"{line}\n" for line in lines))


def memory(session: Session, label: str) -> None:
    """Write memory-<label>.json, for example `ready` before any load and `loaded` after it."""
    session.engine.phase = "memory"
    session.evidence.records(memory_file(label), ask(session, "qualify_memory", MemoryReport))


def _answer(session: Session, method: str, kind: type[R], result: dict[str, Any]) -> R:
    _raise_refusal(session, method, result)
    try:
        return kind.model_validate(result)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise TargetError(
            f"rank {result.get('rank')}: {method} answered in an unknown form: {where}: {first['msg']}",
            phase=session.engine.phase,
            remedy="load the worker extension that belongs to this harness",
        ) from None


def _raise_refusal(session: Session, method: str, result: dict[str, Any]) -> None:
    if "error" in result:
        raise TargetError(
            f"rank {result.get('rank')}: {method}: {result['error']}",
            phase=session.engine.phase,
            remedy="check that the engine is of the pinned version",
        )
