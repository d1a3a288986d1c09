# SPDX-License-Identifier: Apache-2.0
"""throughput.sustained: figures that follow from the counters, and one reason code for each thing that spoils them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_engine import Faults, cells
from fake_engine.bench import ceiling_of, judged, patience, run_record
from fake_engine.cells import Steps
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from qualify import profiles
from qualify.claims.model import Claim, ClaimId, Status
from qualify.errors import TargetError
from qualify.evidence import EvidenceWriter, compress
from qualify.probes.load_records import scrape_file
from qualify.profiles import Boot, Probe
from qualify.reasons import ReasonCode

CODE = ReasonCode
CLAIM = ClaimId.THROUGHPUT_SUSTAINED
PLAIN = Boot(name="control", probes=(Probe.THROUGHPUT,))
SPECULATIVE = Boot(name="speculative", speculation=True, probes=(Probe.THROUGHPUT,))


def noise(count: int = 60, mean: int = 200, seed: int = 4) -> list[int]:
    source = random.Random(seed)
    return [mean + source.randint(-4, 4) for _ in range(count)]


def judge(root: Path, plan: Steps, *, method: str = "dspark", seconds: float | None = None, **changes: object) -> Claim:
    """The claim over one cell at concurrency 1; the profile's window is as long as the samples unless given."""
    boot = cells.boot(speculation=plan.drafts is not None)
    cells.write(root, boot, run_record(), plan, **changes)
    span = seconds or len(plan.steps) * plan.spacing
    return judged(root, cells.profile_of(profiles.load("cpu-smoke"), boot, span, method, plan.draft_tokens), CLAIM)


def verdict(claim: Claim) -> tuple[Status, set[ReasonCode]]:
    return claim.status, set(claim.reason_codes)


def figures(claim: Claim) -> dict[str, float]:
    return {one.name: one.point for one in claim.estimates}


# what a good run says


def test_figures_follow_from_the_counters(tmp_path: Path) -> None:
    """Without drafter T = S from counter and sample times, ten batches of one boot, and acceptance is unknown."""
    steps = noise()
    claim = judge(tmp_path, Steps(steps))
    assert verdict(claim) == (Status.PASSED, set())
    assert figures(claim) == {
        "outputTokensPerSecond": pytest.approx(sum(steps) / 60, rel=1e-11),
        "engineStepsPerSecond": pytest.approx(sum(steps) / 60, rel=1e-11),
    }
    first = claim.estimates[0]
    assert (first.replicates, first.replicate_unit, first.reason) == (10, "batch", CODE.SINGLE_REPLICATE)
    assert first.low is not None
    assert first.low < first.point < (first.high or 0)
    assert claim.observed is not None
    assert claim.observed["only C1"]["draftAcceptance"] is None


def test_acceptance_length_is_a_ratio_of_sums(tmp_path: Path) -> None:
    """L = 1 + accepted / drafts, (L - 1) / K = draft acceptance, and T / S = L when every step has a draft."""
    steps = noise()
    accepted = [2 * count + index % 2 for index, count in enumerate(steps)]
    claim = judge(tmp_path, Steps(steps, drafts=steps, accepted=accepted))
    assert verdict(claim) == (Status.PASSED, set())
    found = figures(claim)
    length = 1 + sum(accepted) / sum(steps)
    assert found["acceptanceLength"] == pytest.approx(length, rel=1e-11)
    assert found["outputTokensPerSecond"] / found["engineStepsPerSecond"] == pytest.approx(length, rel=1e-9)
    assert claim.observed is not None
    assert claim.observed["only C1"]["draftAcceptance"] == pytest.approx((length - 1) / 5, rel=1e-9)


def test_the_summary_gives_the_three_figures_together(tmp_path: Path) -> None:
    """No token rate without the step rate and the acceptance length beside it."""
    claim = judge(tmp_path, Steps([100] * 60, drafts=[100] * 60, accepted=[150] * 60))
    assert claim.summary == "only C1: 250 tok/s, 100 steps/s, 2.5 accepted length"


