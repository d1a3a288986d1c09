# SPDX-License-Identifier: Apache-2.0
"""Builds the libraries and the wheel of vllm-qout: a PEP 517 backend and a small command.

`python build_backend.py` compiles into vllm_qout/ for use from the checkout; pip calls the hooks.
Needs g++ (or $CXX) and an importable torch for its headers; the CUDA library also needs nvcc 13.
Environment: VLLM_QOUT_CUDA=auto|0|1 (auto: build it where nvcc is found), VLLM_QOUT_NVCC=/path/to/nvcc,
VLLM_QOUT_ARCHES=90a,100a,120a (cards to make machine code for).
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
PACKAGE = ROOT / "vllm_qout"
TARGET = "0x020b000000000000"  # torch 2.11, the oldest release that the libraries load in
TAG = "py3-none-linux_x86_64"
CXX_FLAGS = [
    "-std=c++20", "-O2", "-ftree-vectorize", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off",
    "-Wall", "-Wextra", "-Wno-unused-parameter", f"-DTORCH_TARGET_VERSION={TARGET}",
]  # fmt: skip


class BuildError(SystemExit):
    """Stops the build with one line."""

    def __init__(self, text: str) -> None:
        super().__init__(f"vllm-qout build: {text}")


def _run(command: list[str]) -> None:
    # Relative source paths keep the machine's directories out of the error messages.
    if subprocess.run(command, cwd=ROOT, check=False).returncode:
        raise BuildError(f"{Path(command[0]).name} failed; its messages are above")


def _compiler() -> str:
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise BuildError(f"{compiler}: not found; install a C++20 compiler, or name one in CXX")
    return compiler


def _torch() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise BuildError("torch: not importable; install torch 2.11 or newer first (a CPU build will do)")
    return Path(spec.submodule_search_locations[0])


def find_nvcc() -> Path | None:
    """nvcc named by VLLM_QOUT_NVCC, of the NVIDIA wheels beside this Python, or on PATH."""
    named = os.environ.get("VLLM_QOUT_NVCC")
    if named:
        return Path(named)
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        candidate = Path(folder) / "cu13" / "bin" / "nvcc"
        if candidate.is_file():
            return candidate
    found = shutil.which("nvcc")
    return Path(found) if found else None


def _cuda_compiler() -> Path | None:
    choice = os.environ.get("VLLM_QOUT_CUDA", "auto")
    if choice not in ("auto", "0", "1"):
        raise BuildError(f"VLLM_QOUT_CUDA: got {choice!r}; needs auto, 0 or 1")
    nvcc = None if choice == "0" else find_nvcc()
    if choice == "1" and nvcc is None:
        raise BuildError("nvcc: not found; install requirements/cuda-build.txt, or name it in VLLM_QOUT_NVCC")
    return nvcc


def build_cpu(folder: Path) -> Path:
    """Compile libvllm_qout.so (schemas, checks, CPU kernels) into `folder`."""
    torch = _torch()
    library = folder / "libvllm_qout.so"
    _run([
        _compiler(), *CXX_FLAGS, "-shared", "-isystem", str(torch / "include"),
        "csrc/validation.cpp", "csrc/cpu.cpp", "-o", str(library),
        f"-L{torch / 'lib'}", "-ltorch_cpu", "-Wl,-soname,libvllm_qout.so", "-s",
    ])  # fmt: skip
    return library


def build_cuda(folder: Path, nvcc: Path) -> Path:
    """Compile libvllm_qout_cuda.so into `folder`, beside the CPU library that it links to."""
    torch, toolkit, compiler = _torch(), nvcc.resolve().parent.parent, _compiler()
    library = folder / "libvllm_qout_cuda.so"
    arches = os.environ.get("VLLM_QOUT_ARCHES", "90a,100a,120a").split(",")
    targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in arches]
    include = toolkit / "include"
    with tempfile.TemporaryDirectory() as scratch:
        kernels, stub = Path(scratch, "launch.o"), Path(scratch, "libtorch_cuda.so")
        _run([
            str(nvcc), "-std=c++20", "-O3", *targets, f"-I{include}", "-ccbin", compiler,
            "-Xcompiler", "-fPIC,-fvisibility=hidden", "-c", "csrc/launch.cu", "-o", str(kernels),
        ])  # fmt: skip
        # A CPU build of torch has no libtorch_cuda.so to name as needed, so an empty one stands in.
        _run([compiler, "-shared", "-fPIC", "-x", "c++", "/dev/null", "-o", str(stub),
              "-Wl,-soname,libtorch_cuda.so"])  # fmt: skip
        _run([
            compiler, *CXX_FLAGS, "-DUSE_CUDA", "-shared", "-isystem", str(torch / "include"),
            "-isystem", str(include), "csrc/cuda.cpp", str(kernels),
            "-o", str(library), "-Wl,-soname,libvllm_qout_cuda.so", "-s",
            f"-L{folder}", "-l:libvllm_qout.so", f"-L{torch / 'lib'}", "-ltorch_cpu",
            "-Wl,--no-as-needed", f"-L{scratch}", "-ltorch_cuda",
            f"-L{toolkit / 'lib'}", f"-L{toolkit / 'lib64'}", "-l:libcudart.so.13", "-Wl,-rpath,$ORIGIN",
        ])  # fmt: skip
    return library


def build_libraries(folder: Path) -> list[Path]:
    """Compile what this machine can; returns the libraries made."""
    nvcc = _cuda_compiler()
    libraries = [build_cpu(folder)]
    if nvcc is not None:
        libraries.append(build_cuda(folder, nvcc))
    return libraries


def _project() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    match = re.search(r'^__version__ = "(.+)"$', (PACKAGE / "__init__.py").read_text(), re.MULTILINE)
    if match is None:
        raise BuildError("vllm_qout/__init__.py: no __version__ line")
    project["version"] = match[1]
    return project


def _metadata(project: dict[str, Any]) -> str:
    lines = [
        "Metadata-Version: 2.4",
        f"Name: {project['name']}",
        f"Version: {project['version']}",
        f"Summary: {project['description']}",
        f"License-Expression: {project['license']}",
        f"Requires-Python: {project['requires-python']}",
        *(f"Requires-Dist: {dependency}" for dependency in project["dependencies"]),
    ]
    return "\n".join(lines) + "\n"


def _entry_points(project: dict[str, Any]) -> str:
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in entries.items())]
    return "\n".join(lines) + "\n"


def _record_line(name: str, data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(data)}"


def _write_wheel(wheel: Path, files: dict[str, bytes], info: str) -> None:
    record = [_record_line(name, data) for name, data in files.items()] + [f"{info}/RECORD,,"]
    files = files | {f"{info}/RECORD": ("\n".join(record) + "\n").encode()}
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name)  # dated 1980, so that equal inputs give equal wheels
            entry.external_attr = (0o755 if name.endswith(".so") else 0o644) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)


def build_wheel(
    wheel_directory: str,
    config_settings: dict[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """PEP 517 hook: compile, and write one wheel for every Python from 3.10 on."""
    project = _project()
    name = project["name"].replace("-", "_")
    info = f"{name}-{project['version']}.dist-info"
    files = {f"vllm_qout/{path.name}": path.read_bytes() for path in sorted(PACKAGE.glob("*.py"))}
    with tempfile.TemporaryDirectory() as scratch:
        for library in build_libraries(Path(scratch)):
            files[f"vllm_qout/{library.name}"] = library.read_bytes()
    wheel_file = f"Wheel-Version: 1.0\nGenerator: vllm-qout\nRoot-Is-Purelib: false\nTag: {TAG}\n"
    files |= {
        f"{info}/METADATA": _metadata(project).encode(),
        f"{info}/WHEEL": wheel_file.encode(),
        f"{info}/entry_points.txt": _entry_points(project).encode(),
    }
    wheel = f"{name}-{project['version']}-{TAG}.whl"
    _write_wheel(Path(wheel_directory, wheel), files, info)
    return wheel


if __name__ == "__main__":
    for built in build_libraries(PACKAGE):
        sys.stdout.write(f"built {built.relative_to(ROOT)}\n")
