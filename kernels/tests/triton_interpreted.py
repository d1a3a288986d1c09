# SPDX-License-Identifier: Apache-2.0
"""The Triton operators under Triton's interpreter; `test_triton.py` runs this file in a process of its own.

By hand: `TRITON_INTERPRET=1 python -m pytest tests/triton_interpreted.py`.
"""

import os

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_qout import triton_ops
from vllm_qout.triton_ops import Encoding

assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1 before Triton is imported"

RECORD = 584
DATA = 576
SENTINEL = 0xAB


class Case:
    """Seeded inputs; the cache is a strided view whose padding and surroundings carry a sentinel."""

    def __init__(self, rows, heads=3, padded=8, inserts=None, block_size=64, seed=0, scale=1.0):
        random = torch.Generator().manual_seed(seed)
        self.blocks = 3
        self.block_size = block_size
        self.heads = heads
        self.q = torch.randn(rows, heads, 512, generator=random).mul(scale).bfloat16()
        magnitudes = torch.logspace(-4, 4, 8).repeat_interleave(64)
        self.kv = (torch.randn(rows, 512, generator=random) * magnitudes).bfloat16()
        self.q_out = torch.full((rows + 2, padded, 512), -1, dtype=torch.int16).view(torch.bfloat16)
        self.storage = torch.full((self.blocks + 1, block_size * RECORD + 96), SENTINEL, dtype=torch.uint8)
        self.cache = self.storage[1:, 32 : 32 + block_size * RECORD]
        slots = torch.randperm(self.blocks * block_size, generator=random)[:rows]
        self.slots = slots[: rows if inserts is None else inserts].clone()
        self.positions = torch.randint(0, 50, (rows,), generator=random)
        angles = torch.rand(50, 32, generator=random) * 6.28
        self.table = torch.cat([angles.cos(), angles.sin()], dim=1).contiguous()

    def indices(self):
        return self.slots, self.positions, self.table

    def record(self, slot):
        """The 448 codes, 64 rotary values and 8 scale bytes of one slot."""
        block, place = self.cache[slot // self.block_size], slot % self.block_size
        data = block[place * DATA : (place + 1) * DATA]
        start = self.block_size * DATA + place * 8
        return data[:448], data[448:].clone().view(torch.bfloat16), block[start : start + 8]


def fused(operators, case, eps=1e-6, norm=True, **options):
    operators.fused_qnorm_rope_kv_insert(
        case.q, case.kv, case.q_out, case.cache, *case.indices(), eps, case.block_size, norm, **options
    )


def assert_same_cache(got, expected):
    """Codes, scales and untouched bytes equal; rotary values within the tolerance of another FMA order."""
    for slot in (slot for slot in got.slots.tolist() if slot >= 0):
        codes, rotary, scales = got.record(slot)
        other_codes, other_rotary, other_scales = expected.record(slot)
        assert torch.equal(codes, other_codes)
        assert torch.equal(scales, other_scales)
        torch.testing.assert_close(rotary, other_rotary, rtol=1e-2, atol=1e-2)
        rotary_bytes = slice((slot % got.block_size) * DATA + 448, (slot % got.block_size + 1) * DATA)
        for case in (got, expected):
            case.cache[slot // case.block_size, rotary_bytes] = 0
    assert torch.equal(got.storage, expected.storage)


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(0, 4),
    heads=st.integers(1, 16),
    padded=st.sampled_from([8, 16]),
    block_size=st.sampled_from([32, 64]),
    norm=st.booleans(),
    seed=st.integers(0, 2**20),
    data=st.data(),
)
def test_agrees_with_the_cpu_operator(rows, heads, padded, block_size, norm, seed, data):
    """For any shape both backends leave the same cache bytes, padding heads, spare rows and queries."""
    from vllm_qout import ops

    heads = min(heads, padded)
    inserts = data.draw(st.integers(0, rows))
    ours, cpu = (Case(rows, heads, padded, inserts, block_size, seed) for _ in range(2))
    if inserts and data.draw(st.booleans()):
        ours.slots[0] = cpu.slots[0] = -1
    fused(triton_ops, ours, norm=norm)
    fused(ops, cpu, norm=norm)
    torch.testing.assert_close(ours.q_out[:rows], cpu.q_out[:rows], rtol=1e-2, atol=1e-2)
    assert not ours.q_out[:rows, heads:].view(torch.int16).any()
    assert (ours.q_out[rows:].view(torch.int16) == -1).all()
    assert_same_cache(ours, cpu)


def test_kv_only_writes_what_the_fused_operator_writes():
    """The KV-only operator leaves the cache of the fused one, byte for byte."""
    alone, both = Case(5), Case(5)
    triton_ops.kv_rope_insert(alone.kv, alone.cache, *alone.indices(), 64)
    fused(triton_ops, both)
    assert torch.equal(alone.storage, both.storage)


@pytest.mark.parametrize("norm", [True, False])
def test_in_place_equals_the_live_heads(norm):
    """The in-place operator leaves in `q` what the fused one leaves in the live heads of `q_out`."""
    inplace, both = Case(4), Case(4)
    triton_ops.qnorm_rope_kv_insert_(inplace.q, inplace.kv, inplace.cache, *inplace.indices(), 1e-6, 64, norm)
    fused(triton_ops, both, norm=norm)
    assert torch.equal(inplace.q.view(torch.int16), both.q_out[:4, :3].contiguous().view(torch.int16))
    assert torch.equal(inplace.storage, both.storage)


def test_extreme_queries_stay_defined():
    """A zero row and a row whose square sum overflows give zeros, no NaN."""
    case = Case(2)
    case.q[0] = 0
    case.q[1] = 3e38
    fused(triton_ops, case)
    assert (case.q_out[:2, :3] == 0).all()


@pytest.fixture
def unchecked(monkeypatch):
    """As on a GPU, whose slots and positions the checks cannot read."""
    monkeypatch.setattr(triton_ops, "_check", lambda *_: None)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("slot", [-2, 3 * 64, 2**40])
def test_slots_outside_the_cache_write_nothing(slot):
    """A slot that the cache does not have leaves every byte as it was."""
    case = Case(1)
    case.slots[0] = slot
    triton_ops.kv_rope_insert(case.kv, case.cache, *case.indices(), 64)
    assert (case.storage == SENTINEL).all()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("position", [-1, 50, 2**40])
def test_positions_outside_the_table_are_not_read(position):
    """Such a position must not load from outside the table; it rotates to zero."""
    case = Case(1)
    case.positions[0] = position
    fused(triton_ops, case)
    assert (case.q_out[0, :3, 448:] == 0).all()
    assert (case.record(int(case.slots[0]))[1] == 0).all()


def test_rejected_calls_write_nothing():
    """A bad argument is refused before any launch: query output and cache stay as they were."""
    case = Case(2)
    case.positions = case.positions.int()
    q_out, storage = case.q_out.view(torch.int16).clone(), case.storage.clone()
    with pytest.raises(RuntimeError, match=r"position_ids: got dtype Int; needs dtype Long"):
        fused(triton_ops, case)
    assert torch.equal(case.q_out.view(torch.int16), q_out)
    assert torch.equal(case.storage, storage)


def one_token(values, encoding=Encoding.OCP):
    """The record of one token with unrotated values."""
    case = Case(1)
    case.kv[0] = torch.as_tensor(values, dtype=torch.bfloat16)
    case.table = torch.cat([torch.ones(50, 32), torch.zeros(50, 32)], dim=1)
    triton_ops.kv_rope_insert(case.kv, case.cache, *case.indices(), 64, encoding)
    return case.record(int(case.slots[0]))


@pytest.mark.parametrize("exponent", [-20, -1, 0, 1, 60, 119])
def test_scale_is_the_smallest_that_fits(exponent):
    """A group maximum of 448 * 2^j has scale 2^j; the next bf16 value needs 2^(j+1)."""
    exact = torch.zeros(512)
    exact[:64] = 448.0 * 2.0**exponent
    exact[64:128] = 450.0 * 2.0**exponent
    scales = one_token(exact)[2].tolist()
    assert scales == [exponent + 127, exponent + 128] + [105] * 5 + [0]


def test_fnuz_has_the_same_codes_one_scale_higher_and_no_negative_zero():
    """Both encodings dequantise to the same values; FNUZ never holds 0x80, which is its NaN."""
    values = torch.randn(512, generator=torch.Generator().manual_seed(1))
    values[:4] = torch.tensor([-0.0, 0.0, -1e-9, 1e-9])
    codes, _, scales = one_token(values)
    fnuz_codes, _, fnuz_scales = one_token(values, Encoding.FNUZ)
    assert torch.equal(fnuz_scales[:7], scales[:7] + 1)
    assert (codes == 0x80).any()
    assert not (fnuz_codes == 0x80).any()
    scale = torch.exp2(scales[:7].float() - 127).repeat_interleave(64)
    values_ocp = codes.clone().view(torch.float8_e4m3fn).float() * scale
    values_fnuz = fnuz_codes.clone().view(torch.float8_e4m3fnuz).float() * (scale * 2)
    assert torch.equal(values_ocp, values_fnuz)


@triton.jit
def encode(source, target, FNUZ: tl.constexpr, WIDTH: tl.constexpr):
    offsets = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    tl.store(target + offsets, triton_ops._e4m3_code(tl.load(source + offsets), FNUZ).to(tl.uint8))


@triton.jit
def round_bf16(source, target, WIDTH: tl.constexpr):
    offsets = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    tl.store(target + offsets, triton_ops._bf16_bits(tl.load(source + offsets)).to(tl.int16))


def test_e4m3_codes_equal_torch_for_every_bf16_value_in_range():
    """Ties, carries, subnormals and signed zeros round as torch rounds them; FNUZ codes halve the value."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    inside = every[every.abs() <= 448]
    values = torch.zeros(2**16)
    values[: inside.numel()] = inside
    codes = torch.empty(2**16, dtype=torch.uint8)
    encode[(16,)](values, codes, FNUZ=False, WIDTH=4096)
    assert torch.equal(codes, values.to(torch.float8_e4m3fn).view(torch.uint8))
    encode[(16,)](values, codes, FNUZ=True, WIDTH=4096)
    assert torch.equal(codes, (values / 2).to(torch.float8_e4m3fnuz).view(torch.uint8))


def test_values_beyond_the_range_saturate():
    """Magnitudes above 448 become 448, also infinities."""
    values = torch.tensor([448.0, 500.0, 1e30, float("inf"), -500.0, -float("inf"), 0.0, 0.0])
    codes = torch.empty(8, dtype=torch.uint8)
    encode[(1,)](values, codes, FNUZ=False, WIDTH=8)
    assert codes.tolist() == [0x7E] * 4 + [0xFE] * 2 + [0, 0]


def test_bf16_bits_equal_torch():
    """Round to nearest even for random float bits, infinities and subnormals included."""
    bits = torch.randint(-(2**31), 2**31 - 1, (2**16,), generator=torch.Generator().manual_seed(2))
    values = bits.to(torch.int32).view(torch.float32)
    values = torch.where(values.isnan(), torch.inf, values).contiguous()
    rounded = torch.empty(2**16, dtype=torch.int16)
    round_bf16[(16,)](values, rounded, WIDTH=4096)
    assert torch.equal(rounded, values.bfloat16().view(torch.int16))


def test_registered_backend_answers_for_its_dispatch_key():
    """After `register`, torch.ops calls of that key run the Triton code, with its checks."""
    from vllm_qout import ops

    registration = triton_ops.register("CPU")
    try:
        ours, direct = Case(3), Case(3)
        fused(ops, ours)
        fused(triton_ops, direct)
        assert torch.equal(ours.q_out.view(torch.int16), direct.q_out.view(torch.int16))
        assert torch.equal(ours.storage, direct.storage)
        with pytest.raises(RuntimeError, match=r"eps: got -1; needs a finite value of at least 0"):
            fused(ops, ours, eps=-1.0)
    finally:
        registration._destroy()
