# SPDX-License-Identifier: Apache-2.0
"""The checks in Python reject what the C++ checks reject, in the same words, and touch nothing."""

import math

import pytest
import torch
from vllm_qout import ops, validation

ROWS, HEADS, PADDED, BLOCKS, BLOCK_SIZE = 6, 3, 8, 3, 64
RECORD = 584
WIDTH = BLOCK_SIZE * RECORD

FUSED, KV_ONLY, IN_PLACE = "fused", "kv-only", "in-place"
ALL = (FUSED, KV_ONLY, IN_PLACE)
QUERY = (FUSED, IN_PLACE)

CHECKS = {
    FUSED: (validation.check_fused, torch.ops.vllm_qout.check_fused_qnorm_rope_kv_insert),
    KV_ONLY: (validation.check_kv, torch.ops.vllm_qout.check_kv_rope_insert),
    IN_PLACE: (validation.check_in_place, torch.ops.vllm_qout.check_qnorm_rope_kv_insert_),
}
NAMES = {
    FUSED: ("q", "kv", "q_out", "k_cache", "slots", "positions", "table", "eps", "block_size"),
    KV_ONLY: ("kv", "k_cache", "slots", "positions", "table", "block_size"),
    IN_PLACE: ("q", "kv", "k_cache", "slots", "positions", "table", "eps", "block_size"),
}


def good():
    return {
        "q": torch.randn(ROWS, HEADS, 512).bfloat16(),
        "kv": torch.randn(ROWS, 512).bfloat16(),
        "q_out": torch.zeros(ROWS + 1, PADDED, 512, dtype=torch.bfloat16),
        "k_cache": torch.zeros(BLOCKS, WIDTH + 48, dtype=torch.uint8)[:, :WIDTH],
        "slots": torch.arange(ROWS - 1),
        "positions": torch.arange(ROWS),
        "table": torch.randn(20, 64),
        "eps": 1e-6,
        "block_size": BLOCK_SIZE,
    }


def shifted(tensor, offset):
    """A copy of a tensor whose address is `offset` bytes past an aligned one."""
    memory = bytearray(tensor.nbytes + 64)
    view = torch.frombuffer(memory, dtype=torch.uint8)
    start = -view.data_ptr() % 64 + offset
    return torch.frombuffer(memory, dtype=tensor.dtype, offset=start, count=tensor.numel()).view(tensor.shape)


def bf16(*shape):
    return torch.zeros(*shape, dtype=torch.bfloat16)


def within(owner, shape, dtype):
    """A tensor of the given shape in the first bytes of another one's memory."""
    count = math.prod(shape)
    storage = torch.empty(0, dtype=dtype).set_(owner.untyped_storage(), 0, (count,), (1,))
    return storage.view(shape)


