# SPDX-License-Identifier: Apache-2.0
"""The offline bundle, with a small made-up engine in place of the real one of 4 GB."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from qualify import bundle, unpack

PART_BYTES = 40_000
FILES = {
    f"{unpack.SITE}/vllm/__init__.py": b"NAME = 'vllm'\n",
    f"{unpack.SITE}/nvidia/nccl/lib/libnccl.so.2": bytes(range(256)) * 4000,
    f"{unpack.SITE}/big.bin": b"".join(hashlib.sha256(bytes([i % 256, i // 256])).digest() for i in range(4000)),
    "engine/bin/ninja": b"\x7fELF",
}


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, Path]:
    found = {}
    for name, content in FILES.items():
        path = tmp_path / "sources" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        found[name] = path
    found["engine/bin/ninja"].chmod(0o755)
    return found


def make(sources: dict[str, Path], folder: Path, python: str | None = None) -> Path:
    folder.mkdir()
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    about = {"platform": f"{sys.platform}-{platform.machine()}", "python": python or version, "harness": "0"}
    packed = bundle.pack("engine", sources, folder, PART_BYTES, lambda _: None)
    bundle._write_manifest(folder, {**about, "archives": [packed, bundle._pack_harness(folder, 10**6, lambda _: None)]})
    return folder


def run(folder: Path, target: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-I", str(folder / "unpack.py"), str(target)], capture_output=True, text=True, check=False
    )


def test_what_is_packed_comes_out(sources: dict[str, Path], tmp_path: Path) -> None:
    """Every file returns with its bytes and its right to run, next to the harness and a launcher."""
    target = tmp_path / "engine"
    done = run(make(sources, tmp_path / "out"), target)
    assert done.returncode == 0, done.stderr
    assert {name: (target / name).read_bytes() for name in FILES} == FILES
    assert (target / "engine/bin/ninja").stat().st_mode & 0o111
    assert (target / "harness/qualify/cli.py").is_file()
    assert (target / "bin/qualify").stat().st_mode & 0o111
    assert (target / "engine/pyvenv.cfg").read_text().startswith("home = ")
    libraries = json.loads((target / "host.json").read_text())["libraries"]
    assert libraries[0] == str(target / unpack.SITE / "nvidia/nccl/lib")


def test_parts_have_the_chosen_size_and_a_digest(sources: dict[str, Path], tmp_path: Path) -> None:
    """All but the last part are as large as asked for, and the manifest names size and digest of each."""
    folder = make(sources, tmp_path / "out")
    parts = json.loads((folder / "manifest.json").read_text())["archives"][0]["parts"]
    assert len(parts) > 2
    assert {part["size"] for part in parts[:-1]} == {PART_BYTES}
    assert all(unpack.sha256(folder / part["name"]) == part["sha256"] for part in parts)


def test_equal_inputs_give_equal_parts(sources: dict[str, Path], tmp_path: Path) -> None:
    """Times and the order of the disk do not show in the parts."""
    one = make(sources, tmp_path / "one")
    for path in sources.values():
        path.touch()
    other = make(dict(reversed(sources.items())), tmp_path / "other")
    assert [path.read_bytes() for path in sorted(one.glob("engine.*"))] == [
        path.read_bytes() for path in sorted(other.glob("engine.*"))
    ]


@pytest.mark.parametrize(
    ("harm", "status", "words"),
    [
        (lambda folder: (folder / "engine.01").unlink(), unpack.MISSING, "engine.01 is missing"),
        (lambda folder: flip(folder / "engine.01"), unpack.DAMAGED, "engine.01 is damaged"),
        (lambda folder: (folder / "harness.00").write_bytes(b""), unpack.DAMAGED, "harness.00 is damaged"),
        (lambda folder: (folder / "manifest.json").unlink(), unpack.MISSING, "manifest.json is missing"),
        (lambda folder: (folder / "manifest.json").write_text("{"), unpack.DAMAGED, "manifest.json is damaged"),
    ],
)
def test_damage_is_named_and_leaves_nothing(
    sources: dict[str, Path], tmp_path: Path, harm: object, status: int, words: str
) -> None:
    """A missing and a damaged file have exit statuses of their own, and nothing is left half unpacked."""
    folder = make(sources, tmp_path / "out")
    assert callable(harm)
    harm(folder)
    done = run(folder, tmp_path / "there" / "engine")
    assert (done.returncode, words in done.stderr) == (status, True), done.stderr
    assert not list((tmp_path / "there").glob("*"))


def test_another_python_is_refused(sources: dict[str, Path], tmp_path: Path) -> None:
    """The packages are built for one Python; another one is named before anything is unpacked."""
    done = run(make(sources, tmp_path / "out", python="2.7"), tmp_path / "engine")
    assert done.returncode == unpack.HOST
    assert "needs Python 2.7" in done.stderr


def test_an_existing_folder_is_never_touched(sources: dict[str, Path], tmp_path: Path) -> None:
    """Unpacking into a folder that is there is a wrong usage."""
    (tmp_path / "engine").mkdir()
    assert run(make(sources, tmp_path / "out"), tmp_path / "engine").returncode == unpack.USAGE
    assert not list((tmp_path / "engine").iterdir())


def test_the_harness_is_renewed_alone(sources: dict[str, Path], tmp_path: Path) -> None:
    """A new harness leaves the engine's parts as they are, and the bundle stays whole."""
    folder = make(sources, tmp_path / "out")
    before = {path.name: path.read_bytes() for path in folder.glob("engine.*")}
    bundle.renew_harness(folder, 10**6, lambda _: None)
    assert {path.name: path.read_bytes() for path in folder.glob("engine.*")} == before
    assert run(folder, tmp_path / "engine").returncode == 0


def test_pruned_files_are_listed(tmp_path: Path) -> None:
    """What is left out on purpose is told file by file; everything else stays."""
    for name in ("torch/include/a/b.h", "vllm/_qutlass_C.abi3.so", "vllm/_C.abi3.so"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert bundle.prune(tmp_path) == ["torch/include/a/b.h", "vllm/_qutlass_C.abi3.so"]
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["_C.abi3.so"]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
