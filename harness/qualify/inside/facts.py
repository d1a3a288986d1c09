# SPDX-License-Identifier: Apache-2.0
"""Reading facts that may not be there: private names of an engine move between versions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def gather(readers: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """One value per reader. A reader that fails or gives None leaves null, and its reason under `unknown`."""
    values: dict[str, Any] = {}
    unknown: dict[str, str] = {}
    for name, reader in readers.items():
        try:
            values[name] = reader()
        except Exception as error:
            values[name] = None
            unknown[name] = f"{type(error).__name__}: {error}"[:300]
            continue
        if values[name] is None:
            unknown[name] = "the engine gives no value"
    return {**values, "unknown": unknown}
