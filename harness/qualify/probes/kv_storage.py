# SPDX-License-Identifier: Apache-2.0
"""The cache server's file storage: what is in it, and how to damage it for the negative controls.

A file of the `fs` adapter is raw bytes without header or checksum. Its name, in hexadecimal, is
<model>@0x<world, rank, local world, local rank: a byte each>@<object group>@<chunk hash>[@<salt>].data
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from qualify.errors import TargetError
from qualify.probes.kv_records import Case, Damage, Fault, Stored, StoredFile, expected_external
from qualify.probes.workers import KvTensor
from qualify.session import Session

NAME = re.compile(r"@0x([0-9a-f]{2})([0-9a-f]{2})[0-9a-f]{4}@([0-9a-f]+)@([0-9a-f]+)(?:@[^@]*)?\.data$")

Location = tuple[int, int, int]
"""(rank, object, chunk)"""


def folder(session: Session) -> Path:
    if session.storage is None:
        raise TargetError(
            "the cache server's storage cannot be seen from here", phase="kv.storage", remedy="use a local target"
        )
    return session.storage


def names(storage: Path) -> frozenset[str]:
    return frozenset(path.relative_to(storage).as_posix() for path in storage.rglob("*") if path.is_file())


def listing(storage: Path, before: frozenset[str]) -> tuple[tuple[StoredFile, ...], tuple[str, ...]]:
    """The files that are new since `before`, and the digests of those with an unknown name."""
    files, strangers = [], []
    for name in sorted(names(storage) - before):
        content = (storage / name).read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        parts = NAME.search(name)
        if parts is None:
            strangers.append(digest)
            continue
        files.append(
            StoredFile(
                world=int(parts[1], 16),
                rank=int(parts[2], 16),
                object_group=int(parts[3], 16),
                chunk_hash=parts[4],
                size=len(content),
                sha256=digest,
            )
        )
    return tuple(files), tuple(strangers)


def kernel_groups(status: dict[str, Any]) -> list[dict[str, Any]]:
    """The kernel groups of the first registered worker; every worker of one model has the same."""
    for context in status["cache_context_meta"].values():
        return list(context["kv_cache_layout"]["kernel_groups"])
    raise TargetError("no worker is registered with the cache server", phase="kv.storage")


def objects(status: dict[str, Any]) -> tuple[tuple[int, ...], ...]:
    """The engine groups of each object group, in the cache server's order."""
    found: dict[int, list[int]] = {}
    for group in kernel_groups(status):
        members = found.setdefault(group["object_group_idx"], [])
        if group["engine_group_idx"] not in members:
            members.append(group["engine_group_idx"])
    return tuple(tuple(found[index]) for index in sorted(found))


