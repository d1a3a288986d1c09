# SPDX-License-Identifier: Apache-2.0
"""The look at what the attention layers really run, on a made-up model. Needs torch."""

from __future__ import annotations

import hashlib
import inspect
import sys
from types import MethodType, SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from qualify.inside import memory, plugin  # noqa: E402


class Attention(torch.nn.Module):
    def _fused_qnorm_rope_kv_insert(self, q):
        return q


def ours(self, q):
    return -q


def model(bound):
    layers = torch.nn.ModuleList([Attention() for _ in range(3)])
    for layer in layers[:bound]:
        layer._fused_qnorm_rope_kv_insert = MethodType(ours, layer)
    return layers


def sha(function):
    return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()


def worker(target, draft=None):
    runner = SimpleNamespace(get_model=lambda: target, speculator=SimpleNamespace(model=draft))
    return SimpleNamespace(model_runner=runner)


def test_layers_are_told_by_what_they_run():
    """A layer that kept the stock method is a row of its own; the stock text is hashed whatever runs."""
    stock = Attention._fused_qnorm_rope_kv_insert
    rows = plugin.describe(worker(model(2), model(3)), {})["methods"]
    assert [(row["runs"].rpartition(".")[2], row["layers"]) for row in rows] == [
        ("_fused_qnorm_rope_kv_insert", ["target:2"]),
        ("ours", ["drafter:0", "drafter:1", "drafter:2", "target:0", "target:1"]),
    ]
    assert {row["stock_sha256"] for row in rows} == {sha(stock)}
    assert [row["runs_sha256"] for row in rows] == [sha(stock), sha(ours)]


def test_a_worker_without_the_plugin_is_told_apart_from_an_unknown_one(monkeypatch):
    """Nothing reserved is 0; a report that cannot be had is null with its reason."""
    for name in [name for name in sys.modules if name.startswith("vllm_qout")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vllm_qout", None)
    found = plugin.describe(worker(model(0)), {})
    assert found["now"] == {"reserved_bytes": 0, "buffers": []}
    assert found["report"] is None and "report" in found["unknown"]
    assert found["profiled"] is None and "profiled" in found["unknown"]


def test_figures_of_a_device_are_null_without_one():
    """On the CPU engine nothing is measured, and nothing reads as 0."""
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    found = memory.describe(SimpleNamespace())
    for name in ("allocator", "driver", "admission", "graph_pool_bytes"):
        assert found[name] is None and name in found["unknown"]
