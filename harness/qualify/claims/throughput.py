# SPDX-License-Identifier: Apache-2.0
"""throughput.sustained: output tokens/s, engine steps/s and acceptance length, and whether they can be believed.

There is no bar here: the claim passes when the figures exist and agree with each other, with the client and with the
engine's counters. Steadiness and autocorrelation are judged from JUDGED_FROM_SECONDS on and only reported below it:
a short window cannot tell drift of the engine from noise of the machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import Any

from qualify import statistics
from qualify.claims.boots import ENOUGH_BOOTS, equal_boots, require_boot, visited
from qualify.claims.model import Check, Estimate, Judgement, Status, check
from qualify.claims.window import Counter, Window, estimate
from qualify.errors import EvidenceError
from qualify.evidence import Evidence
from qualify.observe import metrics
from qualify.probes.load_records import Cell, LoadRequest, Sample, cell_file, scrape_file
from qualify.profiles import Boot, Probe, Profile, Throughput
from qualify.reasons import ReasonCode
from qualify.records import HOST, Gpu, Host

JUDGED_FROM_SECONDS = 60.0
"""Windows of at least this length are judged for steadiness and autocorrelation."""
CEILING_FACTOR = 5.0
"""The client must be able to take in this many times the measured rate."""
BUSY_SHARE = 0.9
"""Share of the window in which the slots must have a request in flight."""
LITTLE_SHARE = 0.02
LITTLE_SHARE_SHORT = 0.1
"""Tolerance of Little's law as a share of the concurrency, in judged and in shorter windows; two samples on top.

A shorter window also grants the time for which its samples were late by an interval or more: on two shared cores the
client may be off the CPU for a second, and its times of the requests are then off by as much.
"""
LATE_SHARE = 0.3
"""Most that is granted, so that an engine that says it holds nothing is never believed."""
COVERED_SHARE = 0.9
"""Share of the profile's window that the samples must span."""
VARIABLE_DRAFTERS = frozenset({"ngram", "ngram_gpu", "suffix"})
"""Drafters that may propose fewer than K tokens, or none."""
DEGENERATE_SHARE = 0.5
GPU_FACTS = ("mig", "power_limit_watts", "max_sm_mhz")
SAMPLE_FACTS = ("sm_mhz", "memory_mhz", "power_watts", "throttles")
GROWING = ("generation_tokens", "steps", "drafts", "draft_tokens", "accepted_tokens")


def _tokens(sample: Sample) -> float | None:
    return sample.generation_tokens


def _steps(sample: Sample) -> float | None:
    return sample.steps


def _drafts(sample: Sample) -> float | None:
    return sample.drafts


def _accepted(sample: Sample) -> float | None:
    return sample.accepted_tokens


@dataclass(frozen=True)
class Subject:
    """One cell with what the profile promises of it and the metrics pages around it."""

    name: str
    cell: Cell
    closed: metrics.Delta
    plan: Throughput
    draft_tokens: int | None
    """K; None in a boot without speculation."""
    fixed_drafts: bool
    """Whether every draft has K tokens."""
    gpus: tuple[Gpu, ...] | None
    """The host's GPUs; None where the engine has none."""
    ranks: int

    @property
    def window(self) -> Window:
        return Window(self.cell)

    @property
    def judged(self) -> bool:
        return self.plan.window_seconds >= JUDGED_FROM_SECONDS


@dataclass(frozen=True)
class Findings:
    checks: list[Check]
    estimates: tuple[Estimate, ...] = ()
    observed: dict[str, Any] | None = None


