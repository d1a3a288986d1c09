# SPDX-License-Identifier: Apache-2.0
"""Which cards a compiled CUDA library holds machine code for, read from its bytes without any toolkit."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

_MAGIC = struct.pack("<I", 0xBA55ED50)
_HEADER = struct.Struct("<IHHQ")  # magic, version, header bytes, bytes that follow
_ENTRY = struct.Struct("<HHIQIIHHI")  # kind, flags, header bytes, payload bytes, three unused, minor/major, card
_KINDS = {1: "ptx", 2: "sass"}


@dataclass(frozen=True, order=True)
class Code:
    """One image in the library: `kind` is 'sass' or 'ptx', `card` the capability times ten (9.0 is 90)."""

    card: int
    kind: str


def _entries(data: bytes, start: int, end: int) -> list[Code]:
    found = []
    while start + _ENTRY.size <= end:
        kind, _, header, payload, _, _, _, _, card = _ENTRY.unpack_from(data, start)
        if header == 0:
            break
        found.append(Code(card, _KINDS.get(kind, f"kind {kind}")))
        start += header + payload
    return found


def machine_code(library: Path) -> list[Code]:
    """Every image in `library`, sorted; empty for a library without device code. Raises OSError."""
    data = library.read_bytes()
    found: list[Code] = []
    at = data.find(_MAGIC)
    while at >= 0:
        _, version, header, size = _HEADER.unpack_from(data, at)
        if version == 1 and header == _HEADER.size and at + header + size <= len(data):
            found += _entries(data, at + header, at + header + size)
            at += header + size
        at = data.find(_MAGIC, at + 1)
    return sorted(found)
