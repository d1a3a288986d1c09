# SPDX-License-Identifier: Apache-2.0
"""Private data: what is replaced, what is left alone, and that a scrubbed folder is always found clean."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from qualify.evidence import compress
from qualify.receipt import redact
from qualify.receipt.redact import RULES, scan, scrub, scrub_folder

PRIVATE = [
    "/home/somebody/.cache/vllm",
    "/Users/some.body/x",
    "/root/.cache",
    "tcp://10.1.2.3:4567",
    "inet 192.168.0.17 netmask",
    "8.8.8.8",
    "fe80::1ff:fe23:4567:890a",
    "fd12:3456:789a::1",
    "gpu-node.example.internal",
    "hf_" + "a" * 34,
    "Authorization: Bearer abcdefghijklmnop0123",
    '["--api-key", "correct-horse-battery"]',
    "--api-key correct-horse-battery",
    "api_key='correct-horse'",
    '{"password": "correct-horse"}',
    "ghp_" + "b" * 36,
    "AKIA" + "C" * 16,
    "-----BEGIN RSA PRIVATE KEY-----\nMII\n-----END RSA PRIVATE KEY-----",
]

HARMLESS = [
    "http://127.0.0.1:8000/health",
    "0.0.0.0:8000",
    "http://[::1]:8000",
    '{"name": "nvidia-curand", "version": "10.3.9.90"}',
    '{"version":"10.3.9.90"}',
    "opencv-python==4.13.0.92",
    "nvidia_cudnn-9.10.2.21-py3-none-any.whl",
    "torch 2.13.0+cpu",
    "vbios 96.00.74.00.01",
    "api_key=None, hf_token=None, trust_remote_code=False",
    "max_num_batched_tokens=512 tokenizer='tiny-hybrid'",
    "eos_token='<|endoftext|>'",
    "/rootfs/x and /opt/home/x",
    "example.com/home/page",
    "0f" * 32,
    "12:34:56.789",
]


@pytest.mark.parametrize("text", PRIVATE)
def test_private_data_is_found_and_replaced(text: str) -> None:
    """Each kind is found by the review, and gone after the scrub."""
    assert scan("x.log", text.encode()) is not None
    cleaned, counts = scrub(text.encode(), ())
    assert scan("x.log", cleaned) is None
    assert sum(counts.values()) >= 1


@pytest.mark.parametrize("text", HARMLESS)
def test_ordinary_evidence_is_left_alone(text: str) -> None:
    """Versions with four parts, loopback, token counts and digests are no private data."""
    assert scan("x.log", text.encode()) is None
    assert scrub(text.encode(), ())[0] == text.encode()


PIECES = st.lists(
    st.sampled_from([*PRIVATE, *HARMLESS, " ", "\n", '"', ",", "=", ":", "<", "/", "-", "."]) | st.text(max_size=3)
)


@given(PIECES)
def test_what_was_scrubbed_is_found_clean(pieces: list[str]) -> None:
    """For any text, so that an honest run never fails the review of its own receipt; and scrubbing twice is once."""
    cleaned = scrub("".join(pieces).encode(), ())[0]
    assert scan("x.log", cleaned) is None
    assert scrub(cleaned, ())[0] == cleaned


def test_json_stays_json() -> None:
    """Placeholders go into strings, whatever the string was."""
    record = {"argv": ["--api-key", "correct-horse", "--port", "1"], "password": "correct-horse", "home": "/root/x"}
    cleaned = json.loads(scrub(json.dumps(record).encode(), ())[0])
    assert cleaned["password"] == "<secret>"
    assert cleaned["home"] == "<home>/x"
    assert cleaned["argv"][1:] == ["<secret>", "--port", "1"]


def test_the_line_names_the_place_and_not_the_datum() -> None:
    """A review must not publish what it warns of."""
    found = scan("a.log", b"one\ntwo\nhome /home/somebody/x\n")
    assert found == "a.log, line 3: looks like private data (home)"


def test_folders_of_the_run_get_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths, host name and addresses that only this machine knows are replaced in every text file, also compressed."""
    monkeypatch.setattr(redact.socket, "gethostname", lambda: "node-17")
    monkeypatch.setattr(redact, "_addresses", lambda: ["2001:db8::17"])
    root = tmp_path / "evidence"
    root.mkdir()
    line = f"{tmp_path}/job/engine on node-17 at 2001:db8::17, not node-171\n".encode()
    (root / "engine.log.gz").write_bytes(compress(line))
    (root / "plain.json").write_text('{"kept": 1}')
    (root / "tensor.bin").write_bytes(b"\0" + line)
    redaction = scrub_folder(root, {"bundle": tmp_path, "work": tmp_path / "job"})
    text = gzip.decompress((root / "engine.log.gz").read_bytes()).decode()
    assert text == "<work>/engine on <host> at <address>, not node-171\n"
    assert redaction.replaced == {"address": 1, "host": 1, "work": 1}
    assert (root / "plain.json").read_text() == '{"kept": 1}'
    assert (root / "tensor.bin").read_bytes() == b"\0" + line


@pytest.mark.parametrize(("name", "identifies"), [("localhost", False), ("gpu", False), ("gpu1", True), ("a-b", True)])
def test_a_short_plain_word_is_no_host_name(name: str, identifies: bool) -> None:
    """Replacing a word such as `model` everywhere would destroy evidence and hide nothing."""
    assert redact._identifies(name) is identifies


def test_every_rule_is_exercised() -> None:
    """A rule that never fired is no rule."""
    assert all(any(rule.pattern.search(text.encode()) for text in PRIVATE) for rule in RULES)
