# SPDX-License-Identifier: Apache-2.0
"""The reviewer: each step fires on its own fault, and no folder makes it crash."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from qualify.errors import UsageError
from qualify.profiles import Profile
from qualify.receipt import manifest, verify
from qualify.receipt.build import Derive, build
from qualify.receipt.canonical import canonical
from qualify.receipt.model import MANIFEST, PREDICATE_TYPE, PROFILE, STATEMENT
from qualify.receipt.verify import Assurance, Review, StepStatus, review


def failed(reviewed: Review) -> tuple[int, str]:
    """Number and detail of the step that failed."""
    step = next(step for step in reviewed.steps if step.status is StepStatus.FAILED)
    assert reviewed.exit_code == 20 + step.number
    assert not reviewed.verified
    assert "\n" not in step.detail
    assert len(step.detail) <= 300
    return step.number, step.detail


def edit(bundle: Path, change: Callable[[Any], object], name: str = STATEMENT) -> None:
    value = json.loads((bundle / name).read_bytes())
    change(value)
    (bundle / name).write_bytes(canonical(value))


def rebind(bundle: Path) -> None:
    """What a forger does after changing a file: repair the manifest, and the statement's digest of it."""
    entries = manifest.describe(manifest.read_folder(bundle))
    (bundle / MANIFEST).write_bytes(manifest.encode(entries))
    reference = manifest.reference(entries).model_dump(mode="json")
    edit(bundle, lambda value: value["predicate"].update(manifest=reference))


def test_all_fourteen_steps_are_listed(pristine: Path, derive: Derive) -> None:
    """Ten are taken; the four about signatures say that there is none."""
    reviewed = review(pristine, derive=derive)
    assert [step.number for step in reviewed.steps] == list(range(1, 15))
    assert {step.status for step in reviewed.steps[:10]} == {StepStatus.PASSED}
    assert {step.status for step in reviewed.steps[10:]} == {StepStatus.NOT_APPLICABLE}
    assert reviewed.assurance is Assurance.UNSIGNED


def test_the_json_document_stands_alone(pristine: Path, derive: Derive) -> None:
    """--json carries result, subject, assurance, steps and the exit status, and no null step."""
    document = json.loads(review(pristine, derive=derive).model_dump_json())
    expected = {"verified": True, "result": "PASSED", "subject": "b" * 64, "assurance": "unsigned", "exitCode": 0}
    assert expected.items() <= document.items()
    assert len(document["steps"]) == 14


def test_a_missing_path_is_wrong_usage(tmp_path: Path) -> None:
    """It is not a failed review: nothing was reviewed."""
    with pytest.raises(UsageError, match="no receipt at"):
        review(tmp_path / "nothing")


def test_the_statement_file_stands_for_its_folder(pristine: Path, derive: Derive) -> None:
    """Either path means the same receipt."""
    assert review(pristine / STATEMENT, derive=derive).verified


def test_a_folder_without_statement_is_no_receipt(tmp_path: Path) -> None:
    """The line says what a run that was killed leaves."""
    number, detail = failed(review(tmp_path))
    assert number == 1
    assert STATEMENT in detail


@pytest.mark.parametrize("name", [STATEMENT, MANIFEST, PROFILE])
def test_a_huge_file_is_not_parsed(bundle: Path, name: str) -> None:
    """The limit holds before a byte is read; the file may be sparse."""
    os.truncate(bundle / name, verify.MAX_BYTES[name] + 1)
    number, detail = failed(review(bundle))
    assert (number, "more than the limit" in detail) == (1, True)


