# SPDX-License-Identifier: Apache-2.0
"""The KV probes: the same prompts served with and without the cache, with digests of every KV block.

Order within a restore: reset the engine's prefix cache, clear the cache server's memory (disk arm), poison all KV
memory, serve, wait until everything stands still, collect. One request at a time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from qualify.errors import TargetError
from qualify.evidence import Evidence, FolderSource, compress
from qualify.http import Client
from qualify.observe import metrics
from qualify.probes import kv_storage, workers
from qualify.probes.kv_records import (
    STORED,
    Arm,
    Case,
    Damage,
    Fault,
    Poison,
    RankCapture,
    Scrapes,
    Stored,
    arm_file,
    expected_external,
    prompt,
    prompt_digest,
)
from qualify.session import Session

POLL_SECONDS = 0.1
STILL_POLLS = 3
"""How many polls in a row must show the same before a server counts as quiescent."""

EMPTY = metrics.Scrape({}, {})

SETTLED = (
    ("lmcache_mp_num_submitted_stores_total", "lmcache_mp_num_finished_stores_total"),
    ("lmcache_mp_num_submitted_retrieves_total", "lmcache_mp_num_finished_retrieves_total"),
    ("lmcache_mp_l2_store_submitted_objects_chunks_total", "lmcache_mp_l2_store_completed_objects_chunks_total"),
)
"""Counters of the cache server that are equal when everything that was submitted is finished."""

ENGINE_FAMILIES = (
    "process_start_time_seconds",
    "vllm:prefix_cache_",
    "vllm:external_prefix_cache_",
    "vllm:prompt_tokens_total",
    "vllm:prompt_tokens_by_source_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:num_preemptions_total",
)
CACHE_FAMILIES = (
    "process_start_time_seconds",
    "lmcache_mp_lookup",
    "lmcache_mp_num_",
    "lmcache_mp_l1_read",
    "lmcache_mp_l1_write",
    "lmcache_mp_l2_load",
    "lmcache_mp_l2_store_",
    "lmcache_mp_l2_prefetch_",
    "lmcache_mp_event_bus_",
)


def control(session: Session) -> None:
    """Serve every prompt without a connector."""
    _write(session, Arm.CONTROL, [_serve(session, Arm.CONTROL, tokens) for tokens in session.profile.kv.prompt_tokens])


def cold(session: Session) -> None:
    """Serve every prompt with the connector and empty storage, then list what was stored."""
    storage = kv_storage.folder(session)
    before = kv_storage.names(storage)
    objects = kv_storage.objects(_status(session))
    cases = [_serve(session, Arm.COLD, tokens, objects=objects) for tokens in session.profile.kv.prompt_tokens]
    _write(session, Arm.COLD, cases)
    files, strangers = kv_storage.listing(storage, before)
    stored = Stored(
        boot=session.boot.name,
        chunk_tokens=_chunk_tokens(session),
        objects=objects,
        found_before=len(before),
        files=files,
        strangers=strangers,
    )
    session.evidence.record(STORED, stored)


def restore(session: Session) -> None:
    """Restore every prompt from the cache server's memory, then again from its disk."""
    lengths = session.profile.kv.prompt_tokens
    _write(session, Arm.MEMORY, [_restore(session, Arm.MEMORY, tokens) for tokens in lengths])
    _write(session, Arm.DISK, [_restore(session, Arm.DISK, tokens) for tokens in lengths])


def restart(session: Session) -> None:
    """Restore every prompt from disk in processes that never computed it."""
    _write(session, Arm.RESTART, [_serve(session, Arm.RESTART, tokens) for tokens in session.profile.kv.prompt_tokens])


def negative_controls(session: Session) -> None:
    """Damage restores on purpose; every damage must be found. Every file is put back, and a clean restore ends it."""
    tokens = max(session.profile.kv.prompt_tokens)
    cold_case, stored = _cold_evidence(session, tokens)
    cases = []
    for step in kv_storage.plan(cold_case, stored, kv_storage.folder(session), session.profile.kv.ranks):
        session.progress(f"negative control: {step.fault.damage}")
        if step.fault.not_run is not None:
            cases.append(_not_run(session, tokens, step.fault))
            continue
        with step.applied():
            cases.append(_restore(session, Arm.NEGATIVE, tokens, fault=step.fault, in_engine=step.in_engine))
    cases.append(_restore(session, Arm.NEGATIVE, tokens, fault=Fault(damage=Damage.NONE)))
    _write(session, Arm.NEGATIVE, cases)


def _restore(
    session: Session,
    arm: Arm,
    tokens: int,
    *,
    fault: Fault | None = None,
    in_engine: dict[str, Any] | None = None,
) -> Case:
    attempts = _reset(session)
    cleared = None if arm is Arm.MEMORY else _clear(session)
    session.engine.phase = "kv.poison"
    poison = workers.ask(session, "qualify_poison", Poison)
    case = _serve(session, arm, tokens, in_engine=in_engine)
    return case.model_copy(update={"reset_attempts": attempts, "cleared": cleared, "poison": poison, "fault": fault})


