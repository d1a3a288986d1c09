# SPDX-License-Identifier: Apache-2.0
"""Evidence of a made-up run on two GPUs that passes graphs.capture, plugin.active and memory.admission.

Three boots: with the plugin, with the plugin and DSpark, and stock vLLM beside the first. The numbers of graphs are
those of a real run (9 PIECEWISE, 7 FULL, 6 of the drafter), and so is the form of the log.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import Any

from qualify import profiles
from qualify.claims import plugin
from qualify.evidence import compress
from qualify.load.answer import Answer
from qualify.load.ceiling import Ceiling
from qualify.load.client import Times
from qualify.probes.kv_records import Arm, Case, KvRequest, RankCapture, arm_file
from qualify.probes.load_records import SERVE, Cell, Sample, Served, ServedRequest, cell_file
from qualify.probes.workers import ADMISSION, WORKERS, KvTensor, ProcessIdentity, WorkerReport, memory_file
from qualify.profiles import Profile

PROFILE = """
format = 1
name = "two-gpus"
purpose = "Made-up evidence"

[engine]
kind = "cuda"
tensor_parallel = 2
dtype = "bfloat16"
max_model_len = 16384
max_num_seqs = 8
max_num_batched_tokens = 4096

[engine.graphs]
mode = "FULL_AND_PIECEWISE"
sizes = [1, 2, 4, 8, 16, 24, 32, 40, 48]

[engine.pins]
vllm = "0.32.0"
torch = "2.13.0"
lmcache = "0.5.6"

[model]
recipe = "tiny-hybrid"

[cache]
transfer_mode = "lmcache_driven"
chunk_tokens = 256
memory_gigabytes = 1

[speculation]
method = "dspark"
tokens = 5

[[boots]]
name = "control"
probes = ["serve", "kv.control", "throughput"]

[[boots]]
name = "speculative"
speculation = true
probes = ["throughput"]

[[boots]]
name = "stock"
plugin = false
probes = ["serve", "kv.control", "throughput"]

[kv]
prompt_tokens = [9000]
ranks = "equal"

[throughput]
concurrency = [1, 8]
window_seconds = 12.0
prompt_tokens = 64
output_tokens = 256

[memory]
min_kv_tokens = 4096

[timeouts]
start_seconds = 600.0
request_seconds = 120.0

