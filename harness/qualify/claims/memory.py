# SPDX-License-Identifier: Apache-2.0
"""memory.admission: how much KV cache the engine admitted, agreed by its log, its metrics and every worker.

On CUDA also: under load the device stayed within the engine's own budget and the allocator never had to retry. A host
allocator keeps no such statistics, so on the CPU engine growth is not measured and not claimed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from qualify.claims.boots import visited, worker_reports
from qualify.claims.model import Check, Judgement, Status, check
from qualify.evidence import Evidence
from qualify.observe import log, metrics
from qualify.observe.facts import LogFacts
from qualify.probes.workers import ADMISSION, KvCache, MemoryReport, WorkerReport, memory_file
from qualify.profiles import Profile
from qualify.reasons import ReasonCode

INFO = "vllm:cache_config_info"
READY, LOADED = "ready", "loaded"
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
    if profile.engine.kind == "cuda":
        memory = {boot.name: _memory(evidence, folder) for boot, folder in boots}
        checks += [item for name, pair in memory.items() for item in _growth_checks(name, pair, profile)]
        growth = {name: _growth(pair) for name, pair in memory.items()}
    return Judgement(
        checks=tuple(checks),
        summary=_summary(checks, admissions),
        observed={"boots": {one.boot: _observed(one) for one in admissions}, "growthUnderLoad": growth},
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


Pair = tuple[tuple[MemoryReport, ...], tuple[MemoryReport, ...]]


def _memory(evidence: Evidence, folder: str) -> Pair:
    """Memory of every rank when ready and after the load."""
    return (
        evidence.record(f"{folder}/{memory_file(READY)}", tuple[MemoryReport, ...]),
        evidence.record(f"{folder}/{memory_file(LOADED)}", tuple[MemoryReport, ...]),
    )


def _growth_checks(boot: str, pair: Pair, profile: Profile) -> Iterator[Check]:
    before, after = pair
    ranks = list(range(profile.engine.tensor_parallel))
    seen = [[report.rank for report in reports] for reports in pair]
    yield check(
        "every rank reported its memory before and after the load",
        seen == [ranks, ranks],
        ReasonCode.RANK_MISSING,
        where=boot,
        observed=seen,
        expected=[ranks, ranks],
    )
    for first, last in zip(before, after, strict=False):
        where = f"{boot}, rank {last.rank}"
        used, budget = last.driver.used if last.driver else None, last.budget_bytes
        yield _at_most("the device stayed within the engine's budget", used, budget, ReasonCode.MEMORY_GREW, where)
        for name in ("retries", "out_of_memory"):
            change = (
                getattr(last.allocator, name) - getattr(first.allocator, name)
                if first.allocator and last.allocator
                else None
            )
            yield _at_most(f"no allocator {name} under load", change, 0, ReasonCode.ALLOCATION_RETRY, where)


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


def _growth(pair: Pair) -> list[dict[str, Any]]:
    """Change from ready to loaded per rank, in bytes; null where the allocator or driver could not be read."""
    return [
        {
            "rank": last.rank,
            "reservedBytes": last.allocator.reserved_peak - first.allocator.reserved_peak
            if first.allocator and last.allocator
            else None,
            "driverBytes": last.driver.used - first.driver.used if first.driver and last.driver else None,
        }
        for first, last in zip(*pair, strict=False)
    ]


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
