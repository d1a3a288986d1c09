# SPDX-License-Identifier: Apache-2.0
"""Looking for many needles at once finds what looking for each would find, and needles are where they must be."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from qualify.observe.errors import ANY_ERROR
from qualify.observe.forms import ANY_FORM
from qualify.observe.needles import Needles, any_of

relaxed = settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
letters = st.text("ab.(", min_size=1, max_size=4).map(str.encode)


@settings(deadline=None)
@given(needles=st.lists(letters, min_size=1, max_size=6), text=st.text("ab.( ", max_size=20).map(str.encode))
def test_needles(needles, text):
    """Overlapping needles, equal ones and those with special characters are all found, in the order given."""
    wanted = [number for number, needle in enumerate(needles) if needle in text]
    assert Needles([(needle, number) for number, needle in enumerate(needles)]).found(text) == wanted
    assert bool(any_of(needles).search(text)) == bool(wanted)


@relaxed
@given(data=st.data())
def test_forms_contain_their_needle(data):
    """Text in which a form begins contains the form's needle: otherwise the line would be taken as silent."""
    for needle in ANY_FORM.all:
        for _, form in ANY_FORM.found(needle):
            text = data.draw(st.from_regex(form.pattern))
            assert form in [one for _, one in ANY_FORM.found(text)], (form.start, text)


@relaxed
@given(data=st.data())
def test_errors_contain_a_needle(data):
    """Text that the pattern of an error kind matches contains one of the kind's needles."""
    for needle in ANY_ERROR.all:
        for kind, pattern in ANY_ERROR.found(needle):
            text = data.draw(st.from_regex(pattern))
            assert kind in [one for one, _ in ANY_ERROR.found(text)], (kind, text)
