# SPDX-License-Identifier: Apache-2.0
"""Throughput evidence without a clock: cells whose every counter is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qualify.evidence import EvidenceWriter, compress
from qualify.load.answer import Answer
from qualify.load.ceiling import Ceiling
from qualify.load.client import Times
from qualify.probes.load_records import Cell, LoadRequest, Sample, cell_file, scrape_file
from qualify.profiles import Boot, Probe, Profile
from qualify.records import RUN, Run

LABELS = 'engine="0",model_name="fake"'
PROMPT = 64
OUTSIDE = 3
"""Steps before the window and again after it."""


@dataclass(frozen=True)
class Steps:
    """Per sample interval of `spacing` seconds: engine steps, and of those with a draft, accepted tokens."""

    steps: Sequence[int]
    spacing: float = 1.0
    drafts: Sequence[int] | None = None
    accepted: Sequence[int] | None = None
    draft_tokens: int = 5
    """K of every draft."""

    @property
    def drafts_outside(self) -> int:
        """Where every step has a draft, those outside the window have one too, except the one that prefills."""
        return 2 * OUTSIDE - 1 if self.drafts is not None and list(self.drafts) == list(self.steps) else 0


def write(root: Path, boot: Boot, run: Run, plan: Steps, **changes: object) -> None:
    """One boot with one cell at concurrency 1: a single request decodes over the whole window."""
    evidence = EvidenceWriter(root)
    evidence.record(RUN, run)
    folder = evidence.below(f"boots/01-{boot.name}")
    samples = _samples(plan)
    extra = 2 * OUTSIDE
    accepted = sum(plan.accepted or ())
    tokens = sum(plan.steps) + extra + accepted
    cell = Cell(
        boot=boot.name,
        concurrency=1,
        window_began=0.0,
        window_ended=samples[-1].at,
        sample_seconds=plan.spacing,
        samples=tuple(samples),
        requests=(request(tokens, samples[-1].at),),
        ceiling=Ceiling(concurrency=1, seconds=1.0, tokens=10**6, tokens_per_second=1e6),
        drained=True,
        failure=None,
    )
    folder.record(cell_file(1), cell.model_copy(update=changes))
    folder.bytes(scrape_file(1, "before"), compress(page(0, 0, plan).encode()))
    folder.bytes(scrape_file(1, "after"), compress(page(sum(plan.steps) + extra, accepted, plan).encode()))


def page(steps: int, accepted: int, plan: Steps, **off: int) -> str:
    """The metrics page after so many steps; `off` adds to a counter."""
    tokens = steps + accepted
    values = {
        "generation_tokens_total": tokens,
        "iteration_tokens_total_count": steps,
        "iteration_tokens_total_sum": tokens + (PROMPT if steps else 0),
        "num_preemptions_total": 0,
    }
    if plan.drafts is not None:
        drafts = sum(plan.drafts) + plan.drafts_outside if steps else 0
        values["spec_decode_num_drafts_total"] = drafts
        values["spec_decode_num_draft_tokens_total"] = plan.draft_tokens * drafts
        values["spec_decode_num_accepted_tokens_total"] = accepted
    lines = [f"vllm:{name}{{{LABELS}}} {value + off.get(name, 0)}" for name, value in values.items()]
    lines.append(f'vllm:prompt_tokens_by_source_total{{{LABELS},source="local_compute"}} {PROMPT if steps else 0}')
    if plan.drafts is not None:
        lines.append(f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{LABELS},position="0"}} {accepted}')
    return "\n".join([*lines, "process_start_time_seconds 1000.0"]) + "\n"


def profile_of(base: Profile, boot: Boot, seconds: float, method: str = "dspark", tokens: int = 5) -> Profile:
    load = {"concurrency": (1,), "window_seconds": seconds, "batches": 10}
    return base.model_copy(
        update={
            "boots": (boot,),
            "speculation": base.speculation.model_copy(update={"method": method, "tokens": tokens}),
            "throughput": base.throughput.model_copy(update=load),
        }
    )


def boot(speculation: bool = False) -> Boot:
    return Boot(name="only", speculation=speculation, probes=(Probe.THROUGHPUT,))


def _samples(plan: Steps) -> list[Sample]:
    samples = []
    steps = drafts = accepted = 0
    for index in range(len(plan.steps) + 1):
        if index:
            steps += plan.steps[index - 1]
            drafts += plan.drafts[index - 1] if plan.drafts else 0
            accepted += plan.accepted[index - 1] if plan.accepted else 0
        drafted = plan.drafts is not None
        samples.append(
            Sample(
                at=index * plan.spacing,
                took=0.001,
                generation_tokens=OUTSIDE + steps + accepted,
                steps=OUTSIDE + steps,
                drafts=drafts if drafted else None,
                draft_tokens=plan.draft_tokens * drafts if drafted else None,
                accepted_tokens=accepted if drafted else None,
                preemptions=0,
                running=1,
                waiting=0,
                process_start=1000.0,
            )
        )
    return samples


def request(tokens: int, end: float) -> LoadRequest:
    times = Times(intended=-1.0, sent=-1.0, first_token=-0.5, ended=end + 0.5, longest_silence=0.1)
    answer = Answer(status=200, finish_reason="length", prompt_tokens=PROMPT, completion_tokens=tokens)
    return LoadRequest(
        slot=0,
        warmup=False,
        max_tokens=tokens,
        times=times,
        status=answer.status,
        error=None,
        finish_reason=answer.finish_reason,
        prompt_tokens=PROMPT,
        completion_tokens=tokens,
        delivered_tokens=tokens,
        distinct_tokens=tokens,
        most_common_tokens=1,
        events=tokens,
    )