# (name, operators, change to good arguments, argument that the message names)
BAD = [
    ("1-q-2d", QUERY, lambda a: {"q": bf16(ROWS, 512)}, "q"),
    ("2-q-width", QUERY, lambda a: {"q": bf16(ROWS, HEADS, 511)}, "q"),
    ("3-q-strided", QUERY, lambda a: {"q": bf16(ROWS, 4, 512)[:, :HEADS]}, "q"),
    ("4-q-dtype", QUERY, lambda a: {"q": a["q"].float()}, "q"),
    ("4-q-half", QUERY, lambda a: {"q": a["q"].half()}, "q"),
    ("5-no-heads", QUERY, lambda a: {"q": bf16(ROWS, 0, 512)}, "q"),
    ("5-129-heads", QUERY, lambda a: {"q": bf16(ROWS, 129, 512)}, "q"),
    ("6-kv-3d", ALL, lambda a: {"kv": bf16(ROWS, 1, 512)}, "kv"),
    ("7-kv-width", ALL, lambda a: {"kv": bf16(ROWS, 513)}, "kv"),
    ("8-kv-strided", ALL, lambda a: {"kv": bf16(ROWS, 2, 512).unbind(1)[0]}, "kv"),
    ("9-kv-dtype", ALL, lambda a: {"kv": a["kv"].float()}, "kv"),
    ("10-kv-rows", QUERY, lambda a: {"kv": bf16(ROWS + 1, 512)}, "kv"),
    ("11-q-out-2d", (FUSED,), lambda a: {"q_out": bf16(ROWS, 512)}, "q_out"),
    ("12-q-out-width", (FUSED,), lambda a: {"q_out": bf16(ROWS, PADDED, 448)}, "q_out"),
    ("13-q-out-rows", (FUSED,), lambda a: {"q_out": bf16(ROWS - 1, PADDED, 512)}, "q_out"),
    ("14-q-out-heads", (FUSED,), lambda a: {"q": bf16(ROWS, 9, 512)}, "q_out"),
    ("15-q-out-padding", (FUSED,), lambda a: {"q_out": bf16(ROWS, 12, 512)}, "q_out"),
    ("16-q-out-dtype", (FUSED,), lambda a: {"q_out": a["q_out"].half()}, "q_out"),
    ("17-q-out-strided", (FUSED,), lambda a: {"q_out": bf16(ROWS, 16, 512)[:, :PADDED]}, "q_out"),
    ("18-q-out-over-q", (FUSED,), lambda a: {"q": within(a["q_out"], (ROWS, HEADS, 512), torch.bfloat16)}, "q_out"),
    ("19-q-out-over-kv", (FUSED,), lambda a: {"kv": within(a["q_out"], (ROWS, 512), torch.bfloat16)}, "q_out"),
    ("19-q-over-kv", (IN_PLACE,), lambda a: {"kv": within(a["q"], (ROWS, 512), torch.bfloat16)}, "q"),
    ("19-q-over-table", (IN_PLACE,), lambda a: {"table": within(a["q"], (20, 64), torch.float32)}, "q"),
    (
        "19-q-out-over-slots",
        (FUSED,),
        lambda a: {"slots": within(a["q_out"], (ROWS,), torch.int64)},
        "q_out",
    ),
    (
        "19-q-out-over-cache",
        (FUSED,),
        lambda a: {"q_out": within(a["k_cache"], (ROWS, PADDED, 512), torch.bfloat16)},
        "q_out",
    ),
    ("20-cache-over-kv", ALL, lambda a: {"kv": within(a["k_cache"], (ROWS, 512), torch.bfloat16)}, "k_cache"),
    (
        "20-cache-over-positions",
        ALL,
        lambda a: {"positions": within(a["k_cache"], (ROWS,), torch.int64)},
        "k_cache",
    ),
    ("21-cache-dtype", ALL, lambda a: {"k_cache": a["k_cache"].to(torch.int8)}, "k_cache"),
    ("21-cache-fp8", ALL, lambda a: {"k_cache": a["k_cache"].contiguous().view(torch.float8_e4m3fn)}, "k_cache"),
    ("22-cache-3d", ALL, lambda a: {"k_cache": a["k_cache"].unflatten(1, (64, 584))}, "k_cache"),
    ("23-cache-width", ALL, lambda a: {"k_cache": a["k_cache"][:, :-1]}, "k_cache"),
    ("24-cache-inner", ALL, lambda a: {"k_cache": torch.zeros(WIDTH, BLOCKS, dtype=torch.uint8).T}, "k_cache"),
    ("25-cache-overlap", ALL, lambda a: {"k_cache": a["k_cache"].as_strided((3, WIDTH), (WIDTH - 16, 1))}, "k_cache"),
    ("25-cache-stride", ALL, lambda a: {"k_cache": a["k_cache"].as_strided((2, WIDTH), (WIDTH + 8, 1))}, "k_cache"),
    ("26-no-blocks", ALL, lambda a: {"k_cache": a["k_cache"][:0]}, "k_cache"),
    ("27-block-size-0", ALL, lambda a: {"block_size": 0}, "cache_block_size"),
    ("27-block-size-48", ALL, lambda a: {"block_size": 48}, "cache_block_size"),
    ("28-slots-2d", ALL, lambda a: {"slots": a["slots"][None]}, "slot_mapping"),
    ("28-slots-strided", ALL, lambda a: {"slots": torch.arange(8)[::2]}, "slot_mapping"),
    ("29-slots-int32", ALL, lambda a: {"slots": a["slots"].int()}, "slot_mapping"),
    ("30-slots-rows", ALL, lambda a: {"slots": torch.arange(ROWS + 1)}, "slot_mapping"),
    ("31-positions-int32", ALL, lambda a: {"positions": a["positions"].int()}, "position_ids"),
    ("31-positions-strided", ALL, lambda a: {"positions": torch.arange(2 * ROWS)[::2]}, "position_ids"),
    ("32-positions-rows", ALL, lambda a: {"positions": torch.arange(ROWS - 1)}, "position_ids"),
    ("32-positions-3n", ALL, lambda a: {"positions": a["positions"].expand(3, ROWS)}, "position_ids"),
    ("33-table-dtype", ALL, lambda a: {"table": a["table"].bfloat16()}, "cos_sin_cache"),
    ("34-table-width", ALL, lambda a: {"table": torch.zeros(20, 32)}, "cos_sin_cache"),
    ("34-table-empty", ALL, lambda a: {"table": torch.zeros(0, 64)}, "cos_sin_cache"),
    ("34-table-strided", ALL, lambda a: {"table": torch.zeros(20, 128)[:, :64]}, "cos_sin_cache"),
    ("37-q-address", QUERY, lambda a: {"q": shifted(a["q"], 2)}, "q"),
    ("37-kv-address", ALL, lambda a: {"kv": shifted(a["kv"], 8)}, "kv"),
    ("37-q-out-address", (FUSED,), lambda a: {"q_out": shifted(a["q_out"], 4)}, "q_out"),
    ("37-cache-address", ALL, lambda a: {"k_cache": shifted(a["k_cache"].contiguous(), 1)}, "k_cache"),
    ("37-slots-address", ALL, lambda a: {"slots": shifted(a["slots"], 4)}, "slot_mapping"),
    ("37-positions-address", ALL, lambda a: {"positions": shifted(a["positions"], 4)}, "position_ids"),
    ("37-table-address", ALL, lambda a: {"table": shifted(a["table"], 8)}, "cos_sin_cache"),
    ("38-eps-negative", QUERY, lambda a: {"eps": -1e-6}, "eps"),
    ("38-eps-nan", QUERY, lambda a: {"eps": math.nan}, "eps"),
    ("38-eps-inf", QUERY, lambda a: {"eps": math.inf}, "eps"),
    ("38-eps-beyond-float32", QUERY, lambda a: {"eps": 1e39}, "eps"),
]
CASES = [pytest.param(op, change, name, id=f"{op}-{label}") for label, ops_, change, name in BAD for op in ops_]

