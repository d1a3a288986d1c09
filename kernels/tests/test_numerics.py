# SPDX-License-Identifier: Apache-2.0
"""The CPU kernels and the float64 reference: against each other, and against torch's own conversions."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_qout import contract, ops, reference
from vllm_qout.samples import FUSED, TOKEN_BYTES, bits, make_inputs

BACKEND = contract.load_backend(None)
SHARE_CAP = 2e-4


@st.composite
def calls(draw):
    """Any supported call: rows, slots, heads, padding, block size, strides, position in a storage."""
    padded = draw(st.sampled_from(ops.PADDED_HEADS))
    rows = draw(st.integers(0, 20))
    block_size = draw(st.sampled_from([32, 64, 96]))
    spare = 16 * draw(st.integers(0, 50))
    return make_inputs(
        rows=rows,
        heads=draw(st.integers(1, padded)),
        padded_heads=padded,
        inserts=draw(st.integers(0, rows)),
        block_size=block_size,
        block_stride=block_size * TOKEN_BYTES + spare,
        offset=16 * draw(st.integers(0, 20)),
        spare_rows=draw(st.integers(0, 3)),
        eps=draw(st.sampled_from([0.0, 1e-6, 1e-5, 1.0])),
        apply_q_norm=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )


@settings(max_examples=60, deadline=None)
@given(calls())
def test_every_supported_call_agrees_with_the_reference(inputs):
    """Query, padding, records, untouched bytes, and the agreement of the three operators."""
    assert contract.scenario_detail(BACKEND, inputs) == ""


def test_query_differs_from_rounded_reference_in_few_places():
    """The float32 order of the kernels costs at most 2e-4 of the bf16 values one rounding."""
    inputs = make_inputs(rows=400, heads=8, padded_heads=8, spare_rows=0)
    ops.fused_qnorm_rope_kv_insert(*inputs.arguments(FUSED))
    exact = reference.query(inputs.q_in, inputs.position_ids, inputs.cos_sin_cache, inputs.eps)
    share = (bits(inputs.q_out) != bits(exact.to(torch.bfloat16))).double().mean()
    assert share < SHARE_CAP


def finite_bf16() -> torch.Tensor:
    """Every finite non-negative bf16 value."""
    return torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16)


def test_e4m3_encoding_equals_torch_for_every_bf16():
    """Within +-448 the written-out encoding gives the bytes of torch's cast; beyond, those of +-448."""
    values = torch.cat((finite_bf16(), -finite_bf16()))
    expected = values.float().clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(reference.encode_e4m3(values.double()), expected)


def test_scale_exponent_is_the_smallest_that_fits():
    """448 * 2^k reaches every bf16 maximum and 448 * 2^(k-1) does not."""
    amax = finite_bf16().double().clamp(min=1e-4)
    exponent = reference.scale_exponent(amax)
    assert (448 * torch.ldexp(torch.ones_like(amax), exponent) >= amax).all()
    assert (448 * torch.ldexp(torch.ones_like(amax), exponent - 1) < amax).all()
    assert (exponent.min(), exponent.max()) == (-22, 120)


def test_kernel_scales_and_codes_are_exact_for_every_bf16_maximum():
    """Each finite bf16 value as the maximum of a group gives the reference's scale byte and codes."""
    values = finite_bf16()
    rows = -(-values.numel() // 7)
    inputs = make_inputs(rows=rows, heads=1, padded_heads=8)
    kv = torch.zeros(rows, 512, dtype=torch.bfloat16)
    groups = torch.zeros(rows * 7, dtype=torch.bfloat16)
    groups[: values.numel()] = values
    kv[:, 0:448:64] = groups.view(rows, 7)
    kv[:, 1:448:64] = -groups.view(rows, 7) / 3
    ops.kv_rope_insert(*inputs.but(kv=kv).arguments("kv_rope_insert"))
    got = reference.read_records(inputs.k_cache, inputs.slot_mapping, 64)
    expected = reference.record(kv, inputs.position_ids, inputs.cos_sin_cache)
    assert torch.equal(got, expected)


def test_non_finite_context_gives_the_bytes_of_stock():
    """NaN is not a maximum and quantises to 0xFE; an infinite group scales to 255 and signed zeros."""
    inputs = make_inputs(rows=2, heads=1, padded_heads=8)
    kv = torch.zeros(2, 512, dtype=torch.bfloat16)
    kv[0, :3] = torch.tensor([448.0, float("nan"), -448.0])
    kv[1, :3] = torch.tensor([float("inf"), -1.0, 1.0])
    ops.kv_rope_insert(*inputs.but(kv=kv).arguments("kv_rope_insert"))
    records = reference.read_records(inputs.k_cache, inputs.slot_mapping, 64)
    assert records[:, :3].tolist() == [[0x7E, 0xFE, 0xFE], [0xFE, 0x80, 0x00]]
    assert records[:, 576].tolist() == [127, 255]
