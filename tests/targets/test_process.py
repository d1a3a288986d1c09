# SPDX-License-Identifier: Apache-2.0
"""What a supervised command leaves behind, beyond what the fake engine can show."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from qualify.targets.process import Supervised

# The tracker, which would remove the semaphore at the end, is killed with its maker.
MAKER = """
import multiprocessing, time
lock = multiprocessing.get_context("spawn").Lock()
print(lock._semlock.name, flush=True)
time.sleep(60)
"""


def test_a_semaphore_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    """A named semaphore that only its maker has open goes with the tree, though the maker's map names another file."""
    log = tmp_path / "log"
    with Supervised([sys.executable, "-c", MAKER], log=log, environment={}, cwd=tmp_path) as process:
        deadline = time.monotonic() + 30
        while not log.read_text().endswith("\n"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        semaphore = Path("/dev/shm") / f"sem.{log.read_text().strip().lstrip('/')}"
        assert semaphore.exists()
        process.stop(0.0)
    assert not semaphore.exists()
