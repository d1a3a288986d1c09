# SPDX-License-Identifier: Apache-2.0
"""Evidence of a perfect run, made up: two ranks, a sliding-window and a full-attention group, blocks of 128 tokens.

Built as plain JSON values, so that a test can break one of them and see what the claim says.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from qualify.evidence import Evidence, MappingSource, compress
from qualify.probes.kv_records import STORED, Arm, arm_file, expected_external, prompt, prompt_digest
from qualify.probes.workers import WORKERS, WorkerReport
from qualify.profiles import Profile, load

BLOCK, CHUNK, WINDOW, RANKS = 128, 256, 256, 2
GROUPS = {0: WINDOW, 1: None}
FOLDERS = {"control": "boots/01-control", "cold": "boots/02-cold", "restart": "boots/03-restart"}
BOOTS = {Arm.CONTROL: "control", Arm.RESTART: "restart"}

Tree = dict[str, Any]


def profile() -> Profile:
    return load("cpu-smoke")


def tree(plan: Profile) -> Tree:
    """Arms by name, the stored listing, the engine logs and the workers' reports."""
    lengths = plan.kv.prompt_tokens
    arms = {arm: [case(arm, tokens) for tokens in lengths] for arm in Arm if arm is not Arm.NEGATIVE}
    arms[Arm.NEGATIVE] = controls(max(lengths))
    log = "Creating transfer context (device_type=cpu, mode=lmcache_driven)\n" * RANKS
    return {
        "arms": {str(arm): cases for arm, cases in arms.items()},
        "stored": stored(lengths),
        "logs": {"cold": log, "restart": log},
        "workers": {boot: [worker(boot, rank) for rank in range(RANKS)] for boot in FOLDERS},
    }


def evidence(source: Tree) -> Evidence:
    files = {f"{FOLDERS[boot]}/engine.log.gz": compress(text.encode()) for boot, text in source["logs"].items()}
    for arm, cases in source["arms"].items():
        folder = FOLDERS[BOOTS.get(Arm(arm), "cold")]
        files[f"{folder}/{arm_file(Arm(arm))}"] = compress(json.dumps(cases).encode())
    for boot, reports in source["workers"].items():
        files[f"{FOLDERS[boot]}/{WORKERS}"] = json.dumps(reports).encode()
    files[f"{FOLDERS['cold']}/{STORED}"] = json.dumps(source["stored"]).encode()
    return Evidence(MappingSource(files))


def process(boot: str, rank: int) -> Tree:
    return {"pid": 100 + rank, "started": {"control": 1000, "cold": 2000, "restart": 3000}[boot] + rank}


def worker(boot: str, rank: int) -> Tree:
    """A worker's report, of which this claim reads only the process."""
    empty = dict.fromkeys(field.alias or name for name, field in WorkerReport.model_fields.items())
    return {**empty, "rank": rank, "process": process(boot, rank), "unknown": {}}


def digest(*parts: object) -> str:
    return hashlib.sha256(" ".join(map(str, parts)).encode()).hexdigest()


def tensors() -> list[Tree]:
    """Layers 0 and 2 slide, 1 and 3 attend to everything."""
    return [
        {
            "group": group,
            "layer": f"layers.{layer}",
            "part": 0,
            "spec": "SlidingWindowSpec" if window else "FullAttentionSpec",
            "tokensPerBlock": BLOCK,
            "window": window,
            "cacheable": True,
            "dtype": "torch.float32",
            "shape": [64, 1, BLOCK, 128],
            "stride": [BLOCK * 128, BLOCK * 128, 128, 1],
            "blockBytes": BLOCK * 128 * 4,
        }
        for group, window in GROUPS.items()
        for layer in (group, group + 2)
    ]


def case(arm: Arm, tokens: int) -> Tree:
    cold = arm in (Arm.CONTROL, Arm.COLD)
    external = expected_external(tokens, CHUNK)
    same_boot = arm in (Arm.MEMORY, Arm.DISK, Arm.NEGATIVE)
    return {
        "boot": BOOTS.get(arm, "cold"),
        "arm": str(arm),
        "promptTokens": tokens,
        "promptDigest": prompt_digest(prompt(tokens)),
        "chunkTokens": None if arm is Arm.CONTROL else CHUNK,
        "resetAttempts": 1 if same_boot else None,
        "cleared": {"status": "ok"} if same_boot and arm is not Arm.MEMORY else None,
        "poison": [poison(rank) for rank in range(RANKS)] if same_boot else [],
        "ranks": [capture(arm, rank, tokens, 0 if cold else external) for rank in range(RANKS)],
        "scrapes": scrapes(arm, tokens, 0 if cold else external),
        "cacheStatus": None,
        "seconds": 1.5,
        "tokens": [7, 8, 9, 10],
        "logprobs": [-1.0, -1.0, -1.0, -1.0],
        "fault": None,
    }


