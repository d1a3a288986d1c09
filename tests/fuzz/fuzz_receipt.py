# SPDX-License-Identifier: Apache-2.0
"""Coverage-guided fuzzing of the receipt reader: `review` of a small folder in which one file is hostile.

`run.py` runs it. Besides crashes it looks for broken promises: a changed file is refused, and every step ends in words
of its own instead of an exception that nobody foresaw.
"""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import sys
import tempfile
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parents[1]))

with atheris.instrument_imports(include=["qualify"]):
    from qualify import profiles
    from qualify.claims.model import ClaimId
    from qualify.receipt import canonical, manifest, schema
    from qualify.receipt.build import build
    from qualify.receipt.model import MANIFEST, PROFILE, STATEMENT
    from qualify.receipt.verify import review

from receipt.conftest import fake_derive, write_evidence

SERIES, LOG = "evidence/boots/01-control/series.json", "evidence/boots/01-control/engine.log.gz"
TARGETS = (STATEMENT, MANIFEST, PROFILE, "evidence/run.json", "evidence/boots/01-control/boot.json", SERIES, LOG)
UNFORESEEN = "cannot be examined"


def make() -> Path:
    """A sound receipt folder, removed at exit."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-receipt-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    bundle = folder / "bundle"
    write_evidence(bundle)
    profile = profiles.load("cpu-smoke")
    claims = profile.claims.model_copy(update={"required": (ClaimId.THROUGHPUT_SUSTAINED,)})
    build(bundle, profile.model_copy(update={"claims": claims}), derive=fake_derive)
    return bundle


schema.generate = functools.cache(schema.generate)  # else it takes most of the time
BUNDLE = make()
SOUND = {path: (BUNDLE / path).read_bytes() for path in (*TARGETS, MANIFEST)}


def seeds() -> list[bytes]:
    """Every file as it is, once with and once without repaired digests."""
    return [bytes([index | repair]) + SOUND[path] for index, path in enumerate(TARGETS) for repair in (0, 128)]


def check(data: bytes) -> None:
    """Put `data` in the place of the file that its first byte names; its highest bit repairs the digests."""
    index, content = (data[0], data[1:]) if data else (0, b"")
    path, repair = TARGETS[(index & 127) % len(TARGETS)], index & 128
    try:
        (BUNDLE / path).write_bytes(content)
        if repair and path not in (STATEMENT, MANIFEST):
            bind()
            repair = 2
        found = review(BUNDLE, derive=fake_derive)
    finally:
        for name, sound in SOUND.items():
            (BUNDLE / name).write_bytes(sound)
    details = [step.detail for step in found.steps]
    assert not any(detail.startswith(UNFORESEEN) for detail in details), details
    assert not found.verified or repair == 2 or content == SOUND[path], f"{path} was changed and is verified"


def bind() -> None:
    """Write manifest and statement anew for the files as they are."""
    entries = manifest.describe(manifest.read_folder(BUNDLE))
    (BUNDLE / MANIFEST).write_bytes(manifest.encode(entries))
    statement = json.loads(SOUND[STATEMENT])
    statement["predicate"]["manifest"] = manifest.reference(entries).model_dump(mode="json")
    profile = (BUNDLE / PROFILE).read_bytes()
    if profile != SOUND[PROFILE]:
        try:
            digest = profiles.Profile.model_validate_json(profile).digest()
        except ValueError:
            digest = statement["predicate"]["profile"]["digest"]["sha256"]
        statement["predicate"]["profile"]["digest"]["sha256"] = digest
    (BUNDLE / STATEMENT).write_bytes(canonical.canonical(statement))


if __name__ == "__main__":
    atheris.Setup(sys.argv, check)
    atheris.Fuzz()
