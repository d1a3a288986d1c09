# SPDX-License-Identifier: Apache-2.0
"""Claims that only a GPU run can pass, on made-up evidence: sound evidence passes, each fault has its code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from faults import cuda, device
from faults.lab import Lab, Tree
from faults.model import Fault
from faults.suite import Result
from qualify.claims import plugin
from qualify.claims.derive import derive
from qualify.claims.model import Claim, ClaimId
from qualify.evidence import MappingSource
from qualify.receipt.canonical import canonical

ROOT = Path(__file__).parents[2]


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    """These faults break no real run: only the dice are used."""
    return Lab(run=tmp_path, seed=1, scratch=tmp_path)


def claim(wanted: ClaimId, tree: Tree | None = None) -> Claim:
    files = tree.files if tree else cuda.files()
    return next(one for one in derive(MappingSource(files), cuda.profile()) if one.id is wanted)


def observed(wanted: ClaimId) -> dict[str, Any]:
    found = claim(wanted).observed
    assert found is not None
    return found


@pytest.mark.parametrize("name", device.GOOD)
def test_what_is_good_passes(lab: Lab, name: str) -> None:
    """No false alarm, and stock vLLM that grows is shown, not judged, beside a boot with the plugin."""
    assert device.GOOD[name](lab) == {}


@pytest.mark.parametrize("fault", device.FAULTS, ids=lambda fault: f"{fault.group}: {fault.name}")
def test_each_fault_is_refused_for_its_reason(lab: Lab, fault: Fault) -> None:
    """Exactly the claim of the fault does not pass, with exactly its status and codes."""
    result = Result(fault, fault.act(lab))
    assert not result.false_pass and not result.wrong_code, str(result)


def test_claims_survive_the_receipt() -> None:
    """A claim is compared with itself read back: what JSON would change must not be in it."""
    for one in derive(MappingSource(cuda.files()), cuda.profile()):
        read_back = Claim.model_validate_json(one.model_dump_json())
        assert canonical(read_back.model_dump(mode="json")) == canonical(one.model_dump(mode="json"))


def test_hashes_are_the_plugins_own_pins() -> None:
    """The host cannot import the plugin; its pins and the claim's must not drift apart."""
    pins = re.findall(r'"([0-9a-f]{64})"', (ROOT / "kernels" / "vllm_qout" / "pins.py").read_text())
    assert pins[:2] == [plugin.METHOD_SHA256, plugin.CONTEXT_SHA256]


def test_replays_are_those_of_the_load_alone() -> None:
    """Warm-up before the boot was ready is not counted."""
    rank = observed(ClaimId.GRAPHS_CAPTURE)["boots"]["speculative"]["rank0"]
    assert rank["target"]["replays"] == {"FULL 6": 500, "FULL 36": 7, "FULL 48": 400, "PIECEWISE 24": 4}
    assert rank["target"]["eagerSteps"] == 10
    assert rank["memoryProfile"] == {"target PIECEWISE": 9, "target FULL": 2, "drafter FULL": 6}


def test_the_difference_is_explained_to_the_byte() -> None:
    """With less without the plugin: what the reservation consumes is what the KV cache loses, in whole blocks."""
    row = observed(ClaimId.MEMORY_ADMISSION)["withAndWithoutPlugin"][0]
    assert row["reservedBytes"] == row["consumedBytes"] == -row["availableBytes"] == 4096 * 64 * 1024
    assert row["consumedBesideReservation"] == row["activationBytes"] == 0
    assert -row["kvBytes"] % cuda.BLOCK_BYTES == 0 and row["kvTokens"] < 0


def test_growth_of_stock_is_told(lab: Lab) -> None:
    """The arm without the plugin is not judged, but its bytes past the admitted figure are in the claim."""
    tree = Tree(cuda.files(), lab.dice("told"))
    device.ranks(device.memory_file(device.STOCK), device.grown)(tree)
    found = claim(ClaimId.MEMORY_ADMISSION, tree).observed
    assert found is not None
    growth = found["growthUnderLoad"]
    assert growth["stock"][0]["pastAdmissionBytes"] > 0
    assert growth["control"][0]["pastAdmissionBytes"] == 0


def test_a_cache_server_on_the_device_is_not_the_engines_growth() -> None:
    """Beside one only the allocator is counted: the driver cannot tell the two apart."""
    files = cuda.files()
    text = cuda.PROFILE.replace('name = "speculative"', 'name = "speculative"\ncache = "empty"')
    profile = cuda.profile_of(text)
    tree = Tree(files, Lab(Path(), 1, Path()).dice("cache"))
    device.ranks(device.memory_file(device.SPECULATIVE), lambda report: report["driver"].update(used=75 * cuda.GIB))(
        tree
    )
    found = {one.id: one.status for one in derive(MappingSource(tree.files), profile)}
    assert found[ClaimId.MEMORY_ADMISSION] == "passed"
