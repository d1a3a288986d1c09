# SPDX-License-Identifier: Apache-2.0
"""The registered operators: what they declare, what their fakes accept, how their library loads."""

from __future__ import annotations

import pytest
import torch
from vllm_qout import ops, samples
from vllm_qout.samples import CONTEXT, FUSED, IN_PLACE, OPERATORS, make_inputs


def overload(operator: str):
    return getattr(torch.ops.vllm_qout, operator).default


@pytest.mark.parametrize(
    "operator, mutated",
    [(FUSED, ["q_out", "k_cache"]), (CONTEXT, ["k_cache"]), (IN_PLACE, ["q", "k_cache"])],
)
def test_mutated_arguments_come_from_the_schema(operator, mutated):
    """Exactly the written buffers are declared written, for the overload and its packet alike."""
    assert ops.mutated_arguments(overload(operator)) == mutated
    assert ops.mutated_arguments(getattr(torch.ops.vllm_qout, operator)) == mutated


def test_mutated_arguments_of_unmarked_and_stock_style_schemas():
    """Order follows the schema, read-only aliases do not count, and the `Tensor!` spelling does."""
    library = torch.library.Library("vllm_qout_test", "DEF")
    library.define("mixed(Tensor x, Tensor(a!) late, Tensor(b) alias, Tensor! early) -> Tensor")
    assert ops.mutated_arguments(torch.ops.vllm_qout_test.mixed) == ["late", "early"]


@pytest.mark.parametrize("operator", OPERATORS)
def test_opcheck(operator):
    """Schema, autograd registration, fake and AOT dispatch pass torch's own checks."""
    inputs = make_inputs(rows=5, heads=3, padded_heads=8, inserts=4)
    torch.library.opcheck(overload(operator), inputs.arguments(operator))


@pytest.mark.parametrize("operator", OPERATORS)
def test_fake_accepts_meta_tensors_and_rejects_wrong_shapes(operator):
    """On the meta device a good call returns nothing and a wrong one raises with the argument's name."""
    inputs = make_inputs(rows=5, heads=3, padded_heads=8)
    names = ("q_in", "kv", "q_out", "k_cache", "slot_mapping", "position_ids", "cos_sin_cache")
    meta = inputs.but(**{name: getattr(inputs, name).to("meta") for name in names})
    assert overload(operator)(*meta.arguments(operator)) is None
    for name, wrong in (
        ("kv", meta.kv[:, :256]),
        ("position_ids", meta.position_ids[1:]),
        ("k_cache", meta.k_cache[:, :584]),
    ):
        with pytest.raises(RuntimeError, match=name):
            overload(operator)(*meta.but(**{name: wrong}).arguments(operator))


@pytest.mark.parametrize("name", ["kv", "slot_mapping", "position_ids", "cos_sin_cache"])
def test_a_meta_tensor_among_real_ones_is_no_silent_success(name):
    """Mixing devices selects the fake in torch's dispatcher; it must raise, not return."""
    inputs = make_inputs(rows=5, heads=3, padded_heads=8)
    with pytest.raises(RuntimeError, match=f"{name}: got device meta; needs the device of k_cache"):
        overload(FUSED)(*inputs.but(**{name: getattr(inputs, name).to("meta")}).arguments(FUSED))


def test_cpu_rejects_bad_values_before_it_writes_anything():
    """A bad last slot leaves the first record and the whole query unwritten."""
    inputs = make_inputs(rows=5, heads=3, padded_heads=8)
    slots = inputs.slot_mapping.clone()
    slots[-1] = inputs.k_cache.shape[0] * inputs.cache_block_size
    with pytest.raises(RuntimeError, match="slot_mapping: got slot 128 at row 4; needs -1 or a slot below 128"):
        ops.fused_qnorm_rope_kv_insert(*inputs.but(slot_mapping=slots).arguments(FUSED))
    assert (samples.bits(inputs.q_out) == samples.UNWRITTEN).all()
    assert (inputs.storage == samples.SENTINEL).all()


def test_wrappers_call_the_registered_operators():
    """The typed functions and `torch.ops` write the same bytes."""
    first = make_inputs(rows=5, heads=3, padded_heads=8)
    second = make_inputs(rows=5, heads=3, padded_heads=8)
    for operator in OPERATORS:
        getattr(ops, operator)(*first.arguments(operator))
        overload(operator)(*second.arguments(operator))
    for one, other in zip((*first.written(FUSED), first.q_in), (*second.written(FUSED), second.q_in), strict=True):
        assert torch.equal(samples.bits(one), samples.bits(other))


def test_debug_state_is_returned_and_restored():
    """`set_debug` answers the state before it."""
    before = ops.set_debug(True)
    assert ops.set_debug(before) is True


@pytest.mark.parametrize("version", ["2.10.1", "1.13.0+cu117"])
def test_old_torch_is_refused_with_a_remedy(version):
    """A torch without the stable ABI that we use is named with what is needed."""
    with pytest.raises(ops.LibraryError, match=rf"got version {version.replace('+', '.')}.*install a newer torch"):
        ops.check_torch(version)


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cu130", "3.0.0a0+git1"])
def test_new_torch_is_accepted(version):
    """Every release from 2.11 on loads."""
    ops.check_torch(version)


def test_missing_and_foreign_libraries_name_a_remedy(tmp_path):
    """No file, and a file that is no library for this machine, give one line with what to do."""
    with pytest.raises(ops.LibraryError, match="not found; install the vllm-qout wheel"):
        ops.load_library(tmp_path / "libvllm_qout.so")
    foreign = tmp_path / "foreign.so"
    foreign.write_bytes(b"no library")
    with pytest.raises(ops.LibraryError, match=r"foreign.so: cannot be loaded with torch .*install"):
        ops.load_library(foreign)


@pytest.mark.skipif(torch.cuda.is_available(), reason="states what happens without a GPU")
def test_missing_gpu_is_named():
    """Asking for the CUDA kernels without a usable GPU says which part is missing."""
    with pytest.raises(ops.LibraryError, match=r"not a CUDA build|no NVIDIA GPU is visible|not found"):
        ops.require_cuda()


def test_an_unsupported_card_is_refused_before_serving(monkeypatch):
    """`require_cuda` names the device, its capability and the way out."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(ops, "CUDA_LOADED", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    with pytest.raises(ops.LibraryError, match=r"cuda:1: .*capability 8\.9; .*use the Triton backend"):
        ops.require_cuda(1)


@pytest.mark.parametrize("card", [(7, 5), (8, 0), (8, 9), (10, 3), (12, 1)])
def test_unsupported_cards_are_refused(card):
    """Cards below 8.0, and cards without machine code in the build, are named."""
    with pytest.raises(RuntimeError, match=rf"capability {card[0]}\.{card[1]}; needs compute capability"):
        torch.ops.vllm_qout.check_capability(*card)


@pytest.mark.parametrize("card", ops.CARDS)
def test_supported_cards_are_accepted(card):
    """The cards that the build promises pass."""
    torch.ops.vllm_qout.check_capability(*card)
