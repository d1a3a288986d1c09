# SPDX-License-Identifier: Apache-2.0
"""The command lines and environments of vLLM and of the LMCache server, as pure functions of profile and boot."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qualify.errors import PreflightError
from qualify.gpus import VISIBLE
from qualify.profiles import Boot, Graphs, Profile, Storage

LOOPBACK = "127.0.0.1"

EXTENSION = "qualify.inside.worker.Worker"

EXTENSION_PATH = "{work}/extension"
"""The folder that holds the worker extension and nothing else, as evidence names it."""

CONTAINER_WORK = "/srv/qualify"
"""The working directory in a container, always the same, so that evidence names it as it is."""

INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", VISIBLE, "CUDA_HOME")
"""All that a started process gets of the user's environment: what can change the engine is set by the profile."""

QUIET = {
    # Nothing leaves the machine, and nothing is looked up elsewhere.
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "VLLM_NO_USAGE_STATS": "1",
    # Prefix-cache hashes must be the same in every process and boot.
    "PYTHONHASHSEED": "0",
    # No bytecode is written into the environment, whose files are compared with what their packages recorded.
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUNBUFFERED": "1",
}


CUDA = {
    # Else the engine compiles over a thousand matrix-product shapes before it serves, for more than 10 minutes.
    "VLLM_DEEP_GEMM_WARMUP": "skip",
    # NVLink multicast can put the GPUs of a shared host out of service.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
}


@dataclass(frozen=True)
class Places:
    """Where one boot runs. Paths are relative to the working directory, so that logs and cache keys hold no path
    of the machine."""

    python: str
    model: str
    port: int
    cache_port: int
    cache_http_port: int
    storage: str
    extension_path: str
    """Folder for PYTHONPATH that holds the package `qualify` and nothing else."""
    scratch: str
    """Folder for temporary files and sockets; short, since a socket's path may have 107 bytes."""
    compiled: str
    """Folder for what torch compiles: the boots of a run share it, runs do not."""
    cpus: tuple[int, ...]
    """CPUs that this process may use."""
    gpus: tuple[str, ...] = ()
    """UUIDs of the GPUs, one a rank; none where the engine sees its own only."""


@dataclass(frozen=True)
class Command:
    role: str
    argv: tuple[str, ...]
    environment: dict[str, str]
    """What is set beside the inherited variables."""


def inherited(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: environment[name] for name in INHERITED if name in environment}


def code_variables(profile: Profile) -> dict[str, str]:
    """PYTHONPATH and LD_PRELOAD as an engine process gets them: both change which code runs."""
    promised = {"PYTHONPATH": EXTENSION_PATH, **profile.engine.environment}
    return {name: promised[name] for name in ("PYTHONPATH", "LD_PRELOAD") if name in promised}


def omp_threads_bind(cpus: Sequence[int], ranks: int) -> str:
    """VLLM_CPU_OMP_THREADS_BIND: one core for each rank, e.g. `0|1`. Raises PreflightError if there are too few."""
    if len(cpus) < ranks:
        raise PreflightError(
            f"{ranks} ranks need {ranks} CPU cores, this process may use {len(cpus)}",
            remedy="run on a machine with more cores, or widen the CPU affinity",
        )
    return "|".join(str(cpu) for cpu in sorted(cpus)[:ranks])


def engine(profile: Profile, boot: Boot, places: Places) -> Command:
    """`vllm serve` on loopback with the worker extension and the endpoints that reach it."""
    settings = profile.engine
    argv = [places.python, "-m", "vllm.entrypoints.cli.main", "serve", places.model]
    argv += ["--served-model-name", places.model, "--host", LOOPBACK, "--port", str(places.port)]
    argv += ["--tensor-parallel-size", str(settings.tensor_parallel), "--distributed-executor-backend", "mp"]
    argv += ["--dtype", settings.dtype, "--max-model-len", str(settings.max_model_len)]
    argv += ["--max-num-seqs", str(settings.max_num_seqs)]
    argv += ["--max-num-batched-tokens", str(settings.max_num_batched_tokens)]
    argv += ["--worker-extension-cls", EXTENSION]
    if boot.speculation:
        argv += ["--speculative-config", json.dumps(speculative_config(profile), sort_keys=True)]
    if settings.graphs is not None:
        argv += ["--compilation-config", json.dumps(compilation_config(settings.graphs), sort_keys=True)]
    if boot.cache is not Storage.NONE:
        argv += ["--kv-transfer-config", json.dumps(kv_transfer_config(places.cache_port), sort_keys=True)]
    environment = {
        **QUIET,
        "PYTHONPATH": places.extension_path,
        "TMPDIR": places.scratch,
        "VLLM_RPC_BASE_PATH": places.scratch,
        # Opens /collective_rpc and /reset_prefix_cache; harmless on loopback.
        "VLLM_SERVER_DEV_MODE": "1",
    }
    if settings.kind == "cpu":
        environment["TORCHINDUCTOR_CACHE_DIR"] = places.compiled
        # Without it two ranks on one NUMA node end with "Not enough allowed NUMA nodes".
        environment["VLLM_CPU_OMP_THREADS_BIND"] = omp_threads_bind(places.cpus, settings.tensor_parallel)
    if settings.kind == "cuda":
        environment |= CUDA | visible(places.gpus)
    if boot.cache is not Storage.NONE:
        environment["LMCACHE_MP_TRANSFER_MODE"] = profile.cache.transfer_mode
    if not boot.plugin:
        environment["VLLM_QOUT"] = "0"
    return Command("engine", (*argv, *settings.arguments), environment | settings.environment)


def visible(gpus: tuple[str, ...]) -> dict[str, str]:
    return {VISIBLE: ",".join(gpus)} if gpus else {}


def speculative_config(profile: Profile) -> dict[str, object]:
    speculation = profile.speculation
    return {"method": speculation.method, "num_speculative_tokens": speculation.tokens, **speculation.config}


def compilation_config(graphs: Graphs) -> dict[str, object]:
    sizes = {"cudagraph_capture_sizes": list(graphs.sizes)} if graphs.sizes else {}
    return {"cudagraph_mode": graphs.mode, **sizes}


def kv_transfer_config(cache_port: int) -> dict[str, object]:
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        # "recompute" would hide a load that failed.
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {
            "lmcache.mp.host": f"tcp://{LOOPBACK}",
            "lmcache.mp.port": cache_port,
        },
    }


def cache_server(profile: Profile, places: Places) -> Command:
    """`lmcache server` on loopback with a memory tier and a file tier."""
    settings = profile.cache
    argv = [places.python, "-m", "lmcache.cli.main", "server"]
    argv += ["--host", LOOPBACK, "--port", str(places.cache_port)]
    argv += ["--http-host", LOOPBACK, "--http-port", str(places.cache_http_port)]
    argv += ["--chunk-size", str(settings.chunk_tokens), "--l1-size-gb", str(settings.memory_gigabytes)]
    argv += ["--eviction-policy", "LRU", "--supported-transfer-mode", settings.transfer_mode]
    argv += ["--l2-adapter", json.dumps({"type": "fs", "base_path": places.storage})]
    # The ranks keep the cores busy, so the copies get one thread.
    environment = {**QUIET, "TMPDIR": places.scratch, "OMP_NUM_THREADS": "1"} | visible(places.gpus)
    return Command("cache", (*argv, *settings.arguments), environment)