def judge(evidence: Evidence, profile: Profile) -> Judgement:
    boots = visited(evidence, profile, Probe.THROUGHPUT)
    findings: dict[str, Findings] = {}
    for boot, folder in boots:
        for concurrency in profile.throughput.concurrency:
            subject = _subject(evidence, profile, boot, folder, concurrency)
            findings[subject.name] = _find(subject)
    checks = [*(item for found in findings.values() for item in found.checks), *_not_visited(profile, boots)]
    wrong = [item for item in checks if item.status is not Status.PASSED]
    within = tuple(one for found in findings.values() for one in found.estimates)
    estimates = (*within, *_between_boots(boots, profile.throughput.concurrency, findings))
    return Judgement(
        checks=tuple(checks),
        summary=f"{wrong[0].where}: not true that {wrong[0].name}" if wrong else _figures(estimates, findings),
        observed={name: found.observed for name, found in findings.items()},
        expected={
            "windowSeconds": profile.throughput.window_seconds,
            "batches": profile.throughput.batches,
            "stallSeconds": profile.throughput.stall_seconds,
            "clientCeilingFactor": CEILING_FACTOR,
            "steadinessJudgedFromSeconds": JUDGED_FROM_SECONDS,
        },
        estimates=estimates,
    )


def _subject(evidence: Evidence, profile: Profile, boot: Boot, folder: str, concurrency: int) -> Subject:
    path = f"{folder}/{cell_file(concurrency)}"
    cell = evidence.record(path if evidence.exists(path) else f"{path}.gz", Cell)
    require_boot(path, [cell.boot], boot)
    if cell.concurrency != concurrency:
        raise EvidenceError(f"evidence {path} is of concurrency {cell.concurrency}")
    if not cell.drained and cell.failure is not None:
        # An engine that died has no page after the load; the failure decides alone.
        before = after = metrics.parse("")
    else:
        before, after = (
            metrics.parse(evidence.bytes(f"{folder}/{scrape_file(concurrency, moment)}"))
            for moment in ("before", "after")
        )
    return Subject(
        name=_cell_name(boot, concurrency),
        cell=cell,
        closed=metrics.delta(before, after),
        plan=profile.throughput,
        draft_tokens=profile.speculation.tokens if boot.speculation else None,
        fixed_drafts=profile.speculation.method not in VARIABLE_DRAFTERS,
        gpus=evidence.record(HOST, Host).gpus if profile.engine.kind == "cuda" else None,
        ranks=profile.engine.tensor_parallel,
    )


def _not_visited(profile: Profile, boots: list[tuple[Boot, str]]) -> Iterator[Check]:
    """Boots that a server started by somebody else cannot be asked to make."""
    names = {boot.name for boot, _ in boots}
    for boot in profile.boots:
        if Probe.THROUGHPUT in boot.probes and boot.name not in names:
            yield Check(
                name="every boot of the profile is measured",
                status=Status.INCONCLUSIVE,
                reason_code=ReasonCode.NOT_PERMITTED,
                where=boot.name,
            )


def _find(subject: Subject) -> Findings:
    """The checks in order; a group that does not hold ends the cell, because those behind it would only echo it."""
    checks: list[Check] = []
    for group in (_requests, _counters_usable, _counts, _enough, _gpus, _load, _identities):
        checks.extend(group(subject))
        if any(item.status is not Status.PASSED for item in checks):
            return Findings(checks)
    steadiness = _steadiness(subject)
    checks.extend(_steady(subject, steadiness))
    return Findings(checks, tuple(_estimates(subject)), _observed(subject, steadiness))


def _requests(subject: Subject) -> Iterator[Check]:
    """An error or an unplanned ending voids the cell."""
    cell = subject.cell
    bad = [
        f"slot {request.slot}: {request.error or f'finish reason {request.finish_reason}'}"
        for request in cell.requests
        if request.error is not None or request.finish_reason != "length"
    ]
    failed = bad or ([cell.failure] if cell.failure else [])
    yield check(
        "every request of the load is answered",
        bool(cell.requests) and not failed,
        ReasonCode.REQUEST_FAILED,
        where=subject.name,
        observed=failed[:5],
        otherwise=Status.INVALID,
    )


