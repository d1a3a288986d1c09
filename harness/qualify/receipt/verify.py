# SPDX-License-Identifier: Apache-2.0
"""The offline reviewer: numbered steps over a receipt folder, each one line; the first that fails ends the review.

 1 read        the folder: limits, names, links          8 derive      every claim, and the whole statement, again
 2 manifest    digest of every file, nothing else         9 identities  figures of different claims agree
 3 json        strict, canonical statement               10 redaction   no private data
 4 schema      by an independent validator               11 signature   not signed
 5 presence    typed model; the statement binds          12 signer      not signed
               this manifest                             13 reviews     none
 6 profile     its digest; the required set              14 assurance   unsigned
 7 subject     the digest that the evidence gives

Every byte is read once, and what was hashed is what is judged. No step needs a key, a network or a GPU.
Nothing that a folder holds may end a review otherwise than by a failed step.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import zlib
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import Field, ValidationError, computed_field

from qualify import __version__
from qualify.errors import EvidenceError, ExitCode, UsageError
from qualify.evidence import MappingSource
from qualify.model import Record
from qualify.profiles import Profile
from qualify.receipt import manifest, verdict
from qualify.receipt.build import Derive, assemble, derive_claims
from qualify.receipt.canonical import canonical, parse
from qualify.receipt.identities import broken_identity
from qualify.receipt.model import (
    EVIDENCE,
    MANIFEST,
    PREDICATE_TYPE,
    PROFILE,
    STATEMENT,
    STATEMENT_TYPE,
    Receipt,
    Result,
)
from qualify.receipt.redact import scan

MAX_BYTES = {STATEMENT: 1 << 23, MANIFEST: 1 << 23, PROFILE: 1 << 20}
"""Of the files that are parsed before anything is known about them; ours are well below one MiB."""

MAX_EXPANDED = 1 << 30
"""Bytes that the compressed files of a folder may expand to, all together."""


class StepStatus(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    NOT_REACHED = "notReached"
    NOT_APPLICABLE = "notApplicable"


class Step(Record):
    number: int
    name: str
    status: StepStatus
    detail: str


class Assurance(StrEnum):
    """How far the receipt can be trusted, computed by the reviewer, never read from the receipt."""

    NONE = "none"
    """The review failed: nothing can be trusted."""
    UNSIGNED = "unsigned"
    """Statement and evidence agree; nobody vouches for the evidence."""


class Review(Record):
    steps: tuple[Step, ...]
    assurance: Assurance
    receipt: Receipt | None = Field(default=None, exclude=True)
    """Set only if every step passed."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def verified(self) -> bool:
        return self.receipt is not None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def result(self) -> Result | None:
        return self.receipt.predicate.result if self.receipt else None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def subject(self) -> str | None:
        return self.receipt.subject[0].digest.sha256 if self.receipt else None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def exit_code(self) -> int:
        """20 + the failing step; else what the receipt's own result deserves."""
        if self.receipt is not None:
            return verdict.verdict_code(self.receipt)
        return ExitCode.REVIEW_BASE + next(step.number for step in self.steps if step.status is StepStatus.FAILED)


class _Material(NamedTuple):
    """What the steps have established so far; each step adds to it."""

    folder: Path
    derive: Derive
    files: Mapping[str, bytes]
    statement: Mapping[str, Any]
    receipt: Receipt | None = None
    profile: Profile | None = None
    rebuilt: Receipt | None = None


T = TypeVar("T")

Outcome = tuple[_Material, str]
StepFunction = Callable[[_Material], Outcome]


def review(path: Path, *, derive: Derive = derive_claims) -> Review:
    """Review a receipt folder, or the folder that a statement file lies in. Raises UsageError if it is not there."""
    if not path.exists():
        raise UsageError(f"there is no receipt at {path}", remedy="give the folder that `qualify run` wrote")
    material = _Material(path.parent if path.is_file() else path, derive, files={}, statement={})
    steps: list[Step] = []
    for number, (name, function) in enumerate(_STEPS, 1):
        material, step = _take(number, name, function, material)
        steps.append(step)
        if step.status is StepStatus.FAILED:
            break
    passed = steps[-1].status is StepStatus.PASSED
    return Review(
        steps=(*steps, *_rest(steps, passed)),
        assurance=Assurance.UNSIGNED if passed else Assurance.NONE,
        receipt=material.receipt if passed else None,
    )


def _take(number: int, name: str, function: StepFunction, material: _Material) -> tuple[_Material, Step]:
    try:
        material, detail = function(material)
        return material, Step(number=number, name=name, status=StepStatus.PASSED, detail=detail)
    except EvidenceError as error:
        detail = str(error)
    except OSError as error:
        detail = f"cannot be read: {error.strerror}"
    except Exception as error:  # hostile content may break a reader in ways nobody foresaw; that is a failed step
        detail = f"cannot be examined: {type(error).__name__}: {error}"
    return material, Step(number=number, name=name, status=StepStatus.FAILED, detail=_one_line(detail))


