# SPDX-License-Identifier: Apache-2.0
"""What surrounds a run: image references and digests, builds, shared memory, other people's results and receipts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from qualify.observe.codes import EvidenceCode
from qualify.observe.triage import Finding, Side, Verdict

_C = EvidenceCode
_PINNED = re.compile(r".+@sha256:[0-9a-f]{64}")


class DigestKind(StrEnum):
    """An image has one digest of each kind; none of them equals another."""

    CONFIG = "config"
    MANIFEST = "manifest"
    ATTESTATION = "attestation"
    INDEX = "index"


def judge_digests(digests: Sequence[tuple[DigestKind, str]]) -> Finding | None:
    """Digests that name one image: of one kind they must be equal, of different kinds they cannot be compared."""
    by_kind: dict[DigestKind, set[str]] = {}
    for kind, digest in digests:
        by_kind.setdefault(kind, set()).add(digest)
    for kind, values in by_kind.items():
        if len(values) > 1:
            detail = f"{kind} digests differ: {', '.join(sorted(values))}"
            return _finding(_C.DIGEST_MISMATCH, Side.IMAGE, Verdict.FAIL, detail)
    if len(by_kind) > 1:
        detail = f"kinds: {', '.join(sorted(by_kind))}"
        return _finding(_C.DIGEST_KIND, Side.IMAGE, Verdict.FACT, detail)
    return None


def judge_reference(reference: str) -> Finding | None:
    """An image reference identifies an image only by its digest."""
    if _PINNED.fullmatch(reference):
        return None
    return _finding(_C.TAG_NOT_IDENTITY, Side.IMAGE, Verdict.INCONCLUSIVE, f"{reference} has no digest")


def judge_cuda_majors(majors: Mapping[str, int | None]) -> Finding | None:
    """Libraries in one image by the CUDA major version they were built for; None for a library without CUDA."""
    built = {name: major for name, major in majors.items() if major is not None}
    if len(set(built.values())) <= 1:
        return None
    detail = ", ".join(f"{name}: CUDA {major}" for name, major in sorted(built.items()))
    return _finding(_C.WHEEL_CUDA_MAJOR, Side.IMAGE, Verdict.FAIL, detail)


def judge_build(exit_status: int | None, log: str) -> Finding:
    """A build by its exit status and its export line; the words in its log do not count."""
    exported = re.search(
        r"^#?\d* ?(?:exporting (?:manifest|to image)|writing image sha256:|naming to )", log, re.MULTILINE
    )
    if exit_status is None:
        verdict, detail = Verdict.INCONCLUSIVE, "no exit status was recorded"
    elif exit_status != 0:
        verdict, detail = Verdict.FAIL, f"exit status {exit_status}"
    elif exported is None:
        verdict, detail = Verdict.INCONCLUSIVE, "exit status 0, but nothing was exported"
    else:
        verdict, detail = Verdict.PASS, f"exit status 0, exported: {exported[0].strip()}"
    return _finding(_C.BUILD_STATUS_NOT_BY_WORD, Side.IMAGE, verdict, detail)


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """/dev/shm in bytes: its size, and what was free before and after the run."""

    size: int
    free_before: int
    free_after: int


def judge_shared_memory(found: SharedMemory, needed: int) -> Finding | None:
    """Too small for `needed` bytes fails; a run that does not give back what it took is a leak."""
    if found.free_before < needed:
        detail = f"{found.free_before:,} bytes free of {found.size:,}, {needed:,} needed"
        return _finding(_C.SHM_EXHAUSTED, Side.HOST, Verdict.FAIL, detail)
    if found.free_after < found.free_before:
        detail = f"{found.free_before - found.free_after:,} bytes were not given back"
        return _finding(_C.SHM_EXHAUSTED, Side.HOST, Verdict.INCONCLUSIVE, detail)
    return None


_MILLISECONDS = {
    "mean_ttft_ms": "time_to_first_token",
    "mean_tpot_ms": "time_per_output_token",
    "mean_itl_ms": "inter_token_latency",
}
_BENCH_KEYS = frozenset({"duration", "completed", "total_output_tokens", "output_throughput"})


@dataclass(frozen=True, slots=True)
class BenchResult:
    """A result file of `vllm bench serve`, in seconds and tokens per second."""

    seconds: float
    output_tokens: float
    output_rate: float
    latencies: Mapping[str, float]


def read_result(document: Mapping[str, Any]) -> BenchResult | Finding:
    """A benchmark result by its schema, with units; the same names in an unknown schema are refused."""
    missing = sorted(_BENCH_KEYS - document.keys())
    if missing:
        return _refuse(f"keys missing: {', '.join(missing)}")
    numbers = {key: document[key] for key in (*_BENCH_KEYS, *(_MILLISECONDS.keys() & document.keys()))}
    for key, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            return _refuse(f"{key} is not a number")
    seconds, tokens, rate = (float(numbers[key]) for key in ("duration", "total_output_tokens", "output_throughput"))
    if seconds <= 0 or not math.isclose(rate, tokens / seconds, rel_tol=0.01):
        return _refuse(
            f"output_throughput {rate:g} is not {tokens:g} tokens in {seconds:g} s: rounded, or another unit"
        )
    latencies = {_MILLISECONDS[key]: value / 1000 for key, value in numbers.items() if key in _MILLISECONDS}
    return BenchResult(seconds, tokens, rate, latencies)


def _refuse(detail: str) -> Finding:
    return _finding(_C.SCHEMA_UNKNOWN, Side.HARNESS, Verdict.INCONCLUSIVE, detail)


@dataclass(frozen=True, slots=True)
class ForeignCheck:
    """A check in somebody else's receipt; `passed` None: stated in prose, or not executed."""

    name: str
    passed: bool | None


def judge_foreign_receipt(qualified: bool, checks: Iterable[ForeignCheck]) -> Finding | None:
    """A status counts as far as executed checks carry it, whatever the receipt says about itself."""
    listed = tuple(checks)
    failed = [check.name for check in listed if check.passed is False]
    unexecuted = [check.name for check in listed if check.passed is None]
    if qualified and failed:
        detail = f"says qualified, but failed: {', '.join(failed)}"
        return _finding(_C.RECEIPT_NOT_VERIFIABLE, Side.HARNESS, Verdict.FAIL, detail)
    if unexecuted or not listed:
        detail = f"not executed: {', '.join(unexecuted)}" if unexecuted else "no checks"
        return _finding(_C.RECEIPT_NOT_VERIFIABLE, Side.HARNESS, Verdict.INCONCLUSIVE, detail)
    return None


def _finding(code: EvidenceCode, side: Side, verdict: Verdict, detail: str) -> Finding:
    return Finding(code, None, side, verdict, None, detail)
