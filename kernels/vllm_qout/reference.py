# SPDX-License-Identifier: Apache-2.0
"""The operator in float64, written from its numerics alone: slow, exact, for any device of torch.

A head has 512 dims: 448 plain ones and 64 that RoPE rotates as 32 interleaved pairs. A cached token has
584 bytes: 448 e4m3fn values in 7 groups of 64, 64 bf16 values, and apart from these 7 UE8M0 scale bytes
and a zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

PLAIN_DIM = 448
GROUP_DIM = 64
FP8_MAX = 448.0
AMAX_FLOOR = 1e-4
BF16_HALF_ULP_EXPONENT = -8  # half of the last place of a value in [1, 2), as a power of two
DATA_BYTES = 576
SCALE_BYTES = 8


def rotate(values: Tensor, position_ids: Tensor, cos_sin_cache: Tensor) -> Tensor:
    """Rotate the last 64 of 512 dims of float64 `values` [N, ..., 512] by the row of each position."""
    rows = cos_sin_cache.double()[position_ids]
    rows = rows.reshape(rows.shape[0], *[1] * (values.dim() - 2), 64)
    cosine, sine = rows[..., :32], rows[..., 32:]
    even, odd = values[..., PLAIN_DIM::2], values[..., PLAIN_DIM + 1 :: 2]
    rotated = torch.stack((even * cosine - odd * sine, even * sine + odd * cosine), dim=-1)
    return torch.cat((values[..., :PLAIN_DIM], rotated.flatten(-2)), dim=-1)


def query(q_in: Tensor, position_ids: Tensor, cos_sin_cache: Tensor, eps: float, apply_q_norm: bool = True) -> Tensor:
    """Normed and rotated query [N, H, 512] in float64, before its rounding to bf16."""
    values = q_in.double()
    if apply_q_norm:
        values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return rotate(values, position_ids, cos_sin_cache)


def scale_exponent(amax: Tensor) -> Tensor:
    """Smallest integer k with 448 * 2^k >= amax, for positive finite float64 `amax`."""
    mantissa, exponent = torch.frexp(amax)
    return torch.where(mantissa <= 0.875, exponent - 9, exponent - 8)


def encode_e4m3(values: Tensor) -> Tensor:
    """Nearest-even e4m3fn bytes of float64 `values`, clamped to +-448; the sign of zero is kept."""
    magnitude = values.abs().clamp(max=FP8_MAX)
    # 2^-6 is the smallest normal value; below it, and at zero, steps stay 2^-9 wide.
    exponent = torch.frexp(magnitude.clamp(min=2.0**-6)).exponent - 1
    steps = torch.round(torch.ldexp(magnitude, 3 - exponent)).to(torch.int32)
    code = (exponent + 7) * 8 + steps - 8
    return (code + 128 * torch.signbit(values)).to(torch.uint8)


def record(kv: Tensor, position_ids: Tensor, cos_sin_cache: Tensor) -> Tensor:
    """The 584 bytes of each row of bf16 `kv` [N, 512]: 576 data bytes, then 8 scale bytes."""
    rounded = rotate(kv.double(), position_ids, cos_sin_cache).to(torch.bfloat16)
    groups = rounded[:, :PLAIN_DIM].double().unflatten(1, (-1, GROUP_DIM))
    exponent = scale_exponent(groups.abs().amax(-1).clamp(min=AMAX_FLOOR))
    codes = encode_e4m3(torch.ldexp(groups, -exponent.unsqueeze(-1))).flatten(1)
    rope = rounded[:, PLAIN_DIM:].contiguous().view(torch.uint8)
    scales = (exponent + 127).clamp(0, 255).to(torch.uint8)
    return torch.cat((codes, rope, scales, torch.zeros_like(scales[:, :1])), dim=1)


def record_views(k_cache: Tensor, slot_mapping: Tensor, cache_block_size: int) -> tuple[Tensor, Tensor]:
    """Byte offsets [M, 576] and [M, 8] of the data and scales of each slot, from the start of `k_cache`."""
    base = torch.div(slot_mapping, cache_block_size, rounding_mode="floor") * k_cache.stride(0)
    place = slot_mapping % cache_block_size
    data = (base + place * DATA_BYTES)[:, None] + torch.arange(DATA_BYTES, device=base.device)
    start = base + cache_block_size * DATA_BYTES + place * SCALE_BYTES
    return data, start[:, None] + torch.arange(SCALE_BYTES, device=base.device)


def flat(k_cache: Tensor) -> Tensor:
    """All bytes from the first to the last of a strided cache [blocks, width], gaps included."""
    blocks, width = k_cache.shape
    size = (blocks - 1) * k_cache.stride(0) + width if blocks else 0
    return k_cache.as_strided((size,), (1,))


def read_records(k_cache: Tensor, slot_mapping: Tensor, cache_block_size: int) -> Tensor:
    """The 584 bytes of each slot [M, 584], in the order of `record`."""
    data, scales = record_views(k_cache, slot_mapping, cache_block_size)
    return flat(k_cache)[torch.cat((data, scales), dim=1)]


def insert(
    kv: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    position_ids: Tensor,
    cos_sin_cache: Tensor,
    cache_block_size: int,
) -> None:
    """Write the records of the rows whose slot is not negative into `k_cache`."""
    rows = torch.nonzero(slot_mapping >= 0).flatten()
    data, scales = record_views(k_cache, slot_mapping[rows], cache_block_size)
    flat(k_cache)[torch.cat((data, scales), dim=1)] = record(kv[rows], position_ids[rows], cos_sin_cache)


def rounding_bound(exact: Tensor, magnitude: Tensor) -> Tensor:
    """How far a bf16 result may lie from `exact`: half a last place, plus what float32 arithmetic on
    terms as large as `magnitude` may lose."""
    exponent = torch.frexp(exact.abs()).exponent - 1
    half_place = torch.ldexp(torch.ones_like(exact), exponent.clamp(min=-126) + BF16_HALF_ULP_EXPONENT)
    return half_place + magnitude * 2.0**-20


def rotation_magnitude(values: Tensor) -> Tensor:
    """Size of the terms behind each rotated dim: that of the larger value of its pair."""
    pairs = values.abs().unflatten(-1, (-1, 2)).amax(-1, keepdim=True)
    magnitude: Tensor = pairs.expand(*pairs.shape[:-1], 2).flatten(-2)
    return magnitude
