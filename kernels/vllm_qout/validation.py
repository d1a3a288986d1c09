# SPDX-License-Identifier: Apache-2.0
"""The argument checks of the operators in Python, for backends without the C++ library.

Same rules, order and wording as `csrc/validation.cpp`: each message names the argument, what it got and
what it needs. Nothing here reads device memory.
"""

import ctypes
import math
from dataclasses import dataclass

import torch
from torch import Tensor

HEAD_DIM = 512
ROPE_DIM = 64
RECORD_BYTES = 584
MAX_HEADS = 128
PADDED_HEADS = (8, 16, 32, 64, 128)

_DTYPE_NAMES = {
    torch.bfloat16: "BFloat16",
    torch.float16: "Half",
    torch.float32: "Float",
    torch.float64: "Double",
    torch.uint8: "Byte",
    torch.int8: "Char",
    torch.int16: "Short",
    torch.int32: "Int",
    torch.int64: "Long",
    torch.bool: "Bool",
    torch.float8_e4m3fn: "Float8_e4m3fn",
    torch.float8_e5m2: "Float8_e5m2",
}


class ArgumentError(RuntimeError):
    """An operator argument that the contract forbids. RuntimeError, as the C++ checks raise."""


def _reject(argument: str, got: object, needs: str) -> None:
    raise ArgumentError(f"{argument}: got {got}; needs {needs}")


def _shape(tensor: Tensor) -> str:
    return f"shape {list(tensor.shape)}"


def _strides(tensor: Tensor) -> str:
    return f"{_shape(tensor)} with strides {list(tensor.stride())}"


def _check_placement(name: str, tensor: Tensor, k_cache: Tensor) -> None:
    if tensor.layout != torch.strided:
        _reject(name, "a tensor that is not strided", "a dense strided layout")
    if tensor.device != k_cache.device:
        _reject(name, f"device {tensor.device}", f"the device of k_cache, device {k_cache.device}")


def _check_dtype(name: str, tensor: Tensor, wanted: torch.dtype) -> None:
    if tensor.dtype != wanted:
        got = _DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))
        _reject(name, f"dtype {got}", f"dtype {_DTYPE_NAMES[wanted]}")


