# SPDX-License-Identifier: Apache-2.0
"""The operators of `torch.ops.vllm_qout`, loaded on import, with their fakes and typed wrappers.

Set `VLLM_QOUT_DEBUG=1`, or call `set_debug`, to check slots and positions of GPU calls too: each
call then copies both index tensors to the host and waits for them (never while a CUDA graph is being
captured). CPU calls always check them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

NAMESPACE = "vllm_qout"
HEAD_DIM = 512
ROPE_DIM = 64
TOKEN_BYTES = 584
PADDED_HEADS = (8, 16, 32, 64, 128)
MINIMUM_TORCH = (2, 11)
CARDS = ((9, 0), (10, 0), (12, 0))

LIBRARY = Path(__file__).with_name("libvllm_qout.so")
CUDA_LIBRARY = Path(__file__).with_name("libvllm_qout_cuda.so")


class LibraryError(ImportError):
    """A compiled library is absent or does not fit this torch or this card; the text names a remedy."""


def torch_release(version: str) -> tuple[int, int]:
    """Major and minor release of a torch version text such as '2.13.0+cu130'."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        raise LibraryError(f"torch: got version {version!r}; needs a release number like 2.13.0")
    return int(match[1]), int(match[2])


def check_torch(version: str) -> None:
    """Raise LibraryError for a torch release older than the stable ABI that the libraries use."""
    if torch_release(version) < MINIMUM_TORCH:
        needed = ".".join(map(str, MINIMUM_TORCH))
        raise LibraryError(f"torch: got version {version}; vllm_qout needs {needed} or newer: install a newer torch")


def load_library(path: Path) -> None:
    """Load one compiled library into torch's operator registry; raises LibraryError with a remedy."""
    if not path.is_file():
        raise LibraryError(
            f"{path}: not found; install the vllm-qout wheel, or run `python build_backend.py` in kernels/"
        )
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise LibraryError(
            f"{path.name}: cannot be loaded with torch {torch.__version__}: {error}; "
            "install the vllm-qout wheel built for this platform, with the torch it names"
        ) from error


def _load() -> bool:
    """Load what this torch can use; returns whether the CUDA kernels are among it."""
    check_torch(torch.__version__)
    load_library(LIBRARY)
    if torch.version.cuda is None or not CUDA_LIBRARY.is_file():
        return False
    load_library(CUDA_LIBRARY)
    return True


CUDA_LOADED: bool = _load()


def require_cuda(device_index: int = 0) -> None:
    """Raise LibraryError unless the CUDA kernels are loaded and run on the card `device_index`."""
    if torch.version.cuda is None:
        raise LibraryError(
            f"torch {torch.__version__}: not a CUDA build; install torch for CUDA, or use the Triton backend"
        )
    if not CUDA_LOADED:
        raise LibraryError(f"{CUDA_LIBRARY}: not found; install a vllm-qout wheel that was built with CUDA")
    if not torch.cuda.is_available():
        raise LibraryError("no NVIDIA GPU is visible; check nvidia-smi and CUDA_VISIBLE_DEVICES")
    card = torch.cuda.get_device_capability(device_index)
    try:
        torch.ops.vllm_qout.check_capability(*card)
    except RuntimeError as error:
        raise LibraryError(f"cuda:{device_index}: {error}") from error


def _shape_error(argument: str, tensor: Tensor, needs: str) -> RuntimeError:
    return RuntimeError(f"{argument}: got shape {list(tensor.shape)}; needs {needs}")


def _fake_shape(argument: str, tensor: Tensor, dtype: torch.dtype, sizes: Sequence[object | None]) -> None:
    """Shape and dtype of one argument; None in `sizes` leaves that dimension free."""
    if tensor.dtype != dtype:
        raise RuntimeError(f"{argument}: got dtype {tensor.dtype}; needs {dtype}")
    if tensor.dim() != len(sizes):
        raise _shape_error(argument, tensor, f"{len(sizes)} dimensions")
    for got, wanted in zip(tensor.shape, sizes, strict=True):
        message = f"{argument}: got a dimension of {got}; needs {wanted}"
        torch._check(wanted is None or got == wanted, lambda text=message: text)


def _fake_device(k_cache: Tensor, **tensors: Tensor) -> None:
    # A meta tensor among real ones selects the fake: without this the call would silently do nothing.
    for argument, tensor in tensors.items():
        if tensor.device != k_cache.device:
            raise RuntimeError(
                f"{argument}: got device {tensor.device}; needs the device of k_cache, device {k_cache.device}"
            )


