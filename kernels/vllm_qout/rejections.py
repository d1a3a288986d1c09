# SPDX-License-Identifier: Apache-2.0
"""Every bad call that the operators must reject before they write: one entry for each way to break a rule."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from vllm_qout.samples import FUSED, HEAD_DIM, IN_PLACE, OPERATORS, Inputs, make_cache, make_inputs

QUERY = (FUSED, IN_PLACE)
RULES = 40
CAPABILITY_RULE = 40  # judged from numbers, without a call
DEVICE_RULE = 36  # needs a device that no backend implements

Change = Callable[[Inputs], Inputs]


@dataclass(frozen=True)
class Rejection:
    """One bad input: the rule it breaks, the argument and the need that the message must name."""

    rule: int
    what: str
    operators: tuple[str, ...]
    argument: str
    needs: str
    change: Change

    def argument_in(self, operator: str) -> str:
        """The name that the broken argument has in `operator`."""
        return "q" if operator == IN_PLACE and self.argument == "q_in" else self.argument


def valid_inputs(device: str) -> Inputs:
    """The good call that each rejection spoils."""
    return make_inputs(rows=6, heads=5, padded_heads=8, block_size=32, device=device, positions=16)


def _reshape(name: str, *shape: int) -> Change:
    def change(inputs: Inputs) -> Inputs:
        tensor: Tensor = getattr(inputs, name)
        return inputs.but(**{name: tensor.new_zeros(shape)})

    return change


def _cast(name: str, dtype: torch.dtype) -> Change:
    return lambda inputs: inputs.but(**{name: getattr(inputs, name).to(dtype)})


def _spread(name: str) -> Change:
    """Same shape, but every second element of a wider last dimension."""

    def change(inputs: Inputs) -> Inputs:
        tensor: Tensor = getattr(inputs, name)
        wide = tensor.new_zeros(*tensor.shape[:-1], 2 * tensor.shape[-1])
        return inputs.but(**{name: wide[..., ::2]})

    return change


def _head_slice(inputs: Inputs) -> Inputs:
    rows, heads, _ = inputs.q_in.shape
    return inputs.but(q_in=inputs.q_in.new_zeros(rows, heads + 1, HEAD_DIM)[:, :heads])


def _unbound_kv(inputs: Inputs) -> Inputs:
    return inputs.but(kv=inputs.kv.new_zeros(inputs.kv.shape[0], 2, HEAD_DIM).unbind(1)[0])


def _output_slice(inputs: Inputs) -> Inputs:
    rows, heads, _ = inputs.q_out.shape
    return inputs.but(q_out=inputs.q_out.new_zeros(rows, 2 * heads, HEAD_DIM)[:, :heads])


def _output_transposed(inputs: Inputs) -> Inputs:
    rows, heads, _ = inputs.q_out.shape
    return inputs.but(q_out=inputs.q_out.new_zeros(heads, rows, HEAD_DIM).transpose(0, 1))


def _carve(pool: Tensor, like: Tensor) -> Tensor:
    """A tensor shaped like `like` over the first bytes of `pool`."""
    size = like.numel() * like.element_size()
    carved: Tensor = pool[:size].view(like.dtype).view(like.shape)
    return carved


def _share(first: str, second: str) -> Change:
    """Two arguments that start at the same byte."""

    def change(inputs: Inputs) -> Inputs:
        tensors = getattr(inputs, first), getattr(inputs, second)
        size = max(tensor.numel() * tensor.element_size() for tensor in tensors)
        pool = torch.zeros(size + 16, dtype=torch.uint8, device=inputs.kv.device)
        changed = {name: _carve(pool, like) for name, like in zip((first, second), tensors, strict=True)}
        storage = pool if "k_cache" in changed else inputs.storage
        return inputs.but(**changed, storage=storage)

    return change


def _shift(name: str, elements: int) -> Change:
    """The same values `elements` elements past an aligned address."""

    def change(inputs: Inputs) -> Inputs:
        tensor: Tensor = getattr(inputs, name)
        pool = tensor.new_zeros(tensor.numel() + elements)
        shifted = pool[elements:].view(tensor.shape)
        shifted.copy_(tensor)
        return inputs.but(**{name: shifted})

    return change


def _unaligned_cache(inputs: Inputs) -> Inputs:
    blocks, _ = inputs.k_cache.shape
    k_cache, storage = make_cache(blocks, inputs.cache_block_size, str(inputs.kv.device), offset=8)
    return inputs.but(k_cache=k_cache, storage=storage)


def _unaligned_index(name: str) -> Change:
    """An int64 tensor 4 bytes past an 8-byte boundary; torch makes such views of host memory only."""

    def change(inputs: Inputs) -> Inputs:
        tensor: Tensor = getattr(inputs, name)
        pool = bytearray(tensor.numel() * 8 + 16)
        start = -torch.frombuffer(pool, dtype=torch.uint8).data_ptr() % 8 + 4
        view = torch.frombuffer(pool, dtype=torch.int64, count=tensor.numel(), offset=start)
        view.copy_(tensor)
        return inputs.but(**{name: view})

    return change


def _cache_strides(stride: Callable[[int], int], step: int = 1) -> Change:
    """A cache over its own storage with another block stride or byte step."""

    def change(inputs: Inputs) -> Inputs:
        blocks, width = inputs.k_cache.shape
        storage = inputs.storage.new_zeros(2 * blocks * width * step + 64)
        return inputs.but(k_cache=storage.as_strided((blocks, width), (stride(width), step)), storage=storage)

    return change


def _cache_3d(inputs: Inputs) -> Inputs:
    blocks, width = inputs.k_cache.shape
    return inputs.but(k_cache=inputs.k_cache.view(blocks, inputs.cache_block_size, width // inputs.cache_block_size))


def _block_size(value: int) -> Change:
    return lambda inputs: inputs.but(cache_block_size=value)


def _eps(value: float) -> Change:
    return lambda inputs: inputs.but(eps=value)


def _elsewhere(name: str) -> Change:
    """An argument on the meta device, or on the host when the others are on a GPU."""

    def change(inputs: Inputs) -> Inputs:
        other = "meta" if inputs.kv.device.type == "cpu" else "cpu"
        return inputs.but(**{name: getattr(inputs, name).to(other)})

    return change


def _sparse(name: str) -> Change:
    return lambda inputs: inputs.but(**{name: getattr(inputs, name).to_sparse()})


@cache
def _start_lazy_device() -> None:
    """Once a process: torch refuses a second start."""
    from torch._lazy import ts_backend

    ts_backend.init()


def on_unknown_device(inputs: Inputs) -> Inputs:
    """The inputs on torch's lazy device, for which nobody registers kernels of ours."""
    _start_lazy_device()
    names = ("q_in", "kv", "q_out", "k_cache", "slot_mapping", "position_ids", "cos_sin_cache")
    return inputs.but(**{name: getattr(inputs, name).to("lazy") for name in names})


