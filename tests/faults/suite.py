# SPDX-License-Identifier: Apache-2.0
"""Runs faults and counts: false passes, wrong codes, and good runs that are refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from faults import device, evidence, kv, latent, live, memory, receipts, throughput
from faults.lab import Lab
from faults.model import Fault, Group, Verdicts

FAULTS: tuple[Fault, ...] = (
    *evidence.FAULTS,
    *live.FAULTS,
    *kv.FAULTS,
    *latent.FAULTS,
    *throughput.FAULTS,
    *memory.FAULTS,
    *device.FAULTS,
    *receipts.FAULTS,
)

GOOD: dict[str, Callable[[Lab], Verdicts]] = {
    **evidence.GOOD,
    **live.GOOD,
    **throughput.GOOD,
    **device.GOOD,
    **receipts.GOOD,
}
"""What is not broken must pass, else refusing proves nothing."""


@dataclass(frozen=True)
class Result:
    fault: Fault
    found: Verdicts

    @property
    def false_pass(self) -> bool:
        return self.fault.target not in self.found

    @property
    def wrong_code(self) -> bool:
        return not self.false_pass and dict(self.found) != dict(self.fault.expected)

    def __str__(self) -> str:
        state = "FALSE PASS" if self.false_pass else "WRONG CODE" if self.wrong_code else "refused"
        line = f"{state}  {self.fault.group}: {self.fault.name}: {_text(self.found) or 'passed'}"
        return f"{line}; expected {_text(self.fault.expected)}" if self.false_pass or self.wrong_code else line


def _text(found: Verdicts) -> str:
    return "; ".join(f"{subject} {verdict}" for subject, verdict in sorted(found.items()))


def run(faults: Iterable[Fault], lab: Lab, show: Callable[[str], None]) -> bool:
    """Run the faults and all that is good; the last line counts. True if nothing is wrong."""
    alarms = [name for name, act in GOOD.items() if (found := act(lab)) and not show(f"FALSE ALARM  {name}: {found}")]
    results = []
    for fault in faults:
        results.append(Result(fault, fault.act(lab)))
        show(str(results[-1]))
    count = Counter(result.fault.group for result in results)
    show(", ".join(f"{group} {count[group]}" for group in Group))
    show(f"{len(GOOD)} good runs, {len(alarms)} false alarms")
    passes = sum(result.false_pass for result in results)
    wrong = sum(result.wrong_code for result in results)
    show(f"{len(results)} faults, {passes} false passes, {wrong} wrong codes")
    return not (passes or wrong or alarms)
