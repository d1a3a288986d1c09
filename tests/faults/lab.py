# SPDX-License-Identifier: Apache-2.0
"""The evidence of real runs that passed, changed in memory and judged again."""

from __future__ import annotations

import gzip
import json
import os
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from qualify.claims.derive import derive
from qualify.claims.model import Claim, ClaimId
from qualify.evidence import FolderSource, MappingSource, compress
from qualify.profiles import Profile
from qualify.receipt.model import EVIDENCE, PROFILE, STATEMENT, Receipt

ROOT = Path(__file__).parents[2]
RUN_VARIABLE = "QUALIFY_FAULTS_RUN"
CPU, GPU = "cpu-smoke", "gpu-tp2-ds4-mini"
"""The profiles whose runs are broken."""

ON_GPU = (ClaimId.GRAPHS_CAPTURE, ClaimId.PLUGIN_ACTIVE, ClaimId.MEMORY_ADMISSION, ClaimId.KV_RESTORE)
"""What a run on GPUs is broken for; the other claims look there for nothing that they do not find in a run on CPUs."""


def newest_run(profile: str = CPU) -> Path | None:
    """The newest committed receipt of a profile. For cpu-smoke $QUALIFY_FAULTS_RUN names another run."""
    if profile == CPU and (chosen := os.environ.get(RUN_VARIABLE)):
        return Path(chosen)
    committed = sorted((ROOT / "receipts" / profile).glob(f"*/{STATEMENT}"))
    return committed[-1].parent if committed else None


def gpu_lab(seed: int, scratch: Path) -> Lab:
    """The newest run on two GPUs, judged for ON_GPU alone. Raises FileNotFoundError where no receipt of one is."""
    run = newest_run(GPU)
    if run is None:
        raise FileNotFoundError(f"no receipt of {GPU} to break: commit one")
    return Lab(run, seed, scratch, ON_GPU)


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


def of_claims(profile: Profile, wanted: Collection[ClaimId]) -> Profile:
    """The profile that asks for no other claims."""
    asked = profile.claims
    kept = asked.model_copy(
        update={
            "required": tuple(one for one in asked.required if one in wanted),
            "optional": tuple(one for one in asked.optional if one in wanted),
        }
    )
    return profile.model_copy(update={"claims": kept})


@dataclass
class Lab:
    """One real run, a seed, a folder for what a fault has to write, and the claims that are judged."""

    run: Path
    seed: int
    scratch: Path
    claims: tuple[ClaimId, ...] = tuple(ClaimId)
    _folders: int = field(default=0)

    @cached_property
    def receipt(self) -> Receipt:
        return Receipt.model_validate_json((self.run / STATEMENT).read_bytes())

    @cached_property
    def profile(self) -> Profile:
        return of_claims(Profile.model_validate_json((self.run / PROFILE).read_bytes()), self.claims)

    @cached_property
    def gpu(self) -> Lab:
        """The same seed on the run on GPUs."""
        return gpu_lab(self.seed, self.folder())

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
            again = derive(MappingSource(files), of_claims(wanted, stale))
            return tuple(new if new.id in stale else old for old, new in zip(self.untouched, again, strict=True))
        return derive(MappingSource(files), wanted)

    def folder(self) -> Path:
        """A new empty folder."""
        self._folders += 1
        path = self.scratch / f"{self._folders:03d}"
        path.mkdir(parents=True)
        return path
