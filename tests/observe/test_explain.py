# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501 - log lines and sentences stand here as they are printed
"""`qualify explain`: any log, one answer, and one sentence at the end."""

from __future__ import annotations

import gzip
import io
import json
import sys
from pathlib import Path

import pytest
from qualify.errors import UsageError
from qualify.observe.codes import CODES, EvidenceCode, codes_table
from qualify.observe.explain import explain, explain_command, render_text

RECEIPTS = Path(__file__).parents[2] / "receipts"
DSPARK = "h200x2-tp2-dspark-k5.log"
FIRST = "h200x2-tp2-first-boot-unfinished.log"
REFUSED = (
    "(EngineCore pid=20) INFO 11-30 10:00:00 [core.py:1] Initializing a V1 LLM engine (v0.25.1) with config: "
    "model='m', tensor_parallel_size=2, enforce_eager=False\n"
    "(EngineCore pid=20) ERROR 11-30 10:00:01 [core.py:2] EngineCore failed to start.\n"
    "(EngineCore pid=20) ERROR 11-30 10:00:01 [core.py:2] Traceback (most recent call last):\n"
    "(EngineCore pid=20) ERROR 11-30 10:00:01 [core.py:2] ValueError: To serve at least one request with the model's "
    "max seq len (131072), (18.35 GiB KV cache is needed, which is larger than the available KV cache memory (8.72 GiB).\n"
)


def last_line(text):
    return text.rstrip("\n").rsplit("\n", 1)[-1]


def test_sound_log(sample_path, capsys):
    """A sound log: its facts, exit code 0, and a last line that claims no more than the log shows."""
    assert explain_command((str(sample_path(DSPARK)),), as_json=False) == 0
    text = capsys.readouterr().out
    for part in ("0.32.0 (line 22)", "world size 2, TP 2: rank 0 pid 7332, rank 1 pid 7333", "3,321,847 tokens",
                 "PIECEWISE 9 of 9, FULL 7 of 7, drafter FULL 6 of 6 (final capture)", "attention     unknown"):  # fmt: skip
        assert part in text
    assert (
        last_line(text)
        == "vLLM 0.32.0 with TP 2 (h200x2-tp2-dspark-k5.log) became ready, and the log shows no failure."
    )


def test_fatal_log(tmp_path, capsys):
    """A refused admission: exit code 1, the cause with its line, and a remedy."""
    path = tmp_path / "report.log"
    path.write_text(REFUSED)
    assert explain_command([str(path)], as_json=False) == 1
    text = capsys.readouterr().out
    assert "first fatal cause at line 4: one request of 131072 tokens needs 18.35 GiB, 8.72 GiB are available" in text
    assert f"remedy: {CODES[EvidenceCode.KV_ADMISSION_REFUSED].remedy}" in text
    assert last_line(text).startswith("vLLM 0.25.1 with TP 2 (report.log) failed at line 4 with kv_admission_refused: ")


@pytest.mark.parametrize("boot", ["20261130T184233Z/evidence/boots/02", "20261130T185559Z/evidence/boots/01"])
def test_a_real_engine_that_died_in_the_operator(boot, capsys):
    """Stock vLLM 0.32.0 on an H200: the allocation that failed, by its size, and the remedy that is not "use less"."""
    log = RECEIPTS / "gpu-tp1-ds4-tight" / f"{boot}-dspark-stock" / "engine.log"
    assert explain_command([str(log)], as_json=False) == 1
    text = capsys.readouterr().out
    assert "while trying to allocate 2147483648 bytes" in text
    assert f"remedy: {CODES[EvidenceCode.RUNTIME_ALLOC_FAILURE].remedy}" in text
    assert " with runtime_alloc_failure: " in last_line(text)


def test_undecided_log(sample_path, capsys):
    """A log that ends before ready is neither a pass nor a failure: exit code 3."""
    assert explain_command([str(sample_path(FIRST))], as_json=False) == 3
    assert "does not decide: last progress: JIT kernel warmup (212 compile keys) 7/23." in last_line(
        capsys.readouterr().out
    )


def test_worst_log_decides(sample_path, tmp_path):
    """Of several logs the worst gives the sentence and the exit code."""
    path = tmp_path / "report.log"
    path.write_text(REFUSED)
    text = render_text(explain([sample_path(DSPARK), path, sample_path(FIRST)]))
    assert "kv_admission_refused" in last_line(text)


def test_json(sample_path, capsys):
    """The JSON document has lowerCamelCase keys, and null for what is unknown."""
    explain_command([str(sample_path(DSPARK))], as_json=True)
    document = json.loads(capsys.readouterr().out)
    facts = document["logs"][0]["facts"]
    assert facts["kvTokens"]["value"] == 3_321_847
    assert facts["kvTokens"]["source"] == {"file": DSPARK, "line": 71, "offset": 17071}
    assert facts["attentionBackend"] is None
    assert document["verdict"] == "pass"
    assert {finding["code"] for finding in document["logs"][0]["findings"]} <= set(EvidenceCode)


def test_standard_input_and_gzip(sample_path, tmp_path, monkeypatch):
    """`-` is standard input, and packed logs are read as they are."""
    data = sample_path(DSPARK).read_bytes()
    stdin = io.TextIOWrapper(io.BytesIO(data))
    monkeypatch.setattr(sys, "stdin", stdin)
    (from_stdin,) = explain(["-"]).logs
    path = tmp_path / "engine.log.gz"
    path.write_bytes(gzip.compress(data))
    (from_gzip,) = explain([path]).logs
    assert from_stdin.facts.kv_tokens.value == from_gzip.facts.kv_tokens.value == 3_321_847


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "empty.log contains no line of a vLLM engine."),
        (b"\x00\xff\xfe garbage", "empty.log contains no line of a vLLM engine."),
    ],
)
def test_no_engine_log(tmp_path, content, sentence):
    """A file without any engine line is said to be that, not to be sound."""
    path = tmp_path / "empty.log"
    path.write_bytes(content)
    explanation = explain([path])
    assert last_line(render_text(explanation)) == sentence


def test_unreadable(tmp_path):
    """A missing file and an unknown packing are usage errors with a remedy."""
    with pytest.raises(UsageError, match=r"cannot read .*missing\.log: No such file"):
        explain([tmp_path / "missing.log"])
    packed = tmp_path / "log.zst"
    packed.write_bytes(b"\x28\xb5\x2f\xfd rest")
    with pytest.raises(UsageError, match="zstd: unpack it first"):
        explain([packed])


def test_every_code_is_explained():
    """Each code has meaning, evidence and remedy, and its documentation page lists it."""
    assert set(CODES) == set(EvidenceCode)
    assert all(all(entry) for entry in CODES.values())
    page = (Path(__file__).parents[2] / "docs" / "explain.md").read_text()
    assert codes_table() in page
