# SPDX-License-Identifier: Apache-2.0
"""The manifest: path, size and digest of every file of a receipt folder, except itself and the statement."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from qualify.errors import EvidenceError
from qualify.evidence import SAFE_PATH
from qualify.model import Record
from qualify.receipt.canonical import canonical, parse
from qualify.receipt.model import MANIFEST, STATEMENT, Digest, ManifestReference, Sha256

MAX_FILES = 20_000
MAX_BYTES = 1 << 29
"""Bytes of all files together: they are read into memory once, so that what is hashed is what is judged."""

UNLISTED = frozenset({STATEMENT, MANIFEST})


class Entry(Record):
    path: Annotated[str, Field(pattern=SAFE_PATH.pattern)]
    size: Annotated[int, Field(ge=0)]
    sha256: Sha256


Entries = TypeAdapter(tuple[Entry, ...])


def read_folder(folder: Path) -> dict[str, bytes]:
    """Every file below `folder` by its relative path, sorted.

    Raises EvidenceError for links, special files, empty folders, names that are not plain, and too much content.
    """
    files: dict[str, bytes] = {}
    total = 0
    for path in _walk(folder, folder):
        name = path.relative_to(folder).as_posix()
        if len(files) == MAX_FILES:
            raise EvidenceError(f"the folder holds more than {MAX_FILES} files")
        total += path.stat().st_size
        if total > MAX_BYTES:
            raise EvidenceError(f"the folder holds more than {MAX_BYTES >> 20} MiB, reached at {name}")
        files[name] = path.read_bytes()
    return dict(sorted(files.items()))


def _walk(folder: Path, root: Path) -> list[Path]:
    """The regular files below `folder`; iterative, and no link is followed."""
    found: list[Path] = []
    waiting = [folder]
    while waiting:
        here = waiting.pop()
        entries = list(os.scandir(here))
        if not entries:
            raise EvidenceError(f"{_name(here, root)} is an empty folder")
        for entry in entries:
            path = Path(entry.path)
            if not SAFE_PATH.match(path.relative_to(root).as_posix()):
                raise EvidenceError(f"{_name(path, root)} is not a plain name")
            mode = entry.stat(follow_symlinks=False).st_mode
            if stat.S_ISDIR(mode):
                waiting.append(path)
            elif stat.S_ISREG(mode):
                found.append(path)
            else:
                raise EvidenceError(f"{_name(path, root)} is a link or a special file")
            if len(found) + len(waiting) > MAX_FILES:
                raise EvidenceError(f"the folder holds more than {MAX_FILES} files")
    return found


def _name(path: Path, root: Path) -> str:
    return ascii(path.relative_to(root).as_posix())


def describe(files: Mapping[str, bytes]) -> tuple[Entry, ...]:
    """What the manifest of these files has to say."""
    return tuple(
        Entry(path=path, size=len(content), sha256=hashlib.sha256(content).hexdigest())
        for path, content in sorted(files.items())
        if path not in UNLISTED
    )


def encode(entries: tuple[Entry, ...]) -> bytes:
    """The bytes of manifest.json."""
    return canonical(Entries.dump_python(entries, mode="json"))


def reference(entries: tuple[Entry, ...]) -> ManifestReference:
    """What the statement says about the manifest."""
    return ManifestReference(
        digest=Digest(sha256=hashlib.sha256(encode(entries)).hexdigest()),
        file_count=len(entries),
        total_bytes=sum(entry.size for entry in entries),
    )


def compare(content: bytes, files: Mapping[str, bytes]) -> tuple[Entry, ...]:
    """The manifest in `content`, if it lists exactly these files. Raises EvidenceError naming the first difference."""
    try:
        listed = Entries.validate_python(parse(content, MANIFEST))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise EvidenceError(f"{MANIFEST} is not a list of files: {where}: {first['msg']}") from None
    paths = [entry.path for entry in listed]
    if paths != sorted(set(paths)):
        raise EvidenceError(f"{MANIFEST} is not sorted by path, or lists a path twice")
    found = {entry.path: entry for entry in describe(files)}
    for entry in listed:
        if entry.path not in found:
            raise EvidenceError(f"{entry.path} is in the manifest but missing from the folder")
        if entry != found[entry.path]:
            raise EvidenceError(
                f"{entry.path} has sha256 {found[entry.path].sha256[:12]}… and {found[entry.path].size} bytes,"
                f" the manifest says {entry.sha256[:12]}… and {entry.size}"
            )
    extra = sorted(set(found) - set(paths))
    if extra:
        raise EvidenceError(f"{extra[0]} is in the folder but not in the manifest")
    return listed