def _rest(steps: list[Step], passed: bool) -> tuple[Step, ...]:
    """The steps after the last one taken."""
    names = [*(name for name, _ in _STEPS), "signature", "signer", "reviews", "assurance"]
    later = {
        "signature": "not signed",
        "signer": "not signed",
        "reviews": "none",
        "assurance": f"{Assurance.UNSIGNED}: nobody vouches for the evidence",
    }
    status = StepStatus.NOT_APPLICABLE if passed else StepStatus.NOT_REACHED
    return tuple(
        Step(number=number, name=name, status=status, detail=later[name] if passed else "")
        for number, name in enumerate(names, 1)
        if number > len(steps)
    )


def _one_line(text: str, limit: int = 300) -> str:
    """Printable, on one line, of bounded length: the text may quote what a hostile folder holds."""
    line = "".join(char if char.isprintable() else " " for char in text)
    return line if len(line) <= limit else line[: limit - 1] + "…"


def _read(material: _Material) -> Outcome:
    if not (material.folder / STATEMENT).is_file():
        raise EvidenceError(f"no {STATEMENT}: not a receipt folder, or its run ended before the receipt was written")
    for name, limit in MAX_BYTES.items():
        path = material.folder / name
        size = path.stat().st_size if path.is_file() else 0
        if size > limit:
            raise EvidenceError(f"{name} has {size} bytes, more than the limit of {limit}")
    files = manifest.read_folder(material.folder)
    expanded = 0
    for name, content in files.items():
        expanded += _expanded_size(content, MAX_EXPANDED - expanded) if name.endswith(".gz") else 0
        if expanded > MAX_EXPANDED:
            raise EvidenceError(f"compressed files expand to more than {MAX_EXPANDED >> 20} MiB, reached at {name}")
    total = sum(len(content) for content in files.values())
    return material._replace(files=files), f"{len(files)} files, {total} bytes"


def _expanded_size(content: bytes, limit: int) -> int:
    """Bytes of a gzip file's content, counted to just above `limit`. What is not gzip is for its reader to refuse."""
    size = 0
    with contextlib.suppress(OSError, EOFError, zlib.error), gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
        while size <= limit and (block := file.read(1 << 20)):
            size += len(block)
    return size


def _manifest(material: _Material) -> Outcome:
    content = material.files.get(MANIFEST)
    if content is None:
        raise EvidenceError(f"no {MANIFEST}: the evidence is not bound")
    entries = manifest.compare(content, material.files)
    return material, f"{len(entries)} files have the listed size and sha256, and there are no others"


def _json(material: _Material) -> Outcome:
    value = parse(material.files[STATEMENT], STATEMENT)
    if not isinstance(value, dict):
        raise EvidenceError(f"{STATEMENT} is not a JSON object")
    return material._replace(statement=value), "strict and canonical (RFC 8785)"


def _schema(material: _Material) -> Outcome:
    if material.statement.get("_type") != STATEMENT_TYPE:
        raise EvidenceError(f"{STATEMENT} is not an in-toto Statement v1, so it is not one of our receipts")
    kind = material.statement.get("predicateType")
    if kind != PREDICATE_TYPE:
        family = PREDICATE_TYPE.rsplit("/", 1)[0]
        foreign = not (isinstance(kind, str) and kind.startswith(f"{family}/"))
        raise EvidenceError(
            f"predicateType {kind!a} is "
            + ("not a serving qualification" if foreign else "another version of the format")
            + f"; vllm-qualify {__version__} reads {PREDICATE_TYPE}"
        )
    from jsonschema import Draft202012Validator

    from qualify.receipt.schema import generate

    error = next(Draft202012Validator(generate()).iter_errors(material.statement), None)
    if error is not None:
        raise EvidenceError(f"{error.json_path}: {error.message}")
    return material, "holds, by the jsonschema library"


def _presence(material: _Material) -> Outcome:
    try:
        receipt = Receipt.model_validate(material.statement, by_alias=True, by_name=False)
    except ValidationError as error:
        first = error.errors()[0]
        raise EvidenceError(f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}") from None
    bound, found = receipt.predicate.manifest.digest.sha256, hashlib.sha256(material.files[MANIFEST]).hexdigest()
    if bound != found:
        raise EvidenceError(
            f"the statement binds a manifest with sha256 {bound[:12]}…, this one has {found[:12]}…:"
            " statement and evidence do not belong together"
        )
    return material._replace(receipt=receipt), f"{len(receipt.predicate.claims)} claims; the manifest is the bound one"


