# SPDX-License-Identifier: Apache-2.0
"""Loading: when the plugin registers itself, when it refuses and how, and that it is silent otherwise.

Runs against the installed vLLM; only its platform and our CUDA library are stand-ins.
"""

import importlib.metadata
import json
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

vllm = pytest.importorskip("vllm")

from vllm_qout import activation, ops, pins, plugin  # noqa: E402

PACKAGE = Path(vllm.__file__).parent


@pytest.fixture
def gpu_platform(monkeypatch):
    """A process that looks like one with a GPU and a CUDA build of ours; registrations are undone."""
    from vllm import ModelRegistry
    from vllm.platforms import current_platform

    monkeypatch.delenv("VLLM_QOUT", raising=False)
    monkeypatch.setattr(current_platform, "is_cuda_alike", lambda: True, raising=False)
    monkeypatch.setattr(ops, "CUDA_LOADED", True)
    monkeypatch.setattr(plugin, "_process", plugin._Process())
    monkeypatch.setattr(activation, "_worker", activation._Worker())
    before = dict(ModelRegistry.models)
    yield ModelRegistry.models
    ModelRegistry.models.clear()
    ModelRegistry.models.update(before)


def test_pins_match_the_installed_vllm():
    """Every pinned function has its pinned text in vLLM 0.32.0."""
    seen = pins.check_files(PACKAGE)
    assert len(seen) == len(pins.PINS) == len({pin.name for pin in pins.PINS})


def test_pinned_text_is_what_inspect_gives():
    """The text cut from the file is the text of the live function, so both pin checks agree."""
    import inspect

    from vllm.v1.worker.workspace import WorkspaceManager

    text = (PACKAGE / "v1/worker/workspace.py").read_text()
    cut = pins.source_of(text, "WorkspaceManager.get_persistent")
    assert cut == inspect.getsource(WorkspaceManager.get_persistent)


def patched_package(tmp_path, pin, edit):
    path = tmp_path / pin.file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(edit((PACKAGE / pin.file).read_text()))
    return tmp_path


@pytest.mark.parametrize("pin", pins.PINS, ids=lambda pin: pin.qualname)
def test_a_changed_source_is_refused(tmp_path, pin):
    """One changed character in a pinned function is refused, with its name, both hashes and the remedy."""
    source = pins.source_of((PACKAGE / pin.file).read_text(), pin.qualname)
    package = patched_package(tmp_path, pin, lambda text: text.replace(source, source.rstrip() + "  # patched\n"))
    with pytest.raises(pins.PinMismatch) as caught:
        pins.check_files(package, [pin])
    message = str(caught.value)
    assert f"{pin.name}: got " in message
    assert f"needs {pin.sha256}" in message
    assert "VLLM_QOUT=0" in message
    assert "\n" not in message


def test_a_missing_file_or_function_is_refused(tmp_path):
    """vLLM without the file or without the function says so instead of a traceback."""
    pin = pins.ATTENTION_PIN
    with pytest.raises(pins.PinMismatch, match="got no such file"):
        pins.check_files(tmp_path, [pin])
    package = patched_package(tmp_path, pin, lambda text: text.replace("def _fused_qnorm", "def _renamed"))
    with pytest.raises(pins.PinMismatch, match="got no such function"):
        pins.check_files(package, [pin])


def test_a_function_replaced_at_run_time_is_refused():
    """The live check sees a replacement made in memory by other code."""

    def _fused_qnorm_rope_kv_insert(self, q, kv, positions, attn_metadata):
        return q

    with pytest.raises(pins.PinMismatch, match=r"_fused_qnorm_rope_kv_insert: got [0-9a-f]{64}, needs 2faf4678"):
        pins.check_object(pins.ATTENTION_PIN, _fused_qnorm_rope_kv_insert)
    with pytest.raises(pins.PinMismatch, match="got no source"):
        pins.check_object(pins.ATTENTION_PIN, len)


def test_registers_its_three_architectures_and_no_other(gpu_platform):
    """Only the DeepSeek-V4 architectures change, as lazy references; a second call changes nothing."""
    before = dict(gpu_platform)
    plugin.register()
    registered = dict(gpu_platform)
    plugin.register()
    assert gpu_platform == registered
    changed = {name for name in registered if registered[name] is not before.get(name)}
    assert changed == set(plugin.ARCHITECTURES)
    for name in changed:
        assert f"{registered[name].module_name}:{registered[name].class_name}" == plugin.ARCHITECTURES[name]


def test_other_models_leave_no_trace(gpu_platform, caplog):
    """In a process that serves another model the plugin logs nothing and reports itself inactive."""
    with caplog.at_level("INFO"):
        plugin.register()
        from vllm import ModelRegistry

        assert "LlamaForCausalLM" in ModelRegistry.get_supported_archs()
    report = plugin.report()
    assert not [record for record in caplog.records if record.name.startswith("vllm.qout")]
    assert (report["active"], report["reason"]) == (False, "no DeepSeek-V4 model in this process")
    assert report["sourceHashes"] == {pin.name: pin.sha256 for pin in pins.PINS}
    json.dumps(report)


def test_switched_off_is_stock(gpu_platform, monkeypatch):
    """VLLM_QOUT=0 leaves the registry as it was, even if sources would not match."""
    monkeypatch.setenv("VLLM_QOUT", "0")
    monkeypatch.setattr(plugin, "check_files", pytest.fail)
    before = dict(gpu_platform)
    plugin.register()
    assert gpu_platform == before
    assert plugin.report()["reason"] == "VLLM_QOUT=0"


