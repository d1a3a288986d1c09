# SPDX-License-Identifier: Apache-2.0
"""`qualify explain LOG...`: what an engine log says, the first fatal cause, and what to do about it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from qualify.errors import ExitCode, UsageError
from qualify.observe.facts import CacheServer, Capture, CapturePass, Fact, LogFacts, Readiness
from qualify.observe.log import read, read_file
from qualify.observe.triage import Finding, Verdict, overall, triage

T = TypeVar("T")
_UNKNOWN = "unknown"
_PACKED = {b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"PK\x03\x04": "zip"}


@dataclass(frozen=True, slots=True)
class LogExplanation:
    """One log: its facts, its findings worst first, and the verdict that follows from them."""

    facts: LogFacts
    findings: tuple[Finding, ...]

    @property
    def verdict(self) -> Verdict:
        return overall(self.findings)

    @property
    def cause(self) -> Finding | None:
        """The first fatal cause."""
        return next((finding for finding in self.findings if finding.verdict is Verdict.FAIL), None)


@dataclass(frozen=True, slots=True)
class Explanation:
    logs: tuple[LogExplanation, ...]

    @property
    def verdict(self) -> Verdict:
        return overall(finding for log in self.logs for finding in log.findings)


def explain(paths: Iterable[str | Path]) -> Explanation:
    """Read logs (plain or gzip, `-` for standard input) and judge each by itself.

    Raises UsageError when a file cannot be read.
    """
    return Explanation(tuple(_explain_one(str(path)) for path in paths))


def _explain_one(path: str) -> LogExplanation:
    facts = _read(path)
    return LogExplanation(facts, triage(facts, stop_requested_at=None, exit_status=None))


def _read(path: str) -> LogFacts:
    if path == "-":
        return read_file(sys.stdin.buffer, "stdin")
    try:
        with Path(path).open("rb") as file:
            head = file.read(8)
        for magic, name in _PACKED.items():
            if head.startswith(magic):
                raise UsageError(f"{path} is packed with {name}", remedy="unpack it first")
        return read(Path(path))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}", remedy="name a readable log file") from error


def render_text(explanation: Explanation) -> str:
    """The explanation for a terminal; its last line is one sentence."""
    lines: list[str] = []
    for log in explanation.logs:
        lines += [*_block(log), ""]
    lines.append(sentence(explanation))
    return "\n".join(lines)


def render_json(explanation: Explanation) -> str:
    """The explanation as one JSON document; what is unknown is null."""
    document = {
        "verdict": explanation.verdict,
        "sentence": sentence(explanation),
        "logs": [
            {
                "verdict": log.verdict,
                "facts": _plain(log.facts),
                "findings": [{**_plain(one), "line": one.line, "remedy": one.remedy} for one in log.findings],
            }
            for log in explanation.logs
        ],
    }
    return json.dumps(document, indent=2, ensure_ascii=False)


def explain_command(paths: Sequence[str], as_json: bool) -> int:
    """Print the explanation. Exit code 0: no failure found, 1: a fatal cause, 3: the log does not decide."""
    explanation = explain(paths)
    print(render_json(explanation) if as_json else render_text(explanation))
    codes = {Verdict.FAIL: ExitCode.FAILED, Verdict.INCONCLUSIVE: ExitCode.NOT_USABLE}
    return int(codes.get(explanation.verdict, ExitCode.PASSED))


def sentence(explanation: Explanation) -> str:
    """One sentence on all logs: the worst of them decides."""
    order = [Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.PASS, Verdict.FACT]
    worst = min(explanation.logs, key=lambda log: order.index(log.verdict), default=None)
    if worst is None:
        return "No log was read."
    return _sentence(worst)


def _sentence(log: LogExplanation) -> str:
    facts = log.facts
    if facts.empty:
        return f"{facts.label} contains no line of a vLLM engine."
    name = _subject(facts)
    cause = log.cause
    if cause is not None:
        where = f" at line {cause.line}" if cause.line else ""
        rank = f" on rank {cause.rank}" if cause.rank is not None else ""
        return f"{name} failed{rank}{where} with {cause.code}: {_one_line(cause.detail)}"
    open_points = [finding for finding in log.findings if finding.verdict is Verdict.INCONCLUSIVE]
    if open_points:
        latest = max(open_points, key=lambda finding: finding.line or 0)
        return f"{name} shows no failure, but the log does not decide: {_one_line(latest.detail)}."
    state = "became ready" if facts.ready is Readiness.YES else "ran"
    return f"{name} {state}, and the log shows no failure."


def _subject(facts: LogFacts) -> str:
    if facts.version is None:
        server = facts.cache_server
        if server is not None and server.version is not None and facts.ready is Readiness.NOT_APPLICABLE:
            return f"LMCache {server.version.value} ({facts.label})"
        return f"The run in {facts.label}"
    tensor_parallel = f" with TP {facts.tensor_parallel.value}" if facts.tensor_parallel else ""
    return f"vLLM {facts.version.value}{tensor_parallel} ({facts.label})"


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip().rstrip(".")[:240]


def _block(log: LogExplanation) -> Iterator[str]:
    facts = log.facts
    extent = facts.extent
    yield f"{facts.label}: {extent.lines:,} lines, {extent.bytes:,} bytes"
    if extent.truncated:
        yield f"  incomplete: {extent.truncated}"
    for name, value in _rows(facts):
        yield f"  {name:<13} {value}"
    if log.findings:
        yield "  findings"
    for finding in log.findings:
        where = f"line {finding.line}" if finding.line else "log"
        rank = f", rank {finding.rank}" if finding.rank is not None else ""
        yield f"    {finding.verdict:<12} {finding.code} ({where}{rank}): {_one_line(finding.detail)}"
    cause = log.cause
    if cause is not None:
        where = f" at line {cause.line}" if cause.line else ""
        yield f"  first fatal cause{where}: {_one_line(cause.detail)}"
        yield f"  remedy: {cause.remedy}"


def _rows(facts: LogFacts) -> Iterator[tuple[str, str]]:
    if facts.cache_server is not None and facts.version is None and facts.ready is Readiness.NOT_APPLICABLE:
        yield "LMCache", _cache(facts.cache_server)
        return
    yield "version", _value(facts.version)
    yield "model", _value(facts.model)
    yield "runner", _value(facts.runner)
    yield "ranks", _ranks(facts)
    yield "NCCL", _value(facts.nccl)
    groups = [f"{group} {', '.join(fact.value)}" for group, fact in facts.all_reduce.items()]
    yield "all-reduce", "; ".join(groups) or _UNKNOWN
    yield "attention", _value(facts.attention_backend)
    yield "model memory", _by_rank(facts.model_memory)
    yield "KV memory", _by_rank(facts.available_kv) if facts.available_kv else _reserved(facts)
    yield "KV admission", _admission(facts)
    yield "graphs", _graphs(facts)
    yield "init engine", _value(facts.init_seconds)
    yield "ready", f"{facts.ready}{f' (line {facts.ready_source.line})' if facts.ready_source else ''}"
    answers = [f"{count:,} x {status}" for status, count in facts.http.items()]
    yield "answers", ", ".join(answers) or "none logged"
    if facts.throughput is not None and facts.throughput.max_generation_rate is not None:
        rate = facts.throughput.max_generation_rate
        yield "throughput", f"{facts.throughput.count:,} lines, at most {rate:g} generated tokens/s in one of them"
    if facts.cache_server is not None:
        yield "LMCache", _cache(facts.cache_server)
    stop = facts.shutdown_requested
    yield "stop", f"requested at line {stop.source.line}" if stop else "none requested"


def _cache(cache: CacheServer) -> str:
    stored = " + ".join(f"{fact.value:,}" for fact in cache.stored[-4:]) or "none"
    retrieved = ", ".join(f"{fact.value:,}" for fact in cache.retrieved[-4:]) or "none"
    return (
        f"{_value(cache.version)}; tokens stored by the last lines: {stored}; retrieved, one line a rank: {retrieved}"
    )


def _value(fact: Fact[T] | None) -> str:
    if fact is None:
        return _UNKNOWN
    unit = f" {fact.unit}" if fact.unit else ""
    return f"{fact.value}{unit} (line {fact.source.line})"


def _ranks(facts: LogFacts) -> str:
    if facts.world_size is None:
        return _UNKNOWN
    pids = ", ".join(f"rank {rank} pid {pid}" for pid, rank in sorted(facts.ranks.items(), key=lambda pair: pair[1]))
    parallel = f", TP {facts.tensor_parallel.value}" if facts.tensor_parallel else ""
    return f"world size {facts.world_size.value}{parallel}{f': {pids}' if pids else ''}"


def _by_rank(values: tuple[Fact[float], ...]) -> str:
    parts = [f"rank {_UNKNOWN if fact.rank is None else fact.rank} {fact.value:g} {fact.unit}" for fact in values]
    return ", ".join(sorted(parts)[:16]) or _UNKNOWN


def _reserved(facts: LogFacts) -> str:
    if not facts.kv_reservation:
        return _UNKNOWN
    return f"{facts.kv_reservation[0].value.gib:g} GiB set, not profiled"


def _admission(facts: LogFacts) -> str:
    if facts.kv_refusal is not None:
        value = facts.kv_refusal.value
        where = f"(line {facts.kv_refusal.source.line})"
        return f"refused: needs {value.needed_gib} GiB, has {value.available_gib} GiB {where}"
    if facts.kv_tokens is None:
        return _UNKNOWN
    times = facts.concurrency
    fits = f", {times.value.times:g} requests of {times.value.tokens:,} tokens" if times else ""
    return f"{facts.kv_tokens.value:,} tokens{fits} (line {facts.kv_tokens.source.line})"


def _graphs(facts: LogFacts) -> str:
    final = [fact for fact in facts.captures if fact.capture_pass is CapturePass.FINAL]
    if final:
        return ", ".join(_count(fact) for fact in final) + " (final capture)"
    if facts.captures:
        return ", ".join(_count(fact) for fact in facts.captures) + " (not shown to be the final capture)"
    if (facts.eager and facts.eager.value) or (facts.configured_mode and facts.configured_mode.value == "NONE"):
        return "switched off"
    return _UNKNOWN


def _count(fact: Fact[Capture]) -> str:
    value = fact.value
    role = "" if value.role == "target" else f"{value.role} "
    return f"{role}{value.kind or 'unlabelled'} {value.captured} of {value.total}"


def _plain(value: Any) -> Any:
    """Dataclasses as JSON objects in lowerCamelCase."""
    if is_dataclass(value) and not isinstance(value, type):
        return {_camel(one.name): _plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (frozenset, set)):
        return sorted(_plain(item) for item in value)
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, StrEnum) else value


def _camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(word.capitalize() for word in rest)
