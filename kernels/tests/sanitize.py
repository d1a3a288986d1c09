# SPDX-License-Identifier: Apache-2.0
"""Small calls of every launch shape, under compute-sanitizer: python sanitize.py memcheck|racecheck.

Exits with the sanitizer's status: 0 without findings.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

KERNELS = Path(__file__).resolve().parents[1]
SHAPES = [(1, 16, 64), (65, 16, 64), (40, 63, 64), (1030, 128, 128)]  # latency, balanced, uneven heads, streaming


def calls() -> None:
    """What the sanitizer watches; bad slots and positions included."""
    sys.path.insert(0, str(KERNELS))
    import torch
    from vllm_qout import ops, samples

    for rows, heads, padded in SHAPES:
        inputs = samples.make_inputs(rows=rows, heads=heads, padded_heads=padded, device="cuda", spare_rows=0)
        inputs.slot_mapping[0] = 1 << 40
        inputs.position_ids[-1] = 1 << 40
        for operator in samples.OPERATORS:
            getattr(ops, operator)(*inputs.arguments(operator))
    torch.cuda.synchronize()


def main(tool: str) -> int:
    """Run this file again under `tool`, every tensor in an allocation of its own."""
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", sys.executable, __file__, "calls"]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    if sys.argv[1:] == ["calls"]:
        calls()
    elif sys.argv[1:] in (["memcheck"], ["racecheck"]):
        sys.exit(main(sys.argv[1]))
    else:
        sys.exit("usage: sanitize.py memcheck|racecheck")
