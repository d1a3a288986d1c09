# SPDX-License-Identifier: Apache-2.0
"""The offline bundle: the locked CUDA engine, the plugin and this harness for a GPU host without a network.

`manifest.json`, `unpack.py` and the parts are all that travels; docs/gpu-host.md tells how. Equal inputs give equal
parts: the archive is sorted, its times are 0, and every block is compressed on its own.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from lzma import compress
from pathlib import Path

import qualify
from qualify.environment import INSTALLER, KERNELS, ROOT, lock_digest, version_with_venv
from qualify.errors import PreflightError
from qualify.host import SOURCE, source_record
from qualify.targets.process import Supervised, last_lines
from qualify.unpack import SITE

ENGINE_LOCK = ROOT / "requirements" / "engine-cuda.txt"
COMPILER_LOCK = KERNELS / "requirements" / "cuda-build.txt"

PYTHON = "3.12"
"""Of the wheels in the lock, and so of the host."""

PLATFORM = "linux-x86_64"

PRUNED = {
    "torch/include": "headers: nothing is built against torch on the host",
    "torch/test": "tests",
    "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so": "attention for cards before Hopper",
    "vllm/_qutlass_C.abi3.so": "matrix products for cards after Hopper",
    "vllm/_flashkda_C.abi3.so": "attention of another model",
    "nccl/m2n/lib/cu12": "for CUDA 12",
    "triton/backends/nvidia/lib/cupti/libcupti_static.a": "a static library",
    "triton/backends/nvidia/lib/cupti/libnvperf_host_static.a": "a static library",
    "triton/backends/nvidia/bin/ptxas-blackwell": "assembler for cards after Hopper",
}
"""What the wheels bring and a Hopper host does not load, below site-packages, each with its reason."""

PRUNED_LIST = "pruned.json"
"""In the bundle: the files of PRUNED. They are in the packages' records and not on the host, and that is no damage."""

LOCK = "locks/engine-cuda.txt"
"""In the bundle: the lock that it was made from."""

MANIFEST, UNPACKER = "manifest.json", "unpack.py"

BLOCK_BYTES = 8 << 20
PRESET = 0
"""Of xz: as small as zstd -8 here, and the standard library unpacks it. Higher ones take hours and gain a tenth."""

Progress = Callable[[str], None]


def make(out: Path, python: str, part_bytes: int, progress: Progress) -> Path:
    """Write a bundle into the new folder `out` and return its manifest. Some 10 minutes, 12 GB of disk beside it.

    `python` is a Python 3.12 with pip. Raises PreflightError, with pip's or the compiler's last lines.
    """
    if out.exists():
        raise PreflightError(f"{out} exists", remedy="name a new folder, or renew its harness with --harness-only")
    if version_with_venv(python) != PYTHON:
        raise PreflightError(f"{python} is not a Python {PYTHON} with venv", remedy="name one with --python")
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as name:
            scratch = Path(name)
            engine = _install(scratch, python, progress)
            site = _site(engine)
            _install_plugin(scratch, engine, python, progress)
            pruned = prune(site)
            (scratch / PRUNED_LIST).write_text(json.dumps(pruned, indent=1) + "\n", encoding="utf-8")
            folder = scratch / "out"
            folder.mkdir()
            packed = pack("engine", engine_files(site, engine, scratch / PRUNED_LIST), folder, part_bytes, progress)
            _write_manifest(folder, {**_about(site), "archives": [packed, _pack_harness(folder, part_bytes, progress)]})
            folder.rename(out)
    except OSError as error:
        raise PreflightError(
            f"the bundle cannot be made: {error}", remedy="free space or name another --out"
        ) from error
    return out / MANIFEST


def renew_harness(out: Path, part_bytes: int, progress: Progress) -> Path:
    """Put today's harness into the bundle in `out`; the engine's parts stay. Raises PreflightError."""
    try:
        manifest = json.loads((out / MANIFEST).read_bytes())
        manifest["archives"][1] = _pack_harness(out, part_bytes, progress)
        manifest["harness"] = qualify.__version__
        _write_manifest(out, manifest)
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise PreflightError(f"{out} is no whole bundle: {error}", remedy="make it anew") from None
    return out / MANIFEST


