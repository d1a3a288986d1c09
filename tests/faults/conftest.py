# SPDX-License-Identifier: Apache-2.0
"""Makes the fault suite importable as it is from the command line, and gives its lab."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

SEED = 1


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from faults.lab import CPU, RUN_VARIABLE, Lab, newest_run

    run = newest_run()
    if run is None:
        pytest.fail(f"no receipt of {CPU} to break; name a run with {RUN_VARIABLE}")
    return Lab(run, SEED, tmp_path_factory.mktemp("faults"))