def test_a_drafter_may_skip_steps(tmp_path: Path) -> None:
    """An n-gram drafter without a draft in some steps keeps its identities; a drafter with fixed K does not."""
    plan = Steps([100] * 60, drafts=[60] * 60, accepted=[120] * 60)
    assert verdict(judge(tmp_path / "ngram", plan, method="ngram")) == (Status.PASSED, set())
    assert verdict(judge(tmp_path / "fixed", plan)) == (Status.INVALID, {CODE.IDENTITY_BROKEN})


def over_boots(root: Path, rates: Sequence[int], broken: str = "", stock: str = "") -> Claim:
    """The claim over one boot a rate, all configured alike but `stock`; the cell of `broken` has a failed request."""
    boots = [
        Boot(name=f"boot-{index}", plugin=f"boot-{index}" != stock, probes=(Probe.THROUGHPUT,))
        for index in range(len(rates))
    ]
    for boot, rate in zip(boots, rates, strict=True):
        cells.write(root, boot, run_record(), Steps([rate] * 60), failure="broken" if boot.name == broken else None)
    profile = cells.profile_of(profiles.load("cpu-smoke"), boots[0], 60.0)
    return judged(root, profile.model_copy(update={"boots": tuple(boots)}), CLAIM)


def test_three_equal_boots_give_an_interval_between_boots(tmp_path: Path) -> None:
    """The mean of the boots' figures with its t interval, t(2) = 4.303; the figures of each boot stay."""
    claim = over_boots(tmp_path, [99, 100, 101])
    assert verdict(claim) == (Status.PASSED, set())
    (tokens, steps) = [one for one in claim.estimates if one.replicate_unit == "boot"]
    assert (tokens.name, steps.name) == ("outputTokensPerSecond", "engineStepsPerSecond")
    assert (tokens.scope, tokens.replicates, tokens.reason) == ("boot-0, boot-1, boot-2 C1", 3, None)
    assert (tokens.low, tokens.point, tokens.high) == (
        pytest.approx(100 - 4.303 / 3**0.5, abs=1e-3),
        100,
        pytest.approx(100 + 4.303 / 3**0.5, abs=1e-3),
    )
    assert len(claim.estimates) == 8


@pytest.mark.parametrize("boots", [{"broken": "boot-2"}, {"stock": "boot-2"}])
def test_no_interval_between_fewer_than_three_equal_boots(tmp_path: Path, boots: dict[str, str]) -> None:
    """A boot without figures, or of another configuration, is no replicate."""
    claim = over_boots(tmp_path, [99, 100, 101], **boots)
    assert not [one for one in claim.estimates if one.replicate_unit == "boot"]


# steadiness: judged from 60 s on


