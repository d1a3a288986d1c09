# SPDX-License-Identifier: Apache-2.0
"""op.contract: the operator in the engine's environment has the promised schemas and holds its contract.

The suite (`vllm_qout.contract`) runs in the engine's environment and reports every case; it is recounted here, and
the schemas and the number of rejection rules are this file's own, so that a suite which ran less cannot pass.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from qualify.claims.model import Check, Judgement, Status, check, equal
from qualify.claims.pins import public
from qualify.evidence import Evidence
from qualify.model import Record
from qualify.profiles import Profile
from qualify.reasons import ReasonCode
from qualify.records import CONTRACT, ENGINE, EngineEnvironment

_CONTEXT = "Tensor slot_mapping, Tensor position_ids, Tensor cos_sin_cache"

SCHEMAS = {
    "fused_qnorm_rope_kv_insert": "vllm_qout::fused_qnorm_rope_kv_insert(Tensor q_in, Tensor kv, Tensor(a!) q_out, "
    f"Tensor(b!) k_cache, {_CONTEXT}, float eps, int cache_block_size, bool apply_q_norm=True) -> ()",
    "kv_rope_insert": "vllm_qout::kv_rope_insert(Tensor kv, Tensor(a!) k_cache, "
    f"{_CONTEXT}, int cache_block_size) -> ()",
    "qnorm_rope_kv_insert_": "vllm_qout::qnorm_rope_kv_insert_(Tensor(a!) q, Tensor kv, Tensor(b!) k_cache, "
    f"{_CONTEXT}, float eps, int cache_block_size, bool apply_q_norm=True) -> ()",
}
"""The promised operators: every mutated argument is marked, and nothing is returned."""

RULES = frozenset(f"rule{number:02}" for number in range(1, 41))
"""The bad inputs that must be rejected before launch, as kernels/vllm_qout/rejections.py numbers them."""

KINDS = frozenset({"schema", "reject", "numerics", "edge", "allocation"})


class Case(Record):
    id: str
    kind: str
    passed: bool
    detail: str


class ContractReport(Record):
    """contract.json: what the suite reports. Its own verdict and counts are read, but not trusted."""

    suite: str
    device: str
    backend: str
    environment: dict[str, Any]
    schemas: dict[str, str]
    cases: tuple[Case, ...]
    counts: dict[str, Any]
    passed: bool


def judge(evidence: Evidence, profile: Profile) -> Judgement:
    report = evidence.record(CONTRACT, ContractReport)
    engine = evidence.record(ENGINE, EngineEnvironment)
    checks = (_same_engine(report, engine), *_checks(report, profile))
    by_kind = Counter(case.kind for case in report.cases)
    failed = [case.id for case in report.cases if not case.passed]
    verdict = f"{failed[0]} failed" if failed else "each as promised"
    return Judgement(
        checks=checks,
        summary=f"{len(report.cases)} cases on {report.device}, {verdict}",
        observed={
            "cases": dict(sorted(by_kind.items())),
            "failed": failed,
            "device": report.device,
            "backend": report.backend,
            "environment": report.environment,
        },
        expected={"kinds": sorted(KINDS), "rules": len(RULES), "schemas": SCHEMAS},
    )


def _same_engine(report: ContractReport, engine: EngineEnvironment) -> Check:
    """The suite saw the packages that the engine has."""
    installed = {item.name: public(item.version) for item in engine.distributions}
    expected = {"python": engine.python, "torch": installed.get("torch"), "vllm_qout": installed.get("vllm-qout")}
    # torch adds to its version which CUDA it was built for; the name of its package may leave that out.
    observed = {name: public(report.environment.get(name)) for name in expected}
    return equal("the suite ran in the engine's environment", observed, expected, ReasonCode.VERSION_MISMATCH)


def _checks(report: ContractReport, profile: Profile) -> Iterator[Check]:
    yield equal("suite", report.suite, "vllm_qout.contract", ReasonCode.OP_SCHEMA_MISMATCH)
    device = "cuda" if profile.engine.kind == "cuda" else "cpu"
    yield equal("device", report.device.partition(":")[0], device, ReasonCode.OP_CASE_FAILED)
    for operator, schema in SCHEMAS.items():
        yield equal("schema", report.schemas.get(operator), schema, ReasonCode.OP_SCHEMA_MISMATCH, where=operator)
    ran = {case.kind for case in report.cases}
    yield equal("every kind of case ran", sorted(ran & KINDS), sorted(KINDS), ReasonCode.EVIDENCE_MISSING)
    rules = {found[0] for case in report.cases if case.kind == "reject" and (found := re.match(r"rule\d\d", case.id))}
    missing = sorted(RULES - rules)
    yield check(
        "every rejection rule ran",
        not missing,
        ReasonCode.EVIDENCE_MISSING,
        observed=missing,
        expected=[],
        otherwise=Status.ERROR,
    )
    names = [(case.kind, case.id) for case in report.cases]
    yield equal("no case twice", len(set(names)), len(names), ReasonCode.PARSE_FAILED)
    recount = {"total": len(names), "failed": sum(not case.passed for case in report.cases)}
    stated = {key: report.counts.get(key) for key in recount}
    yield equal("the suite's own counts", stated, recount, ReasonCode.COUNTER_MISMATCH)
    yield equal("the suite's own verdict", report.passed, recount["failed"] == 0, ReasonCode.COUNTER_MISMATCH)
    for case in report.cases:
        if not case.passed:
            yield check(f"{case.kind} case", False, ReasonCode.OP_CASE_FAILED, where=case.id, observed=case.detail)
    passing = sum(case.passed for case in report.cases)
    yield equal("cases passed", passing, len(names) or None, ReasonCode.OP_CASE_FAILED)
