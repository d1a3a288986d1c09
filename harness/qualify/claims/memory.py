# SPDX-License-Identifier: Apache-2.0
"""memory.admission: how much KV cache the engine admitted, agreed by its log, its metrics and every worker.

On CUDA also: the admitted bytes follow from the engine's own figures, the plugin's reservation is among them, and under
load memory stayed within the admitted figure without an allocator retry. Where a boot without the plugin stands beside
an equal one with it, it is measured the same way and compared, but its growth is not judged: it shows what the plugin
cures. A host allocator keeps no such statistics, so on the CPU engine growth is not measured and not claimed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from qualify.claims.boots import require_boot, visited, worker_reports
from qualify.claims.graph_counts import under_load
from qualify.claims.model import Check, Judgement, Status, check
from qualify.evidence import Evidence
from qualify.expect import fullest_step, pairs, prefill_lengths
from qualify.model import Record
from qualify.observe import log, metrics
from qualify.observe.facts import LogFacts
from qualify.probes.graph_records import GraphReport, graphs_file
from qualify.probes.load_records import PREFILL, Prefill
from qualify.probes.moments import LOADED, READY
from qualify.probes.workers import ADMISSION, KvCache, MemoryReport, WorkerReport, memory_file
from qualify.profiles import Boot, Probe, Profile, Storage
from qualify.reasons import ReasonCode

INFO = "vllm:cache_config_info"
MEASURED_GRAIN = 16 << 20
"""The engine reads its consumed memory from the driver, which hands it out in pages of 2 MiB and loads code on first
use, so two equal boots may differ by a few pages."""
NOT_MEASURED = "not applicable: the CPU engine's allocator keeps no statistics"


@dataclass(frozen=True)
class Admission:
    """One boot's KV admission by source. `per_rank` is in rank order."""

    boot: str
    ranks: tuple[int, ...]
    per_rank: tuple[KvCache | None, ...]
    log_tokens: int | None
    log_concurrency: float | None
    log_request_tokens: int | None
    metric_tokens: int | None
    metric_concurrency: float | None
    metric_blocks: int | None

    def workers(self, name: str) -> list[Any]:
        return [None if one is None else getattr(one, name) for one in self.per_rank]

    def agreed(self, name: str) -> Any:
        """The value that all ranks report, else None."""
        values = self.workers(name)
        return values[0] if values and all(value == values[0] for value in values) else None


def judge(evidence: Evidence, profile: Profile) -> Judgement:
    boots = visited(evidence, profile)
    workers = worker_reports(evidence, [folder for _, folder in boots])
    admissions = [_admission(evidence, folder, boot.name, workers[folder]) for boot, folder in boots]
    checks = [item for admission in admissions for item in _admission_checks(admission, profile)]
    growth: Any = {"value": None, "reason": NOT_MEASURED}
    compared: list[dict[str, Any]] = []
    if profile.engine.kind == "cuda":
        on_device = {
            boot.name: OnDevice(boot, *_memory(evidence, folder), admission)
            for (boot, folder), admission in zip(boots, admissions, strict=True)
        }
        stock = {off.name for _, off in pairs(profile)}
        for name, one in on_device.items():
            checks += [*_complete(one, profile), *_explained(one, profile)]
            checks += [] if name in stock else list(_growth_checks(one))
        judged = [pair for pair in boots if pair[0].name not in stock]
        checks.append(_filled(judged, evidence, profile))
        checks += [_served(evidence, boot, folder, profile) for boot, folder in judged if Probe.PREFILL in boot.probes]
        both = [(on_device[on.name], on_device[off.name]) for on, off in pairs(profile)]
        checks += [item for on, off in both for item in _counted(on, off, workers)]
        compared = [row for on, off in both for row in _difference(on, off, workers)]
        growth = {name: _growth(one) for name, one in on_device.items()}
    return Judgement(
        checks=tuple(checks),
        summary=_summary(checks, admissions),
        observed={
            "boots": {one.boot: _observed(one) for one in admissions},
            "growthUnderLoad": growth,
            "withAndWithoutPlugin": compared,
        },
        expected={"minKvTokens": profile.memory.min_kv_tokens, "ranks": profile.engine.tensor_parallel},
    )


