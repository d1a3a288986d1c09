# SPDX-License-Identifier: Apache-2.0
"""The watch over CUDA graphs, on vLLM's own classes with made-up graphs; and the capture rule against vLLM's own plan.

Needs vLLM, so it runs in the engine's environment; no graph is captured, so it needs no GPU.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm.v1.worker.gpu.cudagraph_utils")

from qualify.inside import graphs
from qualify.observe.graphs import expected_sets
from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import BatchDescriptor
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

S9 = [1, 2, 4, 8, 16, 24, 32, 40, 48]
METHODS = [
    (CudaGraphManager, "capture"),
    (CudaGraphManager, "dispatch"),
    (CudaGraphManager, "run_fullgraph"),
    (CudagraphDispatcher, "dispatch"),
    (BreakableCUDAGraphWrapper, "_replay"),
    (CUDAGraphWrapper, "__call__"),
]


class Graph:
    def replay(self):
        pass


def manager(mode=CUDAGraphMode.FULL_AND_PIECEWISE, sizes=S9, requests=8, query_len=6):
    """A manager as its constructor leaves it, with vLLM's own plan; the constructor itself asks for a device."""
    one = CudaGraphManager.__new__(CudaGraphManager)
    one.vllm_config = SimpleNamespace(speculative_config=None, cache_config=SimpleNamespace(use_kda_recoverssm=False))
    one.compilation_config = SimpleNamespace(cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=max(sizes))
    one.cudagraph_mode, one.decode_query_len, one.max_num_reqs = mode, query_len, requests
    one.varlen_decode, one.ubatch_runner, one.lora_capture_cases = False, None, [0]
    one._lora_dispatch_map, one._max_lora_case = {}, 0
    one.graphs, one._candidates, one._capture_descs = {}, {}, {}
    one._max_full_descs_to_capture, one._graphs_captured = None, False
    one.use_breakable_cg, one.breakable_cg_runner = True, breakable()
    one._init_candidates()
    return one


def breakable():
    wrapper = BreakableCUDAGraphWrapper.__new__(BreakableCUDAGraphWrapper)
    wrapper.entries, wrapper.is_debugging_mode = {}, False
    return wrapper


def fake_capture(one, create_forward_fn, progress_bar_desc="Capturing CUDA graphs"):
    """As vLLM: all PIECEWISE, and while memory is profiled only the largest FULL graphs."""
    for descriptor in one._capture_descs.get(CUDAGraphMode.PIECEWISE, ()):
        key = BatchDescriptor(num_tokens=descriptor.num_tokens)
        one.breakable_cg_runner.entries[key] = SimpleNamespace(
            batch_descriptor=key, capture=Graph(), output=None, input_addresses=None
        )
    for descriptor in one._capture_descs.get(CUDAGraphMode.FULL, ())[: one._max_full_descs_to_capture]:
        one.graphs[descriptor] = Graph()
    one._graphs_captured = True


@pytest.fixture
def watched(monkeypatch):
    """The watch installed on vLLM's classes for one test, with a ledger of its own."""
    for owner, name in METHODS:
        monkeypatch.setattr(owner, name, fake_capture if name == "capture" else vars(owner)[name])
    monkeypatch.setattr(graphs, "_ledger", graphs.Ledger())
    graphs.install()
    return graphs.ledger()


def worker(one, **drafters):
    runner = type("GPUModelRunner", (), {"__module__": "vllm.v1.worker.gpu.model_runner"})()
    runner.cudagraph_manager = one
    runner.speculator = SimpleNamespace(**drafters) if drafters else None
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(
            cudagraph_mode=one.cudagraph_mode, cudagraph_capture_sizes=S9, max_cudagraph_capture_size=48
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=4096),
    )
    return SimpleNamespace(model_runner=runner, vllm_config=config)


def run(one, requests, tokens, uniform):
    """A step as the model runner takes it."""
    found = one.dispatch(requests, tokens, uniform, 0)
    if found.cg_mode == CUDAGraphMode.FULL:
        one.run_fullgraph(found)
    elif found.cg_mode == CUDAGraphMode.PIECEWISE:
        entry = one.breakable_cg_runner.entries[BatchDescriptor(num_tokens=found.num_tokens)]
        one.breakable_cg_runner._replay(entry, (), {})


def test_every_part_of_the_pinned_engine_is_watched(watched):
    """A method that moved would leave its counts empty."""
    assert watched.watched == ["managers", "dispatcher", "breakable", "wrappers"]
    assert watched.problems == []