def _serve(
    session: Session,
    arm: Arm,
    tokens: int,
    *,
    objects: tuple[tuple[int, ...], ...] = (),
    in_engine: dict[str, Any] | None = None,
) -> Case:
    """One request with its digests and counters."""
    session.progress(f"{arm}: {tokens} tokens")
    engine, cache = session.engine, session.cache
    engine.phase = f"kv.{arm}"
    chunk = _chunk_tokens(session) if cache else None
    ids = prompt(tokens)
    boundary = expected_external(tokens, chunk or session.profile.cache.chunk_tokens)
    chunks = {"chunk_tokens": chunk, "objects": objects} if objects else {}
    workers.tell(session, "qualify_arm", boundary=boundary, fault=in_engine, **chunks)
    engine_before = engine.get("/metrics")
    cache_before = cache.get("/metrics") if cache else None
    began = time.monotonic()
    answer = engine.post(
        "/v1/completions",
        {
            "model": session.model,
            "prompt": ids,
            "max_tokens": session.profile.kv.max_tokens,
            "temperature": 0,
            "logprobs": 1,
            "ignore_eos": True,
            "return_token_ids": True,
        },
    )
    seconds = time.monotonic() - began
    engine_after = _engine_quiescent(session, engine_before)
    cache_after, status = None, None
    if cache is not None and cache_before is not None:
        stored = tokens // (chunk or 1) if arm is Arm.COLD else 0
        cache_after, status = _cache_quiescent(session, cache, cache_before, stored)
    ranks = workers.ask(session, "qualify_collect", RankCapture)
    choice = answer["choices"][0]
    return Case(
        boot=session.boot.name,
        arm=arm,
        prompt_tokens=tokens,
        prompt_digest=prompt_digest(ids),
        chunk_tokens=chunk,
        ranks=ranks,
        scrapes=Scrapes(
            engine_before=_cut(engine_before, ENGINE_FAMILIES),
            engine_after=_cut(engine_after, ENGINE_FAMILIES),
            cache_before=None if cache_before is None else _cut(cache_before, CACHE_FAMILIES),
            cache_after=None if cache_after is None else _cut(cache_after, CACHE_FAMILIES),
        ),
        cache_status=status,
        seconds=round(seconds, 6),
        tokens=tuple(choice.get("token_ids") or ()),
        logprobs=tuple((choice.get("logprobs") or {}).get("token_logprobs") or ()),
    )


def _not_run(session: Session, tokens: int, fault: Fault) -> Case:
    return Case(
        boot=session.boot.name,
        arm=Arm.NEGATIVE,
        prompt_tokens=tokens,
        prompt_digest=prompt_digest(prompt(tokens)),
        chunk_tokens=_chunk_tokens(session),
        fault=fault,
    )


def _cold_evidence(session: Session, tokens: int) -> tuple[Case, Stored]:
    """What the cold arm of this boot wrote for the prompt."""
    here = Evidence(FolderSource(session.evidence.root))
    cases = here.record(session.evidence.prefix + arm_file(Arm.COLD), tuple[Case, ...])
    stored = here.record(session.evidence.prefix + STORED, Stored)
    found = [case for case in cases if case.prompt_tokens == tokens]
    if not found:
        raise TargetError(f"the cold arm has no prompt of {tokens} tokens", phase="kv.negative")
    return found[0], stored


def _write(session: Session, arm: Arm, cases: list[Case]) -> None:
    lines = ",\n".join(case.model_dump_json() for case in cases)
    session.evidence.bytes(arm_file(arm), compress(f"[\n{lines}\n]\n".encode()))


def _reset(session: Session) -> int:
    """Empty the engine's own prefix cache. It refuses while blocks are held, so ask until it agrees.

    Never with `reset_external`: that would empty the cache server's memory too.
    """
    session.engine.phase = "kv.reset"
    attempts = 0

    def pending() -> str:
        nonlocal attempts
        attempts += 1
        return "" if session.engine.post("/reset_prefix_cache").get("success") else "the prefix cache to reset"

    _wait(session, session.engine, pending)
    return attempts


def _clear(session: Session) -> dict[str, Any]:
    """Empty the memory tier of the cache server, and see that it is empty."""
    cache = _cache(session)
    cache.phase = "kv.clear"
    answer: dict[str, Any] = cache.post("/cache/clear", {"tier": "l1", "force": False})

    def pending() -> str:
        left = _status(session)["storage_manager"]["l1_manager"]["total_object_count"]
        return f"its memory tier to become empty ({left} objects left)" if left else ""

    _wait(session, cache, pending)
    return answer


def _engine_quiescent(session: Session, before: str) -> str:
    """The metric page once the request is counted and nothing runs or waits."""
    start = metrics.parse(before)
    page = before

    def pending() -> str:
        nonlocal page
        page = session.engine.get("/metrics")
        now = metrics.parse(page)
        if _increase(start, now, "vllm:request_success_total") < 1:
            return "the request to be counted as finished"
        busy = [state for state in ("running", "waiting") if _increase(EMPTY, now, f"vllm:num_requests_{state}")]
        return f"no request to be {busy[0]}" if busy else ""

    _wait(session, session.engine, pending)
    return page