def _check_contiguous(name: str, tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        _reject(name, _strides(tensor), "a contiguous tensor")


def _check_query(name: str, q: Tensor) -> None:
    if q.dim() != 3:
        _reject(name, _shape(q), "3 dimensions [rows, heads, 512]")
    if q.shape[2] != HEAD_DIM:
        _reject(name, _shape(q), "a last dimension of 512")
    if not 1 <= q.shape[1] <= MAX_HEADS:
        _reject(name, _shape(q), "1 to 128 heads")
    _check_dtype(name, q, torch.bfloat16)
    _check_contiguous(name, q)


def _check_output(q_out: Tensor, q_in: Tensor) -> None:
    if q_out.dim() != 3:
        _reject("q_out", _shape(q_out), "3 dimensions [rows, padded heads, 512]")
    if q_out.shape[2] != HEAD_DIM:
        _reject("q_out", _shape(q_out), "a last dimension of 512")
    if q_out.shape[0] < q_in.shape[0]:
        _reject("q_out", _shape(q_out), f"at least the {q_in.shape[0]} rows of q_in")
    if q_out.shape[1] < q_in.shape[1]:
        _reject("q_out", _shape(q_out), f"at least the {q_in.shape[1]} heads of q_in")
    if q_out.shape[1] not in PADDED_HEADS:
        _reject("q_out", _shape(q_out), "8, 16, 32, 64 or 128 padded heads")
    _check_dtype("q_out", q_out, torch.bfloat16)
    _check_contiguous("q_out", q_out)


def _check_context(kv: Tensor) -> None:
    if kv.dim() != 2:
        _reject("kv", _shape(kv), "2 dimensions [rows, 512]")
    if kv.shape[1] != HEAD_DIM:
        _reject("kv", _shape(kv), "a last dimension of 512")
    _check_dtype("kv", kv, torch.bfloat16)
    _check_contiguous("kv", kv)


def _check_rows(kv: Tensor, name: str, query: Tensor) -> None:
    if kv.shape[0] != query.shape[0]:
        _reject("kv", _shape(kv), f"the {query.shape[0]} rows of {name}")


def _check_cache(k_cache: Tensor, block_size: int, inserts: int) -> None:
    if block_size <= 0 or block_size % 32:
        _reject("cache_block_size", block_size, "a positive multiple of 32")
    _check_dtype("k_cache", k_cache, torch.uint8)
    if k_cache.dim() != 2:
        _reject("k_cache", _shape(k_cache), "2 dimensions [blocks, cache_block_size * 584]")
    width = block_size * RECORD_BYTES
    if k_cache.shape[1] != width:
        _reject(
            "k_cache",
            _shape(k_cache),
            f"rows of cache_block_size * 584 bytes with cache_block_size {block_size}",
        )
    if k_cache.stride(1) != 1:
        _reject("k_cache", _strides(k_cache), "a stride of 1 inside a block")
    if k_cache.stride(0) < width or k_cache.stride(0) % 16:
        _reject("k_cache", _strides(k_cache), f"a block stride of at least {width} bytes, in multiples of 16")
    if k_cache.shape[0] == 0 and inserts:
        _reject("k_cache", _shape(k_cache), f"at least 1 block for {inserts} slots")


def _check_indices(slot_mapping: Tensor, position_ids: Tensor, rows: int) -> None:
    for name, tensor in (("slot_mapping", slot_mapping), ("position_ids", position_ids)):
        if tensor.dim() != 1:
            _reject(name, _shape(tensor), "1 dimension")
        _check_dtype(name, tensor, torch.int64)
        _check_contiguous(name, tensor)
    if slot_mapping.shape[0] > rows:
        _reject("slot_mapping", _shape(slot_mapping), f"at most the {rows} rows of kv")
    if position_ids.shape[0] != rows:
        _reject("position_ids", _shape(position_ids), f"exactly the {rows} rows of kv")


def _check_table(table: Tensor) -> None:
    _check_dtype("cos_sin_cache", table, torch.float32)
    if table.dim() != 2 or table.shape[1] != ROPE_DIM or table.shape[0] == 0:
        _reject("cos_sin_cache", _shape(table), "shape [positions, 64] with at least 1 position")
    _check_contiguous("cos_sin_cache", table)


def _check_eps(eps: float) -> None:
    # The kernels use eps as float32, where a large double becomes infinite.
    if not (math.isfinite(ctypes.c_float(eps).value) and eps >= 0):
        _reject("eps", f"{eps:g}", "a finite value of at least 0")


def _check_aligned(name: str, tensor: Tensor, alignment: int) -> None:
    past = tensor.data_ptr() % alignment
    if tensor.numel() and past:
        _reject(
            name,
            f"an address {past} bytes past an alignment boundary",
            f"a {alignment}-byte aligned address",
        )


@dataclass(frozen=True)
class _Extent:
    """Bytes of a tensor as `count` pieces, `step` apart: one piece, except for a strided cache."""

    start: int
    piece: int
    step: int
    count: int

    @classmethod
    def contiguous(cls, tensor: Tensor) -> "_Extent":
        return cls(tensor.data_ptr(), tensor.nbytes, tensor.nbytes, 1 if tensor.nbytes else 0)

    @classmethod
    def cache(cls, k_cache: Tensor) -> "_Extent":
        return cls(k_cache.data_ptr(), k_cache.shape[1], k_cache.stride(0), k_cache.shape[0])

    def overlaps(self, other: "_Extent") -> bool:
        """Whether a piece shares a byte with the single piece of `other`."""
        if not self.count or not other.count:
            return False
        past = other.start - (self.start + self.piece)
        index = 0 if past < 0 else past // self.step + 1
        return index < self.count and self.start + index * self.step < other.start + other.piece


def _check_apart(written: str, extent: _Extent, name: str, other: Tensor) -> None:
    if extent.overlaps(_Extent.contiguous(other)):
        _reject(written, f"memory that overlaps {name}", "memory of its own")


@dataclass(frozen=True)
class _Shared:
    """The arguments of the KV half, which every operator has."""

    kv: Tensor
    k_cache: Tensor
    slot_mapping: Tensor
    position_ids: Tensor
    cos_sin_cache: Tensor
    cache_block_size: int

    def check_placement(self) -> None:
        for name in ("k_cache", "kv", "slot_mapping", "position_ids", "cos_sin_cache"):
            _check_placement(name, getattr(self, name), self.k_cache)
        if self.k_cache.device.type not in ("cpu", "cuda"):
            _reject("k_cache", f"device {self.k_cache.device}", "a device with an implementation: cpu or cuda")
        if self.k_cache.device.type == "cuda" and torch.version.hip is None:
            check_capability(*torch.cuda.get_device_capability(self.k_cache.device))

    def check(self) -> None:
        _check_context(self.kv)
        _check_indices(self.slot_mapping, self.position_ids, self.kv.shape[0])
        _check_table(self.cos_sin_cache)
        _check_cache(self.k_cache, self.cache_block_size, self.slot_mapping.shape[0])

    def check_memory(self) -> None:
        _check_aligned("kv", self.kv, 16)
        _check_aligned("k_cache", self.k_cache, 16)
        _check_aligned("slot_mapping", self.slot_mapping, 8)
        _check_aligned("position_ids", self.position_ids, 8)
        _check_aligned("cos_sin_cache", self.cos_sin_cache, 16)
        cache = _Extent.cache(self.k_cache)
        for name in ("kv", "slot_mapping", "position_ids", "cos_sin_cache"):
            _check_apart("k_cache", cache, name, getattr(self, name))

    def check_query_memory(self, name: str, query: Tensor) -> None:
        _check_aligned(name, query, 16)
        if _Extent.cache(self.k_cache).overlaps(_Extent.contiguous(query)):
            _reject(name, "memory that overlaps k_cache", "memory of its own")

    def check_written_query_memory(self, name: str, query: Tensor) -> None:
        self.check_query_memory(name, query)
        extent = _Extent.contiguous(query)
        for other in ("kv", "slot_mapping", "position_ids", "cos_sin_cache"):
            _check_apart(name, extent, other, getattr(self, other))


def check_capability(major: int, minor: int) -> None:
    """Rejects NVIDIA cards older than compute capability 8.0."""
    if major < 8:
        _reject("k_cache", f"a card of compute capability {major}.{minor}", "compute capability 8.0 or newer")


def check_fused(
    q_in: Tensor,
    kv: Tensor,
    q_out: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    position_ids: Tensor,
    cos_sin_cache: Tensor,
    eps: float,
    cache_block_size: int,
) -> None:
    """Checks the arguments of `fused_qnorm_rope_kv_insert`; raises ArgumentError."""
    shared = _Shared(kv, k_cache, slot_mapping, position_ids, cos_sin_cache, cache_block_size)
    _check_placement("q_in", q_in, k_cache)
    _check_placement("q_out", q_out, k_cache)
    shared.check_placement()
    _check_query("q_in", q_in)
    _check_output(q_out, q_in)
    _check_context(kv)
    _check_rows(kv, "q_in", q_in)
    shared.check()
    _check_eps(eps)
    shared.check_memory()
    shared.check_query_memory("q_in", q_in)
    shared.check_written_query_memory("q_out", q_out)
    _check_apart("q_out", _Extent.contiguous(q_out), "q_in", q_in)


def check_kv(
    kv: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    position_ids: Tensor,
    cos_sin_cache: Tensor,
    cache_block_size: int,
) -> None:
    """Checks the arguments of `kv_rope_insert`; raises ArgumentError."""
    shared = _Shared(kv, k_cache, slot_mapping, position_ids, cos_sin_cache, cache_block_size)
    shared.check_placement()
    shared.check()
    shared.check_memory()


def check_in_place(
    q: Tensor,
    kv: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    position_ids: Tensor,
    cos_sin_cache: Tensor,
    eps: float,
    cache_block_size: int,
) -> None:
    """Checks the arguments of `qnorm_rope_kv_insert_`; raises ArgumentError."""
    shared = _Shared(kv, k_cache, slot_mapping, position_ids, cos_sin_cache, cache_block_size)
    _check_placement("q", q, k_cache)
    shared.check_placement()
    _check_query("q", q)
    _check_context(kv)
    _check_rows(kv, "q", q)
    shared.check()
    _check_eps(eps)
    shared.check_memory()
    shared.check_written_query_memory("q", q)