def test_sets_are_read_from_the_managers(watched):
    """Target and drafter by name, sizes as token counts, the memory profile apart from the real capture."""
    target, drafter = manager(), manager(CUDAGraphMode.FULL_DECODE_ONLY, query_len=5)
    profiled = manager()
    profiled._max_full_descs_to_capture = 2
    profiled.capture(None)
    target.capture(None)
    drafter.capture(None, "Capturing dspark CUDA graphs")
    assert sorted(watched.moments) == ["captured", "profiled"]
    found = graphs.describe(worker(target, query_cudagraph_manager=drafter))
    assert found["unknown"] == {} and found["runner"] == "V2"
    by_name = {one["name"]: one for one in found["managers"]}
    assert by_name["target"]["piecewise"] == S9
    assert by_name["target"]["full"] == by_name["target"]["planned_full"] == [6, 12, 18, 24, 36, 42, 48]
    assert by_name["drafter"]["piecewise"] == []
    assert by_name["drafter"]["full"] == [5, 10, 20, 25, 35, 40]
    rounds = [(one["label"], one["profiling"], len(one["piecewise"]), one["full"]) for one in found["passes"]]
    assert rounds == [
        ("Capturing CUDA graphs", True, 9, [42, 48]),
        ("Capturing CUDA graphs", False, 9, [6, 12, 18, 24, 36, 42, 48]),
        ("Capturing dspark CUDA graphs", False, 0, [5, 10, 20, 25, 35, 40]),
    ]


def test_steps_and_replays_are_counted(watched):
    """By what was asked, by the graph that was chosen, and by the graph that was replayed."""
    target = manager()
    target.capture(None)
    for step in ((1, 6, 6), (5, 30, 6), (5, 30, 6), (2, 20, None), (1, 4096, None)):
        run(target, *step)
    found = graphs.describe(worker(target))["managers"][0]
    assert sorted(found["dispatches"], key=str) == [
        [1, 4096, None, "NONE", 4096, 1],
        [1, 6, 6, "FULL", 6, 1],
        [2, 20, None, "PIECEWISE", 24, 1],
        [5, 30, 6, "FULL", 36, 2],
    ]
    assert sorted(found["replays"]) == [["FULL", 6, 1], ["FULL", 36, 2], ["PIECEWISE", 24, 1]]


def test_a_failing_note_does_not_reach_the_engine(watched, monkeypatch):
    """The step goes on; the gap in the counts is told, once."""
    monkeypatch.setattr(watched, "dispatched", lambda *_: {}["x"])
    target = manager()
    target.capture(None)
    for _ in range(3):
        assert target.dispatch(1, 6, 6, 0).num_tokens == 6
    assert watched.problems == ["dispatch: KeyError: 'x'"]


def test_a_missing_manager_leaves_the_others(watched):
    """What this engine does not have is null with a reason, never an exception."""
    broken = worker(manager())
    del broken.vllm_config.scheduler_config
    found = graphs.describe(broken)
    assert found["max_num_seqs"] is None and "max_num_seqs" in found["unknown"]
    assert len(found["managers"]) == 1


def test_watch_does_nothing_on_this_platform():
    """On the CPU engine vLLM's classes stay as they are."""
    before = [vars(owner)[name] for owner, name in METHODS]
    graphs.watch()
    assert [vars(owner)[name] for owner, name in METHODS] == before
    assert graphs.ledger().watched == []


@pytest.mark.parametrize("requests", [1, 3, 6, 8, 64])
@pytest.mark.parametrize("query_len", [1, 4, 6])
@pytest.mark.parametrize("sizes", [S9, [1, 2, 4, 8], [8, 64, 72, 256], [7, 13, 50]])
@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "PIECEWISE", "FULL_DECODE_ONLY"])
def test_the_capture_rule_is_vllms_own(mode, sizes, query_len, requests):
    """Predicted sets equal vLLM's plan, and the predicted graph of every step is the one that vLLM chooses."""
    one = manager(CUDAGraphMode[mode], sizes, requests, query_len)
    one._graphs_captured = True
    expected = expected_sets(
        runner="V2", mode=mode, sizes=sizes, max_num_seqs=requests, spec_tokens=query_len - 1
    ).managers()["target"]
    plan = {
        key.name: sorted(one_.num_tokens for one_ in descriptors) for key, descriptors in one._capture_descs.items()
    }
    assert list(expected.piecewise) == plan.get("PIECEWISE", [])
    assert list(expected.full) == plan.get("FULL", [])
    steps = [(count, count * query_len, query_len) for count in range(1, requests + 1)]
    steps += [(min(tokens, requests), tokens, None) for tokens in range(1, max(sizes) + 3)]
    for count, tokens, uniform in steps:
        found = one.dispatch(count, tokens, uniform, 0)
        chosen = (found.cg_mode.name, found.num_tokens)
        assert expected.chosen(tokens, uniform=uniform == query_len) == chosen, (count, tokens, uniform)
