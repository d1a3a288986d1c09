# SPDX-License-Identifier: Apache-2.0
"""The evidence of a real run that passed, changed in memory and judged again."""

from __future__ import annotations

import gzip
import json
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from qualify.claims.derive import derive
from qualify.claims.model import Claim
from qualify.evidence import FolderSource, MappingSource, compress
from qualify.profiles import Profile
from qualify.receipt.model import EVIDENCE, PROFILE, STATEMENT, Receipt

ROOT = Path(__file__).parents[2]
RUN_VARIABLE = "QUALIFY_FAULTS_RUN"


def newest_run() -> Path | None:
    """The run whose evidence is broken: $QUALIFY_FAULTS_RUN, else the newest committed receipt of cpu-smoke."""
    if chosen := os.environ.get(RUN_VARIABLE):
        return Path(chosen)
    committed = sorted((ROOT / "receipts" / "cpu-smoke").glob(f"*/{STATEMENT}"))
    return committed[-1].parent if committed else None


@dataclass
class Tree:
    """Evidence files by path. A `.gz` file is given and taken expanded."""

    files: dict[str, bytes]
    random: random.Random

    def bytes(self, path: str) -> bytes:
        content = self.files[path]
        return gzip.decompress(content) if path.endswith(".gz") else content

    def write(self, path: str, content: bytes) -> None:
        self.files[path] = compress(content) if path.endswith(".gz") else content

    def json(self, path: str) -> Any:
        return json.loads(self.bytes(path))

    def edit(self, path: str, change: Callable[[Any], object]) -> None:
        """Change a JSON file in place. A change that changes nothing is a defect of the fault."""
        value = self.json(path)
        before = json.dumps(value)
        change(value)
        after = json.dumps(value)
        if after == before:
            raise ValueError(f"the fault changed nothing in {path}")
        self.write(path, after.encode())

    def replace(self, path: str, old: str, new: str, count: int = -1) -> None:
        """Replace text in a file. Text that is not there is a defect of the fault."""
        text = self.bytes(path).decode()
        if old not in text:
            raise ValueError(f"{path} does not hold {old!r}")
        self.write(path, text.replace(old, new, count).encode())

    def remove(self, path: str) -> None:
        del self.files[path]


Tamper = Callable[[Tree], object]


@dataclass
class Lab:
    """One real run, a seed, and a folder for what a fault has to write."""

    run: Path
    seed: int
    scratch: Path
    _folders: int = field(default=0)

    @cached_property
    def receipt(self) -> Receipt:
        return Receipt.model_validate_json((self.run / STATEMENT).read_bytes())

    @cached_property
    def profile(self) -> Profile:
        return Profile.model_validate_json((self.run / PROFILE).read_bytes())

    @cached_property
    def files(self) -> dict[str, bytes]:
        source = FolderSource(self.run / EVIDENCE)
        return {path: source.read(path) for path in source.paths()}

    @cached_property
    def untouched(self) -> tuple[Claim, ...]:
        return derive(MappingSource(self.files), self.profile)

    def dice(self, name: str) -> random.Random:
        """The same seed and name give the same fault."""
        return random.Random(f"{self.seed} {name}")

    def tampered(self, name: str, change: Tamper) -> dict[str, bytes]:
        tree = Tree(dict(self.files), self.dice(name))
        change(tree)
        return tree.files

    def derive(self, files: dict[str, bytes], profile: Profile | None = None) -> tuple[Claim, ...]:
        """All claims of the profile over other files. A claim that read none of the changed files is not judged again:
        its judge would see what it saw before."""
        wanted = profile or self.profile
        if profile is None and files.keys() == self.files.keys():
            changed = {path for path, content in files.items() if content != self.files[path]}
            stale = {c.id for c in self.untouched if changed & {reference.path for reference in c.evidence}}
            claims = wanted.claims
            kept = claims.model_copy(
                update={
                    "required": tuple(one for one in claims.required if one in stale),
                    "optional": tuple(one for one in claims.optional if one in stale),
                }
            )
            again = derive(MappingSource(files), wanted.model_copy(update={"claims": kept}))
            return tuple(new if new.id in stale else old for old, new in zip(self.untouched, again, strict=True))
        return derive(MappingSource(files), wanted)

    def folder(self) -> Path:
        """A new empty folder."""
        self._folders += 1
        path = self.scratch / f"{self._folders:03d}"
        path.mkdir(parents=True)
        return path
