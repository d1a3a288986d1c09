# SPDX-License-Identifier: Apache-2.0
"""The engine of an unpacked bundle: where it is found, what it is given, and what the evidence says of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from qualify import profiles
from qualify.environment import bundled_engine
from qualify.errors import PreflightError
from qualify.host import SOURCE, observe_harness, source_record
from qualify.inside import introspect
from qualify.profiles import Boot
from qualify.targets import command
from qualify.targets.command import Places


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "locks").mkdir()
    (tmp_path / "locks" / "engine-cuda.txt").write_text("vllm==0.32.0\n")
    (tmp_path / "host.json").write_text(json.dumps({"libraries": ["/a/lib", "/b/lib"]}))
    monkeypatch.setenv("QUALIFY_BUNDLE", str(tmp_path))
    return tmp_path


def test_the_engine_is_that_of_the_bundle(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Python, its lock, its list of pruned files, and this host's CUDA libraries before those of the user."""
    monkeypatch.setenv("LD_LIBRARY_PATH", "/mine")
    env = bundled_engine()
    assert env.python == root / "engine" / "bin" / "python"
    assert env.locks == (root / "locks" / "engine-cuda.txt",)
    assert env.lock_digest is not None
    assert env.pruned == root / "pruned.json"
    assert env.variables["LD_LIBRARY_PATH"] == "/a/lib:/b/lib:/mine"
    assert env.variables["PATH"].startswith(f"{root}/engine/bin:")


def test_without_a_bundle_the_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal says what to do."""
    monkeypatch.delenv("QUALIFY_BUNDLE", raising=False)
    with pytest.raises(PreflightError, match="qualify bundle"):
        bundled_engine()


def test_half_a_bundle_is_refused(root: Path) -> None:
    """The file that is missing is named."""
    (root / "host.json").unlink()
    with pytest.raises(PreflightError, match=r"host\.json"):
        bundled_engine()


def test_a_cuda_engine_gets_its_gpus_and_no_cores() -> None:
    """One GPU a rank by UUID for engine and cache server; CPU threads are not bound."""
    profile = profiles.load("gpu-tp2-ds4-mini")
    boot = next(boot for boot in profile.boots if boot.name == "cold")
    started = (command.engine(profile, boot, places("GPU-a", "GPU-b")), command.cache_server(profile, places("GPU-a")))
    assert [one.environment["CUDA_VISIBLE_DEVICES"] for one in started] == ["GPU-a,GPU-b", "GPU-a"]
    assert "VLLM_CPU_OMP_THREADS_BIND" not in started[0].environment
    assert started[0].environment["NCCL_NVLS_ENABLE"] == "0"


def test_a_cpu_engine_gets_no_gpu() -> None:
    """Nothing about GPUs is set where none was chosen."""
    profile = profiles.load("cpu-smoke")
    started = command.engine(profile, profile.boots[0], places())
    assert not {"CUDA_VISIBLE_DEVICES", *command.CUDA} & set(started.environment)


def test_an_ab_pair_differs_in_the_plugin_only() -> None:
    """The stock boot is the control boot without the plugin."""
    boots = {boot.name: boot for boot in profiles.load("gpu-tp2-ds4-mini").boots}
    assert boots["stock"] == boots["control"].model_copy(update={"name": "stock", "plugin": False})


def places(*gpus: str) -> Places:
    return Places(
        python="python",
        model="m",
        port=1,
        cache_port=2,
        cache_http_port=3,
        storage="s",
        extension_path="x",
        scratch="t",
        compiled="c",
        cpus=(0, 1),
        gpus=gpus,
    )


def test_pruned_files_are_no_damage(tmp_path: Path) -> None:
    """A file that was left out on purpose is not missing; one that is missing without that still is."""
    info = tmp_path / "vllm-1.dist-info"
    info.mkdir()
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "here.py").write_text("")
    empty = "47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU"
    files: dict[str, str | None] = {f"vllm/{name}.py": empty for name in ("here", "pruned", "lost")}
    from importlib.metadata import PathDistribution

    count, lines = introspect.verify(PathDistribution(info), files, frozenset({"vllm/pruned.py"}))
    assert (count, lines) == (2, ["vllm/lost.py (missing)"])


def test_a_bundled_harness_knows_its_revision_until_it_is_changed(tmp_path: Path) -> None:
    """Without a repository the bundle tells the revision; a changed file makes it unclean."""
    package = tmp_path / "qualify"
    package.mkdir()
    (package / "a.py").write_text("A = 1\n")
    source = source_record(package).model_copy(update={"git_commit": "abc", "clean": True})
    (tmp_path / SOURCE).write_text(source.model_dump_json())
    assert (observe_harness(package).git_commit, observe_harness(package).clean) == ("abc", True)
    (package / "a.py").write_text("A = 2\n")
    assert observe_harness(package).clean is False


def test_the_command_is_refused_where_there_is_no_gpu(tmp_path: Path) -> None:
    """`qualify run` of a GPU profile ends with status 4 before it makes anything."""
    argv = [sys.executable, "-m", "qualify", "run", "--profile", "gpu-tp1-ds4-mini", "--out", str(tmp_path / "out")]
    done = subprocess.run(
        argv, capture_output=True, text=True, check=False, env={"PATH": "", "PYTHONPATH": "harness", "HOME": "/"}
    )
    assert done.returncode == 4, done.stderr
    assert not (tmp_path / "out").exists()


def test_boots_of_the_gpu_profiles_are_few() -> None:
    """A boot takes about two minutes, so a qualification stays within ten."""
    boots: tuple[Boot, ...] = profiles.load("gpu-tp2-ds4-mini").boots
    assert len(boots) <= 5