def _admission(evidence: Evidence, folder: str, boot: str, workers: tuple[WorkerReport, ...]) -> Admission:
    page = metrics.parse(evidence.text(f"{folder}/{ADMISSION}"))
    facts = _log(evidence, folder)
    concurrency = facts.concurrency.value if facts.concurrency else None
    return Admission(
        boot=boot,
        ranks=tuple(worker.rank for worker in workers),
        per_rank=tuple(worker.kv_cache for worker in workers),
        log_tokens=facts.kv_tokens.value if facts.kv_tokens else None,
        log_concurrency=concurrency.times if concurrency else None,
        log_request_tokens=concurrency.tokens if concurrency else None,
        metric_tokens=_whole(page.info(INFO, "kv_cache_size_tokens")),
        metric_concurrency=_number(page.info(INFO, "kv_cache_max_concurrency")),
        metric_blocks=_whole(page.info(INFO, "num_gpu_blocks")),
    )


def _log(evidence: Evidence, folder: str) -> LogFacts:
    packed = f"{folder}/engine.log.gz"
    return log.read([evidence.bytes(packed if evidence.exists(packed) else f"{folder}/engine.log")], "engine.log")


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def _whole(text: str | None) -> int | None:
    value = _number(text)
    return int(value) if value is not None and value == int(value) else None


def _admission_checks(one: Admission, profile: Profile) -> Iterator[Check]:
    ranks = list(range(profile.engine.tensor_parallel))
    yield check(
        "every rank reported its KV cache",
        list(one.ranks) == ranks,
        ReasonCode.RANK_MISSING,
        where=one.boot,
        observed=list(one.ranks),
        expected=ranks,
    )
    for name in ("blocks", "bytes", "tokens", "concurrency"):
        yield _same(f"equal {name} on all ranks", one.workers(name), one.boot, ReasonCode.RANKS_DISAGREE)
    yield _same(
        "KV tokens agree: log, metrics, workers",
        [one.log_tokens, one.metric_tokens, *one.workers("tokens")],
        one.boot,
    )
    yield _same("KV blocks agree: metrics, workers", [one.metric_blocks, *one.workers("blocks")], one.boot)
    # The log rounds to two decimals.
    precise = [one.metric_concurrency, *one.workers("concurrency")]
    rounded = [None if value is None else round(float(value), 2) for value in precise]
    yield _same("concurrency agrees: log, metrics, workers", [one.log_concurrency, *rounded], one.boot)
    yield _same(
        "concurrency is for the profile's longest request",
        [one.log_request_tokens, profile.engine.max_model_len],
        one.boot,
    )
    tokens = one.agreed("tokens")
    yield check(
        "at least the profile's KV tokens were admitted",
        tokens is not None and tokens >= profile.memory.min_kv_tokens,
        ReasonCode.ADMISSION_MISSING if tokens is None else ReasonCode.KV_BELOW_FLOOR,
        where=one.boot,
        observed=tokens,
        expected=profile.memory.min_kv_tokens,
        otherwise=Status.INCONCLUSIVE if tokens is None else Status.FAILED,
    )


def _same(rule: str, values: list[Any], where: str, code: ReasonCode = ReasonCode.ADMISSION_DISAGREES) -> Check:
    """All values are known, positive and equal. An unknown one leaves the rule open, unless known ones differ."""
    known = {value for value in values if value is not None}
    missing = not values or (len(known) <= 1 and None in values)
    return check(
        rule,
        not missing and len(known) == 1 and min(known) > 0,
        ReasonCode.ADMISSION_MISSING if missing else code,
        where=where,
        observed=values,
        expected="equal and above 0",
        otherwise=Status.INCONCLUSIVE if missing else Status.FAILED,
    )


Reports = tuple[MemoryReport, ...]


@dataclass(frozen=True)
class OnDevice:
    """Memory of one boot: every rank when ready and after the load."""

    boot: Boot
    ready: Reports
    loaded: Reports
    admission: Admission

    def ranks(self) -> Iterator[tuple[MemoryReport, MemoryReport, str]]:
        for first, last in zip(self.ready, self.loaded, strict=False):
            yield first, last, f"{self.boot.name}, rank {last.rank}"


def _memory(evidence: Evidence, folder: str) -> tuple[Reports, Reports]:
    return (
        evidence.record(f"{folder}/{memory_file(READY)}", tuple[MemoryReport, ...]),
        evidence.record(f"{folder}/{memory_file(LOADED)}", tuple[MemoryReport, ...]),
    )


def _complete(one: OnDevice, profile: Profile) -> Iterator[Check]:
    ranks = list(range(profile.engine.tensor_parallel))
    seen = [[report.rank for report in reports] for reports in (one.ready, one.loaded)]
    yield check(
        "every rank reported its memory before and after the load",
        seen == [ranks, ranks],
        ReasonCode.RANK_MISSING,
        where=one.boot.name,
        observed=seen,
        expected=[ranks, ranks],
    )


