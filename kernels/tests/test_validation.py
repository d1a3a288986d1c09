# SPDX-License-Identifier: Apache-2.0
"""The `check_*` operators: every rule of a call, in one form of words. Python backends call them before a launch."""

import math

import pytest
import torch
from vllm_qout.rejections import rejections, valid_inputs
from vllm_qout.samples import FUSED, OPERATORS

CASES = [
    pytest.param(operator, rejection, id=f"{operator}-{rejection.rule:02}-{rejection.argument}-{rejection.what}")
    for rejection in rejections("cpu")
    for operator in rejection.operators
]


def check(operator, inputs):
    getattr(torch.ops.vllm_qout, f"check_{operator}")(*inputs.arguments(operator))


def message_of(operator, inputs):
    with pytest.raises(RuntimeError) as caught:
        check(operator, inputs)
    return str(caught.value).splitlines()[0]


@pytest.mark.parametrize(("operator", "rejection"), CASES)
def test_each_bad_argument_is_named(operator, rejection):
    """Each bad input is rejected, naming the argument, what it got and what it needs."""
    message = message_of(operator, rejection.change(valid_inputs("cpu")))
    assert f"{rejection.argument_in(operator)}: got " in message
    assert rejection.needs in message.partition("; needs ")[2]


def test_the_shared_list_covers_every_rule_of_a_call():
    """All 40 rules but the capability of a card and the unknown device, which have tests of their own."""
    assert {rejection.rule for rejection in rejections("cpu")} == set(range(1, 41)) - {36, 40}


@pytest.mark.parametrize("operator", OPERATORS)
def test_good_calls_pass(operator):
    """The call that every bad one spoils is accepted, also without slots and cache blocks."""
    inputs = valid_inputs("cpu")
    check(operator, inputs)
    check(operator, inputs.but(slot_mapping=torch.arange(0), k_cache=inputs.k_cache[:0]))


@pytest.mark.parametrize("eps", [-1e-6, math.nan, math.inf, 1e39])
def test_eps_is_judged_as_float32(eps):
    """A double that float32 cannot hold is rejected like an infinity."""
    assert "eps: got " in message_of(FUSED, valid_inputs("cpu").but(eps=eps))


def test_old_cards_are_rejected():
    """Compute capability below 8.0 has no fp8 conversion."""
    torch.ops.vllm_qout.check_capability(9, 0)
    with pytest.raises(RuntimeError, match=r"k_cache: got a card of compute capability 7\.5; needs"):
        torch.ops.vllm_qout.check_capability(7, 5)
