# SPDX-License-Identifier: Apache-2.0
"""Evidence: raw files below one folder. Probes write them, claims read them; nothing else passes between the two."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, TypeVar

from pydantic import TypeAdapter, ValidationError

from qualify.claims.model import EvidenceRef
from qualify.errors import EvidenceError
from qualify.model import Record

T = TypeVar("T")
R = TypeVar("R", bound=Record)

SAFE_PATH = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*$")

MAX_EXPANDED = 1 << 30
"""Bytes that one compressed evidence file may expand to; a larger one is refused as a decompression bomb."""


class MissingEvidence(EvidenceError):
    """A file that a claim needs is not there."""

    def __init__(self, path: str) -> None:
        super().__init__(f"evidence {path} is missing")
        self.path = path


class Source(Protocol):
    """Where evidence bytes come from: a folder, or a mapping in tests."""

    def paths(self) -> tuple[str, ...]: ...

    def read(self, path: str) -> bytes: ...


class FolderSource:
    def __init__(self, root: Path) -> None:
        self.root = root

    def paths(self) -> tuple[str, ...]:
        found = (path.relative_to(self.root).as_posix() for path in self.root.rglob("*") if path.is_file())
        return tuple(sorted(found))

    def read(self, path: str) -> bytes:
        try:
            return (self.root / path).read_bytes()
        except FileNotFoundError:
            raise MissingEvidence(path) from None


class MappingSource:
    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files = files

    def paths(self) -> tuple[str, ...]:
        return tuple(sorted(self.files))

    def read(self, path: str) -> bytes:
        try:
            return self.files[path]
        except KeyError:
            raise MissingEvidence(path) from None


class Evidence:
    """A view of a source that remembers what was read, so that a claim's evidence list cannot be wrong."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._read: dict[str, str] = {}

    def paths(self, pattern: str = "") -> tuple[str, ...]:
        """Paths below the evidence folder that match the regular expression, sorted."""
        return tuple(path for path in self._source.paths() if re.search(pattern, path))

    def exists(self, path: str) -> bool:
        return path in self._source.paths()

    def bytes(self, path: str) -> bytes:
        """The content; a path ending in .gz is expanded. Raises MissingEvidence, EvidenceError."""
        raw = self._source.read(path)
        self._read[path] = hashlib.sha256(raw).hexdigest()
        return _expand(raw, path) if path.endswith(".gz") else raw

    def text(self, path: str) -> str:
        return self.bytes(path).decode("utf-8", errors="replace")

    def record(self, path: str, kind: type[T]) -> T:
        """The file as a typed record (a Record, or any type pydantic can validate). Raises EvidenceError."""
        try:
            return TypeAdapter(kind).validate_json(self.bytes(path), strict=False)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise EvidenceError(
                f"evidence {path} is not a {getattr(kind, '__name__', kind)}: {where}: {first['msg']}"
            ) from None

    def references(self) -> tuple[EvidenceRef, ...]:
        return tuple(EvidenceRef(path=path, sha256=digest) for path, digest in sorted(self._read.items()))

    def fresh(self) -> Evidence:
        """The same source with an empty memory, for the next claim."""
        return Evidence(self._source)


class EvidenceWriter:
    """Writes evidence files below a folder; the only way a probe leaves a trace."""

    def __init__(self, root: Path, prefix: str = "") -> None:
        self.root = root
        self.prefix = prefix

    def below(self, name: str) -> EvidenceWriter:
        return EvidenceWriter(self.root, f"{self.prefix}{name}/")

    def path(self, name: str) -> Path:
        """The file for `name`, its folder made. Raises EvidenceError for a name that is not a plain relative path."""
        full = self.prefix + name
        if not SAFE_PATH.match(full):
            raise EvidenceError(f"evidence name {full!r} is not a plain relative path")
        target = self.root / full
        target.parent.mkdir(parents=True, exist_ok=True)
        return target

    def bytes(self, name: str, content: bytes) -> None:
        write_atomically(self.path(name), content)

    def text(self, name: str, content: str) -> None:
        self.bytes(name, content.encode())

    def record(self, name: str, value: Record) -> None:
        self.text(name, value.model_dump_json(indent=1) + "\n")

    def records(self, name: str, values: tuple[R, ...] | list[R]) -> None:
        """A JSON array, one record a line."""
        lines = ",\n".join(value.model_dump_json() for value in values)
        self.text(name, f"[\n{lines}\n]\n" if lines else "[]\n")


def write_atomically(path: Path, content: bytes) -> None:
    """Write beside the target and rename, so that no reader ever sees half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise EvidenceError(
            f"{path} cannot be written: {error.strerror}", remedy="free space or choose another --out"
        ) from error


def compress(content: bytes) -> bytes:
    """Deterministic gzip: the same bytes give the same file."""
    return gzip.compress(content, compresslevel=9, mtime=0)


def _expand(raw: bytes, path: str) -> bytes:
    if not raw:  # for the gzip module, no members at all are a whole file; here it is a write that never happened
        raise EvidenceError(f"evidence {path} is not a whole gzip file: it is empty")
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(raw)) as file:
            content = file.read(MAX_EXPANDED + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise EvidenceError(f"evidence {path} is not a whole gzip file: {error}") from None
    if len(content) > MAX_EXPANDED:
        raise EvidenceError(f"evidence {path} expands to more than {MAX_EXPANDED} bytes")
    return content
