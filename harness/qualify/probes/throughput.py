# SPDX-License-Identifier: Apache-2.0
"""Sustained load: per concurrency a warm-up, then C busy slots, and the engine's counters over the window.

The closed interval runs from an idle engine to an idle engine, so that its counters must equal the sum of `usage`;
the window lies inside it, from the moment every slot decodes.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable
from types import TracebackType

import httpx

from qualify import gpus
from qualify.errors import TargetError
from qualify.evidence import compress
from qualify.load import ceiling
from qualify.load.client import COMPLETIONS, ClosedLoop, Request, Supply, Turn, monotonic_clock
from qualify.load.prompts import token_prompt
from qualify.observe import metrics
from qualify.probes.load_records import Cell, LoadRequest, Sample, cell_file, scrape_file
from qualify.records import GpuSample
from qualify.session import Session

COARSE_SAMPLE_SECONDS = 1.0
FINE_SAMPLE_SECONDS = 0.25
COARSE_FROM_SECONDS = 60.0
"""A window shorter than this is sampled finely, so that it still holds enough samples for ten batches."""
CEILING_SECONDS = 0.2
CEILING_TOKENS = 256
WARMUP_SHARE = 8
"""Warm-up answers are this many times shorter than those of the load."""
IDLE_SECONDS = 10.0
IDLE_POLL_SECONDS = 0.05
LARGE_BYTES = 256 << 10
GPU_SAMPLE_SECONDS = 1.0

NAMES = {
    "generation_tokens": "vllm:generation_tokens_total",
    "steps": "vllm:iteration_tokens_total_count",
    "drafts": "vllm:spec_decode_num_drafts_total",
    "draft_tokens": "vllm:spec_decode_num_draft_tokens_total",
    "accepted_tokens": "vllm:spec_decode_num_accepted_tokens_total",
    "preemptions": "vllm:num_preemptions_total",
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "process_start": metrics.START_TIME,
}


def collect(session: Session) -> None:
    """Write one cell per concurrency. Raises TargetError when the engine stops answering; what was seen is kept."""
    with ceiling.null_engine() as null_url:
        for concurrency in session.profile.throughput.concurrency:
            limit = ceiling.measure(null_url, concurrency, _null_supply, CEILING_SECONDS)
            cell = _cell(session, concurrency, limit)
            _write(session, cell)
            if cell.failure is not None:
                session.engine.get("/health")  # raises if the engine is gone; a failed request alone is evidence


def _cell(session: Session, concurrency: int, limit: ceiling.Ceiling) -> Cell:
    profile = session.profile
    clock = monotonic_clock()
    supplies = [_supply(session, concurrency, slot) for slot in range(concurrency)]

    def note(turn: Turn) -> None:
        session.note(turn.request.path, turn.reply)

    with contextlib.closing(_Scraper(session, clock)) as scraper:
        idle_before = scraper.keep_idle_page(concurrency, "before")
        with ClosedLoop(session.engine.base_url, supplies, clock, profile.timeouts.request_seconds, note) as loop:
            session.progress(f"concurrency {concurrency}: warm-up")
            loop.wait_until_decoding()
            began = clock()
            with _GpuWatch(session.gpus, clock) as watch:
                samples = scraper.window(began, profile.throughput.window_seconds, loop, f"concurrency {concurrency}")
            ended = clock()
            session.progress(f"concurrency {concurrency}: requests in flight end")
            turns = loop.finish()
        try:
            idle_after = scraper.keep_idle_page(concurrency, "after")
        except TargetError as error:  # the cell is kept: it says how the engine went
            idle_after = False
            scraper.failure = scraper.failure or str(error)
    return Cell(
        boot=session.boot.name,
        concurrency=concurrency,
        window_began=round(began, 6),
        window_ended=round(ended, 6),
        sample_seconds=scraper.spacing,
        samples=samples,
        requests=tuple(_load_request(turn) for turn in turns),
        ceiling=limit,
        drained=idle_before and idle_after,
        failure=loop.failure() or scraper.failure,
        gpus=tuple(watch.samples),
    )


class _GpuWatch:
    """Looks at the GPUs while the window lasts, beside the scraper: nvidia-smi may take longer than a sample."""

    def __init__(self, uuids: tuple[str, ...], clock: Callable[[], float]) -> None:
        self.samples: list[GpuSample] = []
        self._uuids, self._clock = uuids, clock
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="gpu watch", daemon=True)

    def __enter__(self) -> _GpuWatch:
        if self._uuids:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._uuids:
            self._thread.join(gpus.ASK_SECONDS)

    def _watch(self) -> None:
        while not self._ended.is_set():
            self.samples.extend(gpus.sample(self._uuids, round(self._clock(), 6)))
            self._ended.wait(GPU_SAMPLE_SECONDS)


class _Scraper:
    """Reads the engine's metrics. Its exchanges are written down only when they fail: they are many."""

    def __init__(self, session: Session, clock: Callable[[], float]) -> None:
        short = session.profile.throughput.window_seconds < COARSE_FROM_SECONDS
        self.spacing = FINE_SAMPLE_SECONDS if short else COARSE_SAMPLE_SECONDS
        self.failure: str | None = None
        self._session = session
        self._clock = clock
        timeout = session.profile.timeouts.request_seconds
        self._http = httpx.Client(base_url=session.engine.base_url, timeout=timeout, trust_env=False)

    def close(self) -> None:
        self._http.close()

    def window(self, began: float, seconds: float, loop: ClosedLoop, label: str) -> tuple[Sample, ...]:
        """Samples from `began` for `seconds`; fewer if a slot or a scrape fails.

        A sample that comes late drops those that were due meanwhile, so that samples never bunch.
        """
        samples: list[Sample] = []
        due = 0.0
        while loop.failure() is None:
            time.sleep(max(0.0, began + due - self._clock()))
            try:
                samples.append(self._sample())
            except TargetError as error:
                self.failure = str(error)
                break
            if due >= seconds:
                break
            passed = self._clock() - began
            self._session.progress(f"{label}: {min(passed, seconds):.0f} of {seconds:.0f} s")
            due = min(seconds, self.spacing * (int(passed / self.spacing) + 1))
        return tuple(samples)

    def keep_idle_page(self, concurrency: int, moment: str) -> bool:
        """Wait until the engine is idle, write its page, and say whether it really was idle by then."""
        deadline = self._clock() + IDLE_SECONDS
        page, before = self._page(), None
        while not (idle := _is_idle(page, before)) and self._clock() < deadline:
            time.sleep(IDLE_POLL_SECONDS)
            page, before = self._page(), page
        self._session.evidence.bytes(scrape_file(concurrency, moment), compress(page.encode()))
        return idle

    def _sample(self) -> Sample:
        sent = self._clock()
        page = self._page()
        arrived = self._clock()
        values = _counters(page)
        return Sample(at=round((sent + arrived) / 2, 6), took=round(arrived - sent, 6), **values)

    def _page(self) -> str:
        began = time.monotonic()
        engine = self._session.engine
        try:
            answer = self._http.get("/metrics")
        except httpx.HTTPError as error:
            engine.record("GET", "/metrics", began, None, f"{type(error).__name__}: {error}")
            raise TargetError(f"GET /metrics failed: {type(error).__name__}", phase=engine.phase) from error
        if answer.status_code != 200:
            engine.record("GET", "/metrics", began, answer.status_code, answer.text[:300])
            raise TargetError(f"GET /metrics answered {answer.status_code}", phase=engine.phase)
        return answer.text


