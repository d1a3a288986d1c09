# SPDX-License-Identifier: Apache-2.0
"""The checks in Python reject what the C++ checks reject, in the same words."""

import math

import pytest
import torch
from vllm_qout import ops, validation
from vllm_qout.rejections import rejections, valid_inputs
from vllm_qout.samples import CONTEXT, FUSED, IN_PLACE, OPERATORS

PYTHON = {FUSED: validation.check_fused, CONTEXT: validation.check_kv, IN_PLACE: validation.check_in_place}

CASES = [
    pytest.param(operator, rejection, id=f"{operator}-{rejection.rule:02}-{rejection.argument}-{rejection.what}")
    for rejection in rejections("cpu")
    for operator in rejection.operators
]
# The two languages name devices differently; there only argument and need are compared.
DEVICE_RULES = (35, 36)


def check_in_python(operator, inputs):
    arguments = inputs.arguments(operator)
    PYTHON[operator](*(arguments if operator == CONTEXT else arguments[:-1]))


def check_in_cpp(operator, inputs):
    getattr(torch.ops.vllm_qout, f"check_{operator}")(*inputs.arguments(operator))


def message_of(check, operator, inputs):
    with pytest.raises(RuntimeError) as caught:
        check(operator, inputs)
    return str(caught.value).splitlines()[0]


@pytest.mark.parametrize(("operator", "rejection"), CASES)
def test_python_and_cpp_reject_in_the_same_words(operator, rejection):
    """Each bad input is rejected by both, naming the argument, what it got and what it needs."""
    inputs = rejection.change(valid_inputs("cpu"))
    python = message_of(check_in_python, operator, inputs)
    assert python.startswith(f"{rejection.argument_in(operator)}: got ")
    assert rejection.needs in python.partition("; needs ")[2]
    cpp = message_of(check_in_cpp, operator, inputs)
    if rejection.rule not in DEVICE_RULES:
        assert cpp.endswith(python)


def test_the_shared_list_covers_every_rule_of_a_call():
    """All 40 rules but the capability of a card and the unknown device, which have tests of their own."""
    assert {rejection.rule for rejection in rejections("cpu")} == set(range(1, 41)) - {36, 40}


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("check", [check_in_python, check_in_cpp])
def test_good_calls_pass(check, operator):
    """The call that every bad one spoils is accepted, also without slots and cache blocks."""
    inputs = valid_inputs("cpu")
    check(operator, inputs)
    check(operator, inputs.but(slot_mapping=torch.arange(0), k_cache=inputs.k_cache[:0]))


def test_a_device_without_an_implementation_is_rejected():
    """All tensors on such a device: rule 36 names the cache."""
    inputs = valid_inputs("cpu")
    moved = {name: value.to("meta") for name, value in vars(inputs).items() if isinstance(value, torch.Tensor)}
    message = message_of(check_in_python, FUSED, inputs.but(**moved))
    assert message == "k_cache: got device meta; needs a device with an implementation: cpu or cuda"


@pytest.mark.parametrize("eps", [-1e-6, math.nan, math.inf, 1e39])
def test_eps_is_judged_as_float32(eps):
    """A double that float32 cannot hold is rejected like an infinity, in the same words."""
    inputs = valid_inputs("cpu").but(eps=eps)
    python, cpp = (message_of(check, FUSED, inputs) for check in (check_in_python, check_in_cpp))
    assert cpp.endswith(python)


def test_old_cards_are_rejected():
    """Compute capability below 8.0 has no fp8 conversion."""
    for check in (validation.check_capability, torch.ops.vllm_qout.check_capability):
        check(9, 0)
        with pytest.raises(RuntimeError, match=r"k_cache: got a card of compute capability 7\.5; needs"):
            check(7, 5)


def test_record_sizes_are_the_operators():
    """The constants of the Python checks are those of the operators."""
    assert (validation.RECORD_BYTES, validation.HEAD_DIM, validation.ROPE_DIM, validation.PADDED_HEADS) == (
        ops.TOKEN_BYTES,
        ops.HEAD_DIM,
        ops.ROPE_DIM,
        ops.PADDED_HEADS,
    )
