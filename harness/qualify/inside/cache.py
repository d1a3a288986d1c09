# SPDX-License-Identifier: Apache-2.0
"""The KV cache of one rank as tensors of blocks: geometry, digests, poison.

A block is hashed as the engine views it. Pages that several groups share have padding between the views, and padding
is not data.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

POISON = 0xA5
"""Finite as float32, bfloat16 and float8_e4m3: poison in a masked slot must not become NaN and spread."""

BATCH_BYTES = 64 << 20
"""How much of the cache is copied to the host at once."""


@dataclass(frozen=True)
class KvTensor:
    """One part of one layer's cache. `tensor` counts blocks on axis 0: [blocks, ...]."""

    group: int
    layer: str
    part: int
    spec: str
    tokens_per_block: int
    window: int | None
    cacheable: bool | None
    tensor: torch.Tensor

    @property
    def block_bytes(self) -> int:
        return self.tensor[0].numel() * self.tensor.element_size()

    @property
    def row_axis(self) -> int | None:
        """The axis of one block that counts rows; None for a layout that is not known.

        The engine lays blocks out as [heads, rows, content], latent attention as [rows, content].
        """
        return {4: 1, 3: 0}.get(self.tensor.dim())

    @property
    def token_axis(self) -> int | None:
        """The row axis where each row is one token; compressed attention keeps one row for several."""
        axis = self.row_axis
        return axis if axis is not None and self.tensor.shape[1 + axis] == self.tokens_per_block else None

    def describe(self) -> dict[str, Any]:
        return {
            "group": self.group,
            "layer": self.layer,
            "part": self.part,
            "spec": self.spec,
            "tokens_per_block": self.tokens_per_block,
            "window": self.window,
            "cacheable": self.cacheable,
            "dtype": str(self.tensor.dtype),
            "shape": list(self.tensor.shape),
            "stride": list(self.tensor.stride()),
            "block_bytes": self.block_bytes,
        }


def synchronize() -> None:
    """Wait for the device: with asynchronous scheduling a returned step may still be running."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def tensors_of(worker: Any) -> tuple[KvTensor, ...]:
    """Every cache tensor of this rank, in the order of groups and of their layers."""
    config = worker.model_runner.kv_cache_config
    layers = worker.vllm_config.compilation_config.static_forward_context
    found = []
    for index, group in enumerate(config.kv_cache_groups):
        for name in group.layer_names:
            cache = layers[name].kv_cache
            parts = cache if isinstance(cache, (list, tuple)) else [cache]
            # A group of mixed layers keeps one spec for each of them.
            spec = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)
            for part, tensor in enumerate(parts):
                if isinstance(tensor, torch.Tensor) and tensor.numel():
                    found.append(
                        KvTensor(
                            group=index,
                            layer=name,
                            part=part,
                            spec=type(spec).__name__,
                            tokens_per_block=group.kv_cache_spec.block_size,
                            window=getattr(spec, "sliding_window", None),
                            cacheable=getattr(group.kv_cache_spec, "prefix_cacheable", None),
                            tensor=_by_block(tensor, config.num_blocks),
                        )
                    )
    return tuple(found)


def _by_block(tensor: torch.Tensor, blocks: int) -> torch.Tensor:
    """The same memory with axis 0 counting the manager's blocks; kernels may split each into several rows."""
    for axis, size in enumerate(tensor.shape):
        if size >= blocks and size % blocks == 0:
            moved = tensor.movedim(axis, 0)
            return moved if size == blocks else moved.unflatten(0, (blocks, size // blocks))
    raise RuntimeError(f"no axis of {tuple(tensor.shape)} counts {blocks} blocks")


def read_blocks(tensor: torch.Tensor, blocks: Sequence[int]) -> Iterator[torch.Tensor]:
    """Each named block as a contiguous host tensor, copied in batches."""
    size = max(1, tensor[0].numel() * tensor.element_size())
    step = max(1, BATCH_BYTES // size)
    for start in range(0, len(blocks), step):
        index = torch.tensor(blocks[start : start + step], dtype=torch.long, device=tensor.device)
        yield from tensor.index_select(0, index).contiguous().cpu()


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(raw(tensor)).hexdigest()


def raw(tensor: torch.Tensor) -> memoryview:
    """The bytes of a host tensor."""
    return memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def fill(tensor: torch.Tensor, value: int = POISON) -> None:
    """Set every byte of a view with one strided write."""
    if tensor.stride(-1) == 1:
        tensor.view(torch.uint8).fill_(value)
    else:
        element = torch.full((tensor.element_size(),), value, dtype=torch.uint8, device=tensor.device)
        tensor.copy_(element.view(tensor.dtype).expand(tensor.shape))


def poison(tensors: Sequence[KvTensor]) -> dict[str, Any]:
    """Overwrite the whole cache, then read blocks back. Groups may share memory: each view is written once."""
    views = {(item.tensor.data_ptr(), item.tensor.shape, item.tensor.stride()): item.tensor for item in tensors}
    for view in views.values():
        fill(view)
    synchronize()
    return {
        "value": POISON,
        "tensors": len(tensors),
        "views": len(views),
        "bytes": sum(view.numel() * view.element_size() for view in views.values()),
        "verified": all(_poisoned(view) for view in views.values()),
    }


def _poisoned(view: torch.Tensor) -> bool:
    """Whether the first blocks, which are handed out first, the last and some between hold nothing but poison."""
    count = view.shape[0]
    sample = sorted({*range(min(64, count)), *range(0, count, max(1, count // 64)), count - 1})
    return all(bool((block.reshape(-1).view(torch.uint8) == POISON).all()) for block in read_blocks(view, sample))
