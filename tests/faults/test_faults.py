# SPDX-License-Identifier: Apache-2.0
"""The fault suite in its short form: every fault but those that take seconds each, such as a live server.

tests/faults_real kills processes of the real engine at the same moments as the faults of `--engine`.
"""

from __future__ import annotations

from collections import Counter

import pytest

from faults import suite
from faults.lab import Lab
from faults.model import Fault, Group
from faults.suite import GOOD, Result

LIVE = [fault for fault in suite.FAULTS if fault.name.startswith("live: ")]
SHORT = [fault for fault in suite.FAULTS if fault not in LIVE] + LIVE[::7]


@pytest.mark.parametrize("name", GOOD)
def test_what_is_good_passes(lab: Lab, name: str) -> None:
    """No false alarm: else refusing proves nothing."""
    assert GOOD[name](lab) == {}


@pytest.mark.parametrize("fault", SHORT, ids=lambda fault: f"{fault.group}: {fault.name}")
def test_each_fault_is_refused_for_its_reason(lab: Lab, fault: Fault) -> None:
    """Exactly the documented claims do not pass, with exactly their statuses and reason codes."""
    result = Result(fault, fault.act(lab))
    assert not result.false_pass and not result.wrong_code, str(result)


def test_names_are_unique() -> None:
    """A name and a seed say which fault it was."""
    assert [name for name, count in Counter((f.group, f.name) for f in suite.FAULTS).items() if count > 1] == []


def test_every_group_has_faults() -> None:
    """A claim without a fault was never seen to refuse anything."""
    assert {fault.group for fault in suite.FAULTS} == set(Group)
    assert len(suite.FAULTS) >= 60


def test_a_false_pass_and_a_wrong_code_are_counted(lab: Lab) -> None:
    """The suite itself can fail, and says so in its last line."""
    sound = suite.FAULTS[0]
    blind = Fault(sound.group, "blind", lambda lab: {}, sound.expected)
    odd = Fault(sound.group, "odd", lambda lab: {sound.target: suite.FAULTS[3].expected[sound.target]}, sound.expected)
    lines: list[str] = []
    assert not suite.run([sound, blind, odd], lab, lines.append)
    assert lines[-1] == "3 faults, 1 false passes, 1 wrong codes"
