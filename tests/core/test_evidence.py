# SPDX-License-Identifier: Apache-2.0
"""Evidence: written whole or not at all, read with a memory, refused when it is not what it claims to be."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path

import pytest
from qualify import evidence as module
from qualify.errors import EvidenceError
from qualify.evidence import Evidence, EvidenceWriter, FolderSource, MappingSource, MissingEvidence, compress
from qualify.records import Harness


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    """A record survives the round trip, and the reader remembers path and digest of the raw file."""
    writer = EvidenceWriter(tmp_path).below("boots").below("01-a")
    record = Harness(version="1", git_commit=None, clean=None)
    writer.record("x.json", record)
    reader = Evidence(FolderSource(tmp_path))
    assert reader.record("boots/01-a/x.json", Harness) == record
    (reference,) = reader.references()
    assert reference.sha256 == hashlib.sha256((tmp_path / "boots/01-a/x.json").read_bytes()).hexdigest()


@pytest.mark.parametrize("name", ["../x", "/x", "a/../b", "a//b", ".hidden", "a b", ""])
def test_names_that_leave_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    """An evidence name is a plain relative path."""
    with pytest.raises(EvidenceError, match="plain relative path"):
        EvidenceWriter(tmp_path).text(name, "x")


def test_a_missing_file_is_its_own_error() -> None:
    """Missing evidence can be told from broken evidence."""
    with pytest.raises(MissingEvidence, match=r"run\.json"):
        Evidence(MappingSource({})).bytes("run.json")


def test_a_record_of_another_form_names_the_field() -> None:
    """A file with an unknown or missing field is refused with the field's name."""
    source = MappingSource({"h.json": b'{"version":"1","gitCommit":null,"clean":null,"more":1}'})
    with pytest.raises(EvidenceError, match="more"):
        Evidence(source).record("h.json", Harness)


def test_compression_is_deterministic() -> None:
    """The same content gives the same file, so digests repeat."""
    assert compress(b"abc" * 100) == compress(b"abc" * 100)
    assert Evidence(MappingSource({"a.gz": compress(b"abc")})).bytes("a.gz") == b"abc"


def test_a_damaged_archive_is_evidence_error() -> None:
    """A truncated gzip file is refused, never half read; cut to nothing, it is not an empty log."""
    whole = compress(b"abc" * 1000)
    for cut in (whole[:-9], whole[:5], b""):
        with pytest.raises(EvidenceError, match="whole gzip"):
            Evidence(MappingSource({"a.gz": cut})).bytes("a.gz")
    assert Evidence(MappingSource({"a.gz": compress(b"")})).bytes("a.gz") == b""


def test_a_bomb_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file that expands beyond the limit is refused."""
    monkeypatch.setattr(module, "MAX_EXPANDED", 1000)
    with pytest.raises(EvidenceError, match="expands"):
        Evidence(MappingSource({"a.gz": gzip.compress(b"0" * 2000)})).bytes("a.gz")


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the disk is full there is one clear error and no half-written file."""

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(EvidenceError, match="No space left"):
        EvidenceWriter(tmp_path).text("x.txt", "content")
    assert list(tmp_path.iterdir()) == []