def _fake_context(
    kv: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    position_ids: Tensor,
    cos_sin_cache: Tensor,
    cache_block_size: int,
) -> None:
    _fake_device(k_cache, kv=kv, slot_mapping=slot_mapping, position_ids=position_ids, cos_sin_cache=cos_sin_cache)
    _fake_shape("kv", kv, torch.bfloat16, (None, HEAD_DIM))
    _fake_shape("k_cache", k_cache, torch.uint8, (None, cache_block_size * TOKEN_BYTES))
    _fake_shape("slot_mapping", slot_mapping, torch.int64, (None,))
    _fake_shape("position_ids", position_ids, torch.int64, (kv.shape[0],))
    _fake_shape("cos_sin_cache", cos_sin_cache, torch.float32, (None, ROPE_DIM))
    torch._check(
        slot_mapping.shape[0] <= kv.shape[0],
        lambda: f"slot_mapping: got {slot_mapping.shape[0]} slots; needs at most the rows of kv",
    )


@torch.library.register_fake("vllm_qout::fused_qnorm_rope_kv_insert")
def _fused_fake(
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
) -> None:
    _fake_device(k_cache, q_in=q_in, q_out=q_out)
    _fake_shape("q_in", q_in, torch.bfloat16, (None, None, HEAD_DIM))
    _fake_shape("q_out", q_out, torch.bfloat16, (None, None, HEAD_DIM))
    torch._check(q_out.shape[0] >= q_in.shape[0], lambda: f"q_out: got {q_out.shape[0]} rows; needs those of q_in")
    torch._check(q_out.shape[1] >= q_in.shape[1], lambda: f"q_out: got {q_out.shape[1]} heads; needs those of q_in")
    torch._check(kv.shape[0] == q_in.shape[0], lambda: f"kv: got {kv.shape[0]} rows; needs those of q_in")
    _fake_context(kv, k_cache, slot_mapping, position_ids, cos_sin_cache, cache_block_size)


@torch.library.register_fake("vllm_qout::kv_rope_insert")
def _kv_fake(
    kv: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    position_ids: Tensor,
    cos_sin_cache: Tensor,
    cache_block_size: int,
) -> None:
    _fake_context(kv, k_cache, slot_mapping, position_ids, cos_sin_cache, cache_block_size)


@torch.library.register_fake("vllm_qout::qnorm_rope_kv_insert_")
def _in_place_fake(
    q: Tensor,
    kv: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    position_ids: Tensor,
    cos_sin_cache: Tensor,
    eps: float,
    cache_block_size: int,
    apply_q_norm: bool = True,
) -> None:
    _fake_device(k_cache, q=q)
    _fake_shape("q", q, torch.bfloat16, (None, None, HEAD_DIM))
    torch._check(kv.shape[0] == q.shape[0], lambda: f"kv: got {kv.shape[0]} rows; needs those of q")
    _fake_context(kv, k_cache, slot_mapping, position_ids, cos_sin_cache, cache_block_size)


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
) -> None:
    """Norm and rotate `q_in` [N, H, 512] into `q_out` [R >= N, P, 512]; insert `kv` into `k_cache`.

    Heads H to P-1 of the first N rows become zero; rows from N on stay untouched. Raises RuntimeError
    before any write when an argument breaks the contract.
    """
    torch.ops.vllm_qout.fused_qnorm_rope_kv_insert(
        q_in, kv, q_out, k_cache, slot_mapping, position_ids, cos_sin_cache, eps, cache_block_size, apply_q_norm
    )


def kv_rope_insert(
    kv: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    position_ids: Tensor,
    cos_sin_cache: Tensor,
    cache_block_size: int,
) -> None:
    """Rotate and quantise `kv` [N, 512] into the 584-byte records of `k_cache`; no query is touched."""
    torch.ops.vllm_qout.kv_rope_insert(kv, k_cache, slot_mapping, position_ids, cos_sin_cache, cache_block_size)


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
) -> None:
    """As `fused_qnorm_rope_kv_insert`, with `q` [N, H, 512] rewritten in place and nothing padded."""
    torch.ops.vllm_qout.qnorm_rope_kv_insert_(
        q, kv, k_cache, slot_mapping, position_ids, cos_sin_cache, eps, cache_block_size, apply_q_norm
    )


def set_debug(enabled: bool) -> bool:
    """Turn the device-side value checks of GPU calls on or off; returns the previous state."""
    previous: bool = torch.ops.vllm_qout.set_debug(enabled)
    return previous


def mutated_arguments(op: torch._ops.OpOverload | torch._ops.OpOverloadPacket) -> list[str]:
    """Names of the arguments that the registered schema of `op` declares written, in schema order."""
    overload = op.default if isinstance(op, torch._ops.OpOverloadPacket) else op
    return [
        argument.name
        for argument in overload._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
