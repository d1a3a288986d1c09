# SPDX-License-Identifier: Apache-2.0
"""Server-sent events: whatever the network cuts, the events are the same."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from qualify.load import sse
from qualify.load.sse import Decoder, StreamError

line = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\r\n"), min_size=1, max_size=20)
events = st.lists(st.lists(line, min_size=1, max_size=3), min_size=1, max_size=6)


def decode(chunks: list[bytes]) -> list[str]:
    decoder = Decoder()
    found = [event for chunk in chunks for event in decoder.feed(chunk)]
    return found + decoder.finish()


def cut(data: bytes, at: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(position % (len(data) + 1) for position in at)})
    return [data[start:end] for start, end in itertools.pairwise(edges)]


@settings(deadline=None)
@given(events, st.sampled_from(["\n", "\r\n", "\r"]), st.lists(st.integers(0, 10_000), max_size=12))
def test_events_do_not_depend_on_the_reads(wanted: list[list[str]], ending: str, at: list[int]) -> None:
    """Any cut of the bytes, also within a character or between CR and LF, gives the same events in order."""
    text = "".join("".join(f"data: {part}{ending}" for part in event) + ending for event in wanted)
    assert decode(cut(text.encode(), at)) == ["\n".join(event) for event in wanted]


def test_several_events_in_one_read() -> None:
    """One read holds several events; comments, other fields and empty events are no data."""
    stream = b": hello\n\nid: 7\nevent: x\ndata: one\n\n\n\ndata:two\ndata\n\n:\n\ndata:  three\n\n"
    assert decode([stream]) == ["one", "two\n", " three"]


def test_a_byte_order_mark_is_no_data() -> None:
    """A mark before the first line belongs to the encoding."""
    assert decode([b"\xef\xbb\xbfdata: x\n\n"]) == ["x"]


def test_an_unfinished_event_is_lost() -> None:
    """An event without its blank line was never sent whole."""
    assert decode([b"data: one\n\ndata: two\n"]) == ["one"]


def test_bytes_that_are_no_text_are_refused() -> None:
    """An event that is not UTF-8 breaks the stream."""
    with pytest.raises(StreamError, match="UTF-8"):
        decode([b"data: \xff\xfe\n\n"])


@pytest.mark.parametrize("chunk", [b"x" * 64, b"data: " + b"x" * 48 + b"\n"])
def test_an_endless_event_is_refused(monkeypatch: pytest.MonkeyPatch, chunk: bytes) -> None:
    """A server that never ends its line, or its event, cannot fill the memory."""
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 1000)
    decoder = Decoder()
    with pytest.raises(StreamError, match="larger"):
        for _ in range(100):
            decoder.feed(chunk)
