# SPDX-License-Identifier: Apache-2.0
"""Coverage-guided fuzzing of the log reader and everything that reads its facts.

Needs atheris (`pip install atheris` in an environment with this package's dependencies). From the repository root:

    PYTHONPATH=harness python tests/fuzz/fuzz_log.py -max_total_time=480 -max_len=4096 NEW_CORPUS tests/fuzz/corpus/log

Besides crashes it looks for broken promises: the cut of the chunks must not change a fact.
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["qualify"]):
    from qualify.observe import explain, log, triage


def check(data: bytes) -> None:
    """Read `data` whole and in chunks of a size that its first byte gives, then judge and render the facts."""
    size = 1 + (data[0] if data else 0)
    text = data[1:]
    facts = log.read([text])
    chunks = [text[at : at + size] for at in range(0, len(text), size)]
    assert log.read(chunks) == facts, f"chunks of {size} bytes change the facts"
    assert facts.extent.bytes == len(text)
    findings = triage.triage(facts, stop_requested_at=None, exit_status=None, deadline_expired=bool(size % 2))
    explanation = explain.Explanation((explain.LogExplanation(facts, findings),))
    assert explain.render_text(explanation).count("\n") >= 1
    explain.render_json(explanation)


if __name__ == "__main__":
    atheris.Setup(sys.argv, check)
    atheris.Fuzz()
