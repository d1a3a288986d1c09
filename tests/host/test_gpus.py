# SPDX-License-Identifier: Apache-2.0
"""What nvidia-smi prints, as recorded on one and on two H200, and as drivers print what they do not support."""

from __future__ import annotations

import pytest
from qualify import gpus
from qualify.errors import ExitCode, PreflightError
from qualify.records import GpuLink

IDLE = "GPU-aaa, NVIDIA H200, 143771, 0, 580.159.04, Disabled, 700.00, 1980, 3201, 5, 16\n"
BUSY = "GPU-bbb, NVIDIA H200, 143771, 70000, 580.159.04, Disabled, 700.00, 1980, 3201, 5, 16\n"
UNKNOWN = "GPU-ccc, Some GPU, 8192, [N/A], 535.1, [N/A], [Not Supported], [N/A], [N/A], [N/A], [N/A]\n"

TOPOLOGY = """\t\x1b[4mGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\t0-31\t0\t\tN/A
GPU1\tNV18\t X \t0-31\t0\t\tN/A

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks
"""


def test_facts_of_a_gpu() -> None:
    """Every fact is read, and the UUID is kept out of the record."""
    (seen,) = gpus.parse_facts(IDLE)
    assert (seen.uuid, seen.used_mib) == ("GPU-aaa", 0)
    assert seen.record.uuid_hash == gpus.uuid_hash("GPU-aaa")
    assert "GPU-aaa" not in seen.record.model_dump_json()
    assert seen.record.memory_bytes == 143771 << 20
    assert (seen.record.mig, seen.record.power_limit_watts, seen.record.max_sm_mhz) == ("Disabled", 700.0, 1980.0)
    assert seen.record.pcie == "gen 5 x16"


def test_what_the_driver_does_not_report_is_unknown() -> None:
    """[N/A] is None, never 0."""
    (seen,) = gpus.parse_facts(UNKNOWN)
    record = seen.record
    assert (seen.used_mib, record.mig, record.power_limit_watts, record.max_sm_mhz, record.pcie) == (None,) * 5


@pytest.mark.parametrize(
    ("mask", "names"),
    [
        ("0x0000000000000001", ()),
        ("0x0000000000000004", ("software power cap",)),
        ("0x0000000000000048", ("hardware slowdown", "hardware thermal slowdown")),
        ("[N/A]", None),
    ],
)
def test_slow_downs_by_name(mask: str, names: tuple[str, ...] | None) -> None:
    """Idling is no slow-down; what the driver does not tell is unknown."""
    (sample,) = gpus.parse_sample(f"GPU-aaa, 1980, 3201, 320.52, 51, 97, {mask}\n", 1.5)
    assert (sample.at, sample.sm_mhz, sample.power_watts, sample.busy_percent) == (1.5, 1980.0, 320.52, 97.0)
    assert sample.throttles == names


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [
        (None, ("GPU-aaa", "GPU-bbb")),
        ("1", ("GPU-bbb",)),
        ("GPU-bbb, 0", ("GPU-bbb", "GPU-aaa")),
        ("", ()),
        ("0,GPU-aaa", ("GPU-aaa",)),
    ],
)
def test_the_usual_variable_limits_the_choice(visible: str | None, uuids: tuple[str, ...]) -> None:
    """As for any CUDA program: numbers or UUIDs, in their order; set and empty means none."""
    seen = gpus.parse_facts(IDLE + BUSY)
    assert tuple(gpu.uuid for gpu in gpus.allowed(seen, visible)) == uuids
    with pytest.raises(PreflightError, match="names 7"):
        gpus.allowed(seen, "0,7")


@pytest.mark.parametrize("text", ["", "Failed to initialize NVML\n", "GPU-a, 1\n", "No devices were found\n"])
def test_other_output_gives_nothing(text: str) -> None:
    """A broken driver's words are no GPU, no process and no link."""
    assert (gpus.parse_facts(text), gpus.parse_sample(text, 0.0), gpus.parse_users(text)) == ((), (), ())
    assert gpus.parse_links(text, 2) == ()


def test_links_between_every_two_gpus() -> None:
    """The matrix is read once above its diagonal; one GPU has no link."""
    assert gpus.parse_links(TOPOLOGY, 2) == (GpuLink(one=0, other=1, link="NV18"),)
    assert gpus.parse_links(TOPOLOGY, 1) == ()


def test_a_busy_gpu_is_refused_by_the_name_of_its_user() -> None:
    """Too few idle GPUs refuse the run with status 4 and say who is there."""
    seen = gpus.parse_facts(IDLE + BUSY)
    users = gpus.parse_users("GPU-bbb, 4711, python3\n")
    gpus.refuse_unless_idle(seen, users, 1, lambda _: None)
    with pytest.raises(PreflightError, match=r"2 idle GPUs are needed, 1 of 2 are: VLLM::Worker \(pid 4711\)") as found:
        gpus.refuse_unless_idle(seen, users, 2, lambda _: "VLLM::Worker")
    assert found.value.exit_code is ExitCode.REFUSED


def test_a_gpu_with_a_process_is_not_idle_however_little_it_uses() -> None:
    """A process may take memory later; memory in use that nobody shows counts as well."""
    (idle,), (busy,) = gpus.parse_facts(IDLE), gpus.parse_facts(BUSY)
    assert gpus.is_idle(idle, ())
    assert not gpus.is_idle(idle, gpus.parse_users("GPU-aaa, 1, x\n"))
    assert not gpus.is_idle(busy, ())
    assert not gpus.is_idle(gpus.parse_facts(UNKNOWN)[0], ())
