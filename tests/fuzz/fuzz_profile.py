# SPDX-License-Identifier: Apache-2.0
"""Coverage-guided fuzzing of the profile reader, from TOML and from the JSON of a receipt folder.

`run.py` runs it. Besides crashes it looks for broken promises: a refusal names a line that exists, and a profile that
is read keeps its digest on its way through a receipt.
"""

from __future__ import annotations

import re
import sys

import atheris

with atheris.instrument_imports(include=["qualify"]):
    from pydantic import ValidationError
    from qualify import profiles
    from qualify.errors import UsageError


def check(data: bytes) -> None:
    """Read `data` as a profile: of JSON if it begins as that, else of TOML."""
    text = data.decode("utf-8", "replace")
    try:
        is_json = text.startswith("{")
        profile = profiles.Profile.model_validate_json(text) if is_json else profiles.parse(text, "fuzz")
    except ValidationError:
        return
    except UsageError as error:
        line = re.search(r"profile fuzz, line (\d+), ", str(error))
        assert line is None or 1 <= int(line[1]) <= max(1, len(text.splitlines())), str(error)
        return
    assert profiles.Profile.model_validate_json(profile.model_dump_json()).digest() == profile.digest()


if __name__ == "__main__":
    atheris.Setup(sys.argv, check)
    atheris.Fuzz()
