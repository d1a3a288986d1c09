# SPDX-License-Identifier: Apache-2.0
"""The replaced call sites on vLLM's own classes, with the CPU operator behind them.

Real: `DeepseekV4FlashMLAAttention` (all methods that run here), the DSpark context insertion, the workspace
manager with its lanes and lock, the forward context. Stand-ins: projections, norms and the FlashMLA kernel.
"""

import json
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")

from vllm.forward_context import override_forward_context
from vllm.models.deepseek_v4.attention import DeepseekV4Attention
from vllm.models.deepseek_v4.nvidia import dspark, flashmla
from vllm.v1.worker import ubatching, workspace
from vllm_qout import activation, models, ops, pins, plugin
from vllm_qout.reservation import ReservationError

HEADS, PADDED, BLOCK_SIZE, BLOCKS, TOKENS, EPS = 4, 64, 64, 4, 48, 1e-6
CPU = torch.device("cpu")


class Projection(nn.Module):
    def forward(self, hidden):
        return hidden.repeat(1, HEADS)


class ContextNorm(nn.Module):
    def forward(self, kv):
        return kv.contiguous()


class SwaCache(nn.Module):
    """The cache layer's attributes; an empty placeholder until `bind_kv_cache`, as in vLLM."""

    def __init__(self, prefix, dtype):
        super().__init__()
        self.prefix, self.dtype, self.block_size = prefix, dtype, BLOCK_SIZE
        self.kv_cache = torch.tensor([])

    def fill(self):
        page = 37440  # 64 * 584 rounded up to a multiple of 576
        storage = torch.full((BLOCKS, 3 * page), 0xAB, dtype=torch.uint8)
        flat = storage[:, page : page + BLOCK_SIZE * 584]
        self.kv_cache = flat.unflatten(1, (BLOCK_SIZE, 584))
        return storage


class Attention(flashmla.DeepseekV4FlashMLAAttention):
    """vLLM's FlashMLA attention layer without its CUDA construction; records what its consumer receives."""

    def __init__(self, prefix="model.layers.0.attn", dtype=torch.uint8):
        nn.Module.__init__(self)
        self.prefix, self.eps = prefix, EPS
        self.head_dim, self.n_local_heads = 512, HEADS
        self.padded_heads = self.get_padded_num_q_heads(HEADS)
        self.max_num_batched_tokens, self.max_model_len, self.window_size = TOKENS, 128, 128
        self.max_image_tokens, self.compress_ratio = 0, 1
        self.aux_stream_list = self.indexer = self.compressor = self.topk_indices_buffer = None
        self.ln_events = [None] * 4
        self.wq_b = Projection()
        self.kv_norm = ContextNorm()
        self.swa_cache_layer = SwaCache(f"{prefix}.swa_cache", dtype)
        angles = torch.rand(128, 32, generator=torch.Generator().manual_seed(3)) * 6.28
        self.rotary_emb = SimpleNamespace(cos_sin_cache=torch.cat([angles.cos(), angles.sin()], 1).contiguous())
        self.received = []

    def forward_mqa(self, q, kv, positions, output):
        self.received.append(q)
        if not isinstance(workspace_context().attn_metadata, dict):
            super().forward_mqa(q, kv, positions, output)


class PlatformAttention(Attention):
    """As the CPU and XPU layers: a method of its own."""

    def _fused_qnorm_rope_kv_insert(self, q, kv, positions, attn_metadata):
        return q


def workspace_context():
    from vllm.forward_context import get_forward_context

    return get_forward_context()


def vllm_config(dbo=False, draft=False, kv_bytes=None, seqs=4):
    speculative = SimpleNamespace(
        use_dspark=lambda: True,
        num_speculative_tokens=5,
        draft_model_config=SimpleNamespace(hf_config=SimpleNamespace()),
    )
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=TOKENS, max_num_seqs=seqs),
        parallel_config=SimpleNamespace(use_ubatching=dbo, num_ubatches=2, data_parallel_size=2),
        speculative_config=speculative if draft else None,
        cache_config=SimpleNamespace(kv_cache_memory_bytes=kv_bytes),
        device_config=SimpleNamespace(device_type="cpu"),
    )


