# SPDX-License-Identifier: Apache-2.0
"""Prompts as token ids: seeded, all different, and valid for every vocabulary that can spell bytes."""

from __future__ import annotations

import random

TOKEN_IDS = range(16, 256)
"""Behind the special tokens of the usual vocabularies and within the smallest (256 bytes)."""


def token_prompt(tokens: int, *parts: object) -> list[int]:
    """`tokens` ids that depend on `parts` only, on any machine."""
    source = random.Random("/".join(str(part) for part in parts))
    return [source.choice(TOKEN_IDS) for _ in range(tokens)]
