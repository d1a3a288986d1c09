# SPDX-License-Identifier: Apache-2.0
"""Times our operators against the stock ones of vLLM 0.32.0 on one GPU, in one process, interleaved.

    python -m bench [--stock LIB] [--out DIR]

Each time is the median of CUDA-graph replays of many launches, both sides in turn. From 1,024 rows on the
inputs rotate over several sets that exceed the L2 cache; below that one set stays, so latency is measured.
Both sides write one output buffer: ours owns it, the stock operator gets the same block back each call.
Writes <gpu>-<date>.json and .svg.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm_qout import __version__, ops
from vllm_qout.samples import CONTEXT, FUSED, Inputs, make_inputs

from bench.plot import ratio_plot

ROWS = (1, 2, 4, 6, 8, 16, 48, 64, 256, 1024, 4096, 8192)
HEADS = ((8, 64), (16, 64), (32, 64), (64, 64), (64, 128), (128, 128))
CONTEXT_ROWS = (1, 6, 48, 128, 512, 2048, 8192)
CONTEXT_HEADS = 64  # of the dummy query that stock DSpark makes
STREAMED_ROWS = 1024
PAGE = 37440
HEAD_BYTES = 1024
ROW_BYTES = 1024 + 256 + 16  # kv, one row of the table, position and slot
RECORD_BYTES = 584
LAUNCHES = 100
REPLAYS = 40
ROTATED_BYTES = 400e6
GRAPH_BYTES = 4e9


class BenchError(Exception):
    """The bench cannot run here; the text names a remedy."""


@dataclass(frozen=True)
class Timing:
    """Microseconds of one launch over the replays."""

    median: float
    p10: float
    p90: float


def capture(launch: Callable[[int], object], launches: int) -> torch.cuda.CUDAGraph:
    """A graph of `launches` calls, replayed once."""
    launch(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(launches):
            launch(index)
    graph.replay()
    torch.cuda.synchronize()
    return graph


def timing(samples: list[float]) -> Timing:
    """Median and deciles."""
    deciles = statistics.quantiles(samples, n=10)
    return Timing(statistics.median(samples), deciles[0], deciles[-1])


def interleaved(works: Mapping[str, Callable[[], object]], launches: int, rounds: int = REPLAYS) -> dict[str, Timing]:
    """Time each work in turn, the order reversed every round."""
    events: dict[str, list[tuple[Any, Any]]] = {name: [] for name in works}
    for index in range(rounds):
        order = list(works) if index % 2 else list(works)[::-1]
        for name in order:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            works[name]()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {
        name: timing([start.elapsed_time(end) * 1000 / launches for start, end in pairs])
        for name, pairs in events.items()
    }


def copy_ceiling() -> float:
    """Bytes read and written a second by the faster of torch's copies of 4 GiB, in TB/s."""
    source = torch.empty(1 << 32, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    words, out = source.view(torch.float32), target.view(torch.float32)
    works = {"copy": lambda: target.copy_(source), "kernel": lambda: torch.mul(words, 1.0, out=out)}
    times = interleaved(works, 1)
    return 2 * source.numel() / min(time.median for time in times.values()) / 1e6


def input_sets(rows: int, heads: int, padded: int, moved: int) -> list[Inputs]:
    """One set, or as many as exceed the L2 cache; the cache and q_out are shared."""
    first = make_inputs(rows=rows, heads=heads, padded_heads=padded, device="cuda", block_stride=PAGE, spare_rows=0)
    count = 1 if rows < STREAMED_ROWS else max(2, min(8, int(ROTATED_BYTES // moved) + 1))
    return [first] + [
        first.but(q_in=torch.randn_like(first.q_in), kv=torch.randn_like(first.kv)) for _ in range(count - 1)
    ]


def slots_of(inputs: Inputs, slots: str) -> Inputs:
    """All rows inserted, the first half only, or none (every slot -1)."""
    mapping = inputs.slot_mapping
    if slots == "half":
        return inputs.but(slot_mapping=mapping[: max(1, mapping.shape[0] // 2)].contiguous())
    return inputs if slots == "all" else inputs.but(slot_mapping=torch.full_like(mapping, -1))


def stock_arguments(inputs: Inputs, q_in: Tensor, padded: int) -> tuple[Any, ...]:
    """Positional arguments of the stock fused operator."""
    return (
        q_in, inputs.kv, inputs.k_cache, inputs.slot_mapping, inputs.position_ids, inputs.cos_sin_cache,
        padded, inputs.eps, inputs.cache_block_size,
    )  # fmt: skip


def row(
    op: str, rows: int, heads: int, padded: int, moved: int, ceiling: float, times: dict[str, Timing]
) -> dict[str, Any]:
    """One line of the results."""
    ours, stock = times["ours"], times["stock"]
    return {
        "op": op,
        "n": rows,
        "local_heads": heads,
        "padded_heads": padded,
        "ours_us": round(ours.median, 3),
        "stock_us": round(stock.median, 3),
        "ratio": round(ours.median / stock.median, 4),
        "copy_fraction": round(moved / ours.median / 1e6 / ceiling, 4),
        "ours_p10_p90_us": [round(ours.p10, 3), round(ours.p90, 3)],
        "stock_p10_p90_us": [round(stock.p10, 3), round(stock.p90, 3)],
        "bytes": moved,
    }


def fused_row(stock: Any, rows: int, heads: int, padded: int, slots: str, ceiling: float) -> dict[str, Any]:
    """The fused operator against the stock one."""
    inserted = {"all": rows, "half": max(1, rows // 2), "none": 0}[slots]
    moved = rows * (HEAD_BYTES * (heads + padded) + ROW_BYTES) + inserted * RECORD_BYTES
    sets = [slots_of(inputs, slots) for inputs in input_sets(rows, heads, padded, moved)]
    launches = max(len(sets), LAUNCHES if rows < STREAMED_ROWS else min(20, int(GRAPH_BYTES / moved)))
    ours_arguments = [inputs.arguments(FUSED) for inputs in sets]
    theirs = [stock_arguments(inputs, inputs.q_in, padded) for inputs in sets]
    ours_op = getattr(torch.ops.vllm_qout, FUSED).default

    def ours_launch(index: int) -> None:
        ours_op(*ours_arguments[index % len(sets)])

    def stock_launch(index: int) -> None:
        stock(*theirs[index % len(sets)])

    graphs = {"ours": capture(ours_launch, launches), "stock": capture(stock_launch, launches)}
    times = interleaved({name: graph.replay for name, graph in graphs.items()}, launches)
    eager = interleaved({"ours": lambda: ours_launch(0), "stock": lambda: stock_launch(0)}, 1)
    extra = {
        "slots": slots,
        "input_sets": len(sets),
        "ours_eager_us": round(eager["ours"].median, 2),
        "stock_eager_us": round(eager["stock"].median, 2),
    }
    return row(FUSED, rows, heads, padded, moved, ceiling, times) | extra


def context_row(stock: Any, rows: int, ceiling: float) -> dict[str, Any]:
    """The KV-only insert against what stock DSpark does: zeros for a query, then the fused operator."""
    moved = rows * (ROW_BYTES + RECORD_BYTES)
    (inputs,) = input_sets(rows, 1, 64, moved)[:1]
    arguments = inputs.arguments(CONTEXT)
    ours_op = getattr(torch.ops.vllm_qout, CONTEXT).default
    launches = LAUNCHES if rows < STREAMED_ROWS else 10

    def stock_launch(index: int) -> None:
        zeros = torch.zeros(rows, CONTEXT_HEADS, 512, dtype=torch.bfloat16, device="cuda")
        stock(*stock_arguments(inputs, zeros, CONTEXT_HEADS))

    graphs = {
        "ours": capture(lambda index: ours_op(*arguments), launches),
        "stock": capture(stock_launch, launches),
    }
    times = interleaved({name: graph.replay for name, graph in graphs.items()}, launches)
    return row(CONTEXT, rows, CONTEXT_HEADS, CONTEXT_HEADS, moved, ceiling, times) | {"slots": "all", "input_sets": 1}


def driver(query: str) -> str:
    """One figure of nvidia-smi, as text."""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "--id=0"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def machine() -> dict[str, Any]:
    """The card and its clocks under load."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "clocks_sm_memory": driver("clocks.sm,clocks.mem"),
        "cpu": platform.machine(),
    }


def versions() -> dict[str, Any]:
    """Software on both sides."""
    return {
        "vllm_qout": __version__,
        "stock": "vllm 0.32.0 _C_stable_libtorch",
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "driver": driver("driver_version"),
        "python": platform.python_version(),
    }


def load_stock(path: Path | None) -> Any:
    """The stock fused operator, from a named library or the installed vLLM."""
    if path is None:
        spec = importlib.util.find_spec("vllm")
        if spec is None or not spec.submodule_search_locations:
            raise BenchError("vllm is not installed: name its _C_stable_libtorch.abi3.so with --stock")
        path = Path(spec.submodule_search_locations[0]) / "_C_stable_libtorch.abi3.so"
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise BenchError(f"{path}: {error}; name vLLM 0.32.0's library with --stock") from error
    return torch.ops._C.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert.default


def measure(stock: Any) -> dict[str, Any]:
    """The whole grid."""
    ceiling = copy_ceiling()
    rows: list[dict[str, Any]] = []
    for slots in ("all", "half", "none"):
        for n in ROWS:
            for heads, padded in HEADS:
                rows.append(fused_row(stock, n, heads, padded, slots, ceiling))
                torch.cuda.empty_cache()
    rows += [context_row(stock, n, ceiling) for n in CONTEXT_ROWS]
    return {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "machine": machine(),
        "versions": versions(),
        "copy_tb_s": round(ceiling, 3),
        "rows": rows,
    }


def print_table(results: dict[str, Any]) -> None:
    """The rows with every slot inserted."""
    sys.stdout.write(f"copy ceiling {results['copy_tb_s']} TB/s\n")
    for line in results["rows"]:
        if line["slots"] == "all":
            sys.stdout.write(
                f"{line['op'][:16]:16} n={line['n']:<5} {line['local_heads']:>3}/{line['padded_heads']:<3} "
                f"ours {line['ours_us']:9.2f} stock {line['stock_us']:9.2f} us "
                f"ratio {line['ratio']:.3f} copy {line['copy_fraction']:.2f}\n"
            )


def main() -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=str(__doc__).splitlines()[0])
    parser.add_argument("--stock", type=Path, help="vLLM's _C_stable_libtorch.abi3.so (default: the installed one)")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"))
    options = parser.parse_args()
    try:
        ops.require_cuda()
        results = measure(load_stock(options.stock))
    except (BenchError, ops.LibraryError) as error:
        sys.stderr.write(f"bench: {error}\n")
        return 2
    gpu = re.sub(r"[^a-z0-9]+", "-", results["machine"]["gpu"].lower())
    options.out.mkdir(parents=True, exist_ok=True)
    stem = options.out / f"{gpu}-{results['date']}"
    stem.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    stem.with_suffix(".svg").write_text(ratio_plot(results))
    print_table(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