@pytest.fixture(autouse=True)
def worker(monkeypatch):
    """A fresh worker: one workspace lane, no activation, the DSpark module as installed."""
    monkeypatch.setattr(activation, "_worker", activation._Worker())
    monkeypatch.setattr(plugin, "_process", plugin._Process(source_hashes={"pin": "hash"}))
    monkeypatch.setattr(dspark, "_insert_context_kv", dspark._insert_context_kv)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)  # called when scratch grows
    workspace.reset_workspace_manager()
    workspace.init_workspace_manager(CPU, 1, 1)
    yield
    workspace.reset_workspace_manager()


def built(*layers, config=None):
    model = nn.Module()
    model.layers = nn.ModuleList(layers)
    models.bind(model, config or vllm_config())
    return model


def forward(layer, rows, metadata=None, seed=0, layers=None):
    """One pass through vLLM's own `_prepare_and_attn`; returns the query, kv and positions it was given."""
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, 512, generator=random).bfloat16()
    kv = torch.randn(rows, 512, generator=random).bfloat16()
    positions = torch.randint(0, 128, (rows,), generator=random)
    output = torch.empty(rows, PADDED, 512, dtype=torch.bfloat16)
    context = SimpleNamespace(attn_metadata=metadata, no_compile_layers=layers or {layer.prefix: layer})
    with override_forward_context(context):
        layer._prepare_and_attn(hidden, hidden, kv, None, None, None, None, positions, output)
    return hidden.repeat(1, HEADS).view(-1, HEADS, 512), kv, positions


def metadata_for(layer, slots):
    swa = SimpleNamespace(slot_mapping=slots, block_size=BLOCK_SIZE)
    return {layer.swa_cache_layer.prefix: swa}


def report():
    return plugin.report()


def test_profile_reserves_everything_and_real_steps_write_there():
    """A short profile reserves the full capacity; a later prefill gets its query and cache from our operator
    in that same memory, and nothing more is allocated."""
    layer = Attention()
    built(layer)
    forward(layer, 2)
    assert layer.received[-1].shape == (2, PADDED, 512)
    storage = layer.swa_cache_layer.fill()
    expected_storage = storage.clone()
    slots = torch.tensor([5, -1, 200, 7, 0])

    q, kv, positions = forward(layer, 6, metadata_for(layer, slots), seed=1)

    flat = expected_storage[:, 37440 : 37440 + BLOCK_SIZE * 584]
    q_out = torch.empty(6, PADDED, 512, dtype=torch.bfloat16)
    table = layer.rotary_emb.cos_sin_cache
    ops.fused_qnorm_rope_kv_insert(q, kv, q_out, flat, slots, positions, table, EPS, BLOCK_SIZE)
    assert torch.equal(layer.received[-1].view(torch.int16), q_out.view(torch.int16))
    assert torch.equal(storage, expected_storage)
    assert (storage != 0xAB).any()

    (buffer,) = report()["buffers"]
    assert (buffer["rows"], buffer["bytes"]) == (TOKENS, TOKENS * PADDED * 1024)
    assert buffer["addresses"] == {"profile": [buffer["address"]], "capture": [], "live": [buffer["address"]]}
    assert report()["counters"] == {"profile": 1, "op": 1, "kvOnly": 0, "stock": 0}


def test_layers_share_one_buffer_and_the_report_names_them():
    """All layers of a worker write to one buffer; report and log say what is bound."""
    layers = [Attention(f"model.layers.{i}.attn") for i in range(3)]
    built(*layers)
    for layer in layers:
        forward(layer, TOKENS, layers={each.prefix: each for each in layers})
    assert len({layer.received[0].data_ptr() for layer in layers}) == 1
    found = report()
    assert found["active"]
    assert found["reason"] is None
    assert found["backend"] == "cpu"
    assert found["layersBound"] == [layer.prefix for layer in layers]
    assert found["sourceHashes"] == {"pin": "hash"}
    assert found["reservedBytes"] == TOKENS * PADDED * 1024
    assert json.loads(json.dumps(found)) == found