[claims]
required = ["plugin.active", "graphs.capture", "memory.admission"]
"""

RANKS = (0, 1)
FOLDERS = {"control": "boots/01-control", "speculative": "boots/02-speculative", "stock": "boots/03-stock"}
SIZES = [1, 2, 4, 8, 16, 24, 32, 40, 48]
FULL = {"plain": [1, 2, 4, 8], "target": [6, 12, 18, 24, 36, 42, 48], "drafter": [5, 10, 20, 25, 35, 40]}
GIB = 1 << 30
HEADS, ROW = 64, 64 * 1024
BLOCK_BYTES, BUDGET, BEFORE = 93_888, 70 * GIB, 2 * GIB
CONSUMED, ACTIVATION, GRAPHS = 2 * GIB, 2 * GIB, GIB // 4
RESERVED = {"control": 4096 * ROW, "speculative": 4096 * ROW + 40 * ROW, "stock": 0}
TOKENS_PER_BLOCK = 4
"""Of the KV cache as the engine counts them; any number will do."""

# (requests, tokens, tokens of every request if uniform, mode, size, how often under load)
LOAD: dict[str, dict[str, list[tuple[Any, ...]]]] = {
    "plain": {
        "target": [
            (1, 4096, None, "NONE", 4096, 2),
            (1, 808, None, "NONE", 808, 1),
            (8, 40, None, "PIECEWISE", 40, 3),
            (1, 1, 1, "FULL", 1, 900),
            (3, 3, 1, "FULL", 4, 5),
            (8, 8, 1, "FULL", 8, 700),
        ]
    },
    "speculative": {
        "target": [
            (1, 64, None, "NONE", 64, 9),
            (1, 4096, None, "NONE", 4096, 1),
            (3, 20, None, "PIECEWISE", 24, 4),
            (1, 6, 6, "FULL", 6, 500),
            (5, 30, 6, "FULL", 36, 7),
            (8, 48, 6, "FULL", 48, 400),
        ],
        "drafter": [
            (1, 5, 5, "FULL", 5, 510),
            (3, 15, 5, "FULL", 20, 4),
            (5, 25, 5, "FULL", 25, 7),
            (8, 40, 5, "FULL", 40, 400),
        ],
    },
}
TENSOR = KvTensor(
    group=0,
    layer="model.layers.0.attn",
    part=0,
    spec="MLAAttentionSpec",
    tokens_per_block=64,
    window=None,
    cacheable=True,
    dtype="torch.uint8",
    shape=(16, 64, 584),
    stride=(93_888, 584, 1),
    block_bytes=37_376,
)
INDEXER = TENSOR.model_copy(
    update={"group": 1, "layer": "model.layers.1.attn.indexer.k_cache", "tokens_per_block": 256}
)
BEHIND = TENSOR.model_copy(update={"layer": "model.layers.2.attn.swa_cache"})
LAST_SETTLED = 31
"""The last block of 64 tokens that two boots must share behind the indexer: it has to choose from token 2048 on."""
STARTED = 3
"""Steps of every kind before the boot was ready: warm-up, which is not load."""

Json = Any


@cache
def profile_of(text: str) -> Profile:
    return profiles.parse(text, "two-gpus")


def profile() -> Profile:
    return profile_of(PROFILE)


def process(boot: str, rank: int) -> dict[str, int]:
    return {"pid": 100 + rank, "started": 1000 * (1 + list(FOLDERS).index(boot)) + rank}


def files() -> dict[str, bytes]:
    """The evidence by path."""
    found: dict[str, bytes] = {}
    for boot, folder in FOLDERS.items():
        parts: dict[str, Json] = {
            WORKERS: [worker(boot, rank) for rank in RANKS],
            memory_file("ready"): [memory(boot, rank, 0) for rank in RANKS],
            memory_file("loaded"): [memory(boot, rank, 3 << 20) for rank in RANKS],
            "plugin-ready.json": [plugin_report(boot, rank) for rank in RANKS],
            "plugin-loaded.json": [plugin_report(boot, rank) for rank in RANKS],
            "graphs-ready.json": [graphs(boot, rank, loaded=False) for rank in RANKS],
            "graphs-loaded.json": [graphs(boot, rank, loaded=True) for rank in RANKS],
        }
        for concurrency in profile().throughput.concurrency:
            parts[cell_file(concurrency)] = cell(boot, concurrency)
        if boot != "speculative":
            parts[SERVE] = served(boot)
        found |= {f"{folder}/{name}": json.dumps(value).encode() for name, value in parts.items()}
        found[f"{folder}/{ADMISSION}"] = admission(boot).encode()
        found[f"{folder}/engine.log.gz"] = compress(log(boot).encode())
        if boot != "speculative":
            found[f"{folder}/{arm_file(Arm.CONTROL)}"] = compress(json.dumps([case(boot)]).encode())
    return found


# memory


def blocks(boot: str) -> int:
    return available(boot) // BLOCK_BYTES


def available(boot: str) -> int:
    return BUDGET - CONSUMED - RESERVED[boot] - ACTIVATION


def tokens(boot: str) -> int:
    return blocks(boot) * TOKENS_PER_BLOCK


def worker(boot: str, rank: int) -> Json:
    empty = dict.fromkeys(field.alias or name for name, field in WorkerReport.model_fields.items())
    cache_ = {
        "blocks": blocks(boot),
        "bytes": blocks(boot) * BLOCK_BYTES,
        "tokens": tokens(boot),
        "concurrency": tokens(boot) / 16384,
        "maxModelLen": 16384,
        "dtype": "fp8_ds_mla",
        "utilization": 0.5,
        "tensors": [],
        "unknown": {},
    }
    told = {"active": boot != "stock", **({"reservedBytes": RESERVED[boot]} if RESERVED[boot] else {})}
    return {**empty, "rank": rank, "process": process(boot, rank), "kvCache": cache_, "plugin": told, "unknown": {}}


def memory(boot: str, rank: int, grown: int) -> Json:
    held = blocks(boot) * BLOCK_BYTES + CONSUMED + RESERVED[boot] - GIB // 4
    return {
        "rank": rank,
        "residentBytes": None,
        "residentPeakBytes": None,
        "controlGroupBytes": None,
        "allocator": {
            "allocated_bytes.all.current": held,
            "allocated_bytes.all.peak": held + GIB + grown,
            "reserved_bytes.all.current": held + 2 * GIB + grown,
            "reserved_bytes.all.peak": held + 2 * GIB + grown,
            "num_alloc_retries": 0,
            "num_ooms": 0,
        },
        "driver": {"used": BEFORE + held + 2 * GIB + grown + GIB // 4, "total": 140 * GIB},
        "budgetBytes": BUDGET,
        "admission": {
            "before": BEFORE,
            "consumed": CONSUMED + RESERVED[boot],
            "activation": ACTIVATION,
            "graphs": GRAPHS,
            "available": available(boot),
        },
        "graphPoolBytes": GIB // 4,
        "unknown": {},
    }


def admission(boot: str) -> str:
    labels = {
        "num_gpu_blocks": blocks(boot),
        "kv_cache_size_tokens": tokens(boot),
        "kv_cache_max_concurrency": tokens(boot) / 16384,
    }
    inner = ",".join(f'{key}="{value}"' for key, value in labels.items())
    return f"vllm:cache_config_info{{{inner}}} 1.0\n"


# log


def log(boot: str) -> str:
    full, drafted = ("target", 6) if boot == "speculative" else ("plain", 0)
    last = [("(PIECEWISE)", 9), ("(FULL)", len(FULL[full])), *([("dspark (FULL)", drafted)] if drafted else [])]
    first = [("(PIECEWISE)", 9), ("(FULL)", 2), *last[2:]]
    size = (
        f"(EngineCore pid=90) INFO 11-30 04:00:20 [kv_cache_utils.py:2327] GPU KV cache size: {tokens(boot):,} tokens, "
        f"Maximum concurrency for 16,384 tokens per request: {tokens(boot) / 16384:.2f}x\n"
    )
    runner = "(Worker_TP0 pid=100) INFO 11-30 03:59:20 [gpu_worker.py:565] Using V2 Model Runner\n"
    return runner + bars(first) + finished() + size + bars(last) + finished()


def bars(counts: Iterable[tuple[str, int]]) -> str:
    lines = []
    for what, count in counts:
        who, _, mode = what.rpartition("(")
        label = f"Capturing {who}CUDA graphs ({mode}"
        lines.append(f"\r{label}:   0%|          | 0/{count} [00:00<?, ?it/s]")
        lines.append(f"\r{label}: 100%|##########| {count}/{count} [00:01<00:00,  9.00it/s]\n")
    return "".join(lines)


def finished() -> str:
    rest = "INFO 11-30 04:00:25 [model_runner.py:1140] Graph capturing finished in 2 secs, took 0.22 GiB\n"
    return "".join(f"(Worker_TP{rank} pid={100 + rank}) {rest}" for rank in RANKS)


# graphs


def graphs(boot: str, rank: int, *, loaded: bool) -> Json:
    spec = boot == "speculative"
    sets = {"target": (SIZES, FULL["target" if spec else "plain"], 6 if spec else 1)}
    if spec:
        sets["drafter"] = ([], FULL["drafter"], 5)
    load = LOAD["speculative" if spec else "plain"]
    return {
        "rank": rank,
        "process": process(boot, rank),
        "runner": "V2",
        "sizes": SIZES,
        "maxSize": 48,
        "maxNumSeqs": 8,
        "maxNumBatchedTokens": 4096,
        "managers": [manager(name, *sets[name], load[name], loaded=loaded) for name in sets],
        "passes": [*rounds(sets, profiling=True), *rounds(sets, profiling=False)],
        "watched": ["managers", "dispatcher", "breakable", "wrappers"],
        "problems": [],
        "unknown": {},
    }


def manager(name: str, piecewise: list[int], full: list[int], query: int, load: list[Any], *, loaded: bool) -> Json:
    steps = [[*row[:5], STARTED + (row[5] if loaded else 0)] for row in load]
    replays: Counter[tuple[str, int]] = Counter()
    for *_, mode, size, count in steps:
        if mode != "NONE":
            replays[mode, size] += count
    return {
        "name": name,
        "mode": "FULL_AND_PIECEWISE" if name == "target" else "FULL_DECODE_ONLY",
        "queryLen": query,
        "piecewise": piecewise,
        "full": full,
        "plannedPiecewise": piecewise,
        "plannedFull": full,
        "dispatches": steps,
        "replays": [[*key, count] for key, count in replays.items()],
        "unknown": {},
    }


def rounds(sets: dict[str, Any], *, profiling: bool) -> list[Json]:
    labels = {"target": "Capturing CUDA graphs", "drafter": "Capturing dspark CUDA graphs"}
    return [
        {
            "label": labels[name],
            "profiling": profiling,
            "piecewise": piecewise,
            "full": full[-2:] if profiling and name == "target" else full,
            "unknown": {},
        }
        for name, (piecewise, full, _) in sets.items()
    ]


# plugin


def plugin_report(boot: str, rank: int) -> Json:
    on = boot != "stock"
    lanes = [(0, 4096), (1, 40)][: 0 if not on else 2 if boot == "speculative" else 1]
    buffers = [{"lane": lane, "ubatch": 0, "address": address(rank, lane), "bytes": rows * ROW} for lane, rows in lanes]
    held = {"reservedBytes": sum(one["bytes"] for one in buffers), "buffers": buffers}
    layers = [f"target:model.layers.{index}.attn" for index in range(4)]
    spec = boot == "speculative"
    context = {"runs": plugin.OUR_CONTEXT, "runs_sha256": "c" * 64, "stock_sha256": plugin.CONTEXT_SHA256}
    return {
        "rank": rank,
        "process": process(boot, rank),
        "switch": "" if on else "0",
        "report": own_word(lanes, rank) if on else {"active": False, "reason": "VLLM_QOUT=0", "sourceHashes": {}},
        "methods": [
            {
                "runs": plugin.OURS if on else plugin.STOCK,
                "runsSha256": "a" * 64 if on else plugin.METHOD_SHA256,
                "stockSha256": plugin.METHOD_SHA256,
                "layers": layers,
            }
        ],
        "context": context if spec else {},
        "profiled": held,
        "captured": held,
        "now": held,
        "unknown": {},
    }


def address(rank: int, lane: int) -> int:
    return 0x7F0000000000 + (rank << 32) + (lane << 28)


def own_word(lanes: list[tuple[int, int]], rank: int) -> Json:
    """What `vllm_qout.plugin.report()` gives, as far as a claim reads it."""
    return {
        "active": True,
        "reason": None,
        "rank": rank,
        "counters": {"profile": 4, "op": 800, "kvOnly": 12, "stock": 0},
        "frozen": True,
        "reservedBytes": sum(rows * ROW for _, rows in lanes),
        "buffers": [
            {
                "device": f"cuda:{rank}",
                "lane": lane,
                "ubatch": 0,
                "heads": HEADS,
                "dtype": "bfloat16",
                "rows": rows,
                "bytes": rows * ROW,
                "address": address(rank, lane),
                "addresses": {
                    "profile": [address(rank, lane)],
                    "capture": [address(rank, lane)],
                    "live": [address(rank, lane)] if lane == 0 else [],
                },
            }
            for lane, rows in lanes
        ],
    }


# answers, bytes, load


def served(boot: str) -> Json:
    times = Times(intended=0.0, sent=0.0, first_token=0.1, ended=0.2, longest_silence=0.01)
    request = ServedRequest(
        name="greedy",
        subject="greedy",
        endpoint="/v1/completions",
        stream=False,
        greedy=True,
        seed=None,
        max_tokens=4,
        answer=Answer(status=200, token_ids=(5, 6, 7, 8), completion_tokens=4),
        times=times,
    )
    return Served(boot=boot, model="m", models=("m",), requests=(request,)).model_dump(mode="json", by_alias=True)


def case(boot: str) -> Json:
    captures = tuple(
        RankCapture(
            rank=rank,
            process=ProcessIdentity(**process(boot, rank)),
            tensors=(TENSOR, INDEXER, BEHIND),
            requests=(
                KvRequest(
                    id="x",
                    prompt_tokens=9000,
                    computed_tokens=0,
                    table=(),
                    steps=(),
                    cold=(
                        (0, 0, 64, "1" * 64),
                        (1, 0, 256, "4" * 64),
                        (2, LAST_SETTLED, 64, "5" * 64),
                        (2, LAST_SETTLED + 1, 64, "6" * 64),
                    ),
                    restored=(),
                    chunks=(),
                ),
            ),
        )
        for rank in RANKS
    )
    found = Case(
        boot=boot, arm=Arm.CONTROL, prompt_tokens=9000, prompt_digest="3" * 64, chunk_tokens=None, ranks=captures
    )
    return found.model_dump(mode="json", by_alias=True)


def cell(boot: str, concurrency: int) -> Json:
    counts = dict.fromkeys(
        ("generation_tokens", "drafts", "draft_tokens", "accepted_tokens", "preemptions", "running", "waiting")
    )
    samples = tuple(
        Sample(at=at, took=0.0, steps=steps, process_start=1.0, **counts) for at, steps in ((0.0, 10.0), (12.0, 410.0))
    )
    found = Cell(
        boot=boot,
        concurrency=concurrency,
        window_began=0.0,
        window_ended=12.0,
        sample_seconds=12.0,
        samples=samples,
        requests=(),
        ceiling=Ceiling(concurrency=concurrency, seconds=1.0, tokens=1, tokens_per_second=1.0),
        drained=True,
        failure=None,
    )
    return found.model_dump(mode="json", by_alias=True)
