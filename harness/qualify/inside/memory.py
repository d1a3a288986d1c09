# SPDX-License-Identifier: Apache-2.0
"""Memory of one worker: allocator and driver on CUDA; resident set and control group elsewhere. Bytes throughout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from qualify.inside.facts import gather

ALLOCATOR = (
    "allocated_bytes.all.current",
    "allocated_bytes.all.peak",
    "reserved_bytes.all.current",
    "reserved_bytes.all.peak",
    "num_alloc_retries",
    "num_ooms",
)


def describe(worker: Any) -> dict[str, Any]:
    return gather(
        {
            "resident_bytes": lambda: _status("VmRSS"),
            "resident_peak_bytes": lambda: _status("VmHWM"),
            "control_group_bytes": lambda: _control_group("memory.current"),
            "allocator": _allocator,
            "driver": _driver,
            "budget_bytes": lambda: _budget(worker),
            "admission": lambda: _admission(worker),
            "graph_pool_bytes": _graph_pool,
        }
    )


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}")


def _control_group(name: str) -> int:
    """Only version 2 of control groups; the figure is shared by every process of the group."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        hierarchy, _, path = line.split(":", 2)
        if hierarchy == "0":
            return int((Path("/sys/fs/cgroup") / path.lstrip("/") / name).read_text())
    raise RuntimeError("this process is in no version 2 control group")


def _cuda() -> None:
    if not torch.cuda.is_available():
        raise RuntimeError("no CUDA device: the host allocator keeps no statistics")


def _allocator() -> dict[str, int]:
    _cuda()
    statistics = torch.cuda.memory_stats()
    return {name: int(statistics[name]) for name in ALLOCATOR}


def _driver() -> dict[str, int]:
    _cuda()
    free, total = torch.cuda.mem_get_info()
    return {"used": total - free, "total": total}


def _budget(worker: Any) -> int:
    """What the engine allows itself on the device: utilization x total."""
    _cuda()
    return int(worker.requested_memory)


def _admission(worker: Any) -> dict[str, int]:
    """The figures of the engine's own memory profile: available = budget - consumed - activation.

    `activation` is the transient peak of the profile with the estimate of the graphs; `before` was used on the device
    when the engine began to measure.
    """
    _cuda()
    snapshot = worker.init_snapshot
    return {
        "before": int(snapshot.total_memory - snapshot.free_memory),
        "consumed": int(worker.total_consumed),
        "activation": int(worker.peak_activation_memory),
        "graphs": int(worker.cudagraph_memory_estimate),
        "available": int(worker.available_kv_cache_memory_bytes),
    }


def _graph_pool() -> int:
    """Bytes of private pools that no tensor holds: CUDA graphs work in them, so the allocator cannot give them back."""
    _cuda()
    segments = torch.cuda.memory_snapshot()
    private = [one for one in segments if tuple(one["segment_pool_id"]) != (0, 0)]
    return sum(int(one["total_size"]) - int(one["allocated_size"]) for one in private)
