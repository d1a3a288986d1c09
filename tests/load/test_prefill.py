# SPDX-License-Identifier: Apache-2.0
"""The prefill probe: which lengths it asks for, in which order, and what it keeps when the engine fails."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from fake_engine import Faults
from fake_engine.bench import make_bench
from qualify import profiles
from qualify.errors import TargetError
from qualify.expect import prefill_lengths
from qualify.probes.load_records import Prefill
from qualify.profiles import Boot, Probe

FOLDER = "boots/01-control"
MODEL_LEN = 400


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Faults], tuple[Prefill, list[dict]]]:
    """Visits a stand-in with the probe alone; its evidence, and the requests that were listed."""
    made = make_bench(tmp_path, monkeypatch)(Boot(name="control", probes=(Probe.PREFILL,)))
    engine = made.profile.engine.model_copy(update={"max_model_len": MODEL_LEN})
    bench = made._replace(profile=made.profile.model_copy(update={"engine": engine}))

    def visit(faults: Faults) -> tuple[Prefill, list[dict]]:
        try:
            bench.visit("control", faults)
        finally:
            found = Prefill.model_validate_json((bench.root / FOLDER / "prefill.json").read_bytes())
            lines = (bench.root / FOLDER / "requests.jsonl").read_text().splitlines()
        return found, [json.loads(line) for line in lines]

    return visit


def test_lengths_reach_the_longest_prompt_by_equal_factors() -> None:
    """Ascending, all different, by the same factor (to the rounding), and room for the answer behind the longest."""
    profile = profiles.load("gpu-tp1-ds4-tight")
    lengths = prefill_lengths(profile)
    assert (len(lengths), lengths[0], lengths[-1]) == (24, 64, profile.engine.max_model_len - 16)
    assert all(1.33 < later / earlier < 1.38 for earlier, later in pairwise(lengths))
    assert max(lengths) > profile.engine.max_num_batched_tokens


def test_every_length_is_asked_for_alone_and_then_together(place: Callable) -> None:
    """The engine's own counts are kept, and every request is listed once."""
    found, listed = place(Faults())
    lengths = list(prefill_lengths(profiles.load("cpu-smoke").model_copy(update={"engine": _engine()})))
    assert [one.tokens for one in found.requests] == [one.prompt_tokens for one in found.requests] == lengths * 2
    assert [one.together for one in found.requests] == [False] * 24 + [True] * 24
    assert {one.completion_tokens for one in found.requests} == {16}
    alone, together = found.requests[:24], found.requests[24:]
    assert all(later.times.sent >= earlier.times.ended for earlier, later in pairwise(alone))
    assert min(one.times.sent for one in together) >= alone[-1].times.ended
    assert [one["path"] for one in listed] == ["/v1/completions"] * 48


def _engine() -> profiles.Engine:
    return profiles.load("cpu-smoke").engine.model_copy(update={"max_model_len": MODEL_LEN})


def test_the_first_failure_ends_the_first_round(place: Callable) -> None:
    """A prompt that the engine refuses is kept with its reason; nothing is asked behind it."""
    found, listed = place(Faults(fail=3))
    assert [one.error is None for one in found.requests] == [True, True, False]
    assert [one["status"] for one in listed if one["method"] == "POST"] == [200, 200, 500]


def test_a_failure_among_many_costs_that_one_alone(place: Callable) -> None:
    """Of the prompts that were sent together the others are kept."""
    found, _ = place(Faults(drop=30))
    assert sum(one.error is not None for one in found.requests) == 1
    assert len(found.requests) == 48


def test_an_engine_that_dies_leaves_what_it_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TargetError, and the evidence up to there."""
    bench = make_bench(tmp_path, monkeypatch)(Boot(name="control", probes=(Probe.PREFILL,)))
    with pytest.raises(TargetError):
        bench.visit("control", Faults(die_at_step=100))
    found = Prefill.model_validate_json((bench.root / FOLDER / "prefill.json").read_bytes())
    assert 0 < len(found.requests) < 24
    assert found.requests[-1].error is not None