def _counters_usable(subject: Subject) -> Iterator[Check]:
    """One process, counters that only grow, and every series that the figures need."""
    samples = subject.cell.samples
    fell = [name for name in GROWING if any(step < 0 for step in subject.window.differences(attrgetter(name)))]
    restarted = len({sample.process_start for sample in samples}) > 1
    ordered = all(spacing > 0 for spacing in subject.window.spacings)
    yield check(
        "counters and times only grow, in one process",
        subject.closed.invalid is None and not fell and not restarted and ordered,
        ReasonCode.COUNTER_RESET,
        where=subject.name,
        observed=subject.closed.invalid or fell,
        otherwise=Status.INVALID,
    )
    needed = ["generation_tokens", "steps", "running", "waiting", "preemptions"]
    if subject.draft_tokens is not None:
        needed += ["drafts", "draft_tokens", "accepted_tokens"]
    absent = [name for name in needed if any(getattr(sample, name) is None for sample in samples)]
    yield check(
        "every counter is exposed",
        not absent,
        ReasonCode.METRIC_MISSING,
        where=subject.name,
        observed=absent,
        otherwise=Status.ERROR,
    )


def _counts(subject: Subject) -> Iterator[Check]:
    """From idle to idle the engine's counter is the sum of usage, and usage is what was asked for and delivered."""
    cell = subject.cell
    wrong = [
        f"slot {request.slot}: asked {request.max_tokens}, usage {request.completion_tokens},"
        f" delivered {request.delivered_tokens}"
        for request in cell.requests
        if request.completion_tokens != request.max_tokens
        or request.delivered_tokens not in (None, request.completion_tokens)
    ]
    yield check(
        "usage equals the tokens asked for and delivered",
        not wrong,
        ReasonCode.USAGE_MISMATCH,
        where=subject.name,
        observed=wrong[:5],
        otherwise=Status.INVALID,
    )
    if wrong:
        return
    yield check(
        "the engine is idle before and after the load",
        cell.drained,
        ReasonCode.TOKEN_COUNT_MISMATCH,
        where=subject.name,
        otherwise=Status.INVALID,
    )
    yield _exact(
        subject,
        "the token counter grew by the sum of usage",
        subject.closed.total("vllm:generation_tokens_total", {"engine"}).value,
        sum(request.completion_tokens or 0 for request in cell.requests),
        ReasonCode.TOKEN_COUNT_MISMATCH,
    )


def _enough(subject: Subject) -> Iterator[Check]:
    covered = subject.window.seconds >= COVERED_SHARE * subject.plan.window_seconds
    yield check(
        "the window holds enough samples",
        covered and len(subject.window.spacings) >= subject.plan.batches,
        ReasonCode.INSUFFICIENT_SAMPLES,
        where=subject.name,
        observed={"seconds": round(subject.window.seconds, 3), "intervals": len(subject.window.spacings)},
        expected={"seconds": subject.plan.window_seconds, "intervals": subject.plan.batches},
        otherwise=Status.INCONCLUSIVE,
    )
    if subject.draft_tokens is not None:
        yield check(
            "the drafter proposed within the window",
            subject.window.increase(_drafts) > 0,
            ReasonCode.INSUFFICIENT_SAMPLES,
            where=subject.name,
            otherwise=Status.INCONCLUSIVE,
        )


def _gpus(subject: Subject) -> Iterator[Check]:
    """A speed of a GPU counts only together with its clocks, power and driver, and while nothing slowed it down."""
    if subject.gpus is None:
        return
    samples = subject.cell.gpus
    used = {sample.uuid_hash for sample in samples}
    known = {gpu.uuid_hash: gpu for gpu in subject.gpus}
    facts = [known[uuid] for uuid in used if uuid in known]
    missing = sorted(
        {name for gpu in facts for name in GPU_FACTS if getattr(gpu, name) is None}
        | {name for sample in samples for name in SAMPLE_FACTS if getattr(sample, name) is None}
    )
    yield check(
        "driver, limits, clocks and power of every GPU are known",
        len(facts) == subject.ranks and not missing,
        ReasonCode.ENVIRONMENT_INCOMPLETE,
        where=subject.name,
        observed={"gpus": len(facts), "missing": missing},
        expected={"gpus": subject.ranks, "missing": []},
        otherwise=Status.INVALID,
    )
    slowed = sorted({name for sample in samples for name in sample.throttles or ()})
    yield check(
        "no GPU was slowed down in the window",
        not slowed,
        ReasonCode.GPU_THROTTLED,
        where=subject.name,
        observed=slowed,
        expected=[],
        otherwise=Status.INCONCLUSIVE,
    )


