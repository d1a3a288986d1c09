# SPDX-License-Identifier: Apache-2.0
"""Prefixes and headers of every engine version, and text glued before and behind them."""

from __future__ import annotations

import pytest
from qualify.observe.layers import records

HEADER = "INFO 11-30 10:00:00 [core.py:7] "
PREFIXES = [
    ("", None, None, None),
    ("(VllmWorker rank=1 pid=41) ", "VllmWorker", 41, 1),
    ("(VllmWorkerProcess pid=42) ", "VllmWorkerProcess", 42, None),
    ("(EngineCore_DP0 pid=43) ", "EngineCore_DP0", 43, None),
    ("(EngineCore pid=44) ", "EngineCore", 44, None),
    ("(APIServer pid=45) ", "APIServer", 45, None),
    ("(Worker pid=46) ", "Worker", 46, None),
    ("(Worker_TP0 pid=47) ", "Worker_TP0", 47, 0),
    ("(Worker_TP3_DCP1 pid=48) ", "Worker_TP3_DCP1", 48, 3),
    ("(Worker_PP1_TP2_EP2 pid=49) ", "Worker_PP1_TP2_EP2", 49, 2),
    ("(VllmWorker-1 pid=50) ", "VllmWorker-1", 50, 1),
    ("[Worker_TP3 pid=51] ", "Worker_TP3", 51, 3),
]


@pytest.mark.parametrize(("prefix", "process", "pid", "rank"), PREFIXES)
def test_prefixes(prefix, process, pid, rank):
    """Process, pid and rank come from the prefix, with a logger header behind it or without."""
    for text, headed in ((prefix + HEADER + "text", True), (prefix + "raw text", False)):
        (record,) = records(1, 0, text.encode())
        assert (record.process, record.pid, record.rank, record.headed) == (process, pid, rank, headed)
        assert record.message == (b"text" if headed else b"raw text")


@pytest.mark.parametrize(
    ("line", "level", "message"),
    [
        ("ERROR 11-30 10:00:00 [v1/core/file.py:9] text", "ERROR", b"text"),
        ("WARNING 11-30 10:00:00.123 [file.py:9] text", "WARNING", b"text"),
        ("[2026-11-30 04:03:37,442] LMCache WARNING: text", "WARNING", b"text"),
        ("2026-11-30 03:57:56,506 - INFO - text", "INFO", b"text"),
        ("INFO:     text", "INFO", b"text"),
        ("Nothing known text", None, b"Nothing known text"),
    ],
)
def test_headers(line, level, message):
    """Every writer has its own header; text without one has no level."""
    (record,) = records(1, 0, line.encode())
    assert (record.level, record.message) == (level, message)


def test_native_rank():
    """Native code names its rank, but no process."""
    (record,) = records(1, 0, b"[rank3]:[W1130 10:00:00.1 ProcessGroupNCCL.cpp:9] text")
    assert (record.rank, record.pid) == (3, None)


def test_glued_records():
    """Records that were written without line ends between them are told apart, with the text before them."""
    line = f"shell text(Worker_TP0 pid=1) {HEADER}first(Worker_TP1 pid=2) {HEADER}second"
    found = [(record.pid, record.message) for record in records(1, 0, line.encode())]
    assert found == [(None, b"shell text"), (1, b"first"), (2, b"second")]


def test_a_quoted_prefix_is_text():
    """A prefix inside a message, without a header behind it, belongs to the message."""
    (record,) = records(1, 0, f"(EngineCore pid=1) {HEADER}worker (Worker_TP1 pid=2) failed".encode())
    assert (record.pid, record.message) == (1, b"worker (Worker_TP1 pid=2) failed")
