# SPDX-License-Identifier: Apache-2.0
"""Puts the package on the path, compiles it where the checkout has no library yet, finds the stock operator."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest

KERNELS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(KERNELS))
sys.path.insert(0, str(KERNELS / "tests"))

torch = pytest.importorskip("torch")

if importlib.util.find_spec("vllm_qout") and not (KERNELS / "vllm_qout" / "libvllm_qout.so").is_file():
    import build_backend

    build_backend.build_cpu(KERNELS / "vllm_qout")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """GPU tests skip themselves where torch sees no GPU."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="torch sees no NVIDIA GPU"))


def stock_library() -> Path | None:
    """vLLM's own operator library: VLLM_STOCK_LIB, or the one of an installed CUDA vLLM."""
    named = os.environ.get("VLLM_STOCK_LIB")
    if named:
        return Path(named)
    spec = importlib.util.find_spec("vllm")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        library = Path(folder) / "_C_stable_libtorch.abi3.so"
        if library.is_file():
            return library
    return None


@pytest.fixture(scope="session")
def stock() -> Any:
    """The stock fused operator of vLLM 0.32.0, which returns its own padded query."""
    library = stock_library()
    if library is None:
        pytest.skip("needs the stock operator: set VLLM_STOCK_LIB to vLLM's _C_stable_libtorch.abi3.so")
    torch.ops.load_library(str(library))
    return torch.ops._C.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert
