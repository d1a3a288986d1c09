# SPDX-License-Identifier: Apache-2.0
"""The receipt: an in-toto Statement with this project's predicate over one folder of evidence.

The JSON Schema under receipts/schema is generated from these classes (`python -m qualify.receipt.schema`).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, Literal

from pydantic import Field

from qualify.claims.model import Claim, ClaimId
from qualify.model import Record
from qualify.reasons import ReasonCode
from qualify.records import BootOutcome, Harness, Host, Outcome

STATEMENT_TYPE: Final = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE: Final = "https://vllm-qualify.dev/attestation/serving-qualification/v0.1"
SCHEMA_VERSION: Final = "0.1.0"

STATEMENT = "receipt.intoto.json"
MANIFEST = "manifest.json"
PROFILE = "profile.json"
REPORT = "report.html"
EVIDENCE = "evidence"
IMAGE = "image.json"
"""Evidence that a container target writes, as `Image`: which image ran."""

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
ImageDigest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0)]


class Result(StrEnum):
    PASSED = "PASSED"
    WARNED = "WARNED"
    FAILED = "FAILED"
    INVALID = "INVALID"


class Coverage(StrEnum):
    """How much of the whole proof this run holds, computed from what passed and on what hardware."""

    NONE = "none"
    """No claim passed."""
    SMOKE = "smoke"
    """Claims passed, but not on a GPU, or without the engine's identity and its tensor-parallel serving."""
    PARTIAL = "partial"
    """On GPUs, `pins` and `serve.tp` passed, and not yet every claim."""
    FULL = "full"
    """On GPUs, every claim passed."""


class Identity(StrEnum):
    """What the subject's digest names."""

    IMAGE = "image"
    """The platform manifest of the image that ran."""
    ENGINE = "engine"
    """The files installed in the engine's environment."""
    UNVERIFIED = "unverified"
    """The resolved profile only: nothing of the server could be seen, so the receipt identifies no software."""


class Digest(Record):
    sha256: Sha256


class Subject(Record):
    name: str
    digest: Digest
    annotations: dict[str, str] = Field(default_factory=dict)


class ResultReason(Record):
    """Why the result is not PASSED; `claim` is null for a reason that concerns the whole run."""

    claim: ClaimId | None
    reason_code: ReasonCode


class ProfileReference(Record):
    """The resolved profile is profile.json; its sha256 is this digest."""

    name: str
    digest: Digest


class Image(Record):
    """The image that ran. `manifestDigest` is of the platform manifest; the other two are null if not observed."""

    repository: str
    tag: str | None
    manifest_digest: ImageDigest
    index_digest: ImageDigest | None
    config_digest: ImageDigest | None
    platform: str


class Package(Record):
    name: str
    version: str


class Engine(Record):
    """What was installed in the engine's environment."""

    python: str
    digest: Digest
    lock_digest: str | None
    packages: tuple[Package, ...]
    """The distributions that decide what is served; evidence/engine.json lists all."""


class Model(Record):
    """The model that was served; `digest` is over the paths, sizes and digests of its files."""

    name: str
    recipe: str | None
    seed: int | None
    digest: Digest
    file_count: Count
    total_bytes: Count


class BootSummary(Record):
    """One start of the engine until its stop. Null where the boot left no record, because the run ended first."""

    name: str
    started_at: str | None
    ready_seconds: float | None
    outcome: BootOutcome | None


class Caveat(Record):
    """A limitation, or a use that this receipt must not be quoted for; computed from the facts of the run."""

    id: str
    text: str
    affects: tuple[ClaimId, ...]


class ManifestReference(Record):
    """Binds every file of the folder; `digest` is of the bytes of manifest.json."""

    digest: Digest
    file_count: Count
    total_bytes: Count


class Qualification(Record):
    """The predicate. Every field is derived from evidence and profile; nothing is typed in."""

    schema_version: Literal["0.1.0"]
    result: Result
    result_reasons: tuple[ResultReason, ...]
    coverage: Coverage
    started_at: str
    finished_at: str
    outcome: Outcome
    failure: str | None
    """Why the run ended early, in one line."""
    harness: Harness
    profile: ProfileReference
    target: str
    identity: Identity
    image: Image | None
    engine: Engine | None
    model: Model | None
    host: Host | None
    claims: tuple[Claim, ...]
    boots: tuple[BootSummary, ...]
    limitations: tuple[Caveat, ...]
    not_for: tuple[Caveat, ...]
    manifest: ManifestReference


class Receipt(Record):
    """The Statement: exactly one subject, and what is stated about it."""

    type: Literal["https://in-toto.io/Statement/v1"] = Field(default=STATEMENT_TYPE, alias="_type")
    subject: Annotated[tuple[Subject, ...], Field(min_length=1, max_length=1)]
    predicate_type: Literal["https://vllm-qualify.dev/attestation/serving-qualification/v0.1"]
    predicate: Qualification
