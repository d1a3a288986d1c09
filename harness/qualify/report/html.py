# SPDX-License-Identifier: Apache-2.0
"""The HTML report: one page that opens from disk, with nothing loaded from anywhere and no script.

It shows what the receipt and its evidence say, and nothing about the manifest, which lists the report itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from qualify.claims.model import Check, Claim, ClaimId, Status
from qualify.errors import EvidenceError
from qualify.evidence import Evidence, FolderSource, write_atomically
from qualify.reasons import CATALOGUE
from qualify.receipt.model import EVIDENCE, REPORT, Caveat, Qualification, Receipt, Result
from qualify.receipt.verdict import in_profile
from qualify.records import RUN, Outcome, Phase, Run
from qualify.report.bars import bar, bars
from qualify.report.figures import throughput_plots
from qualify.report.markup import Markup, element, table
from qualify.report.restore import restore_arms
from qualify.report.table import figure, figures_by_scope, label

RESULT_CLASS = {
    Result.PASSED: "passed",
    Result.WARNED: "inconclusive",
    Result.FAILED: "failed",
    Result.INVALID: "invalid",
}

MAX_ROWS = 200
"""Checks shown per claim; those that did not pass come first, and the receipt has all."""

POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def write_report(bundle: Path, receipt: Receipt) -> None:
    """Write the report into the bundle."""
    write_atomically(bundle / REPORT, render_html(receipt, bundle).encode())


def render_html(receipt: Receipt, bundle: Path) -> str:
    """The page for a receipt and the evidence in its folder; a plot without evidence is left out."""
    predicate = receipt.predicate
    evidence = Evidence(FolderSource((bundle.parent if bundle.is_file() else bundle) / EVIDENCE))
    title = f"{predicate.result}: {predicate.profile.name} on {receipt.subject[0].name}"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        element("style", Markup(Path(__file__).with_name("style.css").read_text(encoding="utf-8"))),
    )
    body = element(
        "body",
        _header(receipt),
        _caveats("Must not be quoted for", predicate.not_for),
        _caveats("Limitations", predicate.limitations),
        element("h2", "Claims"),
        [_claim(claim) for claim in predicate.claims],
        _section("Figures", _figures(predicate)),
        _section("Throughput over time", throughput_plots(evidence, predicate)),
        _section("KV restore", restore_arms(predicate)),
        _section("Where the time went", _phases(evidence)),
        _identities(predicate),
        _recheck(),
    )
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"


def _section(title: str, content: Markup | None) -> Markup | None:
    return None if content is None else element("section", element("h2", title), content)


def _header(receipt: Receipt) -> Markup:
    predicate = receipt.predicate
    required = [claim for claim in predicate.claims if claim.required]
    passed = sum(claim.status is Status.PASSED for claim in required)
    badge = element("span", predicate.result, class_=f"badge {RESULT_CLASS[predicate.result]}")
    subject = receipt.subject[0]
    facts = {
        "Subject": element("code", f"{subject.name} sha256:{subject.digest.sha256}"),
        "Identity": predicate.identity,
        "Coverage": predicate.coverage,
        "Target": predicate.target,
        "Profile": [f"{predicate.profile.name} ", element("code", f"sha256:{predicate.profile.digest.sha256}")],
        "Run": f"{predicate.started_at} to {predicate.finished_at}, {predicate.outcome}",
        "Ended early": predicate.failure,
        "Reasons": ", ".join(_reason(reason.claim, reason.reason_code) for reason in predicate.result_reasons),
    }
    return element(
        "header",
        element("h1", badge, f" {passed} of {len(required)} required claims"),
        _facts(facts),
    )


def _reason(claim: ClaimId | None, code: str) -> str:
    return f"{claim}: {code}" if claim else code


def _facts(facts: dict[str, Any]) -> Markup:
    pairs = ([element("dt", name), element("dd", value)] for name, value in facts.items() if value)
    return element("dl", list(pairs), class_="facts")


def _caveats(title: str, caveats: tuple[Caveat, ...]) -> Markup | None:
    items = [element("li", caveat.text, " ", element("span", _affects(caveat), class_="soft")) for caveat in caveats]
    return _section(title, element("ul", items)) if items else None


def _affects(caveat: Caveat) -> str:
    return "(every claim)" if len(caveat.affects) == len(ClaimId) else f"({', '.join(caveat.affects)})"


def _claim(claim: Claim) -> Markup:
    need = " (optional)" if in_profile(claim) and not claim.required else ""
    summary = element(
        "summary",
        element("span", claim.status, class_=f"status {claim.status}"),
        element("span", claim.id, need, class_="id"),
        element("span", claim.summary, class_="text"),
    )
    inner = element(
        "div",
        [_explained(code) for code in claim.reason_codes],
        _checks(claim.checks),
        _block("Observed", claim.observed),
        _block("Expected", claim.expected),
        _evidence(claim),
        class_="inner",
    )
    closed = claim.status in (Status.PASSED, Status.NOT_RUN)
    return element("details", summary, inner, open=None if closed else "open")


def _explained(code: Any) -> Markup:
    explanation = CATALOGUE[code]
    return element("p", element("code", code), f": {explanation.meaning}; {explanation.remedy}.")


def _checks(checks: tuple[Check, ...]) -> Markup | None:
    if not checks:
        return None
    ordered = sorted(checks, key=lambda check: check.status is Status.PASSED)
    rows = [
        [
            element("span", check.status, class_=check.status),
            element("span", check.name, f" [{check.reason_code}]" if check.reason_code else ""),
            check.where,
            element("code", _value(check.observed)),
            element("code", _value(check.expected)),
        ]
        for check in ordered[:MAX_ROWS]
    ]
    left_out = len(checks) - len(rows)
    passed = sum(check.status is Status.PASSED for check in checks)
    return element(
        "div",
        element("h3", f"Checks: {passed} of {len(checks)} passed"),
        table(("status", "rule", "where", "observed", "expected"), rows),
        element("p", f"and {left_out} more that passed; the receipt lists all", class_="soft") if left_out else None,
    )


def _value(value: Any, limit: int = 160) -> str:
    text = "" if value is None else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _block(title: str, value: dict[str, Any] | None) -> Markup | None:
    if not value:
        return None
    text = json.dumps(value, indent=1, ensure_ascii=False)
    body = element("pre", element("code", text), class_="scroll")
    return element("details", element("summary", title), element("div", body, class_="inner"))


def _evidence(claim: Claim) -> Markup | None:
    if not claim.evidence:
        return None
    rows: list[list[Any]] = [
        [element("a", reference.path, href=f"{EVIDENCE}/{reference.path}"), element("code", reference.sha256)]
        for reference in claim.evidence
    ]
    inner = element("div", table(("file", "sha256"), rows), class_="inner")
    return element("details", element("summary", f"Evidence: {len(rows)} files"), inner)


def _figures(predicate: Qualification) -> Markup | None:
    """One row a scope, one column a figure."""
    estimates = tuple(estimate for claim in predicate.claims for estimate in claim.estimates)
    names = list(dict.fromkeys(label(estimate) for estimate in estimates))
    if not names:
        return None
    rows: list[list[Any]] = []
    for scope, members in figures_by_scope(estimates).items():
        known = {label(estimate): figure(estimate) for estimate in members}
        rows.append([scope, *(known.get(name) for name in names)])
    methods = sorted(
        {f"{estimate.replicates} × {estimate.replicate_unit}, {estimate.method}" for estimate in estimates}
    )
    note = element("p", f"Point [95 % interval]; {'; '.join(methods)}", class_="soft")
    return element("div", table(("", *names), rows), note)


def _phases(evidence: Evidence) -> Markup | None:
    try:
        phases = evidence.record(RUN, Run).phases
    except EvidenceError:
        return None
    if not phases:
        return None
    total = max(phase.began + phase.seconds for phase in phases) or 1.0
    return bars(_phase(phase, total) for phase in phases)


def _phase(phase: Phase, total: float) -> Markup:
    completed = phase.outcome is Outcome.COMPLETED
    value = f"{phase.seconds:.1f} s" + ("" if completed else f" {phase.outcome}")
    return bar(phase.name, value, begin=phase.began / total, share=phase.seconds / total, good=completed)


def _identities(predicate: Qualification) -> Markup | None:
    host, engine, model = predicate.host, predicate.engine, predicate.model
    facts: dict[str, Any] = {
        "Harness": f"{predicate.harness.version}, commit {predicate.harness.git_commit or 'unknown'}",
        "Image": predicate.image and f"{predicate.image.repository}@{predicate.image.manifest_digest}",
        "Engine": engine and ", ".join(f"{package.name} {package.version}" for package in engine.packages),
        "Model": model
        and [f"{model.name}, {model.file_count} files ", element("code", f"sha256:{model.digest.sha256}")],
        "Processor": host and f"{host.cpu_model}, {host.cores} cores, {host.memory_bytes / 2**30:.1f} GiB",
        "GPUs": host and ", ".join(f"{gpu.name}, driver {gpu.driver}" for gpu in host.gpus),
        "Boots": "; ".join(f"{boot.name}: {boot.outcome or 'no record'}" for boot in predicate.boots),
    }
    return _section("What ran", _facts(facts))


def _recheck() -> Markup:
    return element(
        "section",
        element("h2", "Check it yourself"),
        element("p", "This page is display. ", element("code", "qualify review FOLDER"), " recomputes every claim."),
    )
