# SPDX-License-Identifier: Apache-2.0
"""Predictions: restored tokens follow the chunk rule at and around every boundary."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from qualify import profiles
from qualify.expect import expect, external_tokens, render


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