def _load(subject: Subject) -> Iterator[Check]:
    """The engine was kept busy by C requests, made progress, and was not waiting for the client."""
    window, cell, plan = subject.window, subject.cell, subject.plan
    waits = (_longest_wait(request, plan.stall_seconds) for request in cell.requests)
    stall = max([window.longest_stall(_tokens), *waits])
    moving = stall <= plan.stall_seconds and window.increase(_tokens) > 0 and window.increase(_steps) > 0
    yield check(
        "tokens keep coming",
        moving,
        ReasonCode.STALLED,
        where=subject.name,
        observed=round(stall, 3),
        expected=plan.stall_seconds,
    )
    if not moving:
        return
    in_flight = window.occupancy(lambda request: request.times.sent)
    yield check(
        "slots are kept busy",
        in_flight >= BUSY_SHARE * cell.concurrency,
        ReasonCode.CLIENT_LIMITED,
        where=subject.name,
        observed=statistics.significant(in_flight),
        expected=cell.concurrency,
        otherwise=Status.INVALID,
    )
    rate = window.increase(_tokens) / window.seconds
    yield check(
        "the client is not the limit",
        cell.ceiling.concurrency == cell.concurrency and cell.ceiling.tokens_per_second >= CEILING_FACTOR * rate,
        ReasonCode.CLIENT_LIMITED,
        where=subject.name,
        observed=cell.ceiling.tokens_per_second,
        expected=statistics.significant(CEILING_FACTOR * rate),
        otherwise=Status.INVALID,
    )


def _longest_wait(request: LoadRequest, limit: float) -> float:
    """Longest time without a token while the request was open.

    Warm-up may wait for compilation: before the first token, and beyond the limit also within an answer.
    """
    times = request.times
    silence = times.longest_silence or 0.0
    if request.warmup:
        return silence if silence <= limit else 0.0
    return max(silence, 0.0 if times.first_token is None else times.first_token - times.sent)


def _identities(subject: Subject) -> Iterator[Check]:
    yield _little(subject)
    yield from _step_tokens(subject)
    if subject.draft_tokens is None:
        yield from _without_drafter(subject)
    else:
        yield from _with_drafter(subject, subject.draft_tokens)


def _little(subject: Subject) -> Check:
    """Requests that the engine says it holds lie between those decoding and those in flight by the client's times."""
    window, concurrency = subject.window, subject.cell.concurrency
    held = window.mean_gauge(lambda sample: (sample.running or 0) + (sample.waiting or 0))
    share = LITTLE_SHARE if subject.judged else LITTLE_SHARE_SHORT + min(LATE_SHARE, window.late())
    slack = concurrency * (share + 2 / len(subject.cell.samples))
    low = window.occupancy(lambda request: request.times.first_token) - slack
    high = window.occupancy(lambda request: request.times.sent) + slack
    return _holds(
        subject,
        "Little's law: requests held by the engine are those of the client",
        low <= held <= high,
        observed=statistics.significant(held),
        expected=[statistics.significant(low), statistics.significant(high)],
    )


def _step_tokens(subject: Subject) -> Iterator[Check]:
    """Tokens booked on steps are those generated and those of prompts computed here."""
    booked = subject.closed.total("vllm:iteration_tokens_total_sum", {"engine"}).value
    generated = subject.closed.total("vllm:generation_tokens_total", {"engine"}).value
    computed = subject.closed.total("vllm:prompt_tokens_by_source_total", {"engine"}, source="local_compute").value
    if booked is not None and generated is not None and computed is not None:
        yield _exact(subject, "step tokens = output tokens + computed prompt tokens", booked, generated + computed)


