# SPDX-License-Identifier: Apache-2.0
"""The DeepSeek-V4 model classes of vLLM with our query and KV insertion bound to their attention layers.

Imported by vLLM's model registry, in the worker and in its inspection subprocess, never in the front end.
"""

import logging
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
import vllm.envs as envs
from torch import Tensor, nn
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.models import deepseek_v4 as stock_models
from vllm.models.deepseek_v4.attention import DeepseekV4Attention
from vllm.v1.worker import workspace as workspaces
from vllm.v1.worker.ubatching import dbo_current_ubatch_id

from vllm_qout import ops
from vllm_qout.activation import Activation, activate, current
from vllm_qout.pins import ATTENTION_METHOD, ATTENTION_PIN, CONTEXT_FUNCTION, CONTEXT_PINS, check_object
from vllm_qout.reservation import Reservation, SlotKey, capacity_of

logger = logging.getLogger("vllm.qout")

_stock_attention = DeepseekV4Attention._fused_qnorm_rope_kv_insert


class BindingError(RuntimeError):
    """The model cannot be served with the plugin; the text names a remedy."""


def _activation() -> Activation:
    activation = current()
    if activation is None:
        raise BindingError("vllm_qout: got a forward before any model was bound; needs a model built by vLLM")
    return activation


def _slot_key(layer: Any, q: Tensor) -> SlotKey:
    lane = workspaces._workspace_lane.get()
    return SlotKey(str(q.device), lane, dbo_current_ubatch_id(), layer.padded_heads, q.dtype)


def _fused_qnorm_rope_kv_insert(self: Any, q: Tensor, kv: Tensor, positions: Tensor, attn_metadata: Any) -> Tensor:
    """Replaces the method of the same name: [N, H, 512] -> [N, padded heads, 512] in reserved memory.

    Without metadata (profile, dummy steps) it reserves and returns unspecified contents, which
    `forward_mqa` does not read then.
    """
    activation = _activation()
    if self.swa_cache_layer.dtype != torch.uint8:
        activation.count("stock")
        return _stock_attention(self, q, kv, positions, attn_metadata)
    rows = q.shape[0]
    key = _slot_key(self, q)
    if not isinstance(attn_metadata, dict):
        activation.count("profile")
        return _reserve(activation, key, rows)

    metadata = attn_metadata.get(self.swa_cache_layer.prefix)
    if metadata is None:
        raise BindingError(f"vllm_qout: got no metadata for {self.swa_cache_layer.prefix}; needs vLLM's own")
    activation.count("op")
    capturing = q.is_cuda and torch.cuda.is_current_stream_capturing()
    q_out = activation.reservation.take(key, rows, capturing)
    k_cache = self.swa_cache_layer.kv_cache
    ops.fused_qnorm_rope_kv_insert(
        q,
        kv,
        q_out,
        k_cache.view(k_cache.shape[0], -1),
        metadata.slot_mapping,
        positions,
        self.rotary_emb.cos_sin_cache,
        self.eps,
        metadata.block_size,
    )
    return q_out


def _reserve(activation: Activation, key: SlotKey, rows: int) -> Tensor:
    reservation = activation.reservation
    before = len(reservation.slots)
    q_out = reservation.reserve(key, rows)
    if len(reservation.slots) != before:
        _check_all_bound()
        _log_reservation(activation, key)
    return q_out


def _log_reservation(activation: Activation, key: SlotKey) -> None:
    reserved = activation.reservation.reserved_bytes()
    rows = activation.reservation.capacity.rows(key.lane)
    logger.info(
        "vllm_qout: rank %d reserved lane %d: rows %s x %d heads; %d bytes in all",
        activation.rank,
        key.lane,
        list(rows),
        key.heads,
        reserved,
    )
    if activation.cache_config.kv_cache_memory_bytes:
        logger.warning(
            "vllm_qout: --kv-cache-memory-bytes is set, so the %d bytes reserved for padded queries are not "
            "subtracted from the KV cache; lower it by that much or drop the option",
            reserved,
        )


def _own_method(layer: DeepseekV4Attention) -> bool:
    """Whether a subclass has its own implementation (CPU, XPU), which stays in place."""
    owner = next(cls for cls in type(layer).__mro__ if ATTENTION_METHOD in vars(cls))
    return owner is not DeepseekV4Attention


def _is_bound(layer: DeepseekV4Attention) -> bool:
    return getattr(getattr(layer, ATTENTION_METHOD), "__func__", None) is _fused_qnorm_rope_kv_insert


def _check_all_bound() -> None:
    """Refuses a model with an attention layer that still allocates its own query."""
    if not is_forward_context_available():
        return
    layers = get_forward_context().no_compile_layers
    missed = [
        name
        for name, layer in layers.items()
        if isinstance(layer, DeepseekV4Attention) and not _own_method(layer) and not _is_bound(layer)
    ]
    if missed:
        raise BindingError(
            f"vllm_qout: got DeepSeek-V4 attention without the plugin's method: {', '.join(missed)}; needs "
            "every layer bound. Remove the plugin that overrides this architecture after vllm_qout, or set "
            "VLLM_QOUT=0"
        )