def _pack_harness(folder: Path, part_bytes: int, progress: Progress) -> dict[str, object]:
    """This package, and which revision it is: on the host there is no repository that could tell."""
    package = Path(qualify.__file__).parent
    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / SOURCE
        source.write_text(source_record(package).model_dump_json(indent=1) + "\n", encoding="utf-8")
        files = {f"harness/qualify/{path.relative_to(package).as_posix()}": path for path in _files(package)}
        return pack("harness", files | {f"harness/{SOURCE}": source}, folder, part_bytes, progress)


def _about(site: Path) -> dict[str, object]:
    """What the manifest says beside the archives."""
    versions = dict(path.name.removesuffix(".dist-info").rsplit("-", 1) for path in sorted(site.glob("*.dist-info")))
    return {
        "harness": qualify.__version__,
        "platform": PLATFORM,
        "python": PYTHON,
        "lockDigest": lock_digest((ENGINE_LOCK,)),
        "versions": versions,
        "pruned": PRUNED,
    }


def _site(engine: Path) -> Path:
    return engine / "lib" / f"python{PYTHON}" / "site-packages"


def _install(scratch: Path, python: str, progress: Progress) -> Path:
    """A virtual environment with the locked packages and nothing else. pip's own settings name the index and folders
    of wheels."""
    engine = scratch / "engine"
    progress("installing the locked engine")
    _run([python, "-m", "venv", "--without-pip", str(engine)], scratch, "no virtual environment")
    pip = [python, "-m", "pip", "--python", str(engine / "bin" / "python"), "install", *PIP, "-r", str(ENGINE_LOCK)]
    _run(pip, scratch, f"pip could not install {ENGINE_LOCK.name}")
    return engine


PIP = ("--require-hashes", "--no-deps", "--only-binary", ":all:", "--no-compile", "--no-input", "--quiet")


def _install_plugin(scratch: Path, engine: Path, python: str, progress: Progress) -> None:
    """Build the plugin's wheel, CUDA library included, against the engine's torch, and unpack it into the engine."""
    progress("building the plugin vllm-qout with its CUDA library")
    tools = scratch / "tools"
    pip = [python, "-m", "pip", "install", "--target", str(tools), *PIP, "-r", str(COMPILER_LOCK)]
    _run(pip, scratch, f"pip could not install {COMPILER_LOCK.name}")
    toolkit = tools / "nvidia" / "cu13"
    for program in (*toolkit.glob("bin/*"), *toolkit.glob("nvvm/bin/*")):
        program.chmod(0o755)
    hook = "import sys; sys.path.insert(0, sys.argv[2]); import build_backend; build_backend.build_wheel(sys.argv[1])"
    settings = {"VLLM_QOUT_CUDA": "1", "VLLM_QOUT_NVCC": str(toolkit / "bin" / "nvcc")}
    build = [str(engine / "bin" / "python"), "-c", hook, str(scratch), str(KERNELS)]
    _run(build, scratch, "vllm-qout could not be built", settings)
    site = _site(engine)
    with zipfile.ZipFile(next(scratch.glob("vllm_qout-*.whl"))) as wheel:
        wheel.extractall(site)
    (next(site.glob("vllm_qout-*.dist-info")) / "INSTALLER").write_text(INSTALLER, encoding="utf-8")


def _run(argv: list[str], scratch: Path, failure: str, settings: dict[str, str] | None = None) -> None:
    log = scratch / "log"
    log.unlink(missing_ok=True)
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **(settings or {})}
    with Supervised(argv, log=log, environment=environment, cwd=scratch) as process:
        while (status := process.wait(1.0)) is None:
            pass
    if status != 0:
        raise PreflightError(failure, remedy="see its last lines", tail=last_lines(log, 8))


def prune(site: Path) -> list[str]:
    """Remove what PRUNED names below `site`; the files that are gone, sorted."""
    gone = []
    for name in PRUNED:
        path = site / name
        gone += [file for file in (path, *path.rglob("*")) if file.is_file()]
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    return sorted(path.relative_to(site).as_posix() for path in gone)


