# SPDX-License-Identifier: Apache-2.0
"""Entry point of the vLLM plugin (`vllm.general_plugins`), loaded in every vLLM process.

Standard library at import time: vLLM logs and ignores a plugin whose import fails, but stops on an exception
inside `register`. `register` imports nothing of `vllm.models`: in the front end that would freeze vLLM's
breakable-graph decorators before the configuration has switched them on.
"""

import importlib.metadata
import importlib.util
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vllm_qout import __version__
from vllm_qout.pins import VLLM_VERSION, check_files

logger = logging.getLogger("vllm.qout")

SWITCH = "VLLM_QOUT"
GROUP = "vllm.general_plugins"
OFF = f"set {SWITCH}=0 to serve without the plugin"

# The vision architecture builds its text model through DeepseekV4ForCausalLM, so it needs no entry.
ARCHITECTURES: Mapping[str, str] = {
    "DeepseekV4ForCausalLM": "vllm_qout.models:DeepseekV4ForCausalLM",
    "DeepSeekV4MTPModel": "vllm_qout.models:DeepSeekV4MTP",
    "DSparkDraftModel": "vllm_qout.models:DSparkDeepseekV4ForCausalLM",
}


@dataclass
class _Process:
    """What `register` did in this process: vLLM calls it once per process, other code may call it again."""

    source_hashes: Mapping[str, str] = field(default_factory=dict)  # empty until registered
    inactive_reason: str = "register() was not called"
    triton_registration: object = None  # the backend lasts as long as this


_process = _Process()


class PluginError(RuntimeError):
    """The plugin refuses to load; the text names what is wrong and a remedy."""


def enabled() -> bool:
    """Whether the switch VLLM_QOUT (1, the default, or 0) is on."""
    value = os.environ.get(SWITCH, "1")
    if value not in ("0", "1"):
        raise PluginError(f"vllm_qout: got {SWITCH}={value!r}, needs 0 or 1")
    return value == "1"


def check_version(version: str) -> None:
    """Refuses every vLLM release but the one whose sources are pinned; local build suffixes do not matter."""
    if version.split("+")[0] != VLLM_VERSION:
        raise PluginError(
            f"vllm_qout {__version__}: got vLLM {version}, needs {VLLM_VERSION}; install that version, or {OFF}"
        )


def installed_copies(distributions: Iterable[importlib.metadata.Distribution]) -> list[str]:
    """Places of the distributions that provide this plugin, each place once."""
    places = {
        str(Path(str(distribution.locate_file(""))).resolve() / distribution.metadata["Name"])
        for distribution in distributions
        if any(point.module == __name__ for point in distribution.entry_points.select(group=GROUP))
    }
    return sorted(places)


def check_single(copies: list[str]) -> None:
    """Refuses a second installed copy, whose code might be another version than the one that runs."""
    if len(copies) > 1:
        raise PluginError(
            f"vllm_qout: got {len(copies)} installed copies ({', '.join(copies)}), needs one; "
            f"uninstall the others, or {OFF}"
        )


def _load_operators() -> None:
    try:
        from vllm_qout import ops
    except ImportError as error:
        raise PluginError(f"vllm_qout: {error}; or {OFF}") from error
    import torch

    if torch.version.hip is not None:
        from vllm_qout import triton_ops

        _process.triton_registration = triton_ops.register()
    elif not ops.CUDA_LOADED:
        raise PluginError(
            f"vllm_qout: got no CUDA operators for torch {torch.__version__}, needs libvllm_qout_cuda.so; "
            f"install a vllm-qout wheel that was built with CUDA, or {OFF}"
        )


def register() -> None:
    """Puts our model classes in vLLM's registry, lazily; raises PluginError or PinMismatch to refuse.

    Does nothing when switched off, on platforms whose attention has no padded query of this kind, and on
    later calls.
    """
    if not enabled():
        _process.inactive_reason = f"{SWITCH}=0"
        logger.info("vllm_qout: off (%s=0), DeepSeek-V4 runs stock", SWITCH)
        return
    if _process.source_hashes:
        return
    import vllm

    check_version(vllm.__version__)
    from vllm.platforms import current_platform

    if not current_platform.is_cuda_alike():
        _process.inactive_reason = f"platform {current_platform.device_type}: its attention classes have their own code"
        return
    check_single(installed_copies(importlib.metadata.distributions()))
    hashes = check_files(_vllm_package())
    _load_operators()
    from vllm import ModelRegistry

    for architecture, model in ARCHITECTURES.items():
        ModelRegistry.register_model(architecture, model)
    _process.source_hashes = hashes
    _process.inactive_reason = "no DeepSeek-V4 model in this process"


def _vllm_package() -> Path:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise PluginError(f"vllm_qout: got no vllm package on the path, needs vLLM {VLLM_VERSION}")
    return Path(spec.origin).parent


def source_hashes() -> Mapping[str, str]:
    """Hashes of the pinned vLLM functions as `register` found them, by pin name; empty before it."""
    return dict(_process.source_hashes)


def report() -> dict[str, object]:
    """What the plugin does in this process, JSON-able; `docs/plugin.md` explains the fields.

    Meant to be called in each worker. `active` is false, with a `reason`, where no layer is bound.
    """
    inactive: dict[str, object] = {"active": False, "sourceHashes": dict(_process.source_hashes)}
    activation = None
    if _process.source_hashes:
        from vllm_qout.activation import current

        activation = current()
    state = dict(activation.report()) if activation is not None else inactive
    return {
        "version": __version__,
        "pid": os.getpid(),
        "reason": None if state["active"] else _process.inactive_reason,
        **state,
    }
