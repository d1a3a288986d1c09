# SPDX-License-Identifier: Apache-2.0
"""Makes the stand-in engine importable, and gives its bench."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    from fake_engine.bench import make_bench

    return make_bench(tmp_path, monkeypatch)
