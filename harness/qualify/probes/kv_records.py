# SPDX-License-Identifier: Apache-2.0
"""Evidence of the KV probes. One file per arm: a JSON array with one case a line, compressed deterministically.

Digests are whole sha256 values in hexadecimal. Positions are (tensor, block, tokens): the index into `tensors`, the
position in the request's block table, and how many tokens of the block were hashed (all, except where the restored
length cuts a block).
"""

from __future__ import annotations

import hashlib
import random
from enum import StrEnum
from typing import Any

from pydantic import Field

from qualify.model import Record
from qualify.probes.workers import KvTensor, ProcessIdentity


class Arm(StrEnum):
    CONTROL = "control"
    """No connector."""
    COLD = "cold"
    """Connector, empty storage: computes and stores."""
    MEMORY = "memory"
    """Same processes after reset and poison, restored from the cache server's memory."""
    DISK = "disk"
    """The same, after the cache server's memory was cleared."""
    RESTART = "restart"
    """New processes, storage kept."""
    NEGATIVE = "negative"
    """Restores that were deliberately damaged, and the undamaged one at their end."""


def arm_file(arm: Arm) -> str:
    return f"kv-{arm}.json.gz"


STORED = "kv-stored.json"


class Damage(StrEnum):
    """What a negative control damages. All but the last two must be found in the bytes and in nothing else."""

    FLIP_IN_ENGINE = "flipInEngine"
    STALE_GROUP = "staleGroup"
    FLIP_IN_FILE = "flipInFile"
    SWAPPED_RANKS = "swappedRanks"
    SWAPPED_CHUNKS = "swappedChunks"
    FLIP_OUTSIDE_WINDOW = "flipOutsideWindow"
    NONE = "none"


class Fault(Record):
    """One negative control as it was applied: `groups` are engine groups, `chunks` indexes of cache chunks."""

    damage: Damage
    ranks: tuple[int, ...] = ()
    groups: tuple[int, ...] = ()
    chunks: tuple[int, ...] = ()
    not_run: str | None = None
    """Why the control could not be applied; such a case holds nothing else."""


Digest = tuple[int, int, int, str]
ChunkDigest = tuple[int, int, str]


class KvRequest(Record):
    """One request as one rank saw it. `steps` are (first token, tokens); `table` is the block table on arrival."""

    id: str
    prompt_tokens: int
    computed_tokens: int
    table: tuple[tuple[int, ...], ...]
    steps: tuple[tuple[int, int], ...]
    cold: tuple[Digest, ...]
    restored: tuple[Digest, ...]
    chunks: tuple[ChunkDigest, ...]
    """(object, chunk, sha256) of cold cache chunks, rebuilt from the engine's blocks."""


class RankCapture(Record):
    rank: int
    process: ProcessIdentity
    tensors: tuple[KvTensor, ...] = ()
    requests: tuple[KvRequest, ...] = ()
    faults: tuple[Digest, ...] = ()
    errors: tuple[str, ...] = ()


class Poison(Record):
    """`verified`: blocks read back afterwards held nothing but the value."""

    rank: int
    value: int
    tensors: int
    views: int
    bytes: int
    verified: bool


class Scrapes(Record):
    """Metric pages around one request, cut to the families that the claim reads, lines verbatim."""

    engine_before: str
    engine_after: str
    cache_before: str | None
    cache_after: str | None


class Case(Record):
    """One request of one arm."""

    boot: str
    arm: Arm
    prompt_tokens: int
    prompt_digest: str
    chunk_tokens: int | None
    """As the cache server reports it."""
    reset_attempts: int | None = None
    """How often the prefix cache was asked to reset until it did; None where no reset belongs to the arm."""
    cleared: dict[str, Any] | None = None
    """The cache server's answer to clearing its memory."""
    poison: tuple[Poison, ...] = ()
    ranks: tuple[RankCapture, ...] = ()
    scrapes: Scrapes | None = None
    cache_status: dict[str, Any] | None = None
    """The cache server's own account after the request: what is pending, held and registered."""
    seconds: float | None = None
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    """Output, for information: equal output proves nothing about the cache."""
    fault: Fault | None = None


class StoredFile(Record):
    """One file of the cache server's storage. The name's model part is left out: it may hold a path of the machine."""

    world: int
    rank: int
    object_group: int
    chunk_hash: str
    size: int
    sha256: str


class Stored(Record):
    """What the cold arm left in storage. `objects` are the engine groups of each object group, as the server says."""

    boot: str
    chunk_tokens: int
    objects: tuple[tuple[int, ...], ...] = Field(min_length=1)
    found_before: int
    files: tuple[StoredFile, ...]
    strangers: tuple[str, ...] = ()
    """Digests of files whose names are not of the known form."""


FIRST_TOKEN, LAST_TOKEN = 64, 511
"""Token ids that every vocabulary has and that are rarely special."""


def prompt(tokens: int) -> list[int]:
    """The prompt of this length: varied ids from a fixed seed; no two lengths share a beginning."""
    draw = random.Random(f"kv.restore {tokens}")
    return [draw.randint(FIRST_TOKEN, LAST_TOKEN) for _ in range(tokens)]


def prompt_digest(ids: list[int]) -> str:
    return hashlib.sha256(" ".join(map(str, ids)).encode()).hexdigest()


def expected_external(prompt_tokens: int, chunk_tokens: int) -> int:
    """Tokens that a complete restore supplies: whole chunks, but never the last token, which must be computed."""
    return min(prompt_tokens // chunk_tokens * chunk_tokens, prompt_tokens - 1)