def _without_drafter(subject: Subject) -> Iterator[Check]:
    drafts = [sample.drafts for sample in subject.cell.samples if sample.drafts is not None]
    yield _holds(subject, "a boot without speculation has no drafter", not drafts)
    steps = subject.closed.total("vllm:iteration_tokens_total_count", {"engine"}).value
    tokens = subject.closed.total("vllm:generation_tokens_total", {"engine"}).value
    if subject.cell.concurrency == 1:
        yield _exact(subject, "C1 without drafter: engine steps = output tokens", steps, tokens)
    else:
        yield _within(subject, "output tokens per step are 1 to C", tokens, steps, subject.cell.concurrency)


def _with_drafter(subject: Subject, k: int) -> Iterator[Check]:
    """Over the closed interval; the first token of a request comes from prefill, and its last step may be cut by K."""
    closed, requests = subject.closed, len(subject.cell.requests)
    tokens, steps, drafts, proposed, accepted, by_position = (
        closed.total(name, over).value
        for name, over in (
            ("vllm:generation_tokens_total", {"engine"}),
            ("vllm:iteration_tokens_total_count", {"engine"}),
            ("vllm:spec_decode_num_drafts_total", {"engine"}),
            ("vllm:spec_decode_num_draft_tokens_total", {"engine"}),
            ("vllm:spec_decode_num_accepted_tokens_total", {"engine"}),
            ("vllm:spec_decode_num_accepted_tokens_per_pos_total", {"engine", "position"}),
        )
    )
    if tokens is None or steps is None or drafts is None or proposed is None or accepted is None:
        yield check(
            "every counter is exposed", False, ReasonCode.METRIC_MISSING, where=subject.name, otherwise=Status.ERROR
        )
        return
    yield _exact(subject, "accepted tokens by position sum to accepted tokens", by_position, accepted)
    figures = [accepted, proposed, k * drafts]
    yield _holds(subject, "accepted tokens are at most draft tokens", accepted <= proposed, observed=figures)
    if subject.fixed_drafts:
        yield _exact(subject, "draft tokens = K x drafts, so (L - 1) / K = draft acceptance", proposed, k * drafts)
    else:
        yield _holds(subject, "draft tokens are at most K x drafts", proposed <= k * drafts, observed=figures)
    cut = drafts + accepted - (tokens - requests)
    yield _holds(
        subject,
        "drafts + accepted tokens = output tokens after the first, plus those cut at the end"
        if subject.fixed_drafts
        else "drafts + accepted tokens are at most output tokens after the first, plus those cut at the end",
        cut <= k * requests and (cut >= 0 or not subject.fixed_drafts),
        observed=cut,
        expected=f"at most {k * requests}",
    )
    if subject.cell.concurrency == 1:
        yield _ratio_at_one(subject, k, steps + accepted - tokens)
    else:
        yield _within(
            subject, "output tokens per step are 1 to C(K+1)", tokens, steps, subject.cell.concurrency * (k + 1)
        )


def _ratio_at_one(subject: Subject, k: int, cut: float) -> Check:
    """T / S = 1 + accepted / steps: exact but for cut tokens over the closed interval, and for its edges in the window.

    Where every step has a draft, this is T / S = L.
    """
    window = subject.window
    inside = window.increase(_steps) + window.increase(_accepted) - window.increase(_tokens)
    slack = k * (window.ended_within() + 2) + 1
    return _holds(
        subject,
        "C1: output tokens = engine steps + accepted tokens, so T / S = L where every step has a draft",
        0 <= cut <= k * len(subject.cell.requests) and -slack <= inside <= slack,
        observed={"closed": cut, "window": inside},
        expected={"closed": f"0 to {k * len(subject.cell.requests)}", "window": f"-{slack} to {slack}"},
    )