def test_binding_logs_one_line_per_model(caplog):
    """At bind time each worker logs its rank, bound layers, backend and pins in one line."""
    with caplog.at_level("INFO", logger="vllm.qout"):
        built(Attention())
    (record,) = caplog.records
    assert "active on rank 0" in record.getMessage()
    assert "1 attention layers bound, 0 keep their own method, backend cpu, 1 pins match" in record.getMessage()


def test_v1_profile_after_the_lock_allocates_nothing():
    """The V1 runner calls the profile branch after it locked the workspace (idle ranks, piecewise capture)."""
    layer = Attention()
    built(layer)
    forward(layer, TOKENS)
    workspace.lock_workspace()
    storage = layer.swa_cache_layer.fill()
    forward(layer, 3)
    forward(layer, 3, metadata_for(layer, torch.arange(3)))
    assert (storage != 0xAB).any()
    assert len({q.data_ptr() for q in layer.received}) == 1


def test_v2_draft_lane_has_its_own_fixed_buffer():
    """With DSpark on the V2 runner the draft runs on lane 1, whose buffer holds its query rows."""
    workspace.reset_workspace_manager()
    workspace.init_workspace_manager(CPU, 1, 2)
    target, draft = Attention(), Attention("draft.layers.0.attn")
    config = vllm_config(draft=True)
    built(target, config=config)
    built(draft, config=config)
    forward(target, TOKENS)
    with workspace.use_workspace_lane(1):
        forward(draft, 5)
    assert target.received[0].data_ptr() != draft.received[0].data_ptr()
    assert [(b["lane"], b["rows"]) for b in report()["buffers"]] == [(0, TOKENS), (1, 20)]
    draft.swa_cache_layer.fill()
    with workspace.use_workspace_lane(1), pytest.raises(ReservationError, match=r"got 21 query rows.*holds 20"):
        forward(draft, 21, metadata_for(draft, torch.arange(21)))


