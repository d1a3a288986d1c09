# SPDX-License-Identifier: Apache-2.0
"""Plays `python -m vllm... serve` and `python -m lmcache... server` for tests: one HTTP server, standard library only.

FAKE_MODE, words parted by commas, says how it misbehaves:
die             prints a traceback and exits with 3 before it is healthy
hang            never becomes healthy
mute            is healthy, but never answers a completion
refuse          answers completions with 500
deaf            ignores SIGTERM
family          starts a child, and a daemon in a session of its own, both with shared memory that nobody removes
crash           exits with 9 soon after the first completion
port-taken      prints what a server prints whose port is in use, and exits with 1
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

MODE = set(filter(None, os.environ.get("FAKE_MODE", "").split(",")))
TOKEN = os.environ.get("FAKE_TOKEN", "fake")


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._answer(503 if "hang" in MODE else 200, {})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if "mute" in MODE:
            time.sleep(3600)
        if "refuse" in MODE:
            self._answer(500, {"error": "refused on purpose"})
            return
        self._answer(200, {"choices": [{"text": " yes"}]})
        if "crash" in MODE:
            threading.Timer(0.2, os._exit, (9,)).start()

    def _answer(self, status: int, body: dict[str, object]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


def hold_segment(name: str) -> mmap.mmap:
    with Path(f"/dev/shm/{name}").open("w+b") as file:
        file.truncate(4096)
        return mmap.mmap(file.fileno(), 4096)


def start_family() -> None:
    """As an engine does: a worker, and something that detached itself completely."""
    if os.fork() == 0:
        kept = hold_segment(f"{TOKEN}-worker")
        time.sleep(3600)
        kept.close()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            kept = hold_segment(f"{TOKEN}-daemon")
            time.sleep(3600)
            kept.close()
        os._exit(0)


def main() -> None:
    if "deaf" in MODE:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    print(f"starting with {len(sys.argv)} arguments", flush=True)
    if "family" in MODE:
        start_family()
    if "die" in MODE:
        print("INFO loading the model", flush=True)
        raise RuntimeError("the weights are made of cheese")
    if "port-taken" in MODE:
        print("OSError: [Errno 98] Address already in use", flush=True)
        sys.exit(1)
    flag = "--http-port" if "--http-port" in sys.argv else "--port"
    port = int(sys.argv[sys.argv.index(flag) + 1])
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
