# SPDX-License-Identifier: Apache-2.0
"""Building: what the receipt says about its run, and when there is none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from qualify.claims.model import ClaimId
from qualify.errors import EvidenceError, ExitCode
from qualify.evidence import EvidenceWriter
from qualify.profiles import Boot, Probe, Profile
from qualify.receipt.build import Derive, build
from qualify.receipt.canonical import parse
from qualify.receipt.caveats import limitations
from qualify.receipt.model import STATEMENT, Identity, Image, Receipt, Result
from qualify.receipt.verdict import exit_code
from qualify.receipt.verify import review
from qualify.records import Failure, Harness, Outcome, Run

Make = Callable[..., Path]


def read(bundle: Path) -> Receipt:
    return Receipt.model_validate(parse((bundle / STATEMENT).read_bytes(), STATEMENT))


def test_the_subject_of_a_local_engine_is_its_environment(pristine: Path) -> None:
    """Name and digest are those of the installed engine, not of the profile."""
    receipt = read(pristine)
    assert receipt.predicate.identity is Identity.ENGINE
    assert (receipt.subject[0].name, receipt.subject[0].digest.sha256) == ("engine/vllm-cpu", "b" * 64)


def test_the_subject_of_an_unseen_server_is_the_profile(make: Make, profile: Profile, derive: Derive) -> None:
    """Where nothing can be seen, the receipt identifies no software and says so."""
    bundle = make(edit=lambda root: [(root / name).unlink() for name in ("engine.json", "model.json")])
    receipt = read(bundle)
    assert receipt.predicate.identity is Identity.UNVERIFIED
    assert receipt.subject[0].digest.sha256 == profile.digest()
    assert "engine.unverified" in {caveat.id for caveat in receipt.predicate.limitations}
    assert review(bundle, derive=derive).verified


def test_the_subject_of_an_image_is_its_platform_manifest(make: Make, derive: Derive) -> None:
    """Index and configuration digests are annotations; neither is the subject."""
    digests = ["sha256:" + letter * 64 for letter in "123"]
    image = Image(
        repository="example.invalid/vllm",
        tag="t",
        manifest_digest=digests[0],
        index_digest=digests[1],
        config_digest=digests[2],
        platform="linux/amd64",
    )
    bundle = make(edit=lambda root: EvidenceWriter(root).record("image.json", image))
    receipt = read(bundle)
    assert receipt.predicate.identity is Identity.IMAGE
    assert receipt.subject[0].digest.sha256 == "1" * 64
    assert receipt.subject[0].annotations["indexDigest"] == digests[1]
    assert review(bundle, derive=derive).verified


def test_the_same_evidence_gives_the_same_bytes(make: Make) -> None:
    """A receipt is a pure function of evidence and profile: no clock, no path, no order of a file system."""
    first, second = make(), make()
    names = {path.relative_to(first) for path in first.rglob("*") if path.is_file()}
    assert names == {path.relative_to(second) for path in second.rglob("*") if path.is_file()}
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in names)


def test_without_the_run_record_there_is_no_receipt(make: Make, tmp_path: Path) -> None:
    """A harness that was killed leaves evidence, never a receipt."""
    with pytest.raises(EvidenceError, match=r"run\.json"):
        make(edit=lambda root: (root / "run.json").unlink())
    assert list(tmp_path.rglob(STATEMENT)) == []


def test_a_value_that_json_cannot_carry_gives_no_receipt(make: Make, profile: Profile, tmp_path: Path) -> None:
    """An integer that other readers would round is refused when writing, not when reviewing."""

    def series(root: Path) -> None:
        (root / "boots/01-control/series.json").write_text(json.dumps([10**18] * 30))

    with pytest.raises(EvidenceError, match=r"2\^53"):
        make(edit=series)
    assert list(tmp_path.rglob(STATEMENT)) == []


@pytest.mark.parametrize(
    ("outcome", "code"), [(Outcome.INTERRUPTED, ExitCode.INTERRUPTED), (Outcome.FAILED, ExitCode.BROKEN)]
)
def test_a_run_that_ended_early_says_so(
    make: Make, run_record: Run, derive: Derive, outcome: Outcome, code: ExitCode
) -> None:
    """Partial evidence gives a receipt that verifies, is not passed, and names where the run ended."""
    ended = {"outcome": outcome, "failure": Failure(phase="boot control", message="stopped by SIGTERM")}
    bundle = make(run=run_record.model_copy(update=ended))
    receipt = read(bundle)
    assert receipt.predicate.result is Result.INVALID
    assert receipt.predicate.failure == "boot control: stopped by SIGTERM"
    assert exit_code(receipt) == code
    reviewed = review(bundle, derive=derive)
    assert (reviewed.verified, reviewed.exit_code) == (True, ExitCode.NOT_USABLE)


def test_a_boot_without_a_record_is_listed_as_unknown(make: Make) -> None:
    """All boots are listed; nothing is made up for one that left no record."""
    bundle = make(edit=lambda root: EvidenceWriter(root).text("boots/02-cold/engine.log", "x\n"))
    boots = read(bundle).predicate.boots
    assert [boot.name for boot in boots] == ["01-control", "02-cold"]
    assert (boots[1].outcome, boots[1].ready_seconds) == (None, None)


def test_caveats_follow_from_the_facts(pristine: Path) -> None:
    """A CPU engine with synthetic weights: no figure for GPUs, no statement on answers."""
    predicate = read(pristine).predicate
    assert {"gpu.figures", "model.quality"} <= {caveat.id for caveat in predicate.not_for}
    unshown = next(caveat for caveat in predicate.limitations if caveat.id == "claims.notShown")
    assert ClaimId.KV_RESTORE in unshown.affects
    assert ClaimId.THROUGHPUT_SUSTAINED not in unshown.affects


def test_development_endpoints_are_a_limitation(make: Make) -> None:
    """A server with the engine's development endpoints is not one to expose, and the receipt says so."""

    def development(root: Path) -> None:
        path = root / "boots/01-control/boot.json"
        record: Any = json.loads(path.read_bytes())
        record["processes"][0]["environment"]["VLLM_SERVER_DEV_MODE"] = "1"
        path.write_text(json.dumps(record))

    limitations = read(make(edit=development)).predicate.limitations
    assert "server.developmentEndpoints" in {caveat.id for caveat in limitations}


def test_build_needs_evidence(tmp_path: Path, profile: Profile, derive: Derive) -> None:
    """An empty folder is refused with one line."""
    with pytest.raises(EvidenceError):
        build(tmp_path / "nothing", profile, derive=derive)


@pytest.mark.parametrize(
    ("plugins", "text"),
    [
        ((True, False), "each configuration was booted once;"),
        ((True, True, True, False), "boot-3: fewer than 3 equal boots;"),
        ((True, True, True), None),
    ],
)
def test_boots_without_an_interval_between_them_are_named(
    profile: Profile, plugins: tuple[bool, ...], text: str | None
) -> None:
    """The reader is told which figures hold within a boot only."""
    boots = tuple(
        Boot(name=f"boot-{index}", plugin=plugin, probes=(Probe.THROUGHPUT,)) for index, plugin in enumerate(plugins)
    )
    harness = Harness(version="0", git_commit=None, clean=None)
    run = Run(harness=harness, target="local", started_at="", finished_at="", outcome=Outcome.COMPLETED, phases=())
    found = limitations(profile.model_copy(update={"boots": boots}), run, Identity.ENGINE, (), ())
    texts = [caveat.text for caveat in found if caveat.id == "throughput.singleBoot"]
    assert [one.split(" the intervals")[0] for one in texts] == ([] if text is None else [text])
