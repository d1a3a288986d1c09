# SPDX-License-Identifier: Apache-2.0
"""Coverage-guided fuzzing of the metric reader.

Needs atheris, as `fuzz_log.py` does. From the repository root:

    PYTHONPATH=harness python tests/fuzz/fuzz_metrics.py -max_total_time=480 NEW_CORPUS tests/fuzz/corpus/metrics

Besides crashes it looks for broken promises: a page compared with itself counts nothing, an absent series is unknown.
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["qualify"]):
    from qualify.observe import metrics, speculation


def check(data: bytes) -> None:
    """Read two pages from `data` (apart at the byte 0) and compare them."""
    first, _, second = data.partition(b"\0")
    before, after = metrics.parse(first), metrics.parse(second)
    same = metrics.delta(before, before)
    for name in before.names():
        for labels in before.series(name):
            value = same.value(name, **dict(labels))
            assert value in (None, 0), f"{name} changed on one page"
        before.histogram(name)
    window = metrics.delta(before, after)
    for name in after.names():
        reading = window.total(name, {"engine"})
        assert (reading.value is None) == (reading.reason is not None)
    assert window.value("vllm:certainly_absent_total") is None
    speculation.judge_acceptance(speculation.acceptance(window), floor=1.5)


if __name__ == "__main__":
    atheris.Setup(sys.argv, check)
    atheris.Fuzz()
