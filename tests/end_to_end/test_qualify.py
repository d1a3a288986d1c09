# SPDX-License-Identifier: Apache-2.0
"""What a user types, from `make qualify` to `review`, on the real engine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUALIFY = ROOT / ".venv" / "bin" / "qualify"

pytestmark = pytest.mark.engine


@dataclass(frozen=True)
class Run:
    bundle: Path
    status: int
    stdout: str
    stderr: str


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(QUALIFY), *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    bundle = tmp_path_factory.mktemp("qualify") / "bundle"
    # make hands its own settings to children; a user's shell has none of them.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        ["make", "--silent", "qualify", f"ARGS=--out {bundle}"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    return Run(bundle, done.returncode, done.stdout, done.stderr)


def test_make_qualify_passes_every_required_claim(run: Run) -> None:
    """Exit 0, the configuration first, one sentence with the verdict last."""
    assert run.status == 0, run.stderr[-3000:] + run.stdout
    assert "profile cpu-smoke" in run.stderr.splitlines()[0]
    assert run.stdout.splitlines()[-1].startswith(("PASSED 7 of 7", "WARNED 7 of 7"))


def test_the_receipt_is_reviewed_offline(run: Run) -> None:
    """`review` verifies digests and schema, recomputes every claim and agrees."""
    done = command("review", run.bundle, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["steps"]


def test_one_changed_byte_of_evidence_fails_the_review(run: Run, tmp_path: Path) -> None:
    """The receipt binds its evidence: one bit anywhere in it fails the review at the manifest."""
    copy = tmp_path / "copy"
    shutil.copytree(run.bundle, copy)
    victim = max((copy / "evidence").rglob("*.gz"))
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(bytes(content))
    assert command("review", copy).returncode == 22


def test_the_report_opens_without_a_network(run: Run) -> None:
    """The HTML report loads nothing: no script, no style, no picture from elsewhere."""
    page = (run.bundle / "report.html").read_text()
    assert "<svg" in page
    assert "<script" not in page
    assert 'src="http' not in page and "@import" not in page and "url(" not in page


def test_a_run_differs_from_the_committed_receipt_in_figures_only(run: Run) -> None:
    """A new run of the same profile proves the same claims as the receipt in the repository."""
    committed = sorted((ROOT / "receipts" / "cpu-smoke").iterdir())[-1]
    done = command("diff", committed, run.bundle, "--json")
    assert done.returncode in (0, 1), done.stderr
    changed = [row for row in json.loads(done.stdout)["claims"] if row["left"] != row["right"]]
    assert changed == []
