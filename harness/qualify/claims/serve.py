# SPDX-License-Identifier: Apache-2.0
"""serve.tp: the promised ranks are up on devices of their own, and the server answers a fixed set of requests."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from qualify.claims.boots import is_outside, require_boot, visited, worker_reports
from qualify.claims.model import Check, Judgement, Status, check, equal
from qualify.evidence import Evidence
from qualify.load.client import CHAT, COMPLETIONS
from qualify.probes.load_records import SERVE, Served, ServedRequest
from qualify.probes.workers import WORKERS, Device, WorkerReport
from qualify.profiles import Boot, Probe, Profile
from qualify.reasons import ReasonCode

DEGENERATE_SHARE = 0.5
"""An answer is degenerate if one token makes up more than this share of it."""


def judge(evidence: Evidence, profile: Profile) -> Judgement:
    folders = [folder for _, folder in visited(evidence, profile)]
    blind = is_outside(evidence) and not any(evidence.exists(f"{folder}/{WORKERS}") for folder in folders)
    worlds = list(_not_visible() if blind else _worlds(evidence, folders, profile.engine.tensor_parallel))
    served = [(folder, _record(evidence, boot, folder)) for boot, folder in visited(evidence, profile, Probe.SERVE)]
    answers = [item for folder, one in served for item in _served(one, folder)]
    requests = [request for _, one in served for request in one.requests]
    ranks = "ranks not visible from outside" if blind else f"{profile.engine.tensor_parallel} ranks apart"
    wrong = [item for item in (answers if blind else [*worlds, *answers]) if item.status is not Status.PASSED]
    good = f"{ranks}, {len(requests)} requests answered"
    return Judgement(
        checks=(*worlds, *answers),
        summary=f"{wrong[0].where}: not true that {wrong[0].name}" if wrong else good,
        observed={
            "requests": len(requests),
            "answered": sum(request.answer.error is None for request in requests),
            "degenerate": sum(is_degenerate(request.answer.token_ids) for request in requests),
            "worldSizes": None if blind else [item.observed for item in worlds if item.name == "world size"],
        },
        expected={"worldSize": profile.engine.tensor_parallel},
    )


def _record(evidence: Evidence, boot: Boot, folder: str) -> Served:
    path = f"{folder}/{SERVE}"
    served = evidence.record(path, Served)
    require_boot(path, [served.boot], boot)
    return served


def _not_visible() -> Iterator[Check]:
    yield Check(
        name="world size",
        status=Status.INCONCLUSIVE,
        reason_code=ReasonCode.NOT_PERMITTED,
        where="a url: target shows nothing of its workers",
    )


def _worlds(evidence: Evidence, folders: list[str], promised: int) -> Iterator[Check]:
    for folder, workers in worker_reports(evidence, folders).items():
        yield from _world(workers, promised, folder)


def _world(workers: tuple[WorkerReport, ...], promised: int, where: str) -> Iterator[Check]:
    sizes = [worker.world_size for worker in workers]
    ranks = [worker.rank for worker in workers]
    processes = {worker.process for worker in workers if worker.process is not None}
    yield equal("world size", sizes, [promised] * promised, ReasonCode.WORLD_SIZE_MISMATCH, where=where)
    yield equal("every rank reported", ranks, list(range(promised)), ReasonCode.RANK_MISSING, where=where)
    yield equal("a process of its own per rank", len(processes), promised, ReasonCode.WORLD_SIZE_MISMATCH, where=where)
    yield _devices_apart([worker.device for worker in workers], where)


def _devices_apart(devices: list[Device | None], where: str) -> Check:
    """Distinct GPUs, or disjoint sets of cores."""
    held = [_held(device) for device in devices]
    known = [part for part in held if part]
    name = "ranks share no device or core"
    if len(known) != len(held) or not held:
        return Check(
            name=name, status=Status.ERROR, reason_code=ReasonCode.ENVIRONMENT_INCOMPLETE, where=where, observed=None
        )
    shared = {str(part) for one, other in itertools.combinations(known, 2) for part in one & other}
    observed = [sorted(map(str, part)) for part in known]
    return check(name, not shared, ReasonCode.DEVICE_SHARED, where=where, observed=observed)


def _held(device: Device | None) -> frozenset[str | int]:
    if device is None or device.type is None:
        return frozenset()
    if device.type == "cpu":
        return frozenset(device.cores or ())
    return frozenset(() if device.uuid_hash is None else (device.uuid_hash,))


def _served(served: Served, where: str) -> Iterator[Check]:
    answered = [request for request in served.requests if request.answer.error is None]
    yield _complete_set(served, where)
    yield from _model(served, where)
    yield _all_answered(served, where)
    yield _finish_reasons(answered, where)
    yield from _usage(answered, where)
    yield from _repeats(answered, where)
    yield from _contents(answered, where)


def _complete_set(served: Served, where: str) -> Check:
    """Both endpoints, streamed and not, greedy and sampled; fewer would be another claim."""
    wanted = set(itertools.product((COMPLETIONS, CHAT), (False, True), (False, True)))
    seen = {(request.endpoint, request.stream, request.greedy) for request in served.requests}
    holds = wanted <= seen
    return check("set is complete", holds, ReasonCode.EVIDENCE_MISSING, where=where, otherwise=Status.ERROR)


def _model(served: Served, where: str) -> Iterator[Check]:
    listed = served.model in served.models
    yield check(
        "model is listed", listed, ReasonCode.WRONG_MODEL, where=where, observed=served.models, expected=served.model
    )
    named = sorted({request.answer.model or "" for request in served.requests if request.answer.error is None})
    if named:
        yield equal("answers name the model", named, [served.model], ReasonCode.WRONG_MODEL, where=where)


def _all_answered(served: Served, where: str) -> Check:
    """A stream that was cut is a fault of its own: its status was 200."""
    failed = [request for request in served.requests if request.answer.error is not None]
    cut = failed and all(request.stream and request.answer.status == 200 for request in failed)
    return check(
        "every request is answered",
        not failed,
        ReasonCode.STREAM_BROKEN if cut else ReasonCode.REQUEST_FAILED,
        where=where,
        observed={request.name: request.answer.error for request in failed},
    )


def _finish_reasons(requests: list[ServedRequest], where: str) -> Check:
    """The set ignores the end token, so that every answer ends at its length."""
    other = {request.name: request.answer.finish_reason for request in requests}
    other = {name: reason for name, reason in other.items() if reason != "length"}
    return check("answers end at their length", not other, ReasonCode.REQUEST_FAILED, where=where, observed=other)


def _usage(requests: list[ServedRequest], where: str) -> Iterator[Check]:
    counts = {request.name: request.answer.completion_tokens for request in requests}
    wrong = {request.name: counts[request.name] for request in requests if counts[request.name] != request.max_tokens}
    yield check("usage counts the tokens asked for", not wrong, ReasonCode.USAGE_MISMATCH, where=where, observed=wrong)
    known = [request for request in requests if request.answer.token_ids is not None]
    differ = {
        request.name: [counts[request.name], len(request.answer.token_ids or ())]
        for request in known
        if counts[request.name] != len(request.answer.token_ids or ())
    }
    if len(known) < len(requests):
        yield Check(
            name="usage equals the tokens delivered",
            status=Status.INCONCLUSIVE,
            reason_code=ReasonCode.NOT_SUPPORTED,
            where=f"{where}: the engine returns no token ids",
        )
    else:
        yield check(
            "usage equals the tokens delivered", not differ, ReasonCode.USAGE_MISMATCH, where=where, observed=differ
        )


def _repeats(requests: list[ServedRequest], where: str) -> Iterator[Check]:
    """Within a subject the tokens must repeat (greedy), and where they do, streamed and whole text must be equal."""
    moved: list[str] = []
    texts: list[str] = []
    for subject, group in _by_subject(requests).items():
        by_tokens: dict[tuple[int, ...] | str, set[tuple[str, str]]] = defaultdict(set)
        for request in group:
            answer = request.answer
            by_tokens[answer.token_ids or answer.text].add((answer.text, answer.reasoning))
        if len(by_tokens) > 1 and group[0].greedy:
            moved.append(subject)
        if any(len(same) > 1 for same in by_tokens.values()):
            texts.append(subject)
    yield check(
        "greedy answers repeat",
        not moved,
        ReasonCode.OUTPUT_NOT_REPRODUCED,
        where=where,
        observed=moved,
        otherwise=Status.INCONCLUSIVE,
    )
    yield check("streamed text equals whole text", not texts, ReasonCode.STREAM_BROKEN, where=where, observed=texts)


def _contents(requests: list[ServedRequest], where: str) -> Iterator[Check]:
    """Each endpoint has a comparable answer that does not repeat one token, and not all answers are the same."""
    bad = sorted(request.name for request in requests if is_degenerate(request.answer.token_ids))
    good = {request.endpoint for request in requests if request.name not in bad}
    asked = {request.endpoint for request in requests}
    yield check(
        "answers are not degenerate",
        good == asked,
        ReasonCode.OUTPUT_DEGENERATE,
        where=where,
        observed=bad,
        otherwise=Status.INCONCLUSIVE,
    )
    subjects = _by_subject(requests)
    distinct = {group[0].answer.token_ids or group[0].answer.text for group in subjects.values()}
    yield check(
        "answers vary with the prompt",
        len(distinct) > len(subjects) / 2,
        ReasonCode.OUTPUT_DEGENERATE,
        where=where,
        observed=len(distinct),
        expected=f"> {len(subjects) / 2:g} of {len(subjects)}",
        otherwise=Status.INCONCLUSIVE,
    )


def is_degenerate(token_ids: tuple[int, ...] | None) -> bool:
    """Whether one token makes up more than half of the answer; an answer without ids shows nothing either way."""
    if not token_ids:
        return False
    return Counter(token_ids).most_common(1)[0][1] > DEGENERATE_SHARE * len(token_ids)


def _by_subject(requests: Iterable[ServedRequest]) -> dict[str, list[ServedRequest]]:
    groups: dict[str, list[ServedRequest]] = defaultdict(list)
    for request in requests:
        groups[request.subject].append(request)
    return groups