def series(shape: str) -> list[int]:
    base = noise(120)
    if shape == "drift":
        return [count - index // 6 for index, count in enumerate(base)]
    if shape == "late drop":
        return [count - 60 if index >= 112 else count for index, count in enumerate(base)]
    source, level, found = random.Random(3), 0.0, []
    for _ in base:
        level = 0.97 * level + source.gauss(0, 1)
        found.append(200 + round(level / 2))
    return found


@pytest.mark.parametrize(
    ("shape", "status", "code"),
    [
        ("drift", Status.INVALID, CODE.NOT_STEADY),
        ("late drop", Status.INVALID, CODE.LATE_DROP),
        ("correlated", Status.INCONCLUSIVE, CODE.AUTOCORRELATED),
    ],
)
def test_an_unsteady_window_is_judged_only_when_it_is_long(
    tmp_path: Path, shape: str, status: Status, code: ReasonCode
) -> None:
    """Drift, a drop at the end and slow waves spoil a window of 120 s; at 30 s the same series is only reported."""
    assert verdict(judge(tmp_path / "long", Steps(series(shape)))) == (status, {code})
    short = judge(tmp_path / "short", Steps(series(shape), spacing=0.25))
    assert verdict(short) == (Status.PASSED, set())
    assert short.observed is not None
    assert short.observed["only C1"]["steadiness"]["judged"] is False


def test_no_interval_is_claimed_when_no_batch_is_long_enough(tmp_path: Path) -> None:
    """In a short window a correlated series keeps its point, without bounds and with the reason."""
    claim = judge(tmp_path, Steps(series("correlated"), spacing=0.25))
    assert {(one.low, one.high, one.reason) for one in claim.estimates} == {(None, None, CODE.AUTOCORRELATED)}


# what spoils a cell


def test_too_few_samples(tmp_path: Path) -> None:
    """A window that ended early, or with fewer samples than batches, gives no figure."""
    for plan, seconds in ((Steps(noise(60)), 90.0), (Steps([200] * 6, spacing=10), 60.0)):
        claim = judge(tmp_path / str(seconds), plan, seconds=seconds)
        assert verdict(claim) == (Status.INCONCLUSIVE, {CODE.INSUFFICIENT_SAMPLES})
        assert claim.estimates == ()


def test_a_slow_client_is_the_limit(tmp_path: Path) -> None:
    """Less than five times the measured rate against a null server: the client may have been the limit."""
    slow = ceiling_of(1).model_copy(update={"tokens_per_second": 900.0})
    assert verdict(judge(tmp_path / "slow", Steps([200] * 60), ceiling=slow)) == (Status.INVALID, {CODE.CLIENT_LIMITED})
    other = ceiling_of(8)
    assert verdict(judge(tmp_path / "other", Steps([200] * 60), ceiling=other))[1] == {CODE.CLIENT_LIMITED}


def test_counters_that_do_not_move_for_long_are_a_stall(tmp_path: Path) -> None:
    """Six seconds without a token, where the profile allows five."""
    steps = [200] * 30 + [0] * 6 + [200] * 30
    assert verdict(judge(tmp_path, Steps(steps))) == (Status.FAILED, {CODE.STALLED})


@pytest.mark.parametrize("warmup", [True, False])
def test_only_warmup_may_wait_for_compilation(tmp_path: Path, warmup: bool) -> None:
    """A minute of silence within an answer: a kernel is compiled while warming up, but later it is a stall."""
    steps = Steps([200] * 60)
    total = 200 * 60 + 2 * cells.OUTSIDE
    silent = cells.request(total - 7, 60.0).model_copy(update={"completion_tokens": 7, "max_tokens": 7})
    silent = silent.model_copy(
        update={
            "warmup": warmup,
            "delivered_tokens": 7,
            "times": silent.times.model_copy(update={"longest_silence": 60.0, "ended": -0.4}),
        }
    )
    claim = judge(tmp_path, steps, requests=(silent, cells.request(total - 7, 60.0)))
    assert (CODE.STALLED in claim.reason_codes) is not warmup


def test_the_published_run_has_three_figures_that_agree() -> None:
    """The published figures of one run: T / S = L, (L - 1) / K = draft acceptance, drafts + accepted = output."""
    rate, steps_rate, length = 201.080843, 72.571783, 2.770785
    drafts, accepted, output = 1288, 2001, 3289
    assert round(rate / steps_rate, 6) == length
    assert round((length - 1) / 5, 6) == 0.354157
    assert drafts + accepted == output


COUNTERS = ("generation_tokens_total", "iteration_tokens_total_count", "iteration_tokens_total_sum")
SPEC = ("spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total")


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(COUNTERS + SPEC), st.sampled_from([-500, -7, 7, 500]))
def test_no_single_counter_can_be_wrong(tmp_path: Path, name: str, off: int) -> None:
    """Any one counter of the closed interval that is off by more than a request's cut breaks an identity."""
    plan = Steps([100] * 60, drafts=[100] * 60, accepted=[150] * 60)
    cells.write(tmp_path, cells.boot(True), run_record(), plan)
    after = cells.page(sum(plan.steps) + 2 * cells.OUTSIDE, 9000, plan, **{name: off})
    EvidenceWriter(tmp_path).bytes(f"boots/01-only/{scrape_file(1, 'after')}", compress(after.encode()))
    claim = judged(tmp_path, cells.profile_of(profiles.load("cpu-smoke"), cells.boot(True), 60), CLAIM)
    expected = CODE.TOKEN_COUNT_MISMATCH if name == "generation_tokens_total" else CODE.IDENTITY_BROKEN
    assert verdict(claim) == (Status.INVALID, {expected})


