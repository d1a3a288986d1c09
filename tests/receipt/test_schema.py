# SPDX-License-Identifier: Apache-2.0
"""The committed JSON Schema is the model's, and a second implementation enforces the same rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from qualify.claims.model import Status
from qualify.receipt.model import STATEMENT
from qualify.receipt.schema import FILE, encode, generate


def test_the_committed_schema_is_generated_from_the_model() -> None:
    """Drift is a defect: run `python -m qualify.receipt.schema`, and raise the version if a reader could notice."""
    assert encode() == FILE.read_text(encoding="utf-8")


def test_the_schema_is_valid_itself() -> None:
    """Against the 2020-12 metaschema."""
    jsonschema.Draft202012Validator.check_schema(generate())


@pytest.fixture
def statement(pristine: Path) -> Any:
    return json.loads((pristine / STATEMENT).read_bytes())


def violations(statement: Any) -> list[str]:
    return [error.json_path for error in jsonschema.Draft202012Validator(generate()).iter_errors(statement)]


def test_a_receipt_satisfies_the_schema(statement: Any) -> None:
    """What the writer writes is what the schema promises."""
    assert violations(statement) == []


def test_every_field_is_required_and_no_other_allowed(statement: Any) -> None:
    """Dropping or adding a field anywhere in statement, predicate or claim is a violation."""
    claim = next(claim for claim in statement["predicate"]["claims"] if claim["checks"])
    for part in (statement, statement["predicate"], claim, claim["checks"][0], claim["estimates"][0]):
        for key in list(part):
            kept = part.pop(key)
            assert violations(statement), f"without {key}"
            part[key] = kept
        part["extra"] = None
        assert violations(statement)
        del part["extra"]
    assert violations(statement) == []


@pytest.mark.parametrize("status", Status)
def test_the_presence_table_is_in_the_schema(statement: Any, status: Status) -> None:
    """A passed claim with its status replaced breaks the presence table: it has no reason code."""
    claim = next(claim for claim in statement["predicate"]["claims"] if claim["status"] == Status.PASSED)
    claim["status"] = status.value
    assert bool(violations(statement)) == (status is not Status.PASSED)
