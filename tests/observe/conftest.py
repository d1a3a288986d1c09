# SPDX-License-Identifier: Apache-2.0
"""Samples of real runs, and small logs in the form of many engine versions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from qualify.observe.facts import LogFacts
from qualify.observe.log import read

SAMPLES = Path(__file__).parent / "samples"


@pytest.fixture(scope="session")
def sample_path() -> Callable[[str], Path]:
    """Path of a sample by the end of its name."""

    def find(name: str) -> Path:
        (path,) = SAMPLES.rglob(f"*{name}")
        return path

    return find


@pytest.fixture(scope="session")
def sample_facts(sample_path: Callable[[str], Path]) -> Callable[[str], LogFacts]:
    """Facts of a sample log, read once."""
    known: dict[str, LogFacts] = {}

    def facts(name: str) -> LogFacts:
        if name not in known:
            known[name] = read(sample_path(name))
        return known[name]

    return facts
