# SPDX-License-Identifier: Apache-2.0
"""Plots of throughput: what the engine counted from sample to sample, cell by cell."""

from __future__ import annotations

from collections.abc import Iterator

from qualify.claims.model import Claim, ClaimId
from qualify.claims.window import Window
from qualify.errors import EvidenceError
from qualify.evidence import Evidence
from qualify.probes.load_records import Cell
from qualify.receipt.model import Qualification
from qualify.report.markup import Markup, element
from qualify.report.svg import Band, line_plot

CELLS = r"^boots/\d+-[^/]+/throughput/c\d+\.json(\.gz)?$"
TOKENS_PER_SECOND = "outputTokensPerSecond"

MAX_RATE = 1e12
"""Tokens a second that no engine reaches; beyond it, and below 0, a counter is broken and there is nothing to plot."""


def throughput_plots(evidence: Evidence, predicate: Qualification) -> Markup | None:
    """One plot a cell, for cells that have samples; None if there is none."""
    claim = next(claim for claim in predicate.claims if claim.id is ClaimId.THROUGHPUT_SUSTAINED)
    plots = list(_plots(evidence, claim))
    return element("div", plots, class_="plots") if plots else None


def _plots(evidence: Evidence, claim: Claim) -> Iterator[Markup]:
    for path in evidence.paths(CELLS):
        boot = path.split("/")[1].split("-", 1)[1]
        try:
            cell = evidence.record(path, Cell)
        except EvidenceError:
            continue
        window = Window(cell)
        rates = window.rates(lambda sample: sample.generation_tokens) if _whole(cell) else []
        if len(rates) > 1 and all(0 <= rate < MAX_RATE for rate in rates):
            name = f"{boot} C{cell.concurrency}"
            begin = cell.samples[0].at
            times = [sample.at - begin for sample in cell.samples[1:]]
            plot = line_plot(f"{name}, output tokens per second", times, rates, unit="tok/s", band=_band(claim, name))
            yield element("figure", element("figcaption", f"{name}: output tok/s, dashed mean with interval"), plot)


def _whole(cell: Cell) -> bool:
    """Whether every sample has the counter and its own moment, so that rates can be formed."""
    times = [sample.at for sample in cell.samples]
    return times == sorted(set(times)) and all(sample.generation_tokens is not None for sample in cell.samples)


def _band(claim: Claim, scope: str) -> Band | None:
    for estimate in claim.estimates:
        if (estimate.name, estimate.scope) == (TOKENS_PER_SECOND, scope):
            if estimate.low is None or estimate.high is None:
                return None
            return Band(estimate.point, estimate.low, estimate.high)
    return None
