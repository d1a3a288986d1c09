# SPDX-License-Identifier: Apache-2.0
"""No random change to a receipt folder goes unseen. QUALIFY_MUTATIONS sets how many are tried, QUALIFY_SEED which."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from qualify import profiles
from qualify.receipt import manifest
from qualify.receipt.build import Derive
from qualify.receipt.canonical import canonical
from qualify.receipt.model import MANIFEST, PROFILE, STATEMENT
from qualify.receipt.verify import Assurance, review

COUNT = int(os.environ.get("QUALIFY_MUTATIONS", "300"))
FIRST_SEED = int(os.environ.get("QUALIFY_SEED", "0"))

Mutation = Callable[[Path, Path, random.Random], None]


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def change_byte(folder: Path, other: Path, rng: random.Random) -> None:
    path = rng.choice(files_of(folder))
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= rng.randrange(1, 256)
    path.write_bytes(content)


def change_length(folder: Path, other: Path, rng: random.Random) -> None:
    path = rng.choice(files_of(folder))
    content = path.read_bytes()
    at = rng.randrange(len(content))
    inserted = bytes([rng.choice(b" \n0a\0")])
    path.write_bytes(rng.choice([content[:at], content[:at] + inserted + content[at:], content + inserted]))


def change_field(folder: Path, other: Path, rng: random.Random) -> None:
    """A field of any JSON file gets another value, goes, or gets a neighbour; the file stays well-formed."""
    path = rng.choice([path for path in files_of(folder) if path.suffix == ".json"])
    value = json.loads(path.read_bytes())
    while canonical(mutate(value, rng)) == canonical(json.loads(path.read_bytes())):
        pass
    path.write_bytes(canonical(value))


def change_statement(folder: Path, other: Path, rng: random.Random) -> None:
    """The same for the statement alone, which no manifest lists."""
    statement = folder / STATEMENT
    value = json.loads(statement.read_bytes())
    while canonical(mutate(value, rng)) == statement.read_bytes():
        pass
    statement.write_bytes(canonical(value))


def change_manifest_and_rebind(folder: Path, other: Path, rng: random.Random) -> None:
    """A forger who changes an entry of the manifest, and makes the statement bind the new one."""
    path = folder / MANIFEST
    value = json.loads(path.read_bytes())
    while canonical(mutate(value, rng)) == path.read_bytes():
        pass
    path.write_bytes(canonical(value))
    bind(folder, path.read_bytes())


def change_figure_and_rebind(folder: Path, other: Path, rng: random.Random) -> None:
    """A forger who changes measured data and repairs every digest, but leaves the claims."""
    path = folder / "evidence/boots/01-control/series.json"
    series = json.loads(path.read_bytes())
    series[rng.randrange(len(series))] += rng.randrange(1, 10)
    path.write_text(json.dumps(series))
    content = manifest.encode(manifest.describe(manifest.read_folder(folder)))
    (folder / MANIFEST).write_bytes(content)
    bind(folder, content)


def bind(folder: Path, content: bytes) -> None:
    statement = json.loads((folder / STATEMENT).read_bytes())
    statement["predicate"]["manifest"]["digest"]["sha256"] = hashlib.sha256(content).hexdigest()
    (folder / STATEMENT).write_bytes(canonical(statement))


def reorder_claims(folder: Path, other: Path, rng: random.Random) -> None:
    statement = json.loads((folder / STATEMENT).read_bytes())
    claims = statement["predicate"]["claims"]
    before = list(claims)
    while claims == before:
        rng.shuffle(claims)
    (folder / STATEMENT).write_bytes(canonical(statement))


def alter_expectation(folder: Path, other: Path, rng: random.Random) -> None:
    statement = json.loads((folder / STATEMENT).read_bytes())
    claim = next(claim for claim in statement["predicate"]["claims"] if claim["expected"])
    target = rng.choice([claim["expected"], *claim["checks"]])
    target["samples" if target is claim["expected"] else "expected"] = rng.randrange(31, 99)
    (folder / STATEMENT).write_bytes(canonical(statement))


def remove_file(folder: Path, other: Path, rng: random.Random) -> None:
    rng.choice(files_of(folder)).unlink()


def add_file(folder: Path, other: Path, rng: random.Random) -> None:
    place = rng.choice([path for path in (folder, *folder.rglob("*")) if path.is_dir()])
    (place / f"{rng.choice(['extra', '.hidden', 'Z', 'a b', 'receipt.dsse'])}.json").write_bytes(rng.randbytes(3))


def add_folder(folder: Path, other: Path, rng: random.Random) -> None:
    (rng.choice([path for path in (folder, *folder.rglob("*")) if path.is_dir()]) / "new").mkdir()


def replace_by_link(folder: Path, other: Path, rng: random.Random) -> None:
    """The content stays the same, but it now lies outside of the folder."""
    path = rng.choice(files_of(folder))
    target = other / path.relative_to(folder)
    path.unlink()
    path.symlink_to(target)


def rename_file(folder: Path, other: Path, rng: random.Random) -> None:
    path = rng.choice(files_of(folder))
    path.rename(path.with_name(rng.choice(["renamed.json", path.name + ".bak", path.name.upper()])))


def swap_files(folder: Path, other: Path, rng: random.Random) -> None:
    one, two = rng.sample(files_of(folder), 2)
    left, right = one.read_bytes(), two.read_bytes()
    one.write_bytes(right)
    two.write_bytes(left)


def other_profile(folder: Path, other: Path, rng: random.Random) -> None:
    (folder / PROFILE).write_text(profiles.load("cpu-smoke").model_dump_json())


def replay(folder: Path, other: Path, rng: random.Random) -> None:
    """Statement, manifest, or evidence of another run of the same profile."""
    names = rng.choice([[STATEMENT], [MANIFEST], [STATEMENT, MANIFEST], ["evidence"]])
    for name in names:
        if name == "evidence":
            shutil.rmtree(folder / name)
            shutil.copytree(other / name, folder / name)
        else:
            shutil.copy(other / name, folder / name)


MUTATIONS: tuple[Mutation, ...] = (
    change_byte,
    change_length,
    change_field,
    change_statement,
    change_manifest_and_rebind,
    change_figure_and_rebind,
    reorder_claims,
    alter_expectation,
    remove_file,
    add_file,
    add_folder,
    replace_by_link,
    rename_file,
    swap_files,
    other_profile,
    replay,
)


def mutate(value: Any, rng: random.Random) -> Any:
    """Change one random place of JSON data in place; the data itself, for convenience."""
    node = value
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        inner = [key for key in keys if isinstance(node[key], dict | list) and node[key]]
        if not inner or rng.random() < 0.3:
            break
        node = node[rng.choice(inner)]
    _change(node, keys, rng)
    return value


def _change(node: Any, keys: list[Any], rng: random.Random) -> None:
    act = rng.choice(["replace", "replace", "remove", "add", "rename"])
    key = rng.choice(keys) if keys else None
    if act == "replace" and key is not None:
        node[key] = _another(node[key], rng)
    elif act == "remove" and key is not None:
        del node[key]
    elif isinstance(node, list):
        node.append(rng.choice([None, 0, "x", {}]))
    elif act == "rename" and key is not None:
        node[f"{key}X"] = node.pop(key)
    else:
        node[rng.choice(["clean", "extra", "note"])] = rng.choice([True, None, 1, "x"])


def _another(value: Any, rng: random.Random) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return rng.choice([value + 1, -value - 1, str(value), None, value + 1e-9 * max(1, abs(value))])
    words = ["", "PASSED", "FAILED", "passed", "failed", "full", "smoke", "true"]
    if isinstance(value, str):
        return rng.choice([word for word in [*words, value + "0", value[:-1], None] if word != value])
    return rng.choice([None, [], {}, "", 0, True])


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_every_mutation_is_detected(
    mutation: Mutation, pristine: Path, other: Path, tmp_path: Path, derive: Derive
) -> None:
    """A folder that differs in anything from what was written is never verified; the seeds of misses are printed."""
    missed = []
    for seed in range(FIRST_SEED, FIRST_SEED + max(1, COUNT // len(MUTATIONS))):
        folder = tmp_path / "bundle"
        shutil.copytree(pristine, folder)
        mutation(folder, other, random.Random(seed))
        reviewed = review(folder, derive=derive)
        if reviewed.verified or reviewed.assurance is not Assurance.NONE or not 21 <= reviewed.exit_code <= 30:
            missed.append(seed)
        shutil.rmtree(folder)
    assert missed == [], f"{mutation.__name__}: seeds of undetected mutations"


def test_the_untouched_folder_is_verified(pristine: Path, derive: Derive) -> None:
    """Otherwise the mutations above prove nothing."""
    reviewed = review(pristine, derive=derive)
    assert reviewed.verified, [step.detail for step in reviewed.steps]
    assert reviewed.exit_code == 0