def capture(arm: Arm, rank: int, tokens: int, computed: int) -> Tree:
    boot = BOOTS.get(arm, "cold")
    boundary = expected_external(tokens, CHUNK)
    request = {
        "id": f"cmpl-{arm}-{tokens}",
        "promptTokens": tokens,
        "computedTokens": computed,
        "table": [],
        "steps": [[computed, tokens - computed], [tokens, 1], [tokens + 1, 1], [tokens + 2, 1]],
        "cold": [
            [index, *place, digest(rank, index, tokens, *place)]
            for index in range(4)
            for place in spans(computed, tokens, 0 if computed else boundary)
        ],
        "restored": [
            [index, *place, digest(rank, index, tokens, *place)]
            for index, tensor in enumerate(tensors())
            for place in spans(first_needed(tensor["window"], computed), computed, computed)
        ]
        if computed
        else [],
        "chunks": [
            [number, chunk, chunk_digest(rank, number, tokens, chunk)]
            for chunk in range(tokens // CHUNK)
            for number in GROUPS
        ]
        if arm is Arm.COLD
        else [],
    }
    return {
        "rank": rank,
        "process": process(boot, rank),
        "tensors": tensors(),
        "requests": [request],
        "faults": [],
        "errors": [],
    }


def first_needed(window: int | None, computed: int) -> int:
    return 0 if window is None else max(0, computed - window + 1)


def spans(first: int, end: int, boundary: int) -> list[list[int]]:
    """(block, tokens) of full blocks in [first, end), and of the block that `boundary` cuts."""
    whole = [[block, BLOCK] for block in range(first // BLOCK, end // BLOCK)]
    return whole + ([[boundary // BLOCK, boundary % BLOCK]] if boundary % BLOCK else [])


def chunk_digest(rank: int, number: int, tokens: int, chunk: int) -> str:
    return digest("chunk", rank, number, tokens, chunk)


def poison(rank: int) -> Tree:
    return {"rank": rank, "value": 165, "tensors": 4, "views": 2, "bytes": 1 << 30, "verified": True}


def scrapes(arm: Arm, tokens: int, external: int) -> Tree:
    whole = tokens // CHUNK * CHUNK if external else 0
    boot = {"control": 10, "cold": 20, "restart": 30}[BOOTS.get(arm, "cold")]
    memory, disk = (whole, 0) if arm is Arm.MEMORY else (0, whole)
    engine = {
        'vllm:prefix_cache_hits_total{engine="0",model_name="m"}': 0,
        'vllm:external_prefix_cache_hits_total{engine="0",model_name="m"}': external,
        'vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_compute"}': tokens - external,
        'vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="external_kv_transfer"}': external,
        'vllm:request_success_total{engine="0",model_name="m",finished_reason="length"}': 1,
        'vllm:request_success_total{engine="0",model_name="m",finished_reason="stop"}': 0,
    }
    cache = {
        'lmcache_mp_lookup_hit_tokens_total{model_name="m"}': whole,
        'lmcache_mp_lookup_hit_l1_tokens_total{model_name="m"}': memory,
        'lmcache_mp_lookup_hit_l2_tokens_total{model_name="m"}': disk,
        "lmcache_mp_event_bus_dropped_events_total": 0,
    }
    quiet = arm is Arm.CONTROL
    return {
        "engineBefore": page(boot, dict.fromkeys(engine, 5)),
        "engineAfter": page(boot, {name: 5 + value for name, value in engine.items()}),
        "cacheBefore": None if quiet else page(boot + 1, dict.fromkeys(cache, 3)),
        "cacheAfter": None if quiet else page(boot + 1, {name: 3 + value for name, value in cache.items()}),
    }


def page(start: int, samples: dict[str, int]) -> str:
    lines = [f"{name} {value}.0" for name, value in samples.items()]
    return "\n".join([f"process_start_time_seconds {start}.0", *lines, ""])


def stored(lengths: tuple[int, ...]) -> Tree:
    files = [
        {
            "world": RANKS,
            "rank": rank,
            "objectGroup": number,
            "chunkHash": digest("name", tokens, chunk),
            "size": 262144,
            "sha256": chunk_digest(rank, number, tokens, chunk),
        }
        for rank in range(RANKS)
        for number in GROUPS
        for tokens in lengths
        for chunk in range(tokens // CHUNK)
    ]
    objects = [[0], [1]]
    return {
        "boot": "cold",
        "chunkTokens": CHUNK,
        "objects": objects,
        "foundBefore": 0,
        "files": files,
        "strangers": [],
    }


def controls(tokens: int) -> list[Tree]:
    """Every negative control, behaving."""
    last = expected_external(tokens, CHUNK) // CHUNK - 1
    return [
        control(tokens, "flipInEngine", [1], [1], reached={(1, 2): [last * 2 + 1]}, faults=True),
        control(tokens, "staleGroup", [0, 1], [0], reached={(r, i): None for r in (0, 1) for i in (0, 1)}),
        control(tokens, "staleGroup", [0, 1], [1], reached={(r, i): None for r in (0, 1) for i in (2, 3)}),
        control(tokens, "flipInFile", [1], [1], [last], reached={(1, 3): [last * 2]}),
        control(tokens, "swappedRanks", [0, 1], [1], [last], reached=chunks_of((0, 1), last)),
        control(tokens, "swappedChunks", [1], [1], [0, last], reached=chunks_of((1,), 0, last)),
        control(tokens, "flipOutsideWindow", [], [0], [0], reached={}),
        control(tokens, "none", [], [], reached={}),
    ]


Reached = dict[tuple[int, int], list[int] | None]
"""Blocks that differ by (rank, tensor); None: all of them."""


def chunks_of(ranks: tuple[int, ...], *chunks: int) -> Reached:
    blocks = [chunk * 2 + half for chunk in chunks for half in (0, 1)]
    return {(rank, index): blocks for rank in ranks for index in (2, 3)}


def control(
    tokens: int,
    damage: str,
    ranks: list[int],
    groups: list[int],
    chunks: list[int] | None = None,
    *,
    reached: Reached,
    faults: bool = False,
) -> Tree:
    made = case(Arm.NEGATIVE, tokens)
    made["fault"] = {"damage": damage, "ranks": ranks, "groups": groups, "chunks": chunks or [], "notRun": None}
    for (rank, index), blocks in reached.items():
        for entry in made["ranks"][rank]["requests"][0]["restored"]:
            if entry[0] == index and (blocks is None or entry[1] in blocks):
                entry[3] = digest("damaged", entry[3])
                if faults:
                    made["ranks"][rank]["faults"].append([*entry[:3], "flip"])
    return made
