# SPDX-License-Identifier: Apache-2.0
"""A server that answers completions with canned events as fast as it can: it bounds the client's own speed.

Runs as a process of its own by file path and imports nothing of this package. It prints its port, and ends when its
standard input closes, so that it cannot outlive the harness.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading

EVENT = {"id": "null", "object": "text_completion", "created": 0, "model": "null"}
CHOICE = {"index": 0, "text": " null", "logprobs": None, "finish_reason": None, "stop_reason": None}
EVENTS_PER_WRITE = 16


def _event(**fields: object) -> bytes:
    payload = b"data: " + json.dumps({**EVENT, **fields}).encode() + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(payload), payload)


def _end(tokens: int) -> bytes:
    usage = {"prompt_tokens": 0, "completion_tokens": tokens, "total_tokens": tokens}
    return _event(choices=[], usage=usage) + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    one = _event(choices=[{**CHOICE, "token_ids": [0]}])
    last = _event(choices=[{**CHOICE, "token_ids": [0], "finish_reason": "length"}])
    try:
        while True:
            request = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = int(request.partition(b"content-length:")[2].split(b"\r\n", 1)[0])
            tokens = int(json.loads(await reader.readexactly(length))["max_tokens"])
            writer.write(head)
            for written in range(0, tokens - 1, EVENTS_PER_WRITE):
                writer.write(one * min(EVENTS_PER_WRITE, tokens - 1 - written))
                await writer.drain()
            writer.write(last + _end(tokens))
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def _serve() -> None:
    server = await asyncio.start_server(_answer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    asyncio.run(_serve())
