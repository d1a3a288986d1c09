# SPDX-License-Identifier: Apache-2.0
"""The Triton operators: run under the interpreter in a process of their own, and compiled for GPUs that are
not here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

SIGNATURE = {
    "q_in": "*bf16",
    "q_out": "*bf16",
    "kv": "*bf16",
    "k_cache": "*u8",
    "slots": "*i64",
    "positions": "*i64",
    "table": "*fp32",
    "H": "i32",
    "P": "i32",
    "inserts": "i32",
    "max_position": "i32",
    "blocks": "i32",
    "block_stride": "i64",
    "block_size": "i32",
    "eps": "fp32",
    "NORM": "constexpr",
    "FNUZ": "constexpr",
}


def test_interpreted_suite():
    """Under the interpreter the Triton operators agree with the CPU operators and with torch's roundings.

    Triton decides at import whether it interprets, hence the process of its own.
    """
    suite = Path(__file__).with_name("triton_interpreted.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(suite)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]


@pytest.mark.parametrize(
    ("backend", "architecture", "warp", "fnuz", "assembly"),
    [
        ("cuda", 90, 32, False, "ptx"),
        ("cuda", 120, 32, False, "ptx"),
        ("hip", "gfx942", 64, True, "amdgcn"),
        ("hip", "gfx950", 64, False, "amdgcn"),
    ],
)
def test_compiles_for_each_gpu_without_contraction(backend, architecture, warp, fnuz, assembly, tmp_path, monkeypatch):
    """The kernel compiles for NVIDIA and AMD, with no fused multiply-add that would change KV bytes."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from vllm_qout import triton_ops

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = triton.compile(
        ASTSource(triton_ops._fused_kernel, SIGNATURE, {"NORM": True, "FNUZ": fnuz}),
        target=GPUTarget(backend, architecture, warp),
        options={"num_warps": 2, "enable_fp_fusion": False},
    )
    text = kernel.asm[assembly]
    assert "mul" in text
    assert "fma" not in text
