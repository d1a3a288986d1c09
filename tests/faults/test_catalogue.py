# SPDX-License-Identifier: Apache-2.0
"""The catalogue of reason codes is true, and nothing in it is dead."""

from __future__ import annotations

from qualify.reasons import ReasonCode

from faults import catalogue


def test_the_pages_are_generated_from_the_code() -> None:
    """Drift is a defect: run `python -m tests.faults --docs`."""
    assert catalogue.CODES_PAGE.read_text(encoding="utf-8") == catalogue.codes_page()
    assert catalogue.FAULTS_PAGE.read_text(encoding="utf-8") == catalogue.faults_page()


def test_every_code_can_be_raised() -> None:
    """A code that nothing raises promises a check that does not exist."""
    raised = catalogue.raisers()
    assert [code for code in ReasonCode if not raised[code]] == []


def test_every_code_is_fired_by_a_test() -> None:
    """Except those that only a GPU run can fire, which are listed with their reason."""
    fired = catalogue.firing_tests()
    assert {code for code in ReasonCode if not fired[code]} == set(catalogue.GPU_ONLY)
