# SPDX-License-Identifier: Apache-2.0
"""Inputs of the operators, seeded: for the contract suite, the tests and the bench."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

HEAD_DIM = 512
TOKEN_BYTES = 584
SENTINEL = 0xAB
UNWRITTEN = 0xFF  # every bf16 made of these bytes is a NaN

FUSED = "fused_qnorm_rope_kv_insert"
CONTEXT = "kv_rope_insert"
IN_PLACE = "qnorm_rope_kv_insert_"
OPERATORS = (FUSED, CONTEXT, IN_PLACE)


@dataclass(frozen=True)
class Inputs:
    """Arguments of one call; `storage` holds every byte around and inside `k_cache`."""

    q_in: Tensor
    kv: Tensor
    q_out: Tensor
    k_cache: Tensor
    storage: Tensor
    slot_mapping: Tensor
    position_ids: Tensor
    cos_sin_cache: Tensor
    eps: float
    cache_block_size: int
    apply_q_norm: bool = True

    def but(self, **changes: Any) -> Inputs:
        """A copy with some arguments replaced."""
        return replace(self, **changes)

    def arguments(self, operator: str) -> tuple[Any, ...]:
        """Positional arguments of `operator`; the in-place one rewrites `q_in`."""
        context = (self.kv, self.k_cache, self.slot_mapping, self.position_ids, self.cos_sin_cache)
        query = (self.eps, self.cache_block_size, self.apply_q_norm)
        if operator == CONTEXT:
            return (*context, self.cache_block_size)
        if operator == IN_PLACE:
            return (self.q_in, *context, *query)
        return (self.q_in, self.kv, self.q_out, *context[1:], *query)

    def written(self, operator: str) -> tuple[Tensor, ...]:
        """What the call may write, whole allocations where these are known."""
        query = {FUSED: (self.q_out,), IN_PLACE: (self.q_in,), CONTEXT: ()}[operator]
        return (*query, self.storage)


def rope_table(positions: int, device: str, theta: float = 10000.0) -> Tensor:
    """Cosines and sines [positions, 64] in float32."""
    frequency = theta ** (-torch.arange(32, dtype=torch.float64) / 32)
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * frequency
    return torch.cat((angle.cos(), angle.sin()), dim=1).float().to(device)


def make_cache(
    blocks: int, block_size: int, device: str, block_stride: int | None = None, offset: int = 0
) -> tuple[Tensor, Tensor]:
    """A cache view [blocks, block_size * 584] and its storage, filled with the sentinel."""
    width = block_size * TOKEN_BYTES
    stride = width if block_stride is None else block_stride
    storage = torch.full((offset + blocks * stride,), SENTINEL, dtype=torch.uint8, device=device)
    return storage.as_strided((blocks, width), (stride, 1), offset), storage


def make_inputs(
    *,
    rows: int,
    heads: int,
    padded_heads: int,
    device: str = "cpu",
    inserts: int | None = None,
    block_size: int = 64,
    block_stride: int | None = None,
    offset: int = 0,
    spare_rows: int = 1,
    positions: int = 512,
    eps: float = 1e-6,
    apply_q_norm: bool = True,
    seed: int = 0,
) -> Inputs:
    """Random normal inputs, distinct random slots in a cache with one spare block, poisoned outputs."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        values = torch.randn(*shape, generator=generator, device=device)
        return values.to(torch.bfloat16)

    blocks = -(-max(rows, 1) // block_size) + 1
    k_cache, storage = make_cache(blocks, block_size, device, block_stride, offset)
    slots = torch.randperm(blocks * block_size, generator=generator, device=device)
    q_bytes = torch.full((rows + spare_rows, padded_heads, HEAD_DIM * 2), UNWRITTEN, dtype=torch.uint8, device=device)
    return Inputs(
        q_in=normal(rows, heads, HEAD_DIM),
        kv=normal(rows, HEAD_DIM) * 4,
        q_out=q_bytes.view(torch.bfloat16),
        k_cache=k_cache,
        storage=storage,
        slot_mapping=slots[: rows if inserts is None else inserts].contiguous(),
        position_ids=torch.randint(0, positions, (rows,), generator=generator, device=device),
        cos_sin_cache=rope_table(positions, device),
        eps=eps,
        cache_block_size=block_size,
        apply_q_norm=apply_q_norm,
    )


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, so that NaNs and signed zeros compare."""
    return tensor.contiguous().view(torch.uint8)