# Devices and layouts have no common name in both languages, so only argument and rule are compared.
ELSEWHERE = [
    ("35-kv-device", lambda a: {"kv": a["kv"].to("meta")}, "kv", "the device of k_cache"),
    ("35-slots-device", lambda a: {"slots": a["slots"].to("meta")}, "slot_mapping", "the device of k_cache"),
    (
        "36-device",
        lambda a: {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in a.items()},
        "k_cache",
        "a device with an implementation: cpu or cuda",
    ),
    ("39-layout", lambda a: {"kv": a["kv"].to_sparse()}, "kv", "a dense strided layout"),
]


def rejections(operator, arguments):
    """The messages of the Python and the C++ check for the same arguments."""
    values = [arguments[name] for name in NAMES[operator]]
    messages = []
    for check in CHECKS[operator]:
        with pytest.raises(RuntimeError) as caught:
            check(*values)
        messages.append(str(caught.value))
    return messages


@pytest.mark.parametrize("operator", ALL)
def test_good_arguments_pass_both(operator):
    """The arguments that every bad case starts from are accepted."""
    for check in CHECKS[operator]:
        check(*[good()[name] for name in NAMES[operator]])


@pytest.mark.parametrize("operator", ALL)
def test_no_rows_and_no_slots_pass_both(operator):
    """Zero rows, and rows without slots into a cache without blocks, are legal."""
    nothing = {"q": bf16(0, HEADS, 512), "kv": bf16(0, 512), "slots": torch.arange(0), "positions": torch.arange(0)}
    cacheless = {"slots": torch.arange(0), "k_cache": good()["k_cache"][:0]}
    for change in (nothing, cacheless):
        arguments = {**good(), **change}
        for check in CHECKS[operator]:
            check(*[arguments[name] for name in NAMES[operator]])


@pytest.mark.parametrize(("operator", "change", "name"), CASES)
def test_python_and_cpp_reject_in_the_same_words(operator, change, name):
    """Each bad input is rejected by both, naming the argument, what it got and what it needs."""
    arguments = good()
    arguments.update(change(arguments))
    python, cpp = rejections(operator, arguments)
    if name == "q" and operator == FUSED:
        name = "q_in"
    assert python.startswith(f"{name}: got ")
    assert "; needs " in python
    assert python in cpp


@pytest.mark.parametrize("operator", ALL)
@pytest.mark.parametrize(("change", "name", "needs"), [case[1:] for case in ELSEWHERE], ids=[c[0] for c in ELSEWHERE])
def test_wrong_device_and_layout_are_rejected(operator, change, name, needs):
    """Tensors elsewhere, devices without an implementation and sparse tensors name the same argument."""
    arguments = good()
    arguments.update(change(arguments))
    for message in rejections(operator, arguments):
        assert f"{name}: got " in message
        assert f"; needs {needs}" in message


def test_old_cards_are_rejected():
    """Compute capability below 8.0 has no fp8 conversion."""
    for check in (validation.check_capability, torch.ops.vllm_qout.check_capability):
        check(9, 0)
        with pytest.raises(RuntimeError, match=r"k_cache: got a card of compute capability 7\.5; needs"):
            check(7, 5)


def test_loading_the_operators_is_what_registers_them():
    """The comparison runs against the compiled library."""
    assert ops.LIBRARY.is_file()
