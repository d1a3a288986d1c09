# SPDX-License-Identifier: Apache-2.0
"""The step loop of the stand-in: requests in, tokens and counters out."""

from __future__ import annotations

import hashlib
import itertools
import queue
import threading
import time
from dataclasses import dataclass, field, fields

RANKS = 2
FIRST_ID, IDS = 300, 1000
PIECES = (" word", " straße", " 東京", " →", " naïve", " plain", " 🙂")


@dataclass(frozen=True)
class Faults:
    """What goes wrong. A number that names a request counts generation requests from 1; 0 means none."""

    refuse: int = 0
    """HTTP 400."""
    fail: int = 0
    """HTTP 500."""
    drop: int = 0
    """The connection closes within the answer."""
    cut_stream: int = 0
    """The stream ends in good order, but without finish reason and end mark."""
    error_event: int = 0
    """HTTP 200, then an error inside the stream."""
    hang: int = 0
    """No answer at all."""
    early_stop: int = 0
    """The answer ends half way with finish reason `stop`."""
    usage_off: int = 0
    """Added to the completion tokens of every usage."""
    no_usage: bool = False
    lose_text: bool = False
    """A streamed answer lacks the text of its third token."""
    answer_model: str | None = None
    listed_model: str | None = None
    degenerate: bool = False
    """Every answer repeats one token."""
    moody: bool = False
    """The same greedy request gives other tokens each time."""
    other_client: int = 0
    """Output tokens that the counter gains per request and no usage shows."""
    restart_at_step: int = 0
    """All counters start anew in a new process."""
    stall_at_step: int = 0
    stall_seconds: float = 0.0
    die_at_step: int = 0
    absent: tuple[str, ...] = ()
    """Metrics that the page lacks."""
    double_steps: bool = False
    accepted_off: int = 0
    """Accepted tokens that the counter gains per draft, beyond those emitted."""
    idle_gauge: bool = False
    """The page never shows a running request."""
    busy_gauge: bool = False
    """The page always shows a running request."""
    shared_core: bool = False
    """Both ranks report the same core."""
    ranks: int = RANKS

    def __str__(self) -> str:
        """Only what is wrong; names a test case."""
        wrong = {field.name: getattr(self, field.name) for field in fields(self)}
        return ",".join(f"{name}={value}" for name, value in wrong.items() if value != getattr(Faults, name)) or "none"


SOUND = Faults()


@dataclass
class Job:
    """One request in the step loop; `out` yields a list of token ids per step, then None."""

    number: int
    prompt: tuple[int, ...]
    key: str
    wanted: int
    made: list[int] = field(default_factory=list)
    out: queue.Queue[list[int] | None] = field(default_factory=queue.Queue)


def token(key: str, index: int) -> int:
    digest = hashlib.sha256(f"{key}/{index}".encode()).digest()
    return FIRST_ID + int.from_bytes(digest[:4]) % IDS


def piece(token_id: int) -> str:
    return f"{PIECES[token_id % len(PIECES)]}{token_id}"


class Engine(threading.Thread):
    """Runs steps while there are jobs. `counters` is what the metrics page shows."""

    def __init__(self, step_seconds: float, drafter: int | None, faults: Faults) -> None:
        super().__init__(daemon=True)
        self.faults = faults
        self.drafter = drafter
        self.dead = threading.Event()
        self.lock = threading.Lock()
        self.steps = 0
        self.started_at = 1_000_000.0
        self.counters = self._fresh()
        self._step_seconds = step_seconds
        self._jobs: list[Job] = []
        self._numbers = itertools.count(1)
        self._wake = threading.Event()
        self._halt = False

    @property
    def running(self) -> int:
        return len(self._jobs)

    def number(self) -> int:
        return next(self._numbers)

    def submit(self, number: int, prompt: tuple[int, ...], sampling: str, wanted: int) -> Job:
        mood = f"/{number}" if self.faults.moody else ""
        job = Job(number, prompt, f"{hash_of(prompt)}/{sampling}{mood}", wanted)
        with self.lock:
            self._jobs.append(job)
            self.counters["vllm:generation_tokens_total"] += self.faults.other_client
        self._wake.set()
        return job

    def stop(self) -> None:
        self._halt = True
        self._wake.set()

    def run(self) -> None:
        while not self._halt:
            self._wake.wait()
            time.sleep(self._step_seconds)
            if self.steps and self.steps == self.faults.stall_at_step:
                time.sleep(self.faults.stall_seconds)
            with self.lock:
                self._step()
                if not self._jobs:
                    self._wake.clear()
            if self.faults.die_at_step and self.steps >= self.faults.die_at_step:
                self.dead.set()
                return

    def _fresh(self) -> dict[str, float]:
        names = ["generation_tokens_total", "prompt_tokens_total", "num_preemptions_total", "request_success_total"]
        names += ["iteration_tokens_total_count", "iteration_tokens_total_sum"]
        if self.drafter is not None:
            names += ["spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total"]
            names += ["spec_decode_num_accepted_tokens_total"]
        return {f"vllm:{name}": 0.0 for name in names}

    def _step(self) -> None:
        if not self._jobs:
            return
        self.steps += 1
        if self.steps == self.faults.restart_at_step:
            self.counters = self._fresh()
            self.started_at += 1
        counters = self.counters
        counters["vllm:iteration_tokens_total_count"] += 2 if self.faults.double_steps else 1
        for job in tuple(self._jobs):
            first = not job.made
            ids = self._emit(job)
            job.made += ids
            counters["vllm:generation_tokens_total"] += len(ids)
            counters["vllm:iteration_tokens_total_sum"] += len(ids) + (len(job.prompt) if first else 0)
            counters["vllm:prompt_tokens_total"] += len(job.prompt) if first else 0
            job.out.put(ids)
            if len(job.made) >= job.wanted:
                counters["vllm:request_success_total"] += 1
                self._jobs.remove(job)
                job.out.put(None)

    def _emit(self, job: Job) -> list[int]:
        """The first token comes from prefill; later steps verify a draft, and the length limit may cut them."""
        done = len(job.made)
        count = 1
        if done and self.drafter is not None:
            accepted = token(f"draft/{job.key}", done) % (self.drafter + 1)
            count += accepted
            self.counters["vllm:spec_decode_num_drafts_total"] += 1
            self.counters["vllm:spec_decode_num_draft_tokens_total"] += self.drafter
            self.counters["vllm:spec_decode_num_accepted_tokens_total"] += accepted + self.faults.accepted_off
        count = min(count, job.wanted - done)
        return [FIRST_ID if self.faults.degenerate else token(job.key, done + index) for index in range(count)]


def hash_of(prompt: tuple[int, ...]) -> str:
    return hashlib.sha256(repr(prompt).encode()).hexdigest()[:16]
