# SPDX-License-Identifier: Apache-2.0
"""The wheel and its libraries: one wheel for all, stable symbols only, machine code for every card."""

from __future__ import annotations

import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import build_backend
import pytest
from vllm_qout import __version__, ops
from vllm_qout.machine_code import Code, machine_code

STABLE = re.compile(r"^(aoti_torch_|torch_)")
FOREIGN = re.compile(r"^_Z.*(3c10|2at\d|5torch(?!6stable))")
CARDS = (90, 100, 120)


def cuobjdump() -> Path | None:
    """The tool that comes with nvcc."""
    nvcc = build_backend.find_nvcc()
    tool = nvcc.with_name("cuobjdump") if nvcc else None
    return tool if tool is not None and tool.is_file() else None


needs_cuda_library = pytest.mark.skipif(
    not ops.CUDA_LIBRARY.is_file() or cuobjdump() is None, reason="needs cuobjdump beside nvcc, and the CUDA library"
)


def undefined(library: Path) -> list[str]:
    """Names that a library takes from others, without their versions."""
    command = ["nm", "-D", "--undefined-only", "--format=posix", str(library)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [line.split()[0].partition("@")[0] for line in lines]


@pytest.mark.parametrize("library", [ops.LIBRARY, ops.CUDA_LIBRARY], ids=lambda path: path.name)
def test_only_stable_symbols_of_torch_are_used(library):
    """What is taken from torch are its stable C functions, never a C++ symbol."""
    if not library.is_file():
        pytest.skip(f"{library.name} is not built")
    names = undefined(library)
    assert any(STABLE.match(name) for name in names)
    assert [name for name in names if FOREIGN.search(name) and "qout" not in name] == []


@pytest.mark.parametrize("library", [ops.LIBRARY, ops.CUDA_LIBRARY], ids=lambda path: path.name)
def test_abi_audit_calls_the_libraries_stable(library):
    """torch-abi-audit finds no use of torch outside its stable ABI."""
    audit = shutil.which("torch-abi-audit")
    if audit is None or not library.is_file():
        pytest.skip("needs torch-abi-audit and the library")
    result = subprocess.run([audit, "--check", "torch", str(library)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
    assert "Torch ABI:   STABLE" in result.stdout


def test_cpu_library_needs_no_cuda():
    """The library with schemas, checks and CPU kernels loads where nothing of CUDA is installed."""
    dynamic = subprocess.run(["readelf", "-d", str(ops.LIBRARY)], capture_output=True, text=True, check=True).stdout
    assert "cuda" not in dynamic.lower()


@needs_cuda_library
def test_machine_code_for_every_card_and_no_ptx():
    """Each promised card has SASS, nothing is left to a JIT; the pure reader agrees with cuobjdump."""
    listing = subprocess.run(
        [cuobjdump(), "--list-elf", "--list-ptx", str(ops.CUDA_LIBRARY)], capture_output=True, text=True, check=False
    ).stdout
    assert re.findall(r"\.(sm_\w+)\.cubin", listing) == ["sm_90a", "sm_100a", "sm_120a"]
    assert ".ptx" not in listing
    assert machine_code(ops.CUDA_LIBRARY) == [Code(card, "sass") for card in CARDS]


@needs_cuda_library
def test_no_kernel_spills():
    """No kernel keeps registers in local memory, on any card."""
    usage = subprocess.run(
        [cuobjdump(), "--dump-resource-usage", str(ops.CUDA_LIBRARY)], capture_output=True, text=True, check=True
    ).stdout
    kernels = re.findall(r"STACK:(\d+) .*LOCAL:(\d+)", usage)
    assert len(kernels) == 4 * len(CARDS)
    assert set(kernels) == {("0", "0")}


def test_library_without_device_code_has_no_images():
    """The reader finds nothing in the CPU library."""
    assert machine_code(ops.LIBRARY) == []


def test_wheel(tmp_path, monkeypatch):
    """One wheel for every Python 3, with its library, plugin entry point and a true RECORD; no CUDA needed."""
    monkeypatch.setenv("VLLM_QOUT_CUDA", "0")
    name = build_backend.build_wheel(str(tmp_path))
    assert name == f"vllm_qout-{__version__}-py3-none-linux_x86_64.whl"
    with zipfile.ZipFile(tmp_path / name) as wheel:
        info = f"vllm_qout-{__version__}.dist-info"
        names = wheel.namelist()
        assert "vllm_qout/libvllm_qout.so" in names
        assert not [entry for entry in names if "cuda" in entry]
        metadata = wheel.read(f"{info}/METADATA").decode()
        assert "Requires-Dist: torch>=2.11\n" in metadata
        assert "Requires-Python: >=3.10\n" in metadata
        entry_points = wheel.read(f"{info}/entry_points.txt").decode()
        assert entry_points == "[vllm.general_plugins]\nvllm_qout = vllm_qout.plugin:register\n"
        record = wheel.read(f"{info}/RECORD").decode().splitlines()
        for line in record[:-1]:
            path = line.split(",")[0]
            assert build_backend._record_line(path, wheel.read(path)) == line
        assert {line.split(",")[0] for line in record} == set(names)


def test_missing_tools_stop_the_build_with_one_line(monkeypatch, tmp_path):
    """No compiler, a wrong switch, or no nvcc where CUDA is demanded: one line and a remedy."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(SystemExit, match="no-such-compiler: not found; install a C"):
        build_backend.build_cpu(tmp_path)
    monkeypatch.setenv("VLLM_QOUT_CUDA", "yes")
    with pytest.raises(SystemExit, match="VLLM_QOUT_CUDA: got 'yes'; needs auto, 0 or 1"):
        build_backend.build_libraries(tmp_path)
    monkeypatch.setenv("VLLM_QOUT_CUDA", "1")
    monkeypatch.setattr(build_backend, "find_nvcc", lambda: None)
    with pytest.raises(SystemExit, match=r"nvcc: not found; install requirements/cuda-build.txt"):
        build_backend.build_libraries(tmp_path)
