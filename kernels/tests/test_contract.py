# SPDX-License-Identifier: Apache-2.0
"""The contract suite passes here, fails for a broken operator, and never passes without its cases."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from vllm_qout import contract
from vllm_qout.samples import FUSED, OPERATORS


@pytest.fixture(scope="module")
def report():
    return contract.run("cpu")


def test_passes_with_every_kind_and_rule(report):
    """All 40 rules and all five kinds of case ran, and every case passed."""
    assert [case for case in report["cases"] if not case["passed"]] == []
    assert report["passed"] is True
    assert report["counts"]["rules"] == 40
    assert min(report["counts"]["by_kind"].values()) > 0


def test_report_is_json_with_unique_case_names(report):
    """The report survives JSON, and no two cases share kind and name."""
    assert json.loads(json.dumps(report)) == report
    names = [(case["kind"], case["id"]) for case in report["cases"]]
    assert len(set(names)) == len(names)


def broken(operator: str, wrong) -> contract.Backend:
    """The native backend with one operator replaced."""
    native = contract.load_backend(None)
    return replace(native, operators=native.operators | {operator: wrong(native.operators[operator])})


def failed(cases) -> set[str]:
    return {case.id for case in cases if not case.passed}


def test_a_backend_that_accepts_everything_fails_every_rejection():
    """Each rejection case can fail."""
    backend = contract.Backend("none", dict.fromkeys(OPERATORS, lambda *_: None), checks_values=True)
    rejected = list(contract.reject_cases(backend, "cpu"))
    judged_apart = ("rule36", "rule40")  # these call the checks, not the backend
    assert len(failed(rejected)) == sum(not case.id.startswith(judged_apart) for case in rejected)


def test_a_backend_that_writes_before_it_rejects_fails():
    """A right message after a wrong write is not enough."""

    def eager(call):
        def wrong(*arguments):
            if arguments[2].numel() and arguments[2].is_contiguous() and arguments[2].device.type == "cpu":
                arguments[2].view(-1)[0] = 1
            call(*arguments)

        return wrong

    details = [case.detail for case in contract.reject_cases(broken(FUSED, eager), "cpu") if not case.passed]
    assert "rejected, but an output changed" in details


@pytest.mark.parametrize(
    "damage, detail",
    [
        (lambda q_out, k_cache: q_out[0, 0, 500].mul_(1.02), "query"),
        (lambda q_out, k_cache: q_out[0, -1, 0].fill_(-0.0), "padding"),
        (lambda q_out, k_cache: q_out[-1, 0, 0].fill_(1.0), "rows past the last"),
        (lambda q_out, k_cache: k_cache[0].add_(1), "cache bytes|rotated context"),
    ],
)
def test_small_damage_is_seen(damage, detail):
    """One wrong element anywhere fails a numerics case that says where."""

    def damaged(call):
        def wrong(*arguments):
            call(*arguments)
            damage(arguments[2], arguments[3])

        return wrong

    inputs = contract.make_inputs(rows=3, heads=2, padded_heads=8)
    seen = contract.scenario_detail(broken(FUSED, damaged), inputs)
    assert torch.tensor([part in seen for part in detail.split("|")]).any(), seen


def test_an_allocating_operator_is_seen():
    """The allocation case fails for an operator that makes a temporary."""

    def allocating(call):
        return lambda *arguments: (torch.empty(4096), call(*arguments))

    assert failed(contract.allocation_cases(broken(FUSED, allocating), "cpu")) == {FUSED}


def test_no_cases_is_no_pass():
    """An empty run, or one without a kind or a rule, is never complete."""
    full = {"rules": 40, "by_kind": dict.fromkeys(contract.KINDS, 1)}
    assert contract.complete(full)
    assert not contract.complete({"rules": 0, "by_kind": {}})
    assert not contract.complete(full | {"rules": 39})
    assert not contract.complete(full | {"by_kind": full["by_kind"] | {"edge": 0}})


def test_command_errors_are_one_line(capsys, tmp_path):
    """A device that is not there is an error with a remedy, status 2, no traceback."""
    if torch.cuda.is_available():
        pytest.skip("states what happens without a GPU")
    assert contract.main(["--device", "cuda", "--json", str(tmp_path / "out.json")]) == 2
    assert capsys.readouterr().err == (
        "vllm_qout.contract: device cuda: torch sees no GPU; use --device cpu, or check nvidia-smi\n"
    )
