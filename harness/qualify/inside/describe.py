# SPDX-License-Identifier: Apache-2.0
"""What one worker is: its place among the ranks, its device, its versions, its model and its KV cache."""

from __future__ import annotations

import hashlib
import importlib
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from qualify.inside import cache
from qualify.inside.facts import gather


def process() -> dict[str, int]:
    """Identity of this process. Pids repeat, above all in containers; with the start time (clock ticks since the
    host's boot) they do not.
    """
    # The second field, the command, may hold spaces; the fields behind its closing bracket cannot.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return {"pid": os.getpid(), "started": int(fields[19])}


def describe(worker: Any) -> dict[str, Any]:
    """Every fact of `qualify.probes.workers.WorkerReport`."""
    runner = worker.model_runner
    return gather(
        {
            "local_rank": lambda: int(worker.local_rank),
            "world_size": lambda: int(worker.vllm_config.parallel_config.world_size),
            "tensor_parallel": lambda: int(worker.vllm_config.parallel_config.tensor_parallel_size),
            "process": process,
            "device": lambda: _device(worker),
            "versions": _versions,
            "runner": lambda: f"{type(runner).__module__}.{type(runner).__qualname__}",
            "model_class": lambda: _class(runner),
            "kv_cache": lambda: _kv_cache(worker),
            "plugin": lambda: importlib.import_module("vllm_qout.plugin").report(),
        }
    )


def _device(worker: Any) -> dict[str, Any]:
    if worker.device.type != "cuda":
        return gather(
            {
                "type": lambda: worker.device.type,
                "cores": lambda: sorted(os.sched_getaffinity(0)),
                "threads": torch.get_num_threads,
            }
        )
    index = torch.cuda.current_device()
    properties = torch.cuda.get_device_properties(index)
    return gather(
        {
            "type": lambda: "cuda",
            "index": lambda: index,
            "uuid_hash": lambda: hashlib.sha256(f"GPU-{properties.uuid}".encode()).hexdigest(),
            "name": lambda: properties.name,
            "memory_bytes": lambda: properties.total_memory,
            "capability": lambda: f"{properties.major}.{properties.minor}",
        }
    )


def _versions() -> dict[str, Any]:
    return gather(
        {
            "python": platform.python_version,
            "torch": lambda: torch.__version__,
            "vllm": lambda: importlib.import_module("vllm").__version__,
            "lmcache": lambda: metadata.version("lmcache"),
            "cuda": lambda: torch.version.cuda,
            "nccl": lambda: ".".join(str(part) for part in torch.cuda.nccl.version()),
        }
    )


def _class(runner: Any) -> str:
    model = runner.get_model()
    return f"{type(model).__module__}.{type(model).__qualname__}"


def _kv_cache(worker: Any) -> dict[str, Any]:
    config = worker.model_runner.kv_cache_config
    settings = worker.vllm_config.cache_config
    tensors = cache.tensors_of(worker)
    return gather(
        {
            "blocks": lambda: int(config.num_blocks),
            "bytes": lambda: _allocated(tensors),
            "tokens": lambda: _capacity(worker)[0],
            "concurrency": lambda: _capacity(worker)[1],
            "max_model_len": lambda: int(worker.vllm_config.model_config.max_model_len),
            "dtype": lambda: str(settings.cache_dtype),
            "utilization": lambda: float(settings.gpu_memory_utilization),
            "tensors": lambda: [item.describe() for item in tensors],
        }
    )


def _allocated(tensors: tuple[cache.KvTensor, ...]) -> int:
    """Bytes of the storages behind the cache; groups share them, so each is counted once."""
    storages = {item.tensor.untyped_storage().data_ptr(): item.tensor.untyped_storage() for item in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def _capacity(worker: Any) -> tuple[int, float]:
    """Tokens and concurrency by the engine's own rule, computed again here from this rank's cache."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity

    tokens, concurrency = get_kv_cache_capacity(worker.vllm_config, worker.model_runner.kv_cache_config)
    return int(tokens), float(concurrency)
