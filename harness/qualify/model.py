# SPDX-License-Identifier: Apache-2.0
"""The base of every record that is written to or read from disk."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


class Record(BaseModel):
    """Frozen, strict about unknown keys, snake_case in Python and lowerCamelCase in JSON."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
        allow_inf_nan=False,
    )
