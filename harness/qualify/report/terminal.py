# SPDX-License-Identifier: Apache-2.0
"""Terminal styling: colour only for a terminal and without NO_COLOR; the words mean the same without it."""

from __future__ import annotations

import os
from typing import TextIO

RESET = "\x1b[0m"
STYLES = {
    "bold": "\x1b[1m",
    "dim": "\x1b[2m",
    "red": "\x1b[31m",
    "green": "\x1b[32m",
    "yellow": "\x1b[33m",
}


def wants_colour(stream: TextIO) -> bool:
    """Whether `stream` is a terminal that may be coloured; an empty NO_COLOR does not count (no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(text: str, style: str, colour: bool) -> str:
    return f"{STYLES[style]}{text}{RESET}" if colour else text


def printable(text: str) -> str:
    """The text on one line without control characters: it may quote an engine or a hostile receipt."""
    return "".join(char if char.isprintable() else " " for char in text)
