# SPDX-License-Identifier: Apache-2.0
"""Fixtures: `clean` is the evidence of a perfect run as JSON values, a fresh copy for each test."""

from __future__ import annotations

import copy
import importlib.util
import sys
from pathlib import Path

import pytest

_SPEC = importlib.util.spec_from_file_location("kv_synthetic", Path(__file__).with_name("kv_synthetic.py"))
assert _SPEC is not None and _SPEC.loader is not None
synthetic = importlib.util.module_from_spec(_SPEC)
sys.modules["kv_synthetic"] = synthetic
_SPEC.loader.exec_module(synthetic)

_CLEAN = synthetic.tree(synthetic.profile())


@pytest.fixture
def clean():
    return copy.deepcopy(_CLEAN)
