# SPDX-License-Identifier: Apache-2.0
"""Canonical JSON (RFC 8785) and the strict reader that goes with it."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any, NoReturn

import rfc8785

from qualify.errors import EvidenceError
from qualify.model import Record

MAX_DEPTH = 64
"""Levels of nesting; a receipt of ours has fewer than 20, and readers of other languages overflow on thousands."""

MAX_INTEGER = 2**53 - 1
"""The largest integer that every JSON reader keeps exactly (RFC 8785, RFC 7493)."""


def canonical(value: Any) -> bytes:
    """The RFC 8785 bytes of a record or of plain JSON data. Raises EvidenceError for what JSON cannot carry."""
    data = value.model_dump(mode="json") if isinstance(value, Record) else value
    try:
        return rfc8785.dumps(data)
    except (rfc8785.CanonicalizationError, RecursionError, TypeError) as error:
        raise EvidenceError(f"a value has no canonical JSON form: {error}") from None


def parse(content: bytes, label: str) -> Any:
    """Strict JSON: UTF-8, no duplicate key, no NaN, no integer beyond 2^53, no deep nesting, no other spelling.

    Raises EvidenceError with `label` and the first rule that is broken.
    """

    def refuse(what: str) -> NoReturn:
        raise EvidenceError(f"{label} {what}")

    def integer(digits: str) -> int:
        if len(digits) > 17 or abs(int(digits)) > MAX_INTEGER:
            refuse(f"has an integer beyond 2^53: {digits[:24]}")
        return int(digits)

    def real(digits: str) -> float:
        number = float(digits)
        if not math.isfinite(number):
            refuse(f"has a number that is not finite: {digits[:24]}")
        return number

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
            refuse(f"has the key {twice[:60]!a} twice")
        return found

    try:
        value = json.loads(
            content.decode("utf-8"),
            object_pairs_hook=unique,
            parse_int=integer,
            parse_float=real,
            parse_constant=lambda name: refuse(f"has {name}, which is not JSON"),
        )
    except UnicodeDecodeError as error:
        refuse(f"is not UTF-8 at byte {error.start}")
    except json.JSONDecodeError as error:
        refuse(f"is not JSON at line {error.lineno}, column {error.colno}: {error.msg}")
    except RecursionError:
        refuse(f"is nested more than {MAX_DEPTH} levels deep")
    if _deeper_than(value, MAX_DEPTH):
        refuse(f"is nested more than {MAX_DEPTH} levels deep")
    if canonical(value) != content:
        refuse("is not in canonical form (RFC 8785)")
    return value


def _deeper_than(value: Any, limit: int) -> bool:
    """Level by level, not recursive: the depth is what is in doubt."""
    level = [value]
    for _ in range(limit + 1):
        level = [
            child
            for parent in level
            if isinstance(parent, dict | list)
            for child in (parent.values() if isinstance(parent, dict) else parent)
        ]
        if not level:
            return False
    return True