def test_a_switch_that_is_neither_on_nor_off_is_refused(gpu_platform, monkeypatch):
    """A misspelt switch must not silently mean on or off."""
    monkeypatch.setenv("VLLM_QOUT", "off")
    with pytest.raises(plugin.PluginError, match="got VLLM_QOUT='off', needs 0 or 1"):
        plugin.register()


def test_on_a_platform_without_the_seam_nothing_is_registered(monkeypatch):
    """The CPU platform has its own attention method; the plugin stays out and says why."""
    monkeypatch.delenv("VLLM_QOUT", raising=False)
    monkeypatch.setattr(plugin, "_process", plugin._Process())
    monkeypatch.setattr(plugin, "check_files", pytest.fail)
    plugin.register()
    assert plugin.report()["reason"].startswith("platform cpu")


@pytest.mark.parametrize("version", ["0.31.0", "0.32.1", "0.33.0rc1", "dev", "0.32.0.post1"])
def test_another_vllm_version_is_refused(gpu_platform, monkeypatch, version):
    """Any other release stops the process with both versions and the remedy."""
    monkeypatch.setattr(vllm, "__version__", version)
    with pytest.raises(plugin.PluginError, match=rf"got vLLM {version}, needs 0\.32\.0; install .* VLLM_QOUT=0"):
        plugin.register()


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cu130"])
def test_builds_of_the_pinned_version_are_accepted(version):
    """A local build suffix is the same release."""
    plugin.check_version(version)


def test_a_patched_vllm_is_refused_at_registration(gpu_platform, monkeypatch):
    """A source that differs stops `register` itself, before anything is in the registry."""
    before = dict(gpu_platform)
    wrong = (replace(pins.ATTENTION_PIN, sha256="0" * 64),)
    monkeypatch.setattr(plugin, "check_files", lambda package: pins.check_files(package, wrong))
    with pytest.raises(pins.PinMismatch, match="needs 0000"):
        plugin.register()
    assert gpu_platform == before


def test_a_wheel_without_cuda_is_refused(gpu_platform, monkeypatch):
    """On a GPU platform the CUDA operators must be there."""
    monkeypatch.setattr(ops, "CUDA_LOADED", False)
    with pytest.raises(plugin.PluginError, match=r"needs libvllm_qout_cuda\.so; install .* VLLM_QOUT=0"):
        plugin.register()


def test_a_library_that_cannot_be_loaded_is_refused(gpu_platform, monkeypatch):
    """A library for another torch stops `register`, where vLLM does not swallow the exception."""
    monkeypatch.setitem(sys.modules, "vllm_qout.ops", None)
    monkeypatch.delattr("vllm_qout.ops")
    with pytest.raises(plugin.PluginError, match="VLLM_QOUT=0"):
        plugin.register()


def distribution(place, name="vllm-qout", entry="qout = vllm_qout.plugin:register"):
    info = place / f"{name.replace('-', '_')}-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{entry}\n")
    return importlib.metadata.Distribution.at(info)


def test_a_second_copy_is_refused(tmp_path):
    """Two places that provide the plugin are an error that names both; the same place twice is not."""
    first, second = distribution(tmp_path / "a"), distribution(tmp_path / "b")
    renamed = distribution(tmp_path / "a", name="vllm-qout-fork")
    other = distribution(tmp_path / "c", name="other", entry="other = other.plugin:register")
    plugin.check_single(plugin.installed_copies([first, first, other]))
    for copies in ([first, second], [first, renamed]):
        with pytest.raises(plugin.PluginError, match=f"got 2 installed copies .*{tmp_path}.*uninstall"):
            plugin.check_single(plugin.installed_copies(copies))


def in_fresh_process(code):
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout.split()


def test_vllm_finds_and_runs_the_declared_entry_point(tmp_path, monkeypatch):
    """The entry point of our pyproject is one that vLLM's own plugin loader loads and calls."""
    project = tomllib.loads((Path(plugin.__file__).parents[1] / "pyproject.toml").read_text())["project"]
    ((name, value),) = project["entry-points"][plugin.GROUP].items()
    distribution(tmp_path, entry=f"{name} = {value}")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(plugin.__file__).parents[1]}")
    monkeypatch.delenv("VLLM_QOUT", raising=False)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    reason = in_fresh_process(
        "from vllm.plugins import load_general_plugins\n"
        "load_general_plugins()\n"
        "from vllm_qout import plugin\n"
        "print(plugin.report()['reason'])"
    )
    assert reason[:2] == ["platform", "cpu:"]


def test_the_entry_module_imports_nothing_heavy():
    """A failing import of the entry point would be ignored by vLLM, so it may only need the standard library."""
    loaded = in_fresh_process(
        "import sys, vllm_qout.plugin\n"
        "print(*[name for name in ('torch', 'vllm', 'triton', 'vllm_qout.ops') if name in sys.modules])"
    )
    assert loaded == []


def test_registration_imports_no_vllm_model():
    """`register` runs before vLLM switches breakable graphs on; importing its model code would freeze them off."""
    loaded = in_fresh_process(
        "import sys\n"
        "from vllm.platforms import current_platform\n"
        "current_platform.is_cuda_alike = lambda: True\n"
        "from vllm_qout import ops, plugin\n"
        "ops.CUDA_LOADED = True\n"
        "plugin.register()\n"
        "from vllm import ModelRegistry\n"
        "assert ModelRegistry.models['DeepseekV4ForCausalLM'].module_name == 'vllm_qout.models'\n"
        "print(*[n for n in sys.modules if n.startswith('vllm.models') or n == 'vllm_qout.models'])"
    )
    assert loaded == []
