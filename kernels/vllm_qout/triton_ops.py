# SPDX-License-Identifier: Apache-2.0
# The arguments of Triton functions have no Python types:
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The three operators in Triton: the backend for AMD GPUs, also runs on NVIDIA and in Triton's interpreter.

bf16 and e4m3 are read and rounded with integer operations and floating-point contraction is off, so the
KV record has the same bytes from the interpreter, an NVIDIA GPU and an AMD GPU. (Triton's interpreter
truncates to bf16 and rounds e4m3 wrongly on ties, so its casts cannot be used.) The query differs between
devices by the order of its sum and the reciprocal square root, within the tolerance of the contract.
"""

from collections.abc import Callable, Mapping
from enum import Enum

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_qout import ops


class Encoding(Enum):
    """8-bit float of the cache: OCP e4m3fn (max 448), or FNUZ (gfx942; scaled for the max of 224 that vLLM
    uses there, no negative zero). The reader must use the same one.

    With these maxima the codes are equal and the FNUZ scale byte is one higher, because the FNUZ exponent
    bias is one higher.
    """

    OCP = "ocp"
    FNUZ = "fnuz"


def device_encoding(device: torch.device) -> Encoding:
    """FNUZ on gfx94x, OCP on everything else."""
    if device.type != "cuda" or torch.version.hip is None:
        return Encoding.OCP
    architecture = torch.cuda.get_device_properties(device).gcnArchName
    return Encoding.FNUZ if architecture.startswith("gfx94") else Encoding.OCP


@triton.jit
def _bf16_bits(value):
    bits = value.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return tl.where(is_nan, 0x7FFF, rounded)


@triton.jit
def _load_pair(words, mask):
    # One 32-bit word holds an even dim in its low half and the next odd dim in its high half.
    bits = tl.load(words, mask=mask, other=0).to(tl.uint32, bitcast=True)
    return (bits << 16).to(tl.float32, bitcast=True), (bits & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def _pair_word(even, odd):
    return (_bf16_bits(even) | (_bf16_bits(odd) << 16)).to(tl.int32, bitcast=True)


@triton.jit
def _rotate(even, odd, pair, table, position, max_position):
    # Pairs 224..255 are dims 448..511. A position outside the table is not read; its rotation is zero.
    rotary = pair >= 224
    # As a block, because the interpreter makes an integer of a boolean block combined with a scalar.
    positions = position + pair * 0
    readable = rotary & (positions >= 0) & (positions < max_position)
    row = table + positions * 64 + (pair - 224)
    cosine = tl.load(row, mask=readable, other=0.0)
    sine = tl.load(row + 32, mask=readable, other=0.0)
    return (
        tl.where(rotary, even * cosine - odd * sine, even),
        tl.where(rotary, even * sine + odd * cosine, odd),
    )


@triton.jit
def _e4m3_code(value, FNUZ: tl.constexpr):
    # 0x43E00000 is 448, 0x3C800000 is 2^-6, the smallest normal. Adding 2^14 (0x46800000), whose last
    # mantissa bit is worth 2^-9, rounds a subnormal to its multiple of 2^-9.
    bits = value.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    magnitude = tl.where(magnitude > 0x43E00000, 0x43E00000, magnitude)
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960
    shifted = magnitude.to(tl.float32, bitcast=True) + 16384.0
    subnormal = shifted.to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0x3C800000, subnormal, normal)
    sign = (bits >> 24) & 0x80
    if FNUZ:
        sign = tl.where(code == 0, 0, sign)
    return code | sign


@triton.jit
def _query_row(q_in, q_out, row, head, H, P, table, position, max_position, eps, NORM: tl.constexpr):
    pair = tl.arange(0, 256)
    source = q_in.to(tl.pointer_type(tl.int32)) + (row * H + head) * 256 + pair
    target = q_out.to(tl.pointer_type(tl.int32)) + (row * P + head) * 256 + pair
    even, odd = _load_pair(source, pair < 256)
    if NORM:
        mean = tl.sum(even * even + odd * odd, axis=0) * (1.0 / 512.0)
        scale = tl.rsqrt(mean + eps)
        even = even * scale
        odd = odd * scale
    even, odd = _rotate(even, odd, pair, table, position, max_position)
    tl.store(target, _pair_word(even, odd))


@triton.jit
def _zero_row(q_out, row, head, P):
    pair = tl.arange(0, 256)
    target = q_out.to(tl.pointer_type(tl.int32)) + (row * P + head) * 256 + pair
    tl.store(target, tl.zeros([256], dtype=tl.int32))


@triton.jit
def _context_row(
    kv, k_cache, slots, row, table, position, max_position, blocks, block_stride, block_size, FNUZ: tl.constexpr
):
    slot = tl.load(slots + row)
    if (slot >= 0) & (slot < blocks * block_size):
        block = k_cache + (slot // block_size) * block_stride
        place = slot % block_size
        data = block + place * 576
        scales = block + block_size * 576 + place * 8

        # 8 groups of 32 pairs: seven are quantized, the eighth holds the rotary dims.
        group = tl.arange(0, 8)[:, None]
        inner = tl.arange(0, 32)[None, :]
        pair = group * 32 + inner
        even, odd = _load_pair(kv.to(tl.pointer_type(tl.int32)) + row * 256 + pair, pair < 256)
        even, odd = _rotate(even, odd, pair, table, position, max_position)
        words = _pair_word(even, odd)
        rotary = pair >= 224
        tl.store(data.to(tl.pointer_type(tl.int32)) + 112 + (pair - 224), words, mask=rotary)

        # The input is bf16 already, so rounding it first changes the rotary dims only.
        largest = tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), axis=1)
        largest = tl.maximum(largest, 1e-4)
        bits = largest.to(tl.uint32, bitcast=True)
        # 448 = 1.75 * 2^8: the smallest k with 448 * 2^k >= largest, plus 127.
        byte = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.uint32)
        inverse = ((254 - byte) << 23).to(tl.float32, bitcast=True)[:, None]
        low = _e4m3_code(even * inverse, FNUZ)
        high = _e4m3_code(odd * inverse, FNUZ)
        codes = (low | (high << 8)).to(tl.int16)
        tl.store(data.to(tl.pointer_type(tl.int16)) + pair, codes, mask=pair < 224)

        column = tl.arange(0, 8)
        if FNUZ:
            byte = byte + 1
        tl.store(scales + column, tl.where(column < 7, byte, 0).to(tl.uint8))


@triton.jit
def _fused_kernel(
    q_in,
    q_out,
    kv,
    k_cache,
    slots,
    positions,
    table,
    H,
    P,
    inserts,
    max_position,
    blocks,
    block_stride,
    block_size,
    eps,
    NORM: tl.constexpr,
    FNUZ: tl.constexpr,
):
    # Programs [row, 0..P-1] write one query head each; program [row, P] inserts the row's KV.
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    position = tl.load(positions + row)
    if head < H:
        _query_row(q_in, q_out, row, head, H, P, table, position, max_position, eps, NORM)
    else:
        if head < P:
            _zero_row(q_out, row, head, P)
        else:
            if row < inserts:
                _context_row(
                    kv,
                    k_cache,
                    slots,
                    row,
                    table,
                    position,
                    max_position,
                    blocks,
                    block_stride,
                    block_size,
                    FNUZ,
                )


@triton.jit
def _context_kernel(
    kv, k_cache, slots, positions, table, max_position, blocks, block_stride, block_size, FNUZ: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row)
    _context_row(kv, k_cache, slots, row, table, position, max_position, blocks, block_stride, block_size, FNUZ)


def _launch_fused(
    q_in: Tensor,
    q_out: Tensor,
    kv: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    position_ids: Tensor,
    cos_sin_cache: Tensor,
    eps: float,
    cache_block_size: int,
    apply_q_norm: bool,
    encoding: Encoding,
) -> None:
    rows, heads = q_in.shape[:2]
    padded_heads = q_out.shape[1]
    if rows == 0:
        return
    _fused_kernel[(rows, padded_heads + 1)](
        q_in,
        q_out,
        kv,
        k_cache,
        slot_mapping,
        position_ids,
        cos_sin_cache,
        heads,
        padded_heads,
        slot_mapping.shape[0],
        cos_sin_cache.shape[0],
        k_cache.shape[0],
        k_cache.stride(0),
        cache_block_size,
        eps,
        NORM=apply_q_norm,
        FNUZ=encoding is Encoding.FNUZ,
        num_warps=2,
        enable_fp_fusion=False,
    )


def _check(operator: str, k_cache: Tensor, *arguments: object) -> None:
    """The checks of the C++ library. It also judges slots and positions where the host can read them."""
    if k_cache.device.type == "cuda" and torch.version.hip is None:
        torch.ops.vllm_qout.check_capability(*torch.cuda.get_device_capability(k_cache.device))
    getattr(torch.ops.vllm_qout, f"check_{operator}")(*arguments)


def fused_qnorm_rope_kv_insert(
    q_in: Tensor,
    kv: Tensor,
    q_out: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    position_ids: Tensor,
    cos_sin_cache: Tensor,
    eps: float,
    cache_block_size: int,
    apply_q_norm: bool = True,
    encoding: Encoding | None = None,
) -> None:
    """Normalises and rotates `q_in` [N, H, 512] into `q_out` [>=N, P, 512] and inserts `kv` [N, 512].

    `encoding` None means the device's own. Raises RuntimeError before any launch.
    """
    _check(
        "fused_qnorm_rope_kv_insert",
        k_cache,
        q_in,
        kv,
        q_out,
        k_cache,
        slot_mapping,
        position_ids,
        cos_sin_cache,
        eps,
        cache_block_size,
    )
    _launch_fused(
        q_in,
        q_out,
        kv,
        k_cache,
        slot_mapping,
        position_ids,
        cos_sin_cache,
        eps,
        cache_block_size,
        apply_q_norm,
        encoding or device_encoding(k_cache.device),
    )


def qnorm_rope_kv_insert_(
    q: Tensor,
    kv: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    position_ids: Tensor,
    cos_sin_cache: Tensor,
    eps: float,
    cache_block_size: int,
    apply_q_norm: bool = True,
    encoding: Encoding | None = None,
) -> None:
    """The fused operator with `q` [N, H, 512] rewritten in place and no padding."""
    _check(
        "qnorm_rope_kv_insert_",
        k_cache,
        q,
        kv,
        k_cache,
        slot_mapping,
        position_ids,
        cos_sin_cache,
        eps,
        cache_block_size,
    )
    _launch_fused(
        q,
        q,
        kv,
        k_cache,
        slot_mapping,
        position_ids,
        cos_sin_cache,
        eps,
        cache_block_size,
        apply_q_norm,
        encoding or device_encoding(k_cache.device),
    )


def kv_rope_insert(
    kv: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    position_ids: Tensor,
    cos_sin_cache: Tensor,
    cache_block_size: int,
    encoding: Encoding | None = None,
) -> None:
    """Inserts `kv` [N, 512] without any query; rows past `slot_mapping` are ignored."""
    _check("kv_rope_insert", k_cache, kv, k_cache, slot_mapping, position_ids, cos_sin_cache, cache_block_size)
    if slot_mapping.shape[0] == 0:
        return
    _context_kernel[(slot_mapping.shape[0],)](
        kv,
        k_cache,
        slot_mapping,
        position_ids,
        cos_sin_cache,
        cos_sin_cache.shape[0],
        k_cache.shape[0],
        k_cache.stride(0),
        cache_block_size,
        FNUZ=(encoding or device_encoding(k_cache.device)) is Encoding.FNUZ,
        num_warps=1,
        enable_fp_fusion=False,
    )


IMPLEMENTATIONS: Mapping[str, Callable[..., None]] = {
    "fused_qnorm_rope_kv_insert": fused_qnorm_rope_kv_insert,
    "kv_rope_insert": kv_rope_insert,
    "qnorm_rope_kv_insert_": qnorm_rope_kv_insert_,
}


def register(dispatch_key: str = "CUDA") -> torch.library.Library:
    """Makes this module the implementation of `torch.ops.vllm_qout` for one dispatch key.

    AMD devices use the key "CUDA". The registration lives as long as the returned library.
    """
    library = torch.library.Library(ops.NAMESPACE, "IMPL")
    for name, implementation in IMPLEMENTATIONS.items():
        library.impl(name, implementation, dispatch_key)
    return library