@given(st.lists(st.integers(1, 400), min_size=40, max_size=80))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_two_readers_get_the_same_figures(tmp_path: Path, steps: Sequence[int]) -> None:
    """Judging the same evidence twice gives equal claims, digit for digit."""
    plan = Steps(steps, spacing=0.25)
    assert judge(tmp_path, plan) == judge(tmp_path, plan)


def test_a_cell_of_another_concurrency_is_no_evidence(tmp_path: Path) -> None:
    """A file says by itself what it measured."""
    assert verdict(judge(tmp_path, Steps([100] * 60), concurrency=2)) == (Status.ERROR, {CODE.PARSE_FAILED})


def leaves(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(inner, (*path, key))
    else:
        yield path


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), st.sampled_from([0, -1, 1, 10**9, None, 0.5]))
def test_no_value_in_a_cell_breaks_the_judge(tmp_path: Path, data: st.DataObject, value: float | None) -> None:
    """Whatever number evidence holds, the answer is a claim and not an exception."""
    plan = Steps([100] * 40, spacing=0.25, drafts=[100] * 40, accepted=[150] * 40)
    cells.write(tmp_path, cells.boot(True), run_record(), plan)
    path = tmp_path / "boots/01-only/throughput/c1.json"
    cell = json.loads(path.read_text())
    *way, last = data.draw(st.sampled_from(list(leaves(cell))))
    holder = cell
    for key in way:
        holder = holder[key]
    holder[last] = value
    path.write_text(json.dumps(cell))
    judged(tmp_path, cells.profile_of(profiles.load("cpu-smoke"), cells.boot(True), 10), CLAIM)


@pytest.mark.parametrize(
    ("count", "planned", "expected"),
    [
        (48, 0.25, (Status.INVALID, {CODE.IDENTITY_BROKEN})),
        (48, 0.12, (Status.PASSED, set())),
        (240, 0.12, (Status.INVALID, {CODE.IDENTITY_BROKEN})),
    ],
    ids=["samples in time", "each missed an interval", "the same in a judged window"],
)
def test_an_idle_engine_is_excused_by_late_samples_of_a_short_window_only(
    tmp_path: Path, count: int, planned: float, expected: tuple[Status, set[ReasonCode]]
) -> None:
    """Every third sample finds an idle engine, while the client waits for an answer; samples are 0.25 s apart."""
    boot, plan = cells.boot(), Steps([100] * count, spacing=0.25)
    cells.write(tmp_path, boot, run_record(), plan, sample_seconds=planned)
    path = tmp_path / "boots/01-only/throughput/c1.json"
    cell = json.loads(path.read_text())
    for sample in cell["samples"][::3]:
        sample["running"] = 0
    path.write_text(json.dumps(cell))
    assert verdict(judged(tmp_path, cells.profile_of(profiles.load("cpu-smoke"), boot, count / 4), CLAIM)) == expected


def test_answers_of_one_token_are_named(tmp_path: Path) -> None:
    """Speculation on answers that repeat one token is easy, so the summary says how many there were."""
    boot = cells.boot()
    cells.write(tmp_path, boot, run_record(), Steps([100] * 60))
    path = tmp_path / "boots/01-only/throughput/c1.json"
    path.write_text(path.read_text().replace('"mostCommonTokens": 1', '"mostCommonTokens": 6000'))
    claim = judged(tmp_path, cells.profile_of(profiles.load("cpu-smoke"), boot, 60), CLAIM)
    assert claim.status is Status.PASSED
    assert "1 of 1 answers mostly one token" in claim.summary


# the probe, against the stand-in


def test_the_probe_measures_a_good_engine(bench: Callable) -> None:
    """Both boots and two concurrencies pass, and at concurrency 1 the closed interval holds exactly."""
    place = bench(PLAIN, SPECULATIVE, concurrency=(1, 3), step_seconds=0.002)
    place.visit("control")
    place.visit("speculative")
    claim = place.claim(CLAIM)
    assert verdict(claim) == (Status.PASSED, set())
    assert claim.observed is not None
    assert set(claim.observed) == {"control C1", "control C3", "speculative C1", "speculative C3"}
    assert {one.name for one in claim.estimates if one.scope == "control C1"} == {
        "outputTokensPerSecond",
        "engineStepsPerSecond",
    }


