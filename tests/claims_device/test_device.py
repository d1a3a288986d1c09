# SPDX-License-Identifier: Apache-2.0
"""What the claims of a GPU run show of a real one, and what they leave alone; their faults are in tests/faults."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from faults import device
from faults.lab import Lab, Tamper, gpu_lab
from qualify.claims import plugin
from qualify.claims.model import Claim, ClaimId
from qualify.expect import prefill_lengths
from qualify.profiles import Probe
from qualify.receipt.canonical import canonical

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return gpu_lab(1, tmp_path_factory.mktemp("gpu"))


def nothing(tree: object) -> None:
    """The run as it was."""


def claim(gpu: Lab, wanted: ClaimId, change: Tamper = nothing) -> Claim:
    return next(one for one in gpu.derive(gpu.tampered("told", change)) if one.id is wanted)


def observed(gpu: Lab, wanted: ClaimId, change: Tamper = nothing) -> dict[str, Any]:
    found = claim(gpu, wanted, change).observed
    assert found is not None
    return found


def test_claims_survive_the_receipt(gpu: Lab) -> None:
    """A claim is compared with itself read back: what JSON would change must not be in it."""
    for one in gpu.untouched:
        read_back = Claim.model_validate_json(one.model_dump_json())
        assert canonical(read_back.model_dump(mode="json")) == canonical(one.model_dump(mode="json"))


def test_hashes_are_the_plugins_own_pins() -> None:
    """The host cannot import the plugin; its pins and the claim's must not drift apart."""
    pins = re.findall(r'"([0-9a-f]{64})"', (ROOT / "kernels" / "vllm_qout" / "pins.py").read_text())
    assert pins[:2] == [plugin.METHOD_SHA256, plugin.CONTEXT_SHA256]


def test_replays_are_those_of_the_load_alone(gpu: Lab) -> None:
    """Warm-up before the boot was ready, in graphs and without, is not counted."""
    ready, loaded = (target_of_rank_0(gpu, label) for label in ("ready", "loaded"))
    warmup = {f"{mode} {size}": count for mode, size, count in ready["replays"]}
    graphs = {f"{mode} {size}": count for mode, size, count in loaded["replays"]}
    rank = observed(gpu, ClaimId.GRAPHS_CAPTURE)["boots"]["speculative"]["rank0"]
    found = rank["target"]["replays"]
    assert warmup and found == {name: more for name in graphs if (more := graphs[name] - warmup.get(name, 0))}
    assert 0 < eager(ready) == eager(loaded) - rank["target"]["eagerSteps"]
    assert rank["memoryProfile"] == {"target PIECEWISE": 9, "target FULL": 2, "drafter FULL": 6}


def target_of_rank_0(gpu: Lab, label: str) -> Any:
    reports = json.loads(gpu.files[device.graphs_file(device.SPECULATIVE, label)])
    return next(one for one in reports[0]["managers"] if one["name"] == "target")


def eager(manager: Any) -> int:
    return sum(row[-1] for row in manager["dispatches"] if row[3] == "NONE")


def test_the_difference_is_explained_to_the_byte(gpu: Lab) -> None:
    """With less without the plugin: the reservation is consumed, stock takes as much for activations instead, and what
    is available differs by the rest of both.
    """
    row = observed(gpu, ClaimId.MEMORY_ADMISSION)["withAndWithoutPlugin"][0]
    assert row["reservedBytes"] == -row["activationBytes"] == 4096 * 64 * 1024
    assert row["consumedBytes"] == row["reservedBytes"] + row["consumedBesideReservation"]
    assert row["availableBytes"] == -row["consumedBytes"] - row["activationBytes"]


def test_growth_of_stock_is_told(gpu: Lab) -> None:
    """The arm without the plugin is not judged, but its bytes past the admitted figure are in the claim."""
    more = device.ranks(device.memory_file(device.STOCK), device.grown)
    growth = observed(gpu, ClaimId.MEMORY_ADMISSION, more)["growthUnderLoad"]
    assert growth["stock"][0]["pastAdmissionBytes"] > 0
    assert growth["control"][0]["pastAdmissionBytes"] == 0


def test_a_cache_server_on_the_device_is_not_the_engines_growth(gpu: Lab) -> None:
    """Beside one only the allocator is counted: the driver cannot tell the two apart."""
    more = device.ranks(device.memory_file(device.COLD), device.fuller)
    assert claim(gpu, ClaimId.MEMORY_ADMISSION, more).status == "passed"


def with_prefill(gpu: Lab, *lost: int) -> Claim:
    """memory.admission as if the boot `control` had asked for every length, but for the requests that were lost."""
    control, *others = gpu.profile.boots
    asked = control.model_copy(update={"probes": (*control.probes, Probe.PREFILL)})
    profile = gpu.profile.model_copy(update={"boots": (asked, *others)})
    times = {"intended": 0.0, "sent": 0.0, "firstToken": None, "ended": 1.0, "longestSilence": None}
    planned = [(tokens, together) for together in (False, True) for tokens in prefill_lengths(profile)]
    requests = [
        {
            "tokens": tokens,
            "together": together,
            "times": times,
            "status": 500 if number in lost else 200,
            "error": "HTTP 500" if number in lost else None,
            "promptTokens": None if number in lost else tokens,
            "completionTokens": None if number in lost else 16,
        }
        for number, (tokens, together) in enumerate(planned)
    ]
    content = json.dumps({"boot": "control", "requests": requests}).encode()
    claims = gpu.derive({**gpu.files, f"{device.CONTROL}/prefill.json": content}, profile)
    return next(one for one in claims if one.id is ClaimId.MEMORY_ADMISSION)


def test_every_planned_prompt_counts(gpu: Lab) -> None:
    """All of them: passed. One that was not computed, alone or among others: the load was too small, not a failure."""
    assert with_prefill(gpu).status == "passed"
    for lost in (0, 23, 24, 47):
        found = with_prefill(gpu, lost)
        assert (found.status, found.reason_codes) == ("inconclusive", ("load_too_small",))
