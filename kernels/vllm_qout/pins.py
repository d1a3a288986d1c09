# SPDX-License-Identifier: Apache-2.0
"""The vLLM sources that the plugin relies on, pinned by the hash of their text.

Standard library only: the check runs in every vLLM process, before any model module is imported.
"""

import ast
import hashlib
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

VLLM_VERSION = "0.32.0"

ATTENTION_METHOD = "_fused_qnorm_rope_kv_insert"
CONTEXT_FUNCTION = "_insert_context_kv"


@dataclass(frozen=True)
class Pin:
    """One function of vLLM; `sha256` hashes its source text as `inspect.getsource` gives it."""

    file: str  # relative to the vllm package
    qualname: str
    sha256: str

    @property
    def name(self) -> str:
        return f"{self.file}:{self.qualname}"


ATTENTION_PIN = Pin(
    "models/deepseek_v4/attention.py",
    "DeepseekV4Attention._fused_qnorm_rope_kv_insert",
    "2faf46780af3a94cc8344c4cbe26dd9bc634fd1da64cfb8fbea1a9fcbc3c61b7",
)
CONTEXT_PINS = {
    "vllm.models.deepseek_v4.nvidia.dspark": Pin(
        "models/deepseek_v4/nvidia/dspark.py",
        "_insert_context_kv",
        "648eb4f804ca31416ec5e9a7e0c15c0b114aadf00a9158c6161c51929764ff06",
    ),
    "vllm.models.deepseek_v4.amd.dspark": Pin(
        "models/deepseek_v4/amd/dspark.py",
        "_insert_context_kv",
        "b177c5358d885b023e0174817e2570f35d6e4b22f8df00fb4f124f2658464eb4",
    ),
}

# Replaced code first, then the code whose behaviour the replacement and the reservation assume.
PINS: tuple[Pin, ...] = (
    ATTENTION_PIN,
    *CONTEXT_PINS.values(),
    # Callers and consumers of the query: where it is produced, and that nothing keeps it.
    Pin(
        "models/deepseek_v4/attention.py",
        "DeepseekV4Attention._prepare_and_attn",
        "a6c440bb491135f7581043ef297142ed87a2d9ffb1bdb390512797b0d43c91d3",
    ),
    Pin(
        "models/deepseek_v4/amd/rocm.py",
        "DeepseekV4ROCMAiterMLAAttention._prepare_and_attn",
        "113e08b715eb1e80916872fd7382e2339f1fb283aec584f75e83cc1e98821473",
    ),
    Pin(
        "models/deepseek_v4/nvidia/flashmla.py",
        "DeepseekV4FlashMLAAttention.forward_mqa",
        "d1bdc8ba7dc5cbda29bcb1c68cecfc4821c5ff60cbc2f8cd5c4f523f5fce6b4c",
    ),
    Pin(
        "models/deepseek_v4/nvidia/flashinfer_sparse.py",
        "DeepseekV4FlashInferSM120Attention.forward_mqa",
        "252608cb894bbd5e9bd4578135095d64effd4f316bc0ad659c10900f6cfa6912",
    ),
    Pin(
        "models/deepseek_v4/amd/rocm.py",
        "DeepseekV4ROCMAiterMLAAttention.forward_mqa",
        "4a571063ad6ff99a4fc1e6f9d52ac90cccc77563bff156192a4acbae7085b473",
    ),
    # The workspace slots, the microbatch split and the draft query rows that size the reservation.
    Pin(
        "v1/worker/workspace.py",
        "WorkspaceManager._get_workspace_id",
        "898c9747f3a4017231eabd6e46b9c9849af340e948d90fdc12b5f295e7d8f025",
    ),
    Pin(
        "v1/worker/workspace.py",
        "WorkspaceManager.get_persistent",
        "acda42d32d3c04ffe6e28ef1d9ee58adf01b74e4123daeeb7196686ad4dafd34",
    ),
    Pin(
        "v1/worker/ubatch_utils.py",
        "maybe_create_ubatch_slices",
        "ad325673730fdd87470fefe70e1a9618dfbdf0e41077113a248b31be798c1562",
    ),
    Pin(
        "v1/worker/gpu/spec_decode/dspark/speculator.py",
        "DSparkSpeculator.__init__",
        "78492be34c247517771f458ac1bd6aec2f103623681f6a57577c51d287544efb",
    ),
)


class PinMismatch(RuntimeError):
    """vLLM's source is not the source that this plugin was written for."""


def digest(source: str) -> str:
    """sha256 of a source text, UTF-8, indentation kept."""
    return hashlib.sha256(source.encode()).hexdigest()


def source_of(text: str, qualname: str) -> str | None:
    """The text of one function in a module's text, as `inspect.getsource` returns it; None if absent."""
    body: Iterable[ast.stmt] = ast.parse(text).body
    node: ast.ClassDef | ast.FunctionDef | None = None
    for part in qualname.split("."):
        found = (n for n in body if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == part)
        node = next(found, None)
        if node is None:
            return None
        body = node.body
    if node is None:
        return None
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return "".join(inspect.getblock(text.splitlines(keepends=True)[first - 1 :]))


def _file_hash(package: Path, pin: Pin) -> str:
    path = package / pin.file
    if not path.is_file():
        return "no such file"
    source = source_of(path.read_text(encoding="utf-8"), pin.qualname)
    return "no such function" if source is None else digest(source)


def check_files(package: Path, pins: Iterable[Pin] = PINS) -> Mapping[str, str]:
    """Hashes of the pinned functions in the vllm package directory, by pin name.

    Reads files only, imports nothing. Raises PinMismatch naming each function that differs.
    """
    seen = {pin: _file_hash(package, pin) for pin in pins}
    _refuse([(pin, got) for pin, got in seen.items() if got != pin.sha256])
    return {pin.name: got for pin, got in seen.items()}


def check_object(pin: Pin, function: object) -> None:
    """Checks the live function, so that a replacement made by someone else at run time is seen too."""
    try:
        got = digest(inspect.getsource(function))  # type: ignore[arg-type]
    except (OSError, TypeError):
        got = "no source"
    _refuse([] if got == pin.sha256 else [(pin, got)])


def _refuse(wrong: list[tuple[Pin, str]]) -> None:
    if wrong:
        found = "; ".join(f"{pin.name}: got {got}, needs {pin.sha256}" for pin, got in wrong)
        raise PinMismatch(
            f"vllm_qout: vLLM's source differs from the pinned {VLLM_VERSION} ({found}). "
            "Install stock vLLM of that version, remove what patches it, "
            "or set VLLM_QOUT=0 to serve without the plugin."
        )