def _within(subject: Subject, name: str, tokens: float | None, steps: float | None, most: int) -> Check:
    holds = tokens is not None and steps is not None and steps <= tokens <= most * steps
    return _holds(subject, name, holds, observed=[tokens, steps])


def _exact(
    subject: Subject,
    name: str,
    observed: float | None,
    expected: float | None,
    code: ReasonCode = ReasonCode.IDENTITY_BROKEN,
) -> Check:
    return check(
        name,
        observed is not None and observed == expected,
        code,
        where=subject.name,
        observed=observed,
        expected=expected,
        otherwise=Status.INVALID,
    )


def _holds(subject: Subject, name: str, holds: bool, *, observed: Any = None, expected: Any = None) -> Check:
    return check(
        name,
        holds,
        ReasonCode.IDENTITY_BROKEN,
        where=subject.name,
        observed=observed,
        expected=expected,
        otherwise=Status.INVALID,
    )


@dataclass(frozen=True)
class Steadiness:
    """Of engine steps/s over the window; a figure that the window is too short for is None."""

    lag1: float | None
    batches: int | None
    transient: float | None
    """Share of the window that MSER-5 would cut."""
    trend: statistics.Trend | None
    late_drop: bool | None

    @property
    def drifts(self) -> bool:
        steep = self.trend is not None and (
            abs(self.trend.rank) >= statistics.TREND_RANK and abs(self.trend.drift) > statistics.TREND_DRIFT
        )
        return steep or (self.transient is not None and self.transient > statistics.MSER_CUT)


def _steadiness(subject: Subject) -> Steadiness:
    rates = subject.window.rates(_steps)
    count = len(rates)
    wanted = subject.plan.batches
    return Steadiness(
        lag1=statistics.lag1(rates),
        batches=_batches(subject, _steps),
        transient=statistics.significant(statistics.mser5(rates).cut / count) if count >= 20 else None,
        trend=statistics.trend(statistics.batch_means(rates, wanted)) if count >= wanted else None,
        late_drop=statistics.late_drop(rates) if count >= statistics.LATE_BATCHES else None,
    )


def _steady(subject: Subject, found: Steadiness) -> Iterator[Check]:
    """The first rule that does not hold decides: drift and drops are correlation too."""
    if not subject.judged:
        return
    where = subject.name
    enough = found.batches is not None and _batches(subject, _tokens) is not None
    rules = (
        ("no drift", not found.drifts, ReasonCode.NOT_STEADY, Status.INVALID),
        ("no drop at the end", found.late_drop is False, ReasonCode.LATE_DROP, Status.INVALID),
        ("batches are long against the correlation", enough, ReasonCode.AUTOCORRELATED, Status.INCONCLUSIVE),
    )
    for name, holds, code, otherwise in rules:
        yield check(name, holds, code, where=where, observed=asdict(found), otherwise=otherwise)
        if not holds:
            return


def _batches(subject: Subject, counter: Counter) -> int | None:
    return statistics.usable_batches(subject.window.rates(counter), subject.plan.batches)


def _estimates(subject: Subject) -> Iterator[Estimate]:
    window, scope = subject.window, subject.name
    tokens, steps = window.differences(_tokens), window.differences(_steps)
    batches = _batches(subject, _tokens)
    yield estimate("outputTokensPerSecond", "{token}/s", scope, tokens, window.spacings, batches)
    yield estimate("engineStepsPerSecond", "{step}/s", scope, steps, window.spacings, _batches(subject, _steps))
    if subject.draft_tokens is not None:
        drafts, accepted = window.differences(_drafts), window.differences(_accepted)
        emitted = [one + other for one, other in zip(drafts, accepted, strict=True)]
        yield estimate("acceptanceLength", "1", scope, emitted, drafts, batches)


