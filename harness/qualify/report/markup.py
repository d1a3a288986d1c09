# SPDX-License-Identifier: Apache-2.0
"""Markup that escapes whatever goes in, so that no text of an engine or a receipt becomes HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

VOID = frozenset({"meta", "br"})


class Markup(str):
    """Text that is already markup; everything else is escaped where it is put in."""


Child = object
"""Markup, a value to be shown as text, an iterable of children, or None for nothing."""


def element(name: str, /, *children: Child, **attributes: object) -> Markup:
    """An element. Attribute names lose a trailing underscore and turn others into hyphens; None leaves one out."""
    pairs = (
        f' {key.rstrip("_").replace("_", "-")}="{escape(_clean(str(value)))}"'
        for key, value in attributes.items()
        if value is not None
    )
    opening = f"<{name}{''.join(pairs)}>"
    return Markup(opening if name in VOID else f"{opening}{join(children)}</{name}>")


def table(heads: Sequence[str], rows: Iterable[Sequence[Child]]) -> Markup:
    """A table that scrolls on its own when the page is narrow."""
    head = element("tr", [element("th", name) for name in heads])
    body = [element("tr", [element("td", cell) for cell in row]) for row in rows]
    return element("div", element("table", head, body), class_="scroll")


def join(children: Iterable[Child]) -> Markup:
    return Markup("".join(_inner(child) for child in children))


def _inner(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, Markup):
        return child
    if isinstance(child, list | tuple) or (isinstance(child, Iterable) and not isinstance(child, str | bytes | dict)):
        return join(child)
    return escape(_clean(str(child)))


def _clean(text: str) -> str:
    """HTML has no form for most control characters; one that cannot be shown becomes a space."""
    return "".join(char if char.isprintable() or char == "\n" else " " for char in text)