def _explained(one: OnDevice, profile: Profile) -> Iterator[Check]:
    """To the byte: what was available is the budget less what the profile measured, and the smallest rank's figure,
    rounded down to whole blocks, is the KV cache.
    """
    for _, last, where in one.ranks():
        figures, budget = last.admission, last.budget_bytes
        left = None if figures is None or budget is None else budget - figures.consumed - figures.activation
        yield _follows(
            "available KV bytes are budget - consumed - activation", _field(figures, "available"), left, where
        )
    blocks, admitted = one.admission.agreed("blocks"), one.admission.agreed("bytes")
    available = [last.admission.available if last.admission else None for last in one.loaded]
    known = [value for value in available if value is not None]
    whole = None
    if blocks and admitted and known and len(known) == len(available):
        whole = min(known) // (admitted // blocks) * (admitted // blocks)
    yield _follows("KV bytes are the available ones in whole blocks", admitted, whole, one.boot.name)


def _follows(rule: str, observed: int | None, expected: int | None, where: str) -> Check:
    unknown = observed is None or expected is None
    return check(
        rule,
        not unknown and observed == expected,
        ReasonCode.METRIC_MISSING if unknown else ReasonCode.ADMISSION_UNEXPLAINED,
        where=where,
        observed=observed,
        expected=expected,
        otherwise=Status.INCONCLUSIVE if unknown else Status.FAILED,
    )


def _growth_checks(one: OnDevice) -> Iterator[Check]:
    for first, last, where in one.ranks():
        yield _at_most(
            "the peak under load stayed within the admitted figure",
            _demand(last, one.boot),
            last.budget_bytes,
            ReasonCode.MEMORY_GREW,
            where,
        )
        for name in ("retries", "out_of_memory"):
            change = _minus(_field(last.allocator, name), _field(first.allocator, name))
            yield _at_most(f"no allocator {name} under load", change, 0, ReasonCode.ALLOCATION_RETRY, where)


def _filled(boots: list[tuple[Boot, str]], evidence: Evidence, profile: Profile) -> Check:
    """In some boot a step took as many tokens as the engine allows: without one the peak was never called for."""
    largest: dict[str, int | None] = {}
    for boot, folder in boots:
        ready, loaded = (
            evidence.record(f"{folder}/{graphs_file(label)}", tuple[GraphReport, ...]) for label in (READY, LOADED)
        )
        targets = (under_load(*pair).get("target") for pair in zip(ready, loaded, strict=False))
        largest[boot.name] = max((target.largest for target in targets if target), default=None)
    allowed = {boot.name: fullest_step(profile, boot) for boot, _ in boots}
    return check(
        "a step as large as the engine allows ran",
        any(largest[name] == tokens for name, tokens in allowed.items()),
        ReasonCode.LOAD_TOO_SMALL,
        where=", ".join(allowed),
        observed=largest,
        expected=allowed,
        otherwise=Status.INCONCLUSIVE,
    )


def _served(evidence: Evidence, boot: Boot, folder: str, profile: Profile) -> Check:
    """Every length that the prefill probe was to ask for was computed, alone and together with the others."""
    path = f"{folder}/{PREFILL}"
    found = evidence.record(path, Prefill)
    require_boot(path, [found.boot], boot)
    planned = [(tokens, together) for together in (False, True) for tokens in prefill_lengths(profile)]
    served = [(one.prompt_tokens, one.together) for one in found.requests if one.error is None]
    return check(
        "prompts of every planned length were computed",
        served == planned,
        ReasonCode.LOAD_TOO_SMALL,
        where=boot.name,
        observed=len(served),
        expected=len(planned),
        otherwise=Status.INCONCLUSIVE,
    )


def _demand(report: MemoryReport, boot: Boot) -> int | None:
    """Bytes that the engine needed at once: the allocator's peak, the memory in which graphs work, and what the device
    holds beside the allocator since the engine began. Blocks that the allocator only keeps are not among them: it gives
    them back before it fails, which counts as a retry. A cache server holds memory of the same device, so beside one
    only the allocator is counted.
    """
    if report.allocator is None or report.driver is None or report.admission is None:
        return None
    if report.graph_pool_bytes is None:
        return None
    own = report.allocator.allocated_peak + report.graph_pool_bytes
    beside = report.driver.used - report.admission.before - report.allocator.reserved_current
    return own + (max(0, beside) if boot.cache is Storage.NONE else 0)


Workers = dict[str, tuple[WorkerReport, ...]]


def _reserved(workers: Workers, boot: Boot) -> dict[int, int | None]:
    """Bytes that the plugin reserved, by rank."""
    folder = next(folder for folder in workers if folder.partition("-")[2] == boot.name)
    return {report.rank: (report.plugin or {}).get("reservedBytes") for report in workers[folder]}