def _many(rule: int, operators: tuple[str, ...], argument: str, needs: str, **changes: Change) -> list[Rejection]:
    return [
        Rejection(rule, what.replace("_", " "), operators, argument, needs, change) for what, change in changes.items()
    ]


def rejections(device: str) -> list[Rejection]:
    """All bad inputs that can be made on `device`, except those of rules 36 and 40."""
    host = torch.device(device).type == "cpu"
    tensors = ("q_in", "kv", "q_out", "slot_mapping", "position_ids", "cos_sin_cache")
    using = {"q_in": QUERY, "q_out": (FUSED,)}
    found = [
        *_many(1, QUERY, "q_in", "3 dimensions", two_dimensions=_reshape("q_in", 6, HEAD_DIM)),
        *_many(2, QUERY, "q_in", "last dimension of 512", last_dimension=_reshape("q_in", 6, 5, 256)),
        *_many(3, QUERY, "q_in", "contiguous", head_slice=_head_slice, spread=_spread("q_in")),
        *_many(
            4, QUERY, "q_in", "dtype BFloat16",
            float32=_cast("q_in", torch.float32), float16=_cast("q_in", torch.float16),
            e4m3=_cast("q_in", torch.float8_e4m3fn),
        ),
        *_many(
            5, QUERY, "q_in", "1 to 128 heads",
            no_heads=_reshape("q_in", 6, 0, HEAD_DIM), heads_129=_reshape("q_in", 6, 129, HEAD_DIM),
        ),
        *_many(6, OPERATORS, "kv", "2 dimensions", three_dimensions=_reshape("kv", 6, 1, HEAD_DIM)),
        *_many(7, OPERATORS, "kv", "last dimension of 512", last_dimension=_reshape("kv", 6, 576)),
        *_many(8, OPERATORS, "kv", "contiguous", unbound=_unbound_kv, spread=_spread("kv")),
        *_many(9, OPERATORS, "kv", "dtype BFloat16", float32=_cast("kv", torch.float32)),
        *_many(10, QUERY, "kv", "the 6 rows", five_rows=_reshape("kv", 5, HEAD_DIM)),
        *_many(11, (FUSED,), "q_out", "3 dimensions", two_dimensions=_reshape("q_out", 6, HEAD_DIM)),
        *_many(12, (FUSED,), "q_out", "last dimension of 512", last_dimension=_reshape("q_out", 6, 8, 448)),
        *_many(13, (FUSED,), "q_out", "at least the 6 rows", five_rows=_reshape("q_out", 5, 8, HEAD_DIM)),
        *_many(14, (FUSED,), "q_out", "at least the 5 heads", four_heads=_reshape("q_out", 6, 4, HEAD_DIM)),
        *_many(15, (FUSED,), "q_out", "8, 16, 32, 64 or 128", ten_heads=_reshape("q_out", 6, 10, HEAD_DIM)),
        *_many(16, (FUSED,), "q_out", "dtype BFloat16", float32=_cast("q_out", torch.float32)),
        *_many(17, (FUSED,), "q_out", "contiguous", transposed=_output_transposed, head_slice=_output_slice),
        *_many(18, (FUSED,), "q_out", "memory of its own", shares_q_in=_share("q_out", "q_in")),
        *_many(
            21, OPERATORS, "k_cache", "dtype Byte",
            bfloat16=_cast("k_cache", torch.bfloat16), e4m3=_cast("k_cache", torch.float8_e4m3fn),
        ),
        *_many(22, OPERATORS, "k_cache", "2 dimensions", three_dimensions=_cache_3d),
        *_many(
            23, OPERATORS, "k_cache", "cache_block_size * 584",
            narrow=_reshape("k_cache", 2, 32 * 576), other_block_size=_block_size(64),
        ),
        *_many(24, OPERATORS, "k_cache", "stride of 1", step_of_two=_cache_strides(lambda w: 2 * w, 2)),
        *_many(
            25, OPERATORS, "k_cache", "block stride",
            overlapping_blocks=_cache_strides(lambda w: w - 16), uneven=_cache_strides(lambda w: w + 8),
        ),
        *_many(26, OPERATORS, "k_cache", "at least 1 block", no_blocks=_reshape("k_cache", 0, 32 * 584)),
        *_many(
            27, OPERATORS, "cache_block_size", "positive multiple of 32",
            zero=_block_size(0), negative=_block_size(-32), uneven=_block_size(33),
        ),
        *_many(
            28, OPERATORS, "slot_mapping", "1 dimension", two_dimensions=_reshape("slot_mapping", 6, 1)
        ),
        *_many(28, OPERATORS, "slot_mapping", "contiguous", spread=_spread("slot_mapping")),
        *_many(29, OPERATORS, "slot_mapping", "dtype Long", int32=_cast("slot_mapping", torch.int32)),
        *_many(30, OPERATORS, "slot_mapping", "at most the 6 rows", longer=_reshape("slot_mapping", 7)),
        *_many(31, OPERATORS, "position_ids", "1 dimension", scalar=_reshape("position_ids")),
        *_many(31, OPERATORS, "position_ids", "contiguous", spread=_spread("position_ids")),
        *_many(31, OPERATORS, "position_ids", "dtype Long", int32=_cast("position_ids", torch.int32)),
        *_many(32, OPERATORS, "position_ids", "exactly the 6 rows", shorter=_reshape("position_ids", 5)),
        *_many(32, OPERATORS, "position_ids", "1 dimension", multimodal=_reshape("position_ids", 3, 6)),
        *_many(33, OPERATORS, "cos_sin_cache", "dtype Float", bfloat16=_cast("cos_sin_cache", torch.bfloat16)),
        *_many(
            34, OPERATORS, "cos_sin_cache", "shape [positions, 64]",
            one_dimension=_reshape("cos_sin_cache", 64), width=_reshape("cos_sin_cache", 16, 128),
            empty=_reshape("cos_sin_cache", 0, 64),
        ),
        *_many(34, OPERATORS, "cos_sin_cache", "contiguous", spread=_spread("cos_sin_cache")),
        *_many(37, OPERATORS, "k_cache", "16-byte aligned", shifted=_unaligned_cache),
        *_many(
            38, QUERY, "eps", "finite value of at least 0",
            negative=_eps(-1e-6), nan=_eps(math.nan), infinite=_eps(math.inf),
        ),
        *_many(39, OPERATORS, "kv", "strided layout", sparse=_sparse("kv")),
        *_many(39, (FUSED,), "q_out", "strided layout", sparse=_sparse("q_out")),
    ]  # fmt: skip
    for name in ("kv", "slot_mapping", "position_ids", "cos_sin_cache"):
        share = {f"shares_{name}": _share("q_out", name)}
        found += _many(19, (FUSED,), "q_out", "memory of its own", **share)
        share = {f"shares_{name}": _share("q_in", name)}
        found += _many(19, (IN_PLACE,), "q_in", "memory of its own", **share)
        share = {f"shares_{name}": _share("k_cache", name)}
        found += _many(20, OPERATORS, "k_cache", "memory of its own", **share)
    found += _many(19, (FUSED,), "q_out", "memory of its own", shares_k_cache=_share("q_out", "k_cache"))
    found += _many(20, QUERY, "q_in", "memory of its own", shares_k_cache=_share("q_in", "k_cache"))
    for name in tensors:
        found += _many(
            35, using.get(name, OPERATORS), name, "the device of k_cache", **{f"{name}_elsewhere": _elsewhere(name)}
        )
    for name, elements in (("q_in", 4), ("kv", 4), ("q_out", 4), ("cos_sin_cache", 2)):
        operators = using.get(name, OPERATORS)
        found += _many(37, operators, name, "16-byte aligned", **{f"{name}_shifted": _shift(name, elements)})
    if host:
        for name in ("slot_mapping", "position_ids"):
            found += _many(37, OPERATORS, name, "8-byte aligned", **{f"{name}_shifted": _unaligned_index(name)})
    return found


def value_rejections() -> list[Rejection]:
    """Bad values in device memory: the CPU kernel always rejects them, the GPU in debug mode."""

    def slot(value: int, row: int = 2) -> Change:
        def change(inputs: Inputs) -> Inputs:
            slots = inputs.slot_mapping.clone()
            slots[row] = value
            return inputs.but(slot_mapping=slots)

        return change

    def position(value: int) -> Change:
        def change(inputs: Inputs) -> Inputs:
            positions = inputs.position_ids.clone()
            positions[-1] = value
            return inputs.but(position_ids=positions)

        return change

    def repeated(inputs: Inputs) -> Inputs:
        slots = inputs.slot_mapping.clone()
        slots[4] = slots[1]
        return inputs.but(slot_mapping=slots)

    return [
        *_many(
            0, OPERATORS, "slot_mapping", "-1 or a slot below 64",
            beyond_the_cache=slot(64), negative=slot(-2), huge=slot(1 << 62),
        ),
        *_many(0, OPERATORS, "slot_mapping", "every slot at most once", repeated=repeated),
        *_many(
            0, OPERATORS, "position_ids", "0 to 15",
            beyond_the_table=position(16), negative=position(-1),
        ),
    ]  # fmt: skip