def _context_insert(
    stock: Callable[[Any, Tensor, Tensor, Tensor], None],
) -> Callable[[Any, Tensor, Tensor, Tensor], None]:
    def _insert_context_kv(attn: Any, kv: Tensor, positions: Tensor, slot_mapping: Tensor) -> None:
        """Replaces the function of the same name: KV only, no dummy query and no padded result."""
        activation = _activation()
        cache_layer = attn.swa_cache_layer
        k_cache = cache_layer.kv_cache
        if k_cache.dtype != torch.uint8:
            activation.count("stock")
            stock(attn, kv, positions, slot_mapping)
            return
        activation.count("kvOnly")
        ops.kv_rope_insert(
            kv,
            k_cache.view(k_cache.shape[0], -1),
            slot_mapping,
            positions,
            attn.rotary_emb.cos_sin_cache,
            cache_layer.block_size,
        )

    _insert_context_kv.__dict__["replaces"] = stock
    return _insert_context_kv


def replace_context_insert(activation: Activation, module_name: str) -> None:
    """Replaces `_insert_context_kv` in a DSpark module that is pinned; others (CPU, XPU) stay as they are."""
    pin = CONTEXT_PINS.get(module_name)
    if pin is None:
        return
    module = sys.modules[module_name]
    stock = getattr(module, CONTEXT_FUNCTION)
    if not hasattr(stock, "replaces"):
        check_object(pin, stock)
        setattr(module, CONTEXT_FUNCTION, _context_insert(stock))
    if module_name not in activation.context_sites:
        activation.context_sites.append(module_name)
        logger.info("vllm_qout: rank %d inserts draft context KV without a query (%s)", activation.rank, module_name)


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _backend(device_type: str) -> str:
    """Name of the implementation behind the operators on this worker's device."""
    if device_type == "cpu":
        return "cpu"
    if torch.version.hip is not None:
        return "triton"
    ops.require_cuda(torch.cuda.current_device())
    return "cuda"


def _create(vllm_config: Any, workspace: Any, source_hashes: Mapping[str, str]) -> Activation:
    return Activation(
        workspace=workspace,
        reservation=Reservation(capacity_of(vllm_config), workspace.get_persistent),
        cache_config=vllm_config.cache_config,
        rank=_rank(),
        backend=_backend(vllm_config.device_config.device_type),
        source_hashes=dict(source_hashes),
    )


def bind(model: nn.Module, vllm_config: Any) -> Activation:
    """Binds our method to every DeepSeek-V4 attention layer in `model` that has not its own.

    Raises PinMismatch if the method is no longer the pinned one, BindingError if the plan replay of
    VLLM_ENABLE_STARTUP_PLAN could size the KV cache without our memory.
    """
    from vllm_qout.plugin import source_hashes

    if envs.VLLM_ENABLE_STARTUP_PLAN:
        raise BindingError(
            "vllm_qout: got VLLM_ENABLE_STARTUP_PLAN on; needs it off, because a saved plan does not know "
            "the memory that this plugin reserves. Unset it, or set VLLM_QOUT=0"
        )
    check_object(ATTENTION_PIN, vars(DeepseekV4Attention)[ATTENTION_METHOD])
    workspace = workspaces.current_workspace_manager()
    activation = activate(workspace, lambda: _create(vllm_config, workspace, source_hashes()))
    for module in model.modules():
        if isinstance(module, DeepseekV4Attention):
            _bind_layer(activation, module)
    logger.info(
        "vllm_qout: active on rank %d: %s, %d attention layers bound, %d keep their own method, "
        "backend %s, %d pins match",
        activation.rank,
        type(model).__name__,
        len(activation.layers),
        len(activation.stock_layers),
        activation.backend,
        len(activation.source_hashes),
    )
    return activation


def _bind_layer(activation: Activation, layer: DeepseekV4Attention) -> None:
    own = _own_method(layer)
    names = activation.stock_layers if own else activation.layers
    names[layer.prefix] = type(layer).__name__
    if not own:
        setattr(layer, ATTENTION_METHOD, types.MethodType(_fused_qnorm_rope_kv_insert, layer))


class DeepseekV4ForCausalLM(stock_models.DeepseekV4ForCausalLM):
    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        bind(self, vllm_config)


class DeepSeekV4MTP(stock_models.DeepSeekV4MTP):
    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        bind(self, vllm_config)


class DSparkDeepseekV4ForCausalLM(stock_models.DSparkDeepseekV4ForCausalLM):
    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        activation = bind(self, vllm_config)
        replace_context_insert(activation, stock_models.DSparkDeepseekV4ForCausalLM.__module__)