def _counted(on: OnDevice, off: OnDevice, workers: Workers) -> Iterator[Check]:
    """The reservation is part of what the engine measured as consumed."""
    for row in _difference(on, off, workers):
        consumed, reserved = row["consumedBytes"], row["reservedBytes"]
        unknown = consumed is None or reserved is None
        yield check(
            "the reservation is in the consumed memory",
            not unknown and consumed >= reserved - MEASURED_GRAIN,
            ReasonCode.METRIC_MISSING if unknown else ReasonCode.RESERVATION_NOT_COUNTED,
            where=f"{on.boot.name} against {off.boot.name}, rank {row['rank']}",
            observed=consumed,
            expected=reserved,
            otherwise=Status.INCONCLUSIVE if unknown else Status.FAILED,
        )


def _difference(on: OnDevice, off: OnDevice, workers: Workers) -> list[dict[str, Any]]:
    """What the plugin changes on each rank: with it less without it. available = -consumed - activation, to the byte;
    `consumed` less the reservation is what the engine measured otherwise.
    """
    reserved = _reserved(workers, on.boot)
    tokens = [one.admission.agreed("tokens") for one in (on, off)]
    kv_bytes = [one.admission.agreed("bytes") for one in (on, off)]
    rows = []
    for ours, theirs in zip(on.loaded, off.loaded, strict=False):
        figures = (ours.admission, theirs.admission)
        consumed = _minus(*(_field(one, "consumed") for one in figures))
        rows.append(
            {
                "with": on.boot.name,
                "without": off.boot.name,
                "rank": ours.rank,
                "kvTokens": _minus(*tokens),
                "kvBytes": _minus(*kv_bytes),
                "availableBytes": _minus(*(_field(one, "available") for one in figures)),
                "consumedBytes": consumed,
                "activationBytes": _minus(*(_field(one, "activation") for one in figures)),
                "reservedBytes": reserved.get(ours.rank),
                "consumedBesideReservation": _minus(consumed, reserved.get(ours.rank)),
                "peakBytes": _minus(_demand(ours, on.boot), _demand(theirs, off.boot)),
            }
        )
    return rows


def _field(record: Record | None, name: str) -> int | None:
    value: int | None = getattr(record, name, None)
    return value


def _minus(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one - other


def _at_most(rule: str, value: int | None, limit: int | None, code: ReasonCode, where: str) -> Check:
    unknown = value is None or limit is None
    return check(
        rule,
        value is not None and limit is not None and value <= limit,
        ReasonCode.METRIC_MISSING if unknown else code,
        where=where,
        observed=value,
        expected=limit,
        otherwise=Status.INCONCLUSIVE if unknown else Status.FAILED,
    )


def _growth(one: OnDevice) -> list[dict[str, Any]]:
    """Per rank in bytes: change from ready to loaded, and what the peak needed beyond the admitted figure. Null where
    the allocator, the driver or the engine's figures could not be read.
    """
    rows = []
    for first, last, _ in one.ranks():
        allocators = (last.allocator, first.allocator)
        past = _minus(_demand(last, one.boot), last.budget_bytes)
        rows.append(
            {
                "rank": last.rank,
                "peakBytes": _minus(*(_field(one, "allocated_peak") for one in allocators)),
                "reservedBytes": _minus(*(_field(one, "reserved_peak") for one in allocators)),
                "driverBytes": _minus(_field(last.driver, "used"), _field(first.driver, "used")),
                "retries": _minus(*(_field(one, "retries") for one in allocators)),
                "pastAdmissionBytes": None if past is None else max(0, past),
            }
        )
    return rows


def _observed(one: Admission) -> dict[str, Any]:
    return {
        "tokens": one.agreed("tokens"),
        "bytesPerRank": one.agreed("bytes"),
        "blocks": one.agreed("blocks"),
        "concurrency": one.agreed("concurrency"),
        "log": {"tokens": one.log_tokens, "concurrency": one.log_concurrency},
        "metrics": {
            "tokens": one.metric_tokens,
            "concurrency": one.metric_concurrency,
            "blocks": one.metric_blocks,
        },
    }


def _summary(checks: list[Check], admissions: list[Admission]) -> str:
    bad = next((item for item in checks if item.status is not Status.PASSED), None)
    if bad is not None:
        return f"{bad.where}: not true that {bad.name}"
    least = min(admissions, key=lambda one: one.agreed("tokens"))
    return (
        f"{least.agreed('tokens'):,} KV tokens, {least.agreed('bytes'):,} bytes a rank, concurrency "
        f"{least.agreed('concurrency'):.2f}; log, metrics and workers agree in {len(admissions)} boots"
    )