def engine_files(site: Path, engine: Path, pruned: Path) -> dict[str, Path]:
    """The engine's files by their names in the bundle: packages, compiled programs, and what they are."""
    found = {f"{SITE}/{path.relative_to(site).as_posix()}": path for path in _files(site)}
    # Scripts begin with the path of the Python that installed them, and nothing here calls them.
    found |= {f"engine/bin/{path.name}": path for path in (engine / "bin").iterdir() if _is_program(path)}
    return found | {LOCK: ENGINE_LOCK, PRUNED_LIST: pruned}


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file() and not _is_cache(path.relative_to(folder)))


def _is_cache(path: Path) -> bool:
    return any(part == "__pycache__" or (part.startswith(".") and part.endswith("_cache")) for part in path.parts)


def _is_program(path: Path) -> bool:
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def pack(name: str, files: dict[str, Path], folder: Path, part_bytes: int, progress: Progress) -> dict[str, object]:
    """Write `files` (name in the bundle to file here) as parts called `name` into `folder`; what the manifest says."""
    blocks, digests = list[int](), dict[str, str]()
    parts = _Parts(folder, name, part_bytes)
    workers = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(workers) as pool:
        for block in _ahead(pool, _cut(_archive(files, digests), BLOCK_BYTES), 2 * workers):
            blocks.append(len(block))
            parts.write(block)
            progress(f"packing {name}, part {len(parts.paths)}")
    parts.close()
    return {
        "parts": [{"name": path.name, "size": path.stat().st_size, "sha256": _sha256(path)} for path in parts.paths],
        "blocks": blocks,
        "files": digests,
    }


def _write_manifest(folder: Path, manifest: dict[str, object]) -> None:
    (folder / MANIFEST).write_text(json.dumps(manifest, separators=(",", ":")) + "\n", encoding="utf-8")
    shutil.copyfile(Path(qualify.__file__).with_name(UNPACKER), folder / UNPACKER)


def _archive(files: dict[str, Path], digests: dict[str, str]) -> Iterator[bytes]:
    """The tar archive in pieces; `digests` takes each file's sha256 as it goes by."""
    for name in sorted(files):
        content = files[name].read_bytes()
        digests[name] = hashlib.sha256(content).hexdigest()
        entry = tarfile.TarInfo(name)
        entry.size = len(content)
        entry.mode = 0o755 if os.access(files[name], os.X_OK) else 0o644
        yield entry.tobuf(tarfile.PAX_FORMAT)
        yield content
        yield bytes(-len(content) % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _cut(pieces: Iterable[bytes], size: int) -> Iterator[bytes]:
    """The same bytes in pieces of `size`, the last one shorter."""
    held = io.BytesIO()
    for piece in pieces:
        view = memoryview(piece)
        while view:
            taken = view[: size - held.tell()]
            held.write(taken)
            view = view[len(taken) :]
            if held.tell() == size:
                yield held.getvalue()
                held = io.BytesIO()
    if held.tell():
        yield held.getvalue()


def _ahead(pool: ThreadPoolExecutor, blocks: Iterator[bytes], count: int) -> Iterator[bytes]:
    """The blocks compressed, in order, `count` of them at work at a time."""
    running: list[Future[bytes]] = [pool.submit(compress, block, preset=PRESET) for block in islice(blocks, count)]
    while running:
        yield running.pop(0).result()
        running += [pool.submit(compress, block, preset=PRESET) for block in islice(blocks, 1)]


class _Parts:
    """Files of one size, the last one smaller, filled one after the other."""

    def __init__(self, folder: Path, name: str, size: int) -> None:
        self.paths: list[Path] = []
        self._folder, self._name, self._size = folder, name, size
        self._file: io.BufferedWriter | None = None

    def write(self, content: bytes) -> None:
        view = memoryview(content)
        while view:
            file = self._open()
            taken = view[: self._size - file.tell()]
            file.write(taken)
            view = view[len(taken) :]

    def _open(self) -> io.BufferedWriter:
        if self._file is None or self._file.tell() == self._size:
            self.close()
            self.paths.append(self._folder / f"{self._name}.{len(self.paths):02d}")
            self._file = self.paths[-1].open("wb")
        return self._file

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
