# SPDX-License-Identifier: Apache-2.0
"""Evidence of the serve, prefill and throughput probes, and the names of its files below a boot's folder."""

from __future__ import annotations

from qualify.load.answer import Answer
from qualify.load.ceiling import Ceiling
from qualify.load.client import Times
from qualify.model import Record
from qualify.records import GpuSample

SERVE = "serve.json"
PREFILL = "prefill.json"


def cell_file(concurrency: int) -> str:
    """One throughput cell; it ends in .gz where it is large."""
    return f"throughput/c{concurrency}.json"


def scrape_file(concurrency: int, moment: str) -> str:
    """The metrics page before or after the closed interval of a cell."""
    return f"throughput/c{concurrency}-{moment}.prom.gz"


class ServedRequest(Record):
    """One request of the fixed set. Requests with the same `subject` ask for the same tokens."""

    name: str
    subject: str
    endpoint: str
    stream: bool
    greedy: bool
    seed: int | None
    max_tokens: int
    answer: Answer
    times: Times


class Served(Record):
    """boots/NN-name/serve.json; `model` is the name the requests used, `models` what the server lists."""

    boot: str
    model: str
    models: tuple[str, ...]
    requests: tuple[ServedRequest, ...]


class PrefillRequest(Record):
    """One prompt of `tokens` tokens, asked for alone or together with all others; the counts are the engine's."""

    tokens: int
    together: bool
    times: Times
    status: int | None
    error: str | None
    prompt_tokens: int | None
    completion_tokens: int | None


class Prefill(Record):
    """boots/NN-name/prefill.json, in the order in which the requests were sent or, of those together, planned."""

    boot: str
    requests: tuple[PrefillRequest, ...]


class Sample(Record):
    """Counters of the engine at one moment, in seconds on the cell's clock; a counter it does not expose is null."""

    at: float
    took: float
    """Seconds that the scrape took; `at` is its middle."""
    generation_tokens: float | None
    steps: float | None
    drafts: float | None
    draft_tokens: float | None
    accepted_tokens: float | None
    preemptions: float | None
    running: float | None
    waiting: float | None
    process_start: float | None


class LoadRequest(Record):
    """One request of the load, warm-up included. Token ids are kept as counts: delivered, distinct, most common."""

    slot: int
    warmup: bool
    max_tokens: int
    times: Times
    status: int | None
    error: str | None
    finish_reason: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    delivered_tokens: int | None
    distinct_tokens: int | None
    most_common_tokens: int | None
    events: int


class Cell(Record):
    """boots/NN-name/throughput/cC.json: one concurrency in one boot. All times are on the cell's clock."""

    boot: str
    concurrency: int
    window_began: float
    window_ended: float
    sample_seconds: float
    samples: tuple[Sample, ...]
    requests: tuple[LoadRequest, ...]
    ceiling: Ceiling
    drained: bool
    """Whether the engine was idle at both scrapes around the load."""
    failure: str | None
    """Why the window ended early."""
    gpus: tuple[GpuSample, ...] = ()
    """The engine's GPUs, about once a second within the window; none where it has none that can be seen."""