def _counters(page: str) -> dict[str, float | None]:
    """The counters of a sample, summed over engines; parsing only their lines keeps a scrape cheap."""
    wanted = tuple(NAMES.values())
    lines = (line for line in page.splitlines() if line.startswith(wanted))
    scrape = metrics.parse("\n".join(lines) + "\n")
    return {field: scrape.total(name, {"engine"}).value for field, name in NAMES.items()}


def _is_idle(page: str, before: str | None) -> bool:
    """Nothing runs or waits, and no token was counted since the page before."""
    now = _counters(page)
    settled = before is not None and _counters(before)["generation_tokens"] == now["generation_tokens"]
    return settled and now["running"] == 0 and now["waiting"] == 0


def _supply(session: Session, concurrency: int, slot: int) -> Supply:
    """Short warm-up requests, then the load. The first of the load is cut, so that the slots do not end together."""
    plan = session.profile.throughput
    seed = session.profile.model.seed
    for ordinal in itertools.count():
        warmup = ordinal < plan.warmup_requests
        tokens = plan.output_tokens
        if warmup:
            tokens = max(1, tokens // WARMUP_SHARE)
        elif ordinal == plan.warmup_requests:
            tokens = max(1, tokens * (slot + 1) // concurrency)
        prompt = token_prompt(plan.prompt_tokens, seed, session.boot.name, concurrency, slot, ordinal)
        yield warmup, _request(session.model, prompt, tokens)


def _null_supply(slot: int) -> Supply:
    for ordinal in itertools.count():
        yield False, _request("null", token_prompt(16, slot, ordinal), CEILING_TOKENS)


def _request(model: str, prompt: list[int], tokens: int) -> Request:
    return Request(
        COMPLETIONS,
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        },
    )


def _load_request(turn: Turn) -> LoadRequest:
    answer = turn.reply.answer
    counts = None if answer.token_ids is None else Counter(answer.token_ids)
    return LoadRequest(
        slot=turn.slot,
        warmup=turn.warmup,
        max_tokens=turn.request.body["max_tokens"],
        times=turn.reply.times,
        status=answer.status,
        error=answer.error,
        finish_reason=answer.finish_reason,
        prompt_tokens=answer.prompt_tokens,
        completion_tokens=answer.completion_tokens,
        delivered_tokens=None if counts is None else counts.total(),
        distinct_tokens=None if counts is None else len(counts),
        most_common_tokens=None if counts is None else max(counts.values(), default=0),
        events=answer.events,
    )


def _write(session: Session, cell: Cell) -> None:
    name = cell_file(cell.concurrency)
    content = (cell.model_dump_json(indent=1) + "\n").encode()
    if len(content) > LARGE_BYTES:
        session.evidence.bytes(f"{name}.gz", compress(content))
    else:
        session.evidence.bytes(name, content)
