# SPDX-License-Identifier: Apache-2.0
"""Random mutations of a small receipt folder, each from its own seed; the machinery is that of tests/receipt."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

from qualify import profiles
from qualify.claims.model import ClaimId
from qualify.receipt.build import build
from qualify.receipt.verify import review
from receipt.conftest import fake_derive, write_evidence
from receipt.test_mutations import MUTATIONS


def run(count: int, seed: int, folder: Path, show: Callable[[str], None]) -> int:
    """The number of mutations that no step noticed; their seeds are shown."""
    pristine, other = folder / "pristine", folder / "other"
    profile = profiles.load("cpu-smoke")
    wanted = profile.claims.model_copy(update={"required": (ClaimId.THROUGHPUT_SUSTAINED,)})
    for bundle, shift in ((pristine, 0), (other, 1)):
        write_evidence(bundle, shift=shift)
        build(bundle, profile.model_copy(update={"claims": wanted}), derive=fake_derive)
    missed = 0
    for number in range(seed, seed + count):
        mutation = MUTATIONS[number % len(MUTATIONS)]
        copy = Path(shutil.copytree(pristine, folder / "copy"))
        mutation(copy, other, random.Random(number))
        if review(copy, derive=fake_derive).verified:
            missed += 1
            show(f"NOT DETECTED  {mutation.__name__}, seed {number}")
        shutil.rmtree(copy)
    show(f"{count} mutations of a receipt, seeds {seed} to {seed + count - 1}: {missed} not detected")
    return missed
