# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels against the stock operator of vLLM 0.32.0, and how they behave under graphs and streams."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from vllm_qout import contract, ops, samples
from vllm_qout.samples import CONTEXT, FUSED, IN_PLACE, Inputs, bits, make_inputs

pytestmark = pytest.mark.gpu

PAGE = 37440  # 64 records, rounded up to a multiple of 576 bytes
CALLS = 10_000
REPLAYS = 1_000


def cuda_inputs(**options) -> Inputs:
    """Inputs in rounded pages, the first page left to another layer."""
    return make_inputs(device="cuda", **({"block_stride": PAGE, "offset": PAGE} | options))


def run_stock(stock, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """The stock query [N, P, 512] and the cache storage that the stock operator leaves."""
    storage = inputs.storage.clone()
    cache = storage.as_strided(inputs.k_cache.shape, inputs.k_cache.stride(), inputs.k_cache.storage_offset())
    query = stock(
        inputs.q_in, inputs.kv, cache, inputs.slot_mapping, inputs.position_ids, inputs.cos_sin_cache,
        inputs.q_out.shape[1], inputs.eps, inputs.cache_block_size, inputs.apply_q_norm,
    )  # fmt: skip
    return query, storage


def assert_equal_to_stock(stock, inputs: Inputs) -> None:
    query, storage = run_stock(stock, inputs)
    getattr(ops, FUSED)(*inputs.arguments(FUSED))
    rows = inputs.q_in.shape[0]
    assert torch.equal(bits(inputs.q_out[:rows]), bits(query))
    assert torch.equal(inputs.storage, storage)
    assert (bits(inputs.q_out[rows:]) == samples.UNWRITTEN).all()


@pytest.mark.parametrize(
    "heads, padded", [(1, 8), (16, 16), (20, 32), (8, 64), (63, 64), (64, 64), (65, 128), (128, 128)]
)
@pytest.mark.parametrize("rows", [1, 2, 6, 63, 257, 1023, 1024, 1025])
def test_every_byte_equals_stock(stock, rows, heads, padded):
    """Query, padding and cache are byte for byte those of the stock operator, whatever shape is chosen."""
    assert_equal_to_stock(stock, cuda_inputs(rows=rows, heads=heads, padded_heads=padded, seed=rows))


@pytest.mark.parametrize(
    "options",
    [
        {"rows": 8192, "heads": 32, "padded_heads": 64},
        {"rows": 700, "heads": 16, "padded_heads": 64, "inserts": 333},
        {"rows": 40, "heads": 16, "padded_heads": 64, "inserts": 0},
        {"rows": 130, "heads": 16, "padded_heads": 64, "block_size": 32, "block_stride": 19008, "offset": 0},
        {"rows": 130, "heads": 16, "padded_heads": 64, "block_stride": None, "offset": 0},
        {"rows": 130, "heads": 16, "padded_heads": 64, "block_stride": 5 * PAGE, "offset": 2 * PAGE},
        {"rows": 130, "heads": 16, "padded_heads": 64, "apply_q_norm": False},
        {"rows": 130, "heads": 16, "padded_heads": 64, "eps": 1e-5},
    ],
    ids=lambda options: ",".join(f"{name}={value}" for name, value in options.items()),
)
def test_options_equal_stock(stock, options):
    """Partial inserts, block sizes, strided pages, no norm and another eps also equal the stock bytes."""
    assert_equal_to_stock(stock, cuda_inputs(**options))


def test_special_values_equal_stock(stock):
    """Infinities, NaN, overflowing sums, tiny and zero rows give the stock bytes too."""
    inputs = cuda_inputs(rows=64, heads=4, padded_heads=8)
    special = [float("inf"), float("-inf"), float("nan"), 3e38, 1e-30, 0.0, -0.0, 1e-40]
    for row, value in enumerate(special):
        inputs.kv[row, ::7] = value
        inputs.kv[row + 8] = value
    inputs.q_in[3], inputs.q_in[4], inputs.q_in[5] = 3e38, 1e-30, 0.0
    assert_equal_to_stock(stock, inputs)


def test_skipped_slots_equal_stock(stock):
    """Every negative slot skips its record and still writes its query."""
    inputs = cuda_inputs(rows=96, heads=8, padded_heads=64)
    inputs.slot_mapping[::3] = -1
    inputs.slot_mapping[5] = -2
    assert_equal_to_stock(stock, inputs)


@pytest.mark.parametrize("rows", [1, 48, 2048])
def test_other_operators_equal_the_fused_one(stock, rows):
    """KV-only leaves the stock cache; in place leaves the stock query."""
    inputs = cuda_inputs(rows=rows, heads=64, padded_heads=64)
    query, storage = run_stock(stock, inputs)
    getattr(ops, CONTEXT)(*inputs.arguments(CONTEXT))
    assert torch.equal(inputs.storage, storage)
    getattr(ops, IN_PLACE)(*inputs.arguments(IN_PLACE))
    assert torch.equal(bits(inputs.q_in), bits(query))


def test_contract_on_the_gpu():
    """The whole contract suite passes on the CUDA backend."""
    report = contract.run("cuda")
    assert report["passed"], [case for case in report["cases"] if not case["passed"]]


def capture(call) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of one call, and how many blocks were handed out meanwhile.

    torch takes some itself when no other graph is alive.
    """
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph, torch.cuda.memory_stats()["allocation.all.allocated"] - before


def test_graph_replays_at_fixed_addresses(stock):
    """A captured call takes no more blocks than a captured fill, and 1,000 replays on new inputs stay right."""
    inputs = cuda_inputs(rows=48, heads=32, padded_heads=64)
    address = inputs.q_out.data_ptr()
    getattr(ops, FUSED)(*inputs.arguments(FUSED))
    held, _ = capture(lambda: inputs.q_out.zero_())
    _, control = capture(lambda: inputs.q_out.zero_())
    graph, blocks = capture(lambda: getattr(ops, FUSED)(*inputs.arguments(FUSED)))
    assert blocks == control
    del held
    for replay in range(REPLAYS):
        inputs.q_in.normal_()
        inputs.kv.normal_()
        inputs.position_ids.random_(0, 512)
        inputs.q_out.view(torch.uint8).fill_(samples.UNWRITTEN)
        expected = run_stock(stock, inputs) if replay % 100 == 0 else None
        graph.replay()
        if expected is not None:
            assert torch.equal(bits(inputs.q_out[:48]), bits(expected[0]))
            assert torch.equal(inputs.storage, expected[1])
    torch.cuda.synchronize()
    assert inputs.q_out.data_ptr() == address


def test_back_to_back_calls_keep_their_order(stock):
    """Overlapped launches never overtake: each call of a chain reads what the call before it wrote."""
    inputs = cuda_inputs(rows=300, heads=64, padded_heads=64, spare_rows=0)
    chained = inputs.but(q_in=inputs.q_out, q_out=torch.empty_like(inputs.q_out), apply_q_norm=False)
    query, _ = run_stock(stock, inputs)
    expected, _ = run_stock(stock, chained.but(q_in=query))
    for _ in range(50):
        inputs.q_out.view(torch.uint8).fill_(samples.UNWRITTEN)
        getattr(ops, FUSED)(*inputs.arguments(FUSED))
        getattr(ops, FUSED)(*chained.arguments(FUSED))
        assert torch.equal(bits(chained.q_out), bits(expected))


def test_runs_on_the_current_stream(stock):
    """A call waits for the work before it on its stream, and for no other; inference mode changes nothing."""
    inputs = cuda_inputs(rows=512, heads=16, padded_heads=64)
    query, _ = run_stock(stock, inputs)
    pristine = inputs.q_in.clone()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.inference_mode():
        inputs.q_in.zero_()
        torch.cuda._sleep(20_000_000)
        inputs.q_in.copy_(pristine)
        getattr(ops, FUSED)(*inputs.arguments(FUSED))
    stream.synchronize()
    assert torch.equal(bits(inputs.q_out[:512]), bits(query))


def test_follows_the_device_of_its_tensors(stock):
    """With another device current, the call runs where its tensors are."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    inputs = make_inputs(rows=6, heads=16, padded_heads=64, device="cuda:1")
    with torch.cuda.device(0):
        getattr(ops, FUSED)(*inputs.arguments(FUSED))
        assert torch.cuda.current_device() == 0
    with torch.cuda.device(1):
        query, _ = run_stock(stock, inputs)
    assert torch.equal(bits(inputs.q_out[:6]), bits(query))


def allocations(call, calls: int) -> tuple[int, int]:
    """How many blocks, and how many bytes, the caching allocator handed out in `calls` calls."""
    call()
    torch.cuda.synchronize()
    names = ("allocation.all.allocated", "allocated_bytes.all.allocated")
    before = [torch.cuda.memory_stats()[name] for name in names]
    for _ in range(calls):
        call()
    torch.cuda.synchronize()
    return tuple(torch.cuda.memory_stats()[name] - old for name, old in zip(names, before, strict=True))


def test_ten_thousand_calls_allocate_nothing(stock):
    """No block in 10,000 calls of each operator; the same harness sees one block a call of the stock one."""
    inputs = cuda_inputs(rows=16, heads=16, padded_heads=64)
    for operator in samples.OPERATORS:
        arguments = inputs.arguments(operator)
        assert allocations(lambda: getattr(ops, operator)(*arguments), CALLS) == (0, 0)  # noqa: B023
    arguments = (
        inputs.q_in, inputs.kv, inputs.k_cache, inputs.slot_mapping, inputs.position_ids,
        inputs.cos_sin_cache, 64, inputs.eps, inputs.cache_block_size,
    )  # fmt: skip
    assert allocations(lambda: stock(*arguments), 100) == (100, 100 * 16 * 64 * 1024)


def test_card_is_supported():
    """The loaded build has machine code for this card."""
    ops.require_cuda(torch.cuda.current_device())


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer_is_clean(tool):
    """compute-sanitizer finds no bad access and no race in small calls of every shape."""
    if shutil.which("compute-sanitizer") is None:
        pytest.skip("needs compute-sanitizer")
    script = Path(__file__).with_name("sanitize.py")
    result = subprocess.run([sys.executable, str(script), tool], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
