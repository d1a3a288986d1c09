# SPDX-License-Identifier: Apache-2.0
"""Looks for many literal texts, the needles, at once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")

_COMMON = b" eratio0ns:clp1_d3mu.h2,[g=4I-y56v'kNfF8()]OP"
"""Bytes of engine logs, the most frequent first; a byte that is not here is rarer."""


def any_of(needles: Iterable[bytes]) -> re.Pattern[bytes]:
    """A pattern that finds where any of the needles is.

    It stops only at the rarest byte of each, which takes a tenth of looking for one needle after another. What it
    matches is this byte.
    """
    around: dict[bytes, set[bytes]] = {}
    for needle in needles:
        byte = rarest(needle)
        before, _, behind = needle.partition(byte)
        pattern = b"(?=" + re.escape(behind) + b")(?<=" + re.escape(before + byte) + b")"
        around.setdefault(byte, set()).add(pattern)
    groups = [re.escape(byte) + b"(?:" + b"|".join(sorted(patterns)) + b")" for byte, patterns in around.items()]
    return re.compile(b"|".join(sorted(groups)))


def rarest(needle: bytes) -> bytes:
    """The byte of a needle that engine logs have least; the first one of those that are not common."""
    bytes_ = [needle[at : at + 1] for at in range(len(needle))]
    return next((byte for byte in bytes_ if byte not in _COMMON), max(bytes_, key=_COMMON.find))


class Needles(Generic[T]):
    """Entries of which each needs its needle in a text."""

    def __init__(self, entries: Sequence[tuple[bytes, T]]) -> None:
        self.all = frozenset(needle for needle, _ in entries)
        self._any = any_of(self.all)
        self._by_byte: dict[bytes, list[tuple[int, bytes, T]]] = {}
        for order, (needle, entry) in enumerate(entries):
            self._by_byte.setdefault(rarest(needle), []).append((order, needle, entry))

    def found(self, text: bytes) -> list[T]:
        """The entries whose needle is in the text, in the order in which they were given."""
        grouped = [self._by_byte[byte] for byte in set(self._any.findall(text))]
        found = [one for group in grouped for one in group if one[1] in text]
        return [entry for _, _, entry in sorted(found, key=lambda one: one[0])]