def _profile(material: _Material) -> Outcome:
    receipt = _established(material.receipt)
    content = material.files.get(PROFILE)
    if content is None:
        raise EvidenceError(f"no {PROFILE}")
    try:
        profile = Profile.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise EvidenceError(f"{PROFILE} is not a profile: {where}: {first['msg']}") from None
    promised, found = receipt.predicate.profile.digest.sha256, hashlib.sha256(content).hexdigest()
    if promised != found or profile.digest() != found:
        raise EvidenceError(f"{PROFILE} has sha256 {found[:12]}…, the statement says {promised[:12]}…")
    required = {claim.id for claim in receipt.predicate.claims if claim.required}
    if required != set(profile.claims.required):
        raise EvidenceError("the claims marked as required are not those that the profile requires")
    return material._replace(profile=profile), f"{profile.name}, {len(required)} required claims"


def _subject(material: _Material) -> Outcome:
    """The statement as evidence and profile give it, apart from the claims, which are derived in the next step."""
    receipt = _established(material.receipt)
    predicate = receipt.predicate
    profile = _established(material.profile)
    rebuilt = assemble(_evidence(material), profile, predicate.claims, predicate.manifest)
    if rebuilt.subject != receipt.subject or rebuilt.predicate.identity is not predicate.identity:
        raise EvidenceError(
            f"the subject is {receipt.subject[0].name!a} {receipt.subject[0].digest.sha256[:12]}…,"
            f" the evidence gives {rebuilt.subject[0].name!a} {rebuilt.subject[0].digest.sha256[:12]}…"
        )
    return material, f"{predicate.identity} {receipt.subject[0].name}, sha256 {receipt.subject[0].digest.sha256[:12]}…"


def _derive(material: _Material) -> Outcome:
    receipt = _established(material.receipt)
    profile = _established(material.profile)
    source = _evidence(material)
    entries = manifest.describe(material.files)
    rebuilt = assemble(source, profile, material.derive(source, profile), manifest.reference(entries))
    if canonical(rebuilt) != material.files[STATEMENT]:
        stored, again = material.statement, parse(canonical(rebuilt), "the derived statement")
        where, left, right = _first_difference(stored, again, "")
        raise EvidenceError(
            f"{where} is {_brief(left)}, but evidence and profile give {_brief(right)}"
            f" (receipt by {receipt.predicate.harness.version}, review by {__version__})"
        )
    detail = f"{len(rebuilt.predicate.claims)} claims and result {rebuilt.predicate.result} derived again, all equal"
    return material._replace(rebuilt=rebuilt), detail


def _identities(material: _Material) -> Outcome:
    broken, checked = broken_identity(_established(material.rebuilt).predicate)
    if broken is not None:
        raise EvidenceError(broken)
    return material, f"{checked} identities hold"


def _redaction(material: _Material) -> Outcome:
    for path, content in material.files.items():
        if found := scan(path, content):
            raise EvidenceError(found)
    return material, "no host name, home folder, address or secret found"


_STEPS: tuple[tuple[str, StepFunction], ...] = (
    ("read", _read),
    ("manifest", _manifest),
    ("json", _json),
    ("schema", _schema),
    ("presence", _presence),
    ("profile", _profile),
    ("subject", _subject),
    ("derive", _derive),
    ("identities", _identities),
    ("redaction", _redaction),
)


def _evidence(material: _Material) -> MappingSource:
    prefix = f"{EVIDENCE}/"
    return MappingSource(
        {path.removeprefix(prefix): content for path, content in material.files.items() if path.startswith(prefix)}
    )


def _established(value: T | None) -> T:
    """A value that an earlier step has set; steps run in order and the first failure ends the review."""
    if value is None:
        raise EvidenceError("an earlier step established nothing to go on")
    return value


def _first_difference(left: Any, right: Any, where: str) -> tuple[str, Any, Any]:
    """JSON pointer of the first place where two values differ, and both values there; a missing one is `...`."""
    if isinstance(left, dict) and isinstance(right, dict):
        for key in sorted(set(left) | set(right)):
            if left.get(key, ...) != right.get(key, ...):
                return _first_difference(left.get(key, ...), right.get(key, ...), f"{where}/{key}")
    if isinstance(left, list) and isinstance(right, list):
        for index in range(max(len(left), len(right))):
            one, other = (side[index] if index < len(side) else ... for side in (left, right))
            if one != other:
                return _first_difference(one, other, f"{where}/{index}")
    return where or "/", left, right


def _brief(value: Any) -> str:
    if value is ...:
        return "absent"
    text = ascii(value)
    return text if len(text) <= 80 else text[:79] + "…"
