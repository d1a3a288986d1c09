# SPDX-License-Identifier: Apache-2.0
"""What the vllm_qout plugin does in this worker: by its own report, and by a look at the methods that really run."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import sys
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from qualify.inside.describe import process
from qualify.inside.facts import gather

SWITCH = "VLLM_QOUT"
METHOD = "_fused_qnorm_rope_kv_insert"
CONTEXT_MODULE = "vllm.models.deepseek_v4.nvidia.dspark"
CONTEXT_FUNCTION = "_insert_context_kv"


def report() -> dict[str, Any]:
    found: dict[str, Any] = importlib.import_module("vllm_qout.plugin").report()
    return found


def buffers() -> dict[str, Any]:
    """Address and size of every reserved buffer at this moment; none where the plugin is not loaded."""
    if "vllm_qout.plugin" not in sys.modules:
        return {"reserved_bytes": 0, "buffers": []}
    found = report()
    rows = [{key: row[key] for key in ("lane", "ubatch", "address", "bytes")} for row in found.get("buffers", ())]
    return {"reserved_bytes": found.get("reservedBytes", 0), "buffers": rows}


def describe(worker: Any, moments: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Every fact of `qualify.probes.plugin_records.PluginReport`."""
    return gather(
        {
            "process": process,
            "switch": lambda: os.environ.get(SWITCH, ""),
            "report": report,
            "methods": lambda: _methods(worker.model_runner),
            "context": _context,
            "profiled": lambda: moments.get("profiled"),
            "captured": lambda: moments.get("captured"),
            "now": buffers,
        }
    )


def _methods(runner: Any) -> list[dict[str, Any]]:
    """The attention layers by what their query method runs and by the class method that it stands for."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for place, model in _models(runner):
        for name, module in model.named_modules():
            method = getattr(module, METHOD, None)
            if method is not None:
                function = getattr(method, "__func__", method)
                key = (_name(function), _digest(function), _digest(getattr(type(module), METHOD)))
                groups.setdefault(key, []).append(f"{place}:{name}")
    return [
        {"runs": runs, "runs_sha256": own, "stock_sha256": stock, "layers": sorted(layers)}
        for (runs, own, stock), layers in sorted(groups.items())
    ]


def _models(runner: Any) -> Iterator[tuple[str, Any]]:
    yield "target", runner.get_model()
    draft = getattr(getattr(runner, "speculator", None), "model", None)
    if draft is not None:
        yield "drafter", draft


def _context() -> dict[str, Any]:
    """The draft's context insertion; empty where no such draft is loaded."""
    module = sys.modules.get(CONTEXT_MODULE)
    if module is None:
        return {}
    function = getattr(module, CONTEXT_FUNCTION)
    stock = getattr(function, "replaces", function)
    return {"runs": _name(function), "runs_sha256": _digest(function), "stock_sha256": _digest(stock)}


def _name(function: Any) -> str:
    return f"{function.__module__}.{function.__qualname__}"


@lru_cache(maxsize=64)
def _digest(function: Any) -> str:
    """sha256 of the source text, as the plugin pins it."""
    return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()
