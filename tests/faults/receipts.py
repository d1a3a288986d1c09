# SPDX-License-Identifier: Apache-2.0
"""Faults of a receipt: the folder of a real run, changed by an accident or a forger, is refused at the right step."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qualify.claims.model import ClaimId
from qualify.receipt import manifest
from qualify.receipt.build import build
from qualify.receipt.canonical import canonical
from qualify.receipt.model import EVIDENCE, MANIFEST, PROFILE, STATEMENT, Identity, Image
from qualify.receipt.verify import StepStatus, review

from faults.evidence import CONTROL
from faults.lab import Lab
from faults.model import Fault, Group, Verdicts, refused

Break = Callable[[Path, random.Random, Lab], object]


def reviewed(folder: Path) -> Verdicts:
    """The step at which the review ended; nothing if it verified the receipt."""
    found = review(folder)
    if found.verified:
        return {}
    return {"review": refused(next(step.name for step in found.steps if step.status is StepStatus.FAILED))}


def broken(name: str, change: Break, step: str) -> Fault:
    def act(lab: Lab) -> Verdicts:
        folder = Path(shutil.copytree(lab.run, lab.folder() / "bundle"))
        try:
            change(folder, lab.dice(name), lab)
            return reviewed(folder)
        finally:
            shutil.rmtree(folder)

    return Fault(Group.RECEIPTS, name, act, {"review": refused(step)})


def evidence_files(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / EVIDENCE).rglob("*") if path.is_file() and path.stat().st_size)


def statement(change: Callable[[Any, random.Random], object]) -> Break:
    """A statement that is changed and written canonically."""

    def act(folder: Path, dice: random.Random, lab: Lab) -> None:
        value = json.loads((folder / STATEMENT).read_bytes())
        change(value, dice)
        (folder / STATEMENT).write_bytes(canonical(value))

    return act


def predicate(change: Callable[[Any], object]) -> Break:
    return statement(lambda value, dice: change(value["predicate"]))


def forged(change: Break) -> Break:
    """A forger repairs the manifest, and what the statement says of it."""

    def act(folder: Path, dice: random.Random, lab: Lab) -> None:
        change(folder, dice, lab)
        entries = manifest.describe(manifest.read_folder(folder))
        (folder / MANIFEST).write_bytes(manifest.encode(entries))
        bound = manifest.reference(entries).model_dump(mode="json")
        predicate(lambda value: value.update(manifest=bound))(folder, dice, lab)

    return act


def change_byte(folder: Path, dice: random.Random, lab: Lab) -> None:
    path = dice.choice(evidence_files(folder))
    content = bytearray(path.read_bytes())
    content[dice.randrange(len(content))] ^= dice.randrange(1, 256)
    path.write_bytes(content)


def cut_file(folder: Path, dice: random.Random, lab: Lab) -> None:
    path = dice.choice(evidence_files(folder))
    os.truncate(path, dice.randrange(path.stat().st_size))


def remove_evidence(folder: Path, dice: random.Random, lab: Lab) -> None:
    dice.choice(evidence_files(folder)).unlink()


def add_evidence(folder: Path, dice: random.Random, lab: Lab) -> None:
    (dice.choice(evidence_files(folder)).parent / "more.json").write_text("{}")


def swap_boots(folder: Path, dice: random.Random, lab: Lab) -> None:
    """Two boots' reports under each other's names."""
    one, other = dice.sample(sorted((folder / EVIDENCE / "boots").iterdir()), 2)
    left, right = (one / "boot.json").read_bytes(), (other / "boot.json").read_bytes()
    (one / "boot.json").write_bytes(right)
    (other / "boot.json").write_bytes(left)


def link_away(folder: Path, dice: random.Random, lab: Lab) -> None:
    """The same content, outside of the folder."""
    path = dice.choice(evidence_files(folder))
    target = lab.run / path.relative_to(folder)
    path.unlink()
    path.symlink_to(target)


def other_report(folder: Path, dice: random.Random, lab: Lab) -> None:
    path = folder / "report.html"
    path.write_text(path.read_text().replace("<html", "<html data-x", 1))


def cut_statement(folder: Path, dice: random.Random, lab: Lab) -> None:
    os.truncate(folder / STATEMENT, dice.randrange(1, (folder / STATEMENT).stat().st_size))


def indent_statement(folder: Path, dice: random.Random, lab: Lab) -> None:
    value = json.loads((folder / STATEMENT).read_bytes())
    (folder / STATEMENT).write_text(json.dumps(value, indent=1))


def reorder(value: Any, dice: random.Random) -> None:
    claims = value["predicate"]["claims"]
    before = list(claims)
    while claims == before:
        dice.shuffle(claims)


def lose_claim(value: Any, dice: random.Random) -> None:
    claims = value["predicate"]["claims"]
    claims.remove(dice.choice([claim for claim in claims if claim["required"]]))


def not_required(value: Any, dice: random.Random) -> None:
    dice.choice([claim for claim in value["predicate"]["claims"] if claim["required"]])["required"] = False


def claim(name: ClaimId, change: Callable[[Any], object]) -> Break:
    return predicate(lambda value: change(next(one for one in value["claims"] if one["id"] == name)))


def alter_expectation(one: Any) -> None:
    one["expected"]["minKvTokens"] = 1


def alter_figure(one: Any) -> None:
    one["estimates"][0]["point"] += 1


def alter_check(one: Any) -> None:
    one["checks"][-1]["expected"] = "more"


def alter_evidence_reference(one: Any) -> None:
    one["evidence"][0]["sha256"] = "0" * 64


def easier_profile(folder: Path, dice: random.Random, lab: Lab) -> None:
    memory = lab.profile.memory.model_copy(update={"min_kv_tokens": 1})
    (folder / PROFILE).write_text(lab.profile.model_copy(update={"memory": memory}).model_dump_json())


def easier_profile_with_its_digest(folder: Path, dice: random.Random, lab: Lab) -> None:
    easier_profile(folder, dice, lab)
    memory = lab.profile.memory.model_copy(update={"min_kv_tokens": 1})
    digest = lab.profile.model_copy(update={"memory": memory}).digest()
    predicate(lambda value: value["profile"]["digest"].update(sha256=digest))(folder, dice, lab)


def less_output(folder: Path, dice: random.Random, lab: Lab) -> None:
    """An answer of the real run gets another token."""
    path = folder / EVIDENCE / CONTROL / "serve.json"
    value = json.loads(path.read_bytes())
    value["requests"][0]["answer"]["tokenIds"][0] += 1
    path.write_text(json.dumps(value))


def claim_an_image(folder: Path, dice: random.Random, lab: Lab) -> None:
    """The run of one engine, given out as the run of an image."""
    image = Image(
        repository="registry.example/engine",
        tag=None,
        manifest_digest=f"sha256:{'a' * 64}",
        index_digest=None,
        config_digest=None,
        platform="linux/amd64",
    )
    (folder / EVIDENCE / "image.json").write_text(image.model_dump_json())


def private_note(folder: Path, dice: random.Random, lab: Lab) -> None:
    (folder / EVIDENCE / "note.txt").write_text("see /home/somebody/x\n")


def replay(*names: str) -> Break:
    """Parts of the receipt of another run of the same profile on the same engine."""

    def act(folder: Path, dice: random.Random, lab: Lab) -> None:
        other = another_run(lab)
        for name in names:
            if name == EVIDENCE:
                shutil.rmtree(folder / name)
                shutil.copytree(other / name, folder / name)
            else:
                shutil.copy(other / name, folder / name)

    return act


def another_run(lab: Lab) -> Path:
    """The same evidence, a second later: all that tells two runs apart is when they ended."""
    folder = lab.scratch / "another"
    if not (folder / STATEMENT).exists():
        shutil.copytree(lab.run / EVIDENCE, folder / EVIDENCE)
        path = folder / EVIDENCE / "run.json"
        run = json.loads(path.read_bytes())
        run["finishedAt"] = run["finishedAt"][:-3] + f"{(int(run['finishedAt'][-3:-1]) + 1) % 60:02}Z"
        path.write_text(json.dumps(run))
        build(folder, lab.profile)
    return folder


BROKEN: tuple[tuple[str, Break, str], ...] = (
    ("a byte of the evidence is changed", change_byte, "manifest"),
    ("an evidence file is cut", cut_file, "manifest"),
    ("evidence is removed", remove_evidence, "manifest"),
    ("evidence is added", add_evidence, "manifest"),
    ("two boots are swapped", swap_boots, "manifest"),
    ("the report is changed", other_report, "manifest"),
    ("evidence is a link to elsewhere", link_away, "read"),
    ("the statement is missing", lambda folder, dice, lab: (folder / STATEMENT).unlink(), "read"),
    ("the statement is cut", cut_statement, "json"),
    ("the statement is written another way", indent_statement, "json"),
    ("the statement has a field of its own", predicate(lambda value: value.update(approved=True)), "schema"),
    ("the statement is of another kind", statement(lambda v, dice: v.update(predicateType="x")), "schema"),
    ("the statement of another run", replay(STATEMENT), "presence"),
    ("statement and manifest of another run", replay(STATEMENT, MANIFEST), "manifest"),
    ("the evidence of another run", replay(EVIDENCE), "manifest"),
    ("the evidence of another run, digests repaired", forged(replay(EVIDENCE)), "derive"),
    ("a required claim is gone", statement(lose_claim), "profile"),
    ("a required claim is optional", statement(not_required), "profile"),
    ("an easier profile, digests repaired", forged(easier_profile), "profile"),
    ("an easier profile with its digest", forged(easier_profile_with_its_digest), "derive"),
    (
        "another subject",
        statement(lambda value, dice: value["subject"][0]["digest"].update(sha256="f" * 64)),
        "subject",
    ),
    ("another image", forged(claim_an_image), "subject"),
    ("an unknown identity", predicate(lambda value: value.update(identity=Identity.UNVERIFIED)), "subject"),
    ("claims are reordered", statement(reorder), "derive"),
    ("an expectation is altered", claim(ClaimId.MEMORY_ADMISSION, alter_expectation), "derive"),
    ("a figure is altered", claim(ClaimId.THROUGHPUT_SUSTAINED, alter_figure), "derive"),
    ("a check is altered", claim(ClaimId.KV_RESTORE, alter_check), "derive"),
    ("a claim names other evidence", claim(ClaimId.PINS, alter_evidence_reference), "derive"),
    ("the coverage is overstated", predicate(lambda value: value.update(coverage="full")), "derive"),
    ("the limitations are gone", predicate(lambda value: value.update(limitations=[])), "derive"),
    (
        "the run began at another time",
        predicate(lambda value: value.update(startedAt="2020-01-01T00:00:00Z")),
        "derive",
    ),
    ("evidence is changed, digests repaired", forged(less_output), "derive"),
    ("the evidence holds a private path", forged(private_note), "redaction"),
)

FAULTS = tuple(broken(name, change, step) for name, change, step in BROKEN)
GOOD: dict[str, Callable[[Lab], Verdicts]] = {
    "the receipt of the run": lambda lab: reviewed(lab.run),
    "the receipt of another run": lambda lab: reviewed(another_run(lab)),
}
