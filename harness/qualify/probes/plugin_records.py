# SPDX-License-Identifier: Apache-2.0
"""What each worker says of the vllm_qout plugin, once when the boot is ready and again after its load."""

from __future__ import annotations

from typing import Any

from qualify.model import Record
from qualify.probes.workers import ProcessIdentity


def plugin_file(label: str) -> str:
    return f"plugin-{label}.json"


class Buffer(Record):
    """One reserved buffer; `lane` 0 is the target's, 1 the DSpark draft's."""

    lane: int
    ubatch: int
    address: int
    bytes: int


class Buffers(Record):
    reserved_bytes: int
    buffers: tuple[Buffer, ...]


class Methods(Record):
    """Attention layers that run one function; `stock_sha256` is of the class method that it stands for."""

    runs: str
    runs_sha256: str
    stock_sha256: str
    layers: tuple[str, ...]


class PluginReport(Record):
    """One rank. `report` is the plugin's own word; `methods` what is found on the layers of the model."""

    rank: int
    process: ProcessIdentity | None
    switch: str | None
    """VLLM_QOUT as this process has it; empty where it is not set."""
    report: dict[str, Any] | None
    methods: tuple[Methods, ...] | None
    context: dict[str, str] | None
    """The draft's context insertion: `runs`, `runs_sha256`, `stock_sha256`; empty without a draft."""
    profiled: Buffers | None
    """Before the capture of the memory profile; null where nothing is captured there."""
    captured: Buffers | None
    """After the capture that serves."""
    now: Buffers | None
    unknown: dict[str, str]
