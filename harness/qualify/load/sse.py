# SPDX-License-Identifier: Apache-2.0
"""Server-sent events: bytes as the network cut them in, data of whole events out."""

from __future__ import annotations

MAX_EVENT_BYTES = 16 << 20
"""A larger event is refused, so that a server that never ends a line cannot fill the memory."""

_BOM = b"\xef\xbb\xbf"


class StreamError(Exception):
    """The bytes are not a stream of events."""


class Decoder:
    """Incremental decoder. A read may hold several events, or a part of one, down to half a character."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._size = 0
        self._first = True

    def feed(self, chunk: bytes) -> list[str]:
        """The data of the events that `chunk` completes, in order. Raises StreamError."""
        lines = (self._rest + chunk).splitlines(keepends=True)
        # A final CR may be half of CRLF, so it waits for the next read like a line without an end.
        self._rest = lines.pop() if lines and not lines[-1].endswith(b"\n") else b""
        if len(self._rest) + self._size > MAX_EVENT_BYTES:
            raise StreamError(f"an event is larger than {MAX_EVENT_BYTES} bytes")
        return [event for line in lines if (event := self._line(line.rstrip(b"\r\n"))) is not None]

    def finish(self) -> list[str]:
        """What the end of the stream completes; an event without its blank line is lost, as the standard says."""
        lines = self._rest.splitlines()
        complete = self._rest.endswith(b"\r")
        self._rest = b""
        return [event for line in lines if complete and (event := self._line(line)) is not None]

    def _line(self, line: bytes) -> str | None:
        if self._first:
            line, self._first = line.removeprefix(_BOM), False
        if not line:
            return self._dispatch()
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
            self._size += len(value) + 1
        return None

    def _dispatch(self) -> str | None:
        if not self._data:
            return None
        data, self._data, self._size = b"\n".join(self._data), [], 0
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            raise StreamError("an event is not UTF-8") from None