@dataclass(frozen=True)
class Step:
    """One negative control: damage to stored files, or `in_engine` options for the workers."""

    fault: Fault
    swap: tuple[Path, Path] | None = None
    flip: tuple[Path, int] | None = None
    in_engine: dict[str, Any] | None = field(default=None)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The damage, undone at the end whatever happens."""
        self._touch()
        try:
            yield
        finally:
            self._touch()

    def _touch(self) -> None:
        """Both kinds of damage undo themselves when done twice."""
        if self.swap is not None:
            first, second = (path.read_bytes() for path in self.swap)
            self.swap[0].write_bytes(second)
            self.swap[1].write_bytes(first)
        if self.flip is not None:
            path, offset = self.flip
            with path.open("r+b") as file:
                file.seek(offset)
                octet = file.read(1)[0]
                file.seek(offset)
                file.write(bytes([octet ^ 1]))


def plan(cold: Case, stored: Stored, storage: Path, ranks: Literal["distinct", "equal"]) -> Iterator[Step]:
    """Every negative control that applies to this model and this storage.

    Files are found by the digests of the engine's own cold chunks; where they cannot be, the controls on files are
    listed as not run.
    """
    everyone = tuple(capture.rank for capture in cold.ranks)
    tensors = cold.ranks[0].tensors
    groups = sorted({tensor.group for tensor in tensors})
    last_rank = everyone[-1]
    full = [group for group in groups if _window(tensors, group) is None] or groups
    yield Step(
        Fault(damage=Damage.FLIP_IN_ENGINE, ranks=(last_rank,), groups=(full[-1],)),
        in_engine={"kind": "flip", "rank": last_rank, "group": full[-1], "bit": 98_765},
    )
    for group in groups:
        yield Step(
            Fault(damage=Damage.STALE_GROUP, ranks=everyone, groups=(group,)),
            in_engine={"kind": "stale", "group": group},
        )
    yield from _on_files(cold, stored, storage, ranks, everyone, full[-1])


def _on_files(
    cold: Case,
    stored: Stored,
    storage: Path,
    ranks: Literal["distinct", "equal"],
    everyone: tuple[int, ...],
    full: int,
) -> Iterator[Step]:
    found = locate(cold, stored, storage)
    number = next(index for index, members in enumerate(stored.objects) if full in members)
    members = stored.objects[number]
    # One writer serves every rank where the ranks hold equal bytes, so its damage shows on all of them.
    writer = everyone[-1] if ranks == "distinct" else everyone[0]
    harmed = (writer,) if ranks == "distinct" else everyone
    last = expected_external(cold.prompt_tokens, stored.chunk_tokens) // stored.chunk_tokens - 1

    def step(damage: Damage, shown: Sequence[int], chunks: Sequence[int], *files: Location) -> Step:
        fault = Fault(damage=damage, ranks=tuple(shown), groups=members, chunks=tuple(chunks))
        missing = [location for location in files if location not in found]
        if missing:
            reason = "no stored file equals the engine's cold chunk (rank, object, chunk) " + str(missing[0])
            return Step(fault.model_copy(update={"not_run": reason}))
        paths = [found[location] for location in files]
        if len(paths) == 2:
            return Step(fault, swap=(paths[0], paths[1]))
        return Step(fault, flip=(paths[0], paths[0].stat().st_size // 2))

    yield step(Damage.FLIP_IN_FILE, harmed, (last,), (writer, number, last))
    if ranks == "distinct" and len(everyone) > 1:
        pair = everyone[0], writer
        yield step(Damage.SWAPPED_RANKS, pair, (last,), (pair[0], number, last), (pair[1], number, last))
    if last > 0:
        yield step(Damage.SWAPPED_CHUNKS, harmed, (0, last), (writer, number, 0), (writer, number, last))
    outside = outside_window(cold, stored)
    if outside is not None:
        location = (writer, outside, 0)
        fault = Fault(damage=Damage.FLIP_OUTSIDE_WINDOW, groups=stored.objects[outside], chunks=(0,))
        if location in found:
            yield Step(fault, flip=(found[location], 0))
        else:
            yield Step(fault.model_copy(update={"not_run": f"no stored file equals the engine's chunk {location}"}))


def outside_window(cold: Case, stored: Stored) -> int | None:
    """An object whose chunk 0 no window reaches when the prompt is restored; None if there is none."""
    external = expected_external(cold.prompt_tokens, stored.chunk_tokens)
    for number, members in enumerate(stored.objects):
        windows = [_window(cold.ranks[0].tensors, group) for group in members]
        if all(window is not None and external - window + 1 > stored.chunk_tokens for window in windows):
            return number
    return None


def locate(cold: Case, stored: Stored, storage: Path) -> dict[Location, Path]:
    """The file of each chunk that the engine's cold bytes produce."""
    wanted = {
        (capture.rank, digest): (capture.rank, number, chunk)
        for capture in cold.ranks
        for request in capture.requests
        for number, chunk, digest in request.chunks
    }
    digests = {(file.rank, file.object_group, file.chunk_hash): file.sha256 for file in stored.files}
    found = {}
    for path in sorted(storage.rglob("*.data")):
        parts = NAME.search(path.name)
        if parts is None:
            continue
        rank = int(parts[2], 16)
        digest = digests.get((rank, int(parts[3], 16), parts[4]), "")
        if (rank, digest) in wanted:
            found[wanted[rank, digest]] = path
    return found


def _window(tensors: Sequence[KvTensor], group: int) -> int | None:
    """The widest window of a group; None if one of its layers attends to everything."""
    windows = [tensor.window for tensor in tensors if tensor.group == group]
    known = [window for window in windows if window is not None]
    return max(known) if len(known) == len(windows) else None