@pytest.mark.parametrize(
    ("boot", "faults", "status", "code"),
    [
        (PLAIN, Faults(refuse=4), Status.INVALID, CODE.REQUEST_FAILED),
        (PLAIN, Faults(fail=4), Status.INVALID, CODE.REQUEST_FAILED),
        (PLAIN, Faults(drop=4), Status.INVALID, CODE.REQUEST_FAILED),
        (PLAIN, Faults(cut_stream=4), Status.INVALID, CODE.REQUEST_FAILED),
        (PLAIN, Faults(error_event=4), Status.INVALID, CODE.REQUEST_FAILED),
        (PLAIN, Faults(early_stop=4), Status.INVALID, CODE.REQUEST_FAILED),
        (PLAIN, Faults(usage_off=1), Status.INVALID, CODE.USAGE_MISMATCH),
        (PLAIN, Faults(no_usage=True), Status.INVALID, CODE.USAGE_MISMATCH),
        (PLAIN, Faults(other_client=1), Status.INVALID, CODE.TOKEN_COUNT_MISMATCH),
        (PLAIN, Faults(busy_gauge=True), Status.INVALID, CODE.TOKEN_COUNT_MISMATCH),
        (PLAIN, Faults(restart_at_step=80), Status.INVALID, CODE.COUNTER_RESET),
        (PLAIN, Faults(absent=("vllm:generation_tokens_total",)), Status.ERROR, CODE.METRIC_MISSING),
        (PLAIN, Faults(absent=("vllm:iteration_tokens_total_count",)), Status.ERROR, CODE.METRIC_MISSING),
        (PLAIN, Faults(double_steps=True), Status.INVALID, CODE.IDENTITY_BROKEN),
        (PLAIN, Faults(idle_gauge=True), Status.INVALID, CODE.IDENTITY_BROKEN),
        (PLAIN, Faults(stall_at_step=70, stall_seconds=1.5), Status.FAILED, CODE.STALLED),
        (SPECULATIVE, Faults(accepted_off=1), Status.INVALID, CODE.IDENTITY_BROKEN),
        (SPECULATIVE, Faults(absent=("vllm:spec_decode_num_drafts_total",)), Status.ERROR, CODE.METRIC_MISSING),
    ],
    ids=lambda value: str(value) if isinstance(value, Faults) else "",
)
def test_each_fault_has_its_code(bench: Callable, boot: Boot, faults: Faults, status: Status, code: ReasonCode) -> None:
    """One fault, one code, never a pass."""
    place = bench(boot, step_seconds=0.002, stall_seconds=patience(faults))
    place.visit(boot.name, faults)
    assert verdict(place.claim(CLAIM)) == (status, {code})


def test_an_engine_that_dies_under_load_is_never_passed(bench: Callable) -> None:
    """The probe raises, what was seen is kept, and the cell is void."""
    place = bench(PLAIN, step_seconds=0.002)
    with pytest.raises(TargetError):
        place.visit("control", Faults(die_at_step=100))
    assert verdict(place.claim(CLAIM)) == (Status.INVALID, {CODE.REQUEST_FAILED})


def test_from_outside_only_one_boot_is_measured(bench: Callable) -> None:
    """A url: target has no speculative boot: its cells count, the other boot is named as not permitted."""
    place = bench(PLAIN, SPECULATIVE, step_seconds=0.002)
    place.visit("control")
    assert verdict(place.claim(CLAIM)) == (Status.ERROR, {CODE.EVIDENCE_MISSING})
    place.finish("url:http://127.0.0.1:1")
    assert verdict(place.claim(CLAIM)) == (Status.INCONCLUSIVE, {CODE.NOT_PERMITTED})


def test_a_missing_cell_is_no_pass(bench: Callable) -> None:
    """Every concurrency of the profile needs its evidence."""
    place = bench(PLAIN, step_seconds=0.002)
    place.visit("control")
    (place.root / "boots/01-control/throughput/c1-after.prom.gz").unlink()
    assert verdict(place.claim(CLAIM)) == (Status.ERROR, {CODE.EVIDENCE_MISSING})
