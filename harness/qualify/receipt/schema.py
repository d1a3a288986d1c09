# SPDX-License-Identifier: Apache-2.0
"""The JSON Schema of a receipt, generated from the model: `python -m qualify.receipt.schema` rewrites the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from qualify.claims.model import OBSERVED, Status
from qualify.receipt.model import PREDICATE_TYPE, Receipt

FILE = Path(__file__).parents[3] / "receipts" / "schema" / "serving-qualification-v0.1.schema.json"


def generate() -> dict[str, Any]:
    """The schema (2020-12). The presence tables of claims and checks are in it too, not only in the model."""
    schema = Receipt.model_json_schema(by_alias=True, mode="serialization")
    definitions = schema["$defs"]
    for part in (schema, *definitions.values()):
        # The writer writes every field, null where there is no value: dropping one must not go unseen.
        if "properties" in part:
            part["required"] = sorted(part["properties"])
    # The list of codes grows with the harness, the format does not; docs/reason-codes.md has them all.
    definitions["ReasonCode"] = {"type": "string", "pattern": "^[a-z][a-z0-9_]*$"}
    definitions["Claim"]["allOf"] = [_claim_presence(status) for status in Status]
    definitions["Check"]["allOf"] = [_check_presence(status) for status in Status]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"{PREDICATE_TYPE}.schema.json",
        **schema,
        "title": "Serving qualification receipt",
    }


def _claim_presence(status: Status) -> dict[str, Any]:
    measured = status in OBSERVED
    then: dict[str, Any] = {
        "observed": {"type": "object" if measured else "null"},
        "reasonCodes": {"maxItems": 0} if status is Status.PASSED else {"minItems": 1},
    }
    if measured:
        then["evidence"] = {"minItems": 1}
    else:
        then["estimates"] = {"maxItems": 0}
    if status is Status.PASSED:
        then["checks"] = {"minItems": 1}
    return _when(status, then)


def _check_presence(status: Status) -> dict[str, Any]:
    return _when(status, {"reasonCode": {"type": "null" if status is Status.PASSED else "string"}})


def _when(status: Status, then: dict[str, Any]) -> dict[str, Any]:
    return {"if": {"properties": {"status": {"const": status.value}}}, "then": {"properties": then}}


def encode() -> str:
    """The text of the schema file."""
    return json.dumps(generate(), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_text(encode(), encoding="utf-8")
