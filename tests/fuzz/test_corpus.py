# SPDX-License-Identifier: Apache-2.0
"""Replays the committed corpus of the fuzzers without atheris, so that a found input stays fixed."""

from __future__ import annotations

import importlib.util
import sys
import types
from contextlib import nullcontext
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def load(name, monkeypatch):
    """A fuzzer module with a stand-in for atheris, which only its main program needs."""
    stand_in = types.SimpleNamespace(instrument_imports=lambda include: nullcontext())
    monkeypatch.setitem(sys.modules, "atheris", stand_in)
    spec = importlib.util.spec_from_file_location(f"corpus_{name}", HERE / f"fuzz_{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["log", "metrics", "profile", "receipt"])
def test_corpus(name, monkeypatch):
    """No input of the corpus crashes a reader or breaks a promise that the fuzzer checks."""
    inputs = sorted((HERE / "corpus" / name).iterdir())
    assert inputs
    check = load(name, monkeypatch).check
    for path in inputs:
        try:
            check(path.read_bytes())
        except Exception as error:
            pytest.fail(f"{path.name}: {error!r}")


def test_what_is_sound_is_read(monkeypatch):
    """The fuzzers start from what the readers accept: every shipped profile, every file of a sound receipt."""
    profile, receipt = load("profile", monkeypatch), load("receipt", monkeypatch)
    for path in profile.profiles.FOLDER.glob("*.toml"):
        profile.check(path.read_bytes())
    for content in receipt.seeds():
        receipt.check(content)
    assert receipt.review(receipt.BUNDLE, derive=receipt.fake_derive).verified
