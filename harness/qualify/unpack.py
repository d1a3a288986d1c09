# SPDX-License-Identifier: Apache-2.0
"""Checks and unpacks a bundle where nothing but Python 3.12 is at hand: python3 unpack.py FOLDER

Lies beside manifest.json and the parts, and uses the standard library only. FOLDER must not exist: everything is
unpacked into a hidden folder beside it, which is renamed at the end, so there is never half a FOLDER.

Exit status: 0 unpacked, 2 wrong usage, 4 this host cannot run the bundle, 6 a part is missing, 7 a part is damaged.
"""

from __future__ import annotations

import compileall
import hashlib
import io
import json
import lzma
import os
import platform
import py_compile
import shutil
import sys
import sysconfig
import tarfile
import tempfile
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

USAGE, HOST, MISSING, DAMAGED = 2, 4, 6, 7

SITE = "engine/lib/python3.12/site-packages"

LAUNCHER = """#!/bin/sh
# Runs the harness of this bundle with the engine's own Python. QUALIFY_HARNESS names another copy of the harness.
root=$(dirname "$(dirname "$(readlink -f "$0")")")
export QUALIFY_BUNDLE="$root" PYTHONPATH="${QUALIFY_HARNESS:-$root/harness}" PYTHONDONTWRITEBYTECODE=1
exec "$root/engine/bin/python" -m qualify "$@"
"""


class Refused(Exception):
    """Why nothing was unpacked, and the exit status that says so."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def check_host(manifest: dict[str, Any]) -> None:
    wanted, here = manifest["platform"], f"{sys.platform}-{platform.machine()}"
    if here != wanted:
        raise Refused(HOST, f"the bundle is for {wanted}, this host is {here}")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if version != manifest["python"]:
        raise Refused(HOST, f"the bundle needs Python {manifest['python']}, this is {version}: run it with another")


def check_parts(folder: Path, parts: list[dict[str, Any]]) -> None:
    """Raises Refused naming the first part that is missing or is not the one that was made."""
    for part in parts:
        if not (folder / part["name"]).is_file():
            raise Refused(MISSING, f"{part['name']} is missing: copy it here again")
    with ThreadPoolExecutor() as pool:
        digests = pool.map(lambda part: sha256(folder / part["name"]), parts)
        for part, digest in zip(parts, digests, strict=True):
            size = (folder / part["name"]).stat().st_size
            if size != part["size"] or digest != part["sha256"]:
                raise Refused(
                    DAMAGED, f"{part['name']} is damaged ({size} of {part['size']} bytes): copy it here again"
                )


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def blocks(folder: Path, packed: dict[str, Any]) -> Iterator[bytes]:
    """The compressed blocks, in order; they run on from one part to the next."""
    held = bytearray()
    paths = iter([folder / part["name"] for part in packed["parts"]])
    for size in packed["blocks"]:
        while len(held) < size:
            held += next(paths).read_bytes()
        yield bytes(held[:size])
        del held[:size]


class Unpacked(io.RawIOBase):
    """The archive's bytes. A few blocks are decompressed ahead, each by a thread of its own."""

    def __init__(self, source: Iterator[bytes], pool: ThreadPoolExecutor, ahead: int) -> None:
        self._source, self._pool = source, pool
        self._running: list[Future[bytes]] = [pool.submit(lzma.decompress, block) for block in islice(source, ahead)]
        self._left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._left and self._running:
            self._left = memoryview(self._running.pop(0).result())
            self._running += [self._pool.submit(lzma.decompress, block) for block in islice(self._source, 1)]
        count = min(len(buffer), len(self._left))
        buffer[:count], self._left = self._left[:count], self._left[count:]
        return count


def extract(folder: Path, packed: dict[str, Any], target: Path) -> None:
    ahead = 2 * (os.cpu_count() or 1)
    with (
        ThreadPoolExecutor() as pool,
        io.BufferedReader(Unpacked(blocks(folder, packed), pool, ahead), 1 << 20) as stream,
        tarfile.open(fileobj=stream, mode="r|") as archive,
    ):
        archive.extractall(target, filter="fully_trusted")


def check_files(packed: dict[str, Any], root: Path) -> None:
    """Raises Refused naming the first file that is not what the manifest lists."""
    with ThreadPoolExecutor() as pool:
        paths = sorted(packed["files"])
        for path, digest in zip(paths, pool.map(lambda path: sha256(root / path), paths), strict=True):
            if digest != packed["files"][path]:
                raise Refused(DAMAGED, f"{path} was not written as it was packed: look at the disk")


def settle(root: Path, final: Path) -> None:
    """Make the engine's environment stand on this host's Python, and write down where its CUDA libraries are."""
    engine, base = root / "engine", Path(sys.base_prefix)
    (engine / "bin").mkdir(parents=True, exist_ok=True)
    interpreter = base / "bin" / "python3.12"
    (engine / "bin" / "python").symlink_to(interpreter if interpreter.is_file() else Path(sys.executable).resolve())
    (engine / "pyvenv.cfg").write_text(f"home = {base / 'bin'}\ninclude-system-site-packages = false\n")
    own = sorted((root / SITE / "nvidia").glob("*/lib"))
    hosts = sorted((Path(sysconfig.get_path("purelib")) / "nvidia").glob("*/lib"))
    libraries = [str(final / path.relative_to(root)) for path in own] + [str(path) for path in hosts]
    (root / "host.json").write_text(json.dumps({"libraries": libraries}, indent=1) + "\n")
    launcher = root / "bin" / "qualify"
    launcher.parent.mkdir(exist_ok=True)
    launcher.write_text(LAUNCHER)
    launcher.chmod(0o755)
    # Else every process of every boot would compile thousands of modules again. Some of them are no whole programs.
    warnings.simplefilter("ignore", SyntaxWarning)
    compileall.compile_dir(
        str(root),
        quiet=2,
        workers=0,
        stripdir=str(root),
        prependdir=str(final),
        invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH,
    )


def unpack(folder: Path, target: Path) -> None:
    """Raises Refused, or OSError where the disk does not hold it."""
    if target.exists():
        raise Refused(USAGE, f"{target} exists: name a new folder")
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
    except OSError:
        raise Refused(MISSING, f"manifest.json is missing in {folder}: copy it here again") from None
    except ValueError:
        raise Refused(DAMAGED, "manifest.json is damaged: copy it here again") from None
    check_host(manifest)
    archives = manifest["archives"]
    check_parts(folder, [part for packed in archives for part in packed["parts"]])
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        for packed in archives:
            extract(folder, packed, scratch)
            check_files(packed, scratch)
        settle(scratch, target)
        scratch.chmod(0o755)
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit((__doc__ or "").strip())
    target = Path(sys.argv[1]).absolute()
    try:
        unpack(Path(__file__).resolve().parent, target)
    except Refused as refused:
        print(f"unpack: {refused}", file=sys.stderr)
        sys.exit(refused.status)
    print(f"unpacked; run {target / 'bin' / 'qualify'}")


if __name__ == "__main__":
    main()