def _cache_quiescent(session: Session, cache: Client, before: str, stored_chunks: int) -> tuple[str, dict[str, Any]]:
    """Metric page and status once the cache server has counted the lookup, stored at least `stored_chunks` objects,
    holds no lock, queues nothing, and its counters stand still.
    """
    cache.phase = session.engine.phase
    start = metrics.parse(before)
    page, status = before, {}
    seen: list[tuple[str, ...]] = []

    def pending() -> str:
        nonlocal page, status
        page = cache.get("/metrics")
        now = metrics.parse(page)
        seen.append(_counters(page))
        if _increase(start, now, "lmcache_mp_lookups_requests_total") < 1:
            return "the lookup to be counted"
        written = _increase(start, now, "lmcache_mp_l2_store_completed_objects_chunks_total")
        if written < stored_chunks:
            return f"{stored_chunks} chunks to be stored ({written:g} are)"
        for first, last in SETTLED:
            submitted, finished = _increase(EMPTY, now, first), _increase(EMPTY, now, last)
            if submitted != finished:
                return f"{last} {finished:g} to reach {first} {submitted:g}"
        if len(seen) < STILL_POLLS or len(set(seen[-STILL_POLLS:])) > 1:
            return "its counters to stand still"
        # Last, because the server checks its allocator and logs four lines for each of these.
        status = _excerpt(_status(session))
        busy = [f"{name} ({count})" for name, count in status["busy"].items() if count]
        return f"{busy[0]} to become 0" if busy else ""

    _wait(session, cache, pending)
    return page, status


def _increase(before: metrics.Scrape, after: metrics.Scrape, name: str) -> float:
    """For waiting only; a family that is not there yet has not grown."""
    over = {key for labels in after.series(name) for key, _ in labels}
    return (after.total(name, over).value or 0) - (before.total(name, over).value or 0)


def _counters(page: str) -> tuple[str, ...]:
    """The counter lines that tell whether anything still moves."""
    lines = _cut(page, CACHE_FAMILIES).splitlines()
    return tuple(line for line in lines if line.split("{")[0].split(" ")[0].endswith("_total"))


def _excerpt(status: dict[str, Any]) -> dict[str, Any]:
    """The part of the cache server's status that the claim may need; no path and no model name."""
    manager = status["storage_manager"]
    memory, store, prefetch = manager["l1_manager"], manager["store_controller"], manager["prefetch_controller"]
    return {
        "chunk_size": status["chunk_size"],
        "hash_algorithm": status["hash_algorithm"],
        "busy": {
            "write_locked": memory["write_locked_count"],
            "temporary": memory["temporary_count"],
            "pending_keys": store["pending_keys_count"],
            "in_flight_stores": store["in_flight_task_count"],
            "in_flight_prefetches": prefetch["in_flight_request_count"],
        },
        "memory_objects": memory["total_object_count"],
        "memory_bytes": memory["memory_used_bytes"],
        "world_sizes": [context["world_size"] for context in status["cache_context_meta"].values()],
        "kernel_groups": [
            {key: group[key] for key in ("kernel_group_idx", "engine_group_idx", "object_group_idx", "num_layers")}
            for group in kv_storage.kernel_groups(status)
        ],
    }


def _status(session: Session) -> dict[str, Any]:
    cache = _cache(session)
    try:
        status = json.loads(cache.get("/status"))
        status["storage_manager"]["l1_manager"], status["chunk_size"]
    except (ValueError, KeyError, TypeError):
        raise TargetError(
            "the cache server's /status is not of the known form",
            phase=cache.phase,
            remedy="check that the installed lmcache is the pinned version",
        ) from None
    return dict(status)


def _chunk_tokens(session: Session) -> int:
    return int(_status(session)["chunk_size"])


def _cache(session: Session) -> Client:
    if session.cache is None:
        raise TargetError("this boot has no cache server", phase=session.engine.phase, remedy="give the boot a cache")
    return session.cache


def _cut(page: str, families: tuple[str, ...]) -> str:
    """The sample and TYPE lines of these families, verbatim; histogram buckets and creation times are left out."""
    kept = []
    for line in page.splitlines():
        name = line.removeprefix("# TYPE ")
        if name.startswith(families) and "_created" not in name and "_bucket{" not in name:
            kept.append(line)
    return "".join(f"{line}\n" for line in kept)


def _wait(session: Session, server: Client, pending: Callable[[], str]) -> None:
    """Ask until nothing is pending. Raises TargetError with the phase and what was still awaited."""
    limit = session.profile.timeouts.request_seconds
    deadline = time.monotonic() + limit
    while waited_for := pending():
        if time.monotonic() > deadline:
            who = "the engine" if server is session.engine else "the cache server"
            raise TargetError(
                f"waited {limit:g} s for {who}: {waited_for}",
                phase=server.phase,
                remedy="see the last lines of the engine's and the cache server's logs",
            )
        time.sleep(POLL_SECONDS)