def test_dual_batch_overlap_reserves_both_microbatches_from_one_profile(monkeypatch):
    """With dual-batch overlap one unsplit profile reserves microbatch 1 too, whose thread then only takes it."""
    workspace.reset_workspace_manager()
    workspace.init_workspace_manager(CPU, 2, 1)
    layer = Attention()
    built(layer, config=vllm_config(dbo=True))
    forward(layer, 1)
    workspace.lock_workspace()
    assert [(b["ubatch"], b["rows"]) for b in report()["buffers"]] == [(0, TOKENS), (1, TOKENS // 2)]
    layer.swa_cache_layer.fill()
    failures = []

    def run():
        contexts = {threading.get_ident(): 1}
        monkeypatch.setattr(ubatching, "_THREAD_ID_TO_CONTEXT", contexts)
        try:
            forward(layer, TOKENS // 2, metadata_for(layer, torch.arange(4)))
        except Exception as error:
            failures.append(error)
        finally:
            monkeypatch.setattr(ubatching, "_THREAD_ID_TO_CONTEXT", {})

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not failures
    assert layer.received[-1].data_ptr() == report()["buffers"][1]["address"]


def test_real_forward_without_a_profile_is_refused():
    """Serving without a reservation stops instead of allocating."""
    layer = Attention()
    built(layer)
    layer.swa_cache_layer.fill()
    with pytest.raises(ReservationError, match="needs vLLM's memory profile to run first"):
        forward(layer, 2, metadata_for(layer, torch.arange(2)))


def test_a_layer_without_our_method_is_refused_in_the_profile():
    """A layer that another model class built, unbound, must not serve stock unnoticed."""
    layer, missed = Attention(), Attention("draft.layers.0.attn")
    built(layer)
    with pytest.raises(models.BindingError, match=r"without the plugin's method: draft\.layers\.0\.attn"):
        forward(layer, 2, layers={layer.prefix: layer, missed.prefix: missed})


def test_classes_with_their_own_method_are_left_alone():
    """CPU and XPU layers keep their method and are reported as such."""
    layer = PlatformAttention()
    built(layer)
    assert "_fused_qnorm_rope_kv_insert" not in vars(layer)
    assert report()["layersStock"] == {layer.prefix: "PlatformAttention"}
    assert not report()["active"]


def test_other_cache_types_run_the_stock_method():
    """A bf16 cache goes to vLLM's method, in the profile too, and is counted."""
    layer = Attention(dtype=torch.bfloat16)
    built(layer)
    forward(layer, 3)
    assert layer.received[-1].shape == (3, PADDED, 512)
    assert report()["buffers"] == []
    assert report()["counters"]["stock"] == 1


def test_a_method_patched_by_someone_else_is_refused(monkeypatch):
    """If the base class no longer has the pinned method at bind time, the model is refused."""
    monkeypatch.setattr(DeepseekV4Attention, "_fused_qnorm_rope_kv_insert", lambda *args: None)
    with pytest.raises(pins.PinMismatch):
        built(Attention())


def test_startup_plan_is_refused(monkeypatch):
    """A saved plan would size the KV cache without our memory."""
    monkeypatch.setenv("VLLM_ENABLE_STARTUP_PLAN", "1")
    with pytest.raises(models.BindingError, match="Unset it, or set VLLM_QOUT=0"):
        built(Attention())


def test_fixed_kv_bytes_are_warned_about_with_the_number(caplog):
    """With --kv-cache-memory-bytes the profile's result is ignored, so the reserved bytes come on top."""
    layer = Attention()
    built(layer, config=vllm_config(kv_bytes=1 << 30))
    with caplog.at_level("WARNING", logger="vllm.qout"):
        forward(layer, 1)
        forward(layer, 1)
    (record,) = caplog.records
    assert f"the {TOKENS * PADDED * 1024} bytes reserved" in record.getMessage()


def test_a_new_engine_in_the_same_process_starts_over():
    """A new workspace manager means a new worker: nothing of the old reservation is handed out."""
    first = Attention()
    built(first)
    forward(first, 1)
    workspace.init_workspace_manager(CPU, 1, 1)
    second = Attention()
    built(second)
    assert report()["buffers"] == []


class DraftModel:
    """What `precompute_and_store_context_kv` of vLLM's DSpark model uses of itself."""

    num_dspark_layers = 2
    config = SimpleNamespace(head_dim=512)

    def __init__(self, layers):
        self.layers = [SimpleNamespace(attn=layer) for layer in layers]

    def context_wkv_proj(self, hidden):
        return torch.cat([hidden, hidden * 2], dim=1)


def test_draft_context_goes_through_the_kv_only_operator():
    """vLLM's own DSpark code inserts the context of every layer without any query, as our operator would."""
    layers = [Attention(f"draft.layers.{i}.attn") for i in range(2)]
    bound = models.bind(nn.ModuleList(layers), vllm_config())
    models.replace_context_insert(bound, dspark.__name__)
    models.replace_context_insert(bound, dspark.__name__)
    storages = [layer.swa_cache_layer.fill() for layer in layers]
    expected = [storage.clone() for storage in storages]
    hidden = torch.randn(7, 512).bfloat16()
    positions, slots = torch.arange(7), torch.arange(7) * 3

    dspark.DSparkDeepseekV4Model.precompute_and_store_context_kv(
        DraftModel(layers), hidden, positions, [slots, slots[:2]]
    )

    for index, (storage, want) in enumerate(zip(storages, expected, strict=True)):
        flat = want[:, 37440 : 37440 + BLOCK_SIZE * 584]
        table = layers[index].rotary_emb.cos_sin_cache
        ops.kv_rope_insert(hidden * (index + 1), flat, [slots, slots[:2]][index], positions, table, BLOCK_SIZE)
        assert torch.equal(storage, want)
        assert (storage != 0xAB).any()
    assert report()["contextSites"] == ["vllm.models.deepseek_v4.nvidia.dspark"]
    assert report()["counters"]["kvOnly"] == 2


def test_draft_context_of_other_cache_types_stays_stock(monkeypatch):
    """A bf16 cache reaches the function that was replaced."""
    calls = []
    monkeypatch.setattr(models, "check_object", lambda pin, function: None)
    monkeypatch.setattr(dspark, "_insert_context_kv", lambda *arguments: calls.append(arguments))
    layer = Attention(dtype=torch.bfloat16)
    layer.swa_cache_layer.kv_cache = torch.zeros(2, 64, 512, dtype=torch.bfloat16)
    bound = models.bind(nn.ModuleList([layer]), vllm_config())
    models.replace_context_insert(bound, dspark.__name__)
    dspark._insert_context_kv(layer, torch.zeros(1, 512), torch.zeros(1), torch.zeros(1))
    assert len(calls) == 1
    assert report()["counters"]["stock"] == 1


def test_draft_modules_of_other_platforms_are_left_alone():
    """Modules without a pin (CPU, XPU) keep their function."""
    bound = models.bind(nn.ModuleList([Attention()]), vllm_config())
    models.replace_context_insert(bound, "vllm.models.deepseek_v4.cpu.dspark")
    assert report()["contextSites"] == []


PLATFORM_CODE = """
import importlib, sys
from dataclasses import asdict
from types import SimpleNamespace
import torch
from torch import nn
from vllm.platforms import current_platform

vendor, attention_module, attention_class = sys.argv[1:]
current_platform.is_cpu = lambda: False  # vLLM then takes the classes of a GPU vendor
current_platform.is_rocm = lambda: vendor == "amd"
torch.cuda.get_device_properties = lambda device: SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")

vendor_module = lambda name: importlib.import_module(f"vllm.models.deepseek_v4.{vendor}.{name}")
dspark, model, mtp = (vendor_module(name) for name in ("dspark", "model", "mtp"))
attention = getattr(vendor_module(attention_module), attention_class)
from vllm.model_executor.models.registry import _ModelInfo
from vllm.v1.worker import workspace
from vllm_qout import models, plugin

stock_insert = dspark._insert_context_kv
workspace.init_workspace_manager(torch.device("cpu"))
config = SimpleNamespace(
    scheduler_config=SimpleNamespace(max_num_batched_tokens=8, max_num_seqs=2),
    parallel_config=SimpleNamespace(use_ubatching=False, data_parallel_size=1),
    speculative_config=None,
    cache_config=SimpleNamespace(kv_cache_memory_bytes=None),
    device_config=SimpleNamespace(device_type="cpu"),
)

def build(self, *, vllm_config, prefix=""):
    nn.Module.__init__(self)
    self.attn = attention.__new__(attention)
    nn.Module.__init__(self.attn)
    self.attn.prefix = prefix

bases = [model.DeepseekV4ForCausalLM, mtp.DeepSeekV4MTP, dspark.DSparkDeepseekV4ForCausalLM]
for base, reference in zip(bases, plugin.ARCHITECTURES.values(), strict=True):
    ours = getattr(models, reference.split(":")[1])
    assert ours.__mro__[1] is base, ours.__mro__
    traits, stock_traits = (asdict(_ModelInfo.from_model_cls(cls)) for cls in (ours, base))
    assert traits == stock_traits
    base.__init__ = build
    assert models._is_bound(ours(vllm_config=config, prefix=ours.__name__).attn)
assert dspark._insert_context_kv.__dict__["replaces"] is stock_insert
assert models.current().context_sites == [dspark.__name__]
"""


@pytest.mark.parametrize(
    ("vendor", "attention_module", "attention_class"),
    [
        ("nvidia", "flashmla", "DeepseekV4FlashMLAAttention"),
        ("nvidia", "flashinfer_sparse", "DeepseekV4FlashInferSM120Attention"),
        ("amd", "rocm", "DeepseekV4ROCMAiterMLAAttention"),
    ],
)
def test_our_classes_are_the_vendors_with_the_seam_bound(vendor, attention_module, attention_class):
    """On NVIDIA and AMD each registered class subclasses vLLM's, has the same registry traits, binds the
    attention class when built, and the DSpark module gets our context insertion."""
    command = [sys.executable, "-c", PLATFORM_CODE, vendor, attention_module, attention_class]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
