# SPDX-License-Identifier: Apache-2.0
"""Canonical bytes, and the strict reader."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from qualify.errors import EvidenceError
from qualify.receipt.canonical import MAX_DEPTH, canonical, parse

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**53) + 1, 2**53 - 1)
    | st.floats(-1e15, 1e15)
    | st.text(st.characters(codec="utf-8"))
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
    max_leaves=20,
)


def test_numbers_and_keys_follow_rfc_8785() -> None:
    """Shortest numbers, keys in UTF-16 order, no space (RFC 8785, sections 3.2.2 and 3.2.3)."""
    value = {"b": [1.0, 1e21, 1e-7, 0.1, -0.0], "a": "\u20ac\n", "\ufb33": 1, "\U0001f600": 2}
    expected = '{"a":"€\\n","b":[1,1e+21,1e-7,0.1,0],"\U0001f600":2,"\ufb33":1}'
    assert canonical(value) == expected.encode()


@given(VALUES)
def test_the_strict_reader_reads_what_the_writer_wrote(value: Any) -> None:
    """Reading and writing again gives the same bytes."""
    content = canonical(value)
    assert canonical(parse(content, "x")) == content


@given(st.binary(max_size=60) | st.text(alphabet='{}[]",:0123456789.eE+-ntfau\\ "', max_size=40).map(str.encode))
def test_any_bytes_are_read_or_refused(content: bytes) -> None:
    """The reader knows two endings only: a value whose canonical bytes these are, or an EvidenceError."""
    try:
        value = parse(content, "x")
    except EvidenceError:
        return
    assert canonical(value) == content


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b'{"a":1,"a":2}', "'a' twice"),
        (b'{"a":NaN}', "NaN"),
        (b"[-Infinity]", "-Infinity"),
        (b"[1e999]", "not finite"),
        (b"[9007199254740992]", "beyond 2^53"),
        (b"[" + b"9" * 100_000 + b"]", "beyond 2^53"),
        (b"[1.0]", "canonical form"),
        (b'{"b":1,"a":2}', "canonical form"),
        (b"[1 ]", "canonical form"),
        (b'["\\u0061"]', "canonical form"),
        (b'["\\ud800"]', "canonical JSON form"),
        (b'["\xff"]', "UTF-8"),
        (b"\xef\xbb\xbf[]", "not JSON"),
        (b"", "not JSON"),
        (b"[1", "not JSON"),
        (b"[" * 100_000, "nested"),
        (b"[" * 500 + b"]" * 500, "nested"),
        (b'{"a":' * (MAX_DEPTH + 1) + b"1" + b"}" * (MAX_DEPTH + 1), "nested"),
    ],
)
def test_what_is_not_strict_json_is_refused(content: bytes, why: str) -> None:
    """Each rule of the strict reader fires, with its own words."""
    with pytest.raises(EvidenceError, match="(?s)" + why.replace("^", r"\^")):
        parse(content, "statement")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2**53, {1: 2}, object()])
def test_the_writer_refuses_what_json_cannot_carry(value: Any) -> None:
    """NaN, infinities and large integers never reach a receipt."""
    with pytest.raises(EvidenceError, match="no canonical JSON form"):
        canonical({"value": value})


def test_depth_up_to_the_limit_is_read() -> None:
    """The limit itself is allowed."""
    content = b"[" * MAX_DEPTH + b"]" * MAX_DEPTH
    assert json.loads(content) == parse(content, "x")
