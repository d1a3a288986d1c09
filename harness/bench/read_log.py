# SPDX-License-Identifier: Apache-2.0
"""Speed and memory of the log reader on a synthetic log: real samples between ordinary access lines.

    python harness/bench/read_log.py SAMPLE.log... [--megabytes 200] [--access-share 0.9]

Prints megabytes, seconds, MB/s (1 MB = 10^6 bytes) and the growth of the peak resident memory while reading.
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from qualify.observe.log import CHUNK, read

ROUTES = ("POST /v1/completions", "POST /v1/chat/completions", "GET /metrics", "GET /health")


def access_lines(rng: random.Random, size: int) -> bytes:
    """About `size` bytes of access lines, with a statistics line every hundred of them."""
    lines, total = [], 0
    while total < size:
        port, route = rng.randrange(1024, 65536), rng.choice(ROUTES)
        status = "200 OK" if rng.random() < 0.99 else "400 Bad Request"
        line = f'INFO:     10.0.{rng.randrange(256)}.{rng.randrange(256)}:{port} - "{route} HTTP/1.1" {status}\n'
        if len(lines) % 100 == 99:
            line += (
                f"(APIServer pid=1) INFO 11-30 04:00:44 [loggers.py:335] Engine 000: Avg prompt throughput: "
                f"{rng.random() * 1000:.1f} tokens/s, Avg generation throughput: {rng.random() * 300:.1f} "
                f"tokens/s, Running: 8 reqs, Waiting: 2 reqs, GPU KV cache usage: 12.5%, Prefix cache hit "
                f"rate: 40.1%\n"
            )
        lines.append(line)
        total += len(line)
    return "".join(lines).encode()


def synthetic(samples: list[bytes], megabytes: int, access_share: float) -> Iterator[bytes]:
    """A log of the given size in chunks; the samples take the share that access lines leave."""
    rng = random.Random(671)
    body = b"".join(samples)
    unit = body + access_lines(rng, int(len(body) * access_share / (1 - access_share)))
    remaining, at = megabytes * 1_000_000, 0
    doubled = unit * (1 + CHUNK // len(unit)) + unit
    while remaining > 0:
        size = min(CHUNK, remaining)
        yield doubled[at : at + size]
        at = (at + size) % len(unit)
        remaining -= size


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("samples", nargs="+", type=Path)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--access-share", type=float, default=0.9)
    arguments = parser.parse_args()
    if not 0 <= arguments.access_share < 1:
        parser.error("--access-share must lie in [0, 1)")
    samples = [path.read_bytes() for path in arguments.samples]
    making = time.process_time()
    for _ in synthetic(samples, arguments.megabytes, arguments.access_share):
        pass
    making = time.process_time() - making
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    facts = read(synthetic(samples, arguments.megabytes, arguments.access_share))
    seconds = time.process_time() - start - making
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    rate = arguments.megabytes / seconds
    print(
        f"{arguments.megabytes} MB, {facts.extent.lines} lines in {seconds:.2f} s: {rate:.1f} MB/s; "
        f"peak memory grew by {grown / 1024:.1f} MiB"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
