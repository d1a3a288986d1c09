# SPDX-License-Identifier: Apache-2.0
"""Predictions: restored tokens follow the chunk rule at and around every boundary."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from qualify import profiles
from qualify.expect import expect, external_tokens, fullest_step, pairs, render
from qualify.profiles import Storage


@pytest.mark.parametrize(
    ("prompt", "chunk", "external"),
    [
        (1023, 256, 768),
        (1024, 256, 1023),
        (1025, 256, 1024),
        (2000, 256, 1792),
        (9000, 256, 8960),
        (144028, 4096, 143360),
    ],
)
def test_known_restores(prompt: int, chunk: int, external: int) -> None:
    """The measured examples hold, and one token is always left to compute."""
    assert external_tokens(prompt, chunk) == external


@given(prompt=st.integers(1, 10_000), chunk=st.integers(1, 5_000))
def test_a_restore_is_whole_chunks_and_never_the_whole_prompt(prompt: int, chunk: int) -> None:
    """At most n - 1, at least n - chunk, whole chunks unless the chunks cover the prompt exactly."""
    external = external_tokens(prompt, chunk)
    assert prompt - chunk <= external <= prompt - 1
    assert external % chunk == 0 or external == prompt - 1


def test_the_prediction_is_readable() -> None:
    """`qualify expect` names boots, restores and claims, and says why there are no graphs."""
    text = render(expect(profiles.load("cpu-smoke")))
    assert "1024: 1023 + 1" in text
    assert "no CUDA graphs" in text
    assert "kv.restore" in text


def test_graphs_and_reservation_of_a_gpu_profile_are_predicted() -> None:
    """The sets of the real run that the rule was taken from: 9 PIECEWISE, 7 FULL, 6 of the drafter, by size."""
    lines = render(expect(profiles.load("gpu-tp2-ds4-mini"))).splitlines()
    speculative = lines[lines.index(next(line for line in lines if "dspark K5" in line)) + 1 :]
    assert [line.strip() for line in speculative[:7]] == [
        "target PIECEWISE: 9: 1, 2, 4, 8, 16, 24, 32, 40, 48",
        "target FULL: 7: 6, 12, 18, 24, 36, 42, 48",
        "drafter FULL: 6: 5, 10, 20, 25, 35, 40",
        "the other runner's target PIECEWISE: 7: 6, 12, 18, 24, 36, 42, 48",
        "the other runner's target FULL: 7: 6, 12, 18, 24, 36, 42, 48",
        "q_out lane 0: 4096 rows, 4194304 bytes a padded head",
        "q_out lane 1: 40 rows, 40960 bytes a padded head",
    ]
    assert "    plugin off: stock vLLM" in lines


def test_pairs_differ_in_the_plugin_alone() -> None:
    """A boot with another cache or drafter is not the other side of a comparison."""
    profile = profiles.load("gpu-tp2-ds4-mini")
    *others, stock = profile.boots
    for cache, speculation, sides in (
        (Storage.NONE, False, [("control", "stock")]),
        (Storage.NONE, True, [("speculative", "stock")]),
        (Storage.EMPTY, True, []),
        (Storage.KEPT, False, []),
    ):
        other = stock.model_copy(update={"cache": cache, "speculation": speculation})
        found = pairs(profile.model_copy(update={"boots": (*others, other)}))
        assert [(on.name, off.name) for on, off in found] == sides


def test_a_parallel_drafter_keeps_slots_of_the_fullest_step() -> None:
    """DSpark with K drafts takes K - 1 tokens from what one request may fill; a boot without a drafter fills it."""
    profile = profiles.load("gpu-tp2-ds4-mini")
    found = {boot.name: fullest_step(profile, boot) for boot in profile.boots}
    assert (found["control"], found["speculative"]) == (4096, 4092)


def test_restores_are_predicted_only_where_there_is_a_cache() -> None:
    """A profile without a cache server restores nothing."""
    assert expect(profiles.load("gpu-tp2-ds4-mini")).restores
    plain = profiles.load("gpu-tp1-ds4-steady")
    assert not expect(plain).restores
    assert "restored" not in render(expect(plain))