def test_a_decompression_bomb_is_not_read(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expanded sizes are counted over all files before any of them is used."""
    monkeypatch.setattr(verify, "MAX_EXPANDED", 1 << 21)
    for name in ("a.gz", "b.gz"):
        (bundle / "evidence" / name).write_bytes(gzip.compress(bytes(3 << 19)))
    number, detail = failed(review(bundle))
    assert (number, detail.endswith("reached at evidence/b.gz")) == (1, True)


def test_a_huge_folder_is_not_read(bundle: Path) -> None:
    """Nor are files that are larger together than the limit."""
    (bundle / "evidence" / "huge").touch()
    os.truncate(bundle / "evidence" / "huge", manifest.MAX_BYTES + 1)
    number, detail = failed(review(bundle))
    assert (number, "MiB" in detail) == (1, True)


@pytest.mark.parametrize(
    "disturb",
    [
        lambda folder: (folder / "evidence" / "pipe").mkdir() or os.mkfifo(folder / "evidence" / "pipe" / "p"),
        lambda folder: (folder / "loop").symlink_to(folder),
        lambda folder: (folder / "evidence" / "out.json").symlink_to("/etc/hostname"),
        lambda folder: (folder / "evidence" / "bad\nname\x1b[31m").write_text("x"),
        lambda folder: (folder / "evidence" / os.fsdecode(b"\xff\xfe")).write_text("x"),
        lambda folder: (folder / "evidence" / "..json").write_text("x"),
    ],
    ids=["pipe", "loop", "link", "control characters", "not unicode", "dots"],
)
def test_what_is_not_a_plain_file_is_refused(bundle: Path, disturb: Callable[[Path], object]) -> None:
    """Links, special files and names that are not plain end in step 1, in one printable line."""
    disturb(bundle)
    number, detail = failed(review(bundle))
    assert number == 1
    assert detail.isprintable()


@pytest.mark.parametrize(
    ("listing", "why"),
    [
        (b"", "not JSON"),
        (b"{}", "not a list"),
        (b"[{}]", "path"),
        (b'[{"path":"../x","sha256":"' + b"0" * 64 + b'","size":1}]', "path"),
        (b'[{"path":"/x","sha256":"' + b"0" * 64 + b'","size":1}]', "path"),
        (b'[{"path":"x","sha256":"' + b"0" * 64 + b'","size":1}]', "missing from the folder"),
        (b"[" * 10_000, "nested"),
    ],
)
def test_a_broken_manifest_is_refused(bundle: Path, listing: bytes, why: str) -> None:
    """Paths leave no room for anything outside of the folder."""
    (bundle / MANIFEST).write_bytes(listing)
    number, detail = failed(review(bundle))
    assert (number, why in detail) == (2, True), detail


def test_a_path_listed_twice_is_refused(bundle: Path) -> None:
    """Two entries for one path would let two readers see two files."""
    edit(bundle, lambda value: value.append(value[-1]), MANIFEST)
    assert failed(review(bundle)) == (2, f"{MANIFEST} is not sorted by path, or lists a path twice")


@pytest.mark.parametrize("cut", [0, 1, 100, -1])
def test_a_truncated_statement_is_one_clear_line(bundle: Path, cut: int) -> None:
    """Step 3, whatever the cut."""
    content = (bundle / STATEMENT).read_bytes()
    (bundle / STATEMENT).write_bytes(content[:cut])
    number, detail = failed(review(bundle))
    assert (number, "not JSON" in detail) == (3, True)


@pytest.mark.parametrize("content", [b"[]", b"null", b'"x"', b"1"])
def test_a_statement_that_is_no_object_is_refused(bundle: Path, content: bytes) -> None:
    """Step 3."""
    (bundle / STATEMENT).write_bytes(content)
    assert failed(review(bundle))[0] == 3


def test_a_receipt_of_another_version_names_both(bundle: Path) -> None:
    """The line says what the receipt is and what this reviewer reads."""
    newer = PREDICATE_TYPE.replace("v0.1", "v0.9")
    edit(bundle, lambda value: value.update(predicateType=newer))
    number, detail = failed(review(bundle))
    assert number == 4
    assert "another version" in detail
    assert newer in detail


@pytest.mark.parametrize(
    "change",
    [
        lambda value: value.update(predicateType="https://slsa.dev/provenance/v1"),
        lambda value: value.update(predicateType=None),
        lambda value: value.update(_type="https://in-toto.io/Statement/v0.1"),
        lambda value: value.clear(),
    ],
)
def test_a_foreign_statement_is_refused(bundle: Path, change: Callable[[Any], object]) -> None:
    """Somebody else's attestation is not ours, and the line says so."""
    edit(bundle, change)
    number, detail = failed(review(bundle))
    assert number == 4
    assert "not a serving qualification" in detail or "not one of our receipts" in detail


def test_the_schema_is_enforced_by_the_second_reader(bundle: Path) -> None:
    """An unknown field ends in step 4, named by its path."""
    edit(bundle, lambda value: value["predicate"].update(approved=True))
    number, detail = failed(review(bundle))
    assert (number, "approved" in detail) == (4, True)


def test_the_presence_table_is_enforced_twice(bundle: Path, monkeypatch: pytest.MonkeyPatch, derive: Derive) -> None:
    """With the schema switched off, the typed model still refuses a passed claim that has a reason."""
    monkeypatch.setattr("qualify.receipt.schema.generate", lambda: {})
    edit(bundle, lambda value: value["predicate"]["claims"][7].update(reasonCodes=["crashed"]))
    assert failed(review(bundle, derive=derive))[0] == 5


def test_the_statement_of_another_run_is_refused(bundle: Path, other: Path) -> None:
    """A replayed statement binds another manifest."""
    (bundle / STATEMENT).write_bytes((other / STATEMENT).read_bytes())
    number, detail = failed(review(bundle))
    assert (number, "do not belong together" in detail) == (5, True)


def test_another_profile_is_refused(bundle: Path, profile: Profile) -> None:
    """Also with every digest of files repaired, the statement names the profile's digest."""
    easier = profile.model_copy(update={"purpose": "another"})
    (bundle / PROFILE).write_text(easier.model_dump_json())
    rebind(bundle)
    number, detail = failed(review(bundle))
    assert (number, "the statement says" in detail) == (6, True)


def test_a_receipt_older_than_a_field_of_the_profile_holds(make: Callable, profile: Profile, derive: Derive) -> None:
    """What a later version added to profiles takes its default, and the digests are those of the older file."""
    table = json.loads(profile.resolved())
    del table["throughput"]["stall_seconds"]
    older = json.dumps(table, separators=(",", ":"), ensure_ascii=False)
    bundle = make()
    build(bundle, Profile.model_validate_json(older), derive=derive)
    assert (bundle / PROFILE).read_text() == older
    assert review(bundle, derive=derive).verified


def test_a_required_claim_cannot_be_made_optional(bundle: Path) -> None:
    """The required set is the profile's."""
    edit(bundle, lambda value: value["predicate"]["claims"][7].update(required=False))
    assert failed(review(bundle))[0] == 6


def test_another_subject_is_refused(bundle: Path, derive: Derive) -> None:
    """The receipt of one engine does not speak for another."""
    edit(bundle, lambda value: value["subject"][0]["digest"].update(sha256="f" * 64))
    assert failed(review(bundle, derive=derive))[0] == 7


def test_evidence_that_no_longer_supports_the_claim_is_refused(bundle: Path, derive: Derive) -> None:
    """With all digests repaired, the claims derived again differ, and the line gives the first difference."""
    series = bundle / "evidence/boots/01-control/series.json"
    series.write_text(series.read_text().replace("[10", "[99", 1))
    rebind(bundle)
    number, detail = failed(review(bundle, derive=derive))
    assert number == 8
    assert detail.startswith("/predicate/claims/7/")


@pytest.mark.parametrize(
    "change",
    [
        lambda predicate: predicate.update(result="WARNED"),
        lambda predicate: predicate.update(coverage="full"),
        lambda predicate: predicate.update(limitations=[]),
        lambda predicate: predicate.update(startedAt="2027-01-01T00:00:00Z"),
        lambda predicate: predicate["harness"].update(gitCommit="0" * 40),
        lambda predicate: predicate["host"].update(cores=64),
        lambda predicate: predicate["claims"][7]["observed"].update(mean=12),
        lambda predicate: predicate["claims"][7]["estimates"][0].update(point=11.1),
        lambda predicate: predicate["boots"].pop(),
        lambda predicate: predicate["manifest"].update(fileCount=9),
    ],
)
def test_every_derived_field_is_derived_again(bundle: Path, derive: Derive, change: Callable[[Any], object]) -> None:
    """Nothing in the predicate is believed."""
    edit(bundle, lambda value: change(value["predicate"]))
    assert failed(review(bundle, derive=derive))[0] == 8


@pytest.mark.parametrize("error", [ZeroDivisionError("x"), KeyError("a"), RecursionError(), MemoryError()])
def test_a_claim_function_that_crashes_is_a_failed_step(pristine: Path, error: Exception) -> None:
    """Hostile evidence may break a judge; the review ends in one line."""

    def crash(*arguments: object) -> Any:
        raise error

    number, detail = failed(review(pristine, derive=crash))
    assert (number, type(error).__name__ in detail) == (8, True)


def test_private_data_is_refused(bundle: Path, derive: Derive) -> None:
    """Evidence with a home folder fails step 10, and the line does not repeat what it found."""
    (bundle / "evidence" / "note.txt").write_text("ok\nsee /home/somebody/x\n")
    rebind(bundle)
    number, detail = failed(review(bundle, derive=derive))
    assert (number, "somebody" in detail) == (10, False)
    assert "line 2" in detail


def test_a_failed_receipt_verifies_and_its_status_is_not_zero(make: Callable[..., Path], derive: Derive) -> None:
    """Review answers two questions: is it genuine, and does it pass. Only both give 0."""

    def shorter(root: Path) -> None:
        (root / "boots/01-control/series.json").write_text("[1, 2, 3]")

    reviewed = review(make(edit=shorter), derive=derive)
    assert (reviewed.verified, reviewed.exit_code) == (True, 1)


def test_the_digest_bound_is_that_of_the_manifest_bytes(pristine: Path) -> None:
    """Any sha256 tool can repeat the binding by hand."""
    statement = json.loads((pristine / STATEMENT).read_bytes())
    expected = hashlib.sha256((pristine / MANIFEST).read_bytes()).hexdigest()
    assert statement["predicate"]["manifest"]["digest"]["sha256"] == expected
