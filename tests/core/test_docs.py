# SPDX-License-Identifier: Apache-2.0
"""Documents and code say the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from pydantic import BaseModel
from qualify.profiles import Profile

DOCS = Path(__file__).parents[2] / "docs"


def keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        inner = [kind for kind in (field.annotation, *get_args(field.annotation)) if isinstance(kind, type)]
        section = next((kind for kind in inner if issubclass(kind, BaseModel)), None)
        if section is None or name == "pins":
            yield prefix + name
        else:
            yield from keys(section, f"{prefix}{name}.")


def test_the_profile_reference_names_every_key() -> None:
    """No key of the profile model is undocumented."""
    page = (DOCS / "profile-reference.md").read_text()
    missing = [key for key in keys(Profile) if f"`{key}`" not in page]
    assert missing == []