def _between_boots(
    boots: list[tuple[Boot, str]], concurrency: tuple[int, ...], findings: dict[str, Findings]
) -> Iterator[Estimate]:
    """Mean of the boots' figures and its t interval, for ENOUGH_BOOTS equal boots or more with figures."""
    for equal in equal_boots(boot for boot, _ in boots):
        if len(equal) < ENOUGH_BOOTS:
            continue
        for count in concurrency:
            for figures in zip(*(findings[_cell_name(boot, count)].estimates for boot in equal), strict=False):
                interval = statistics.mean_interval([one.point for one in figures])
                yield Estimate(
                    name=figures[0].name,
                    unit=figures[0].unit,
                    scope=f"{', '.join(boot.name for boot in equal)} C{count}",
                    point=interval.point,
                    low=interval.low,
                    high=interval.high,
                    method="mean of boots",
                    replicates=interval.replicates,
                    replicate_unit="boot",
                )


def _cell_name(boot: Boot, concurrency: int) -> str:
    return f"{boot.name} C{concurrency}"


def _observed(subject: Subject, steadiness: Steadiness) -> dict[str, Any]:
    window, cell = subject.window, subject.cell
    load = [request for request in cell.requests if not request.warmup]
    drafted = subject.draft_tokens is not None
    proposed = window.increase(lambda sample: sample.draft_tokens) if drafted else 0.0
    return {
        "seconds": statistics.significant(window.seconds),
        "outputTokens": window.increase(_tokens),
        "engineSteps": window.increase(_steps),
        "drafts": window.increase(_drafts) if drafted else None,
        "draftTokens": proposed if drafted else None,
        "acceptedTokens": window.increase(_accepted) if drafted else None,
        "draftAcceptance": statistics.significant(window.increase(_accepted) / proposed) if proposed else None,
        "preemptions": window.increase(lambda sample: sample.preemptions),
        "requests": len(load),
        "degenerateAnswers": _degenerate(load),
        "timeToFirstTokenSeconds": _median_first_token(load),
        "clientCeilingTokensPerSecond": cell.ceiling.tokens_per_second,
        "steadiness": {
            "judged": subject.judged,
            "lag1": steadiness.lag1,
            "batches": steadiness.batches,
            "transientShare": steadiness.transient,
            "trendRank": steadiness.trend.rank if steadiness.trend else None,
            "drift": steadiness.trend.drift if steadiness.trend else None,
            "lateDrop": steadiness.late_drop,
        },
    }


def _degenerate(load: list[LoadRequest]) -> int | None:
    """Answers that are mostly one token; speculation finds those easy. None when the engine returns no token ids."""
    known = [request for request in load if request.delivered_tokens and request.most_common_tokens is not None]
    if not known:
        return None
    return sum(
        (request.most_common_tokens or 0) > DEGENERATE_SHARE * (request.delivered_tokens or 0) for request in known
    )


def _median_first_token(load: list[LoadRequest]) -> dict[str, float] | None:
    """Median with its interval; None below 6 requests."""
    waits = [r.times.first_token - r.times.intended for r in load if r.times.first_token is not None]
    found = statistics.percentile_interval(waits, 0.5)
    return None if found is None else dict(zip(("p50", "low", "high"), found, strict=True))


def _figures(estimates: tuple[Estimate, ...], findings: dict[str, Findings]) -> str:
    """The three figures always together: a token rate alone says nothing about the engine."""
    units = {"outputTokensPerSecond": "tok/s", "engineStepsPerSecond": "steps/s", "acceptanceLength": "accepted length"}
    cells: dict[str, list[str]] = {}
    for one in estimates:
        cells.setdefault(one.scope, []).append(f"{one.point:.4g} {units[one.name]}")
    for name, found in findings.items():
        if found.observed and found.observed["degenerateAnswers"]:
            count, load = found.observed["degenerateAnswers"], found.observed["requests"]
            cells[name].append(f"{count} of {load} answers mostly one token, which proves little")
    return "; ".join(f"{scope}: {', '.join(figures)}" for scope, figures in cells.items())
