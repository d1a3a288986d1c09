# SPDX-License-Identifier: Apache-2.0
"""The graph oracle: worked examples, and the rules that tell right sets from wrong ones of the same size."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from qualify.observe.graphs import (
    BLACKWELL_CAPTURE_CEILING,
    Drafter,
    GraphMode,
    GraphSets,
    Runner,
    Unknown,
    default_sizes,
    expected_sets,
    explicit_sizes,
    round_up,
    size_grid,
)

S9 = (1, 2, 4, 8, 16, 24, 32, 40, 48)
S5 = (1, 2, 4, 8, 16)
BOTH = GraphMode.FULL_AND_PIECEWISE


def sets(runner, sizes, max_num_seqs, spec_tokens=0, drafter=None, mode=BOTH, **options):
    return expected_sets(
        runner=runner,
        mode=mode,
        sizes=sizes,
        max_num_seqs=max_num_seqs,
        spec_tokens=spec_tokens,
        drafter=drafter,
        **options,
    )


def multiples(of, to):
    return tuple(range(of, to + 1, of))


@pytest.mark.parametrize(
    ("sizes", "seqs", "tokens", "drafter", "expected"),
    [
        (S9, 8, 5, "dspark", GraphSets(S9, (6, 12, 18, 24, 36, 42, 48), (5, 10, 20, 25, 35, 40))),
        (S5, 8, 0, None, GraphSets(S5, (1, 2, 4, 8))),
        (S5, 4, 3, "dspark", GraphSets(S5, (4, 8, 16), (3, 6, 9))),
        (S9, 6, 5, "dspark", GraphSets(S9, (6, 12, 18, 24, 36), (5, 10, 20, 25))),
        (
            S9, 8, 3, "mtp",
            GraphSets(S9, (4, 8, 16, 24, 32), None, S9, (4, 8, 16, 24, 32), (1, 2, 4, 8)),
        ),
    ],
)  # fmt: skip
def test_v2_examples(sizes, seqs, tokens, drafter, expected):
    """Worked examples of the V2 runner, target and drafter."""
    assert sets("V2", sizes, seqs, tokens, drafter) == expected


def test_v2_default_sizes():
    """Default sizes with DSpark K5 are 17, captured 17, 7 and 7."""
    sizes = default_sizes(8, 5, 4096)
    found = sets("V2", sizes, 8, 5, "dspark")
    assert (len(sizes), len(found.piecewise)) == (17, 17)
    assert found.full == (6, 12, 18, 24, 36, 42, 48)
    assert found.drafter_full == (5, 10, 15, 20, 25, 35, 40)


@pytest.mark.parametrize(
    ("sizes", "seqs", "tokens", "drafter", "piecewise", "full"),
    [
        (S9, 8, 5, None, (6, 12, 18, 24, 36, 42, 48), (6, 12, 18, 24, 36, 42, 48)),
        (size_grid(256), 64, 3, "mtp", (4, *multiples(8, 256)), (4, *multiples(8, 256))),
        (size_grid(256), 32, 3, "mtp", (4, *multiples(8, 256)), (4, *multiples(8, 128))),
        (size_grid(512), 32, 15, "dflash", multiples(16, 512), multiples(16, 512)),
        ((1, 2, 4, 8, 16, 24, 32), 16, 0, None, (1, 2, 4, 8, 16, 24, 32), (1, 2, 4, 8, 16)),
    ],
)
def test_v1_examples(sizes, seqs, tokens, drafter, piecewise, full):
    """V1 rounds the sizes themselves when decode graphs and drafts meet; a V1 drafter cannot be seen."""
    found = sets("V1", sizes, seqs, tokens, drafter)
    assert (found.piecewise, found.full, found.drafter_full) == (piecewise, full, None)


def test_counts_alone_do_not_decide():
    """The raw sizes between 6 and 48 are as many as the drafter's, with the wrong members."""
    found = sets("V2", S9, 8, 5, "dspark").drafter_full
    raw = tuple(size for size in S9 if 6 <= size <= 48)
    assert len(raw) == len(found)
    assert raw != found


@pytest.mark.parametrize(
    ("mode", "piecewise", "full", "drafter"),
    [
        ("NONE", (), (), None),
        ("PIECEWISE", S9, (), ()),
        ("FULL", (), S9, (5, 10, 20, 25, 35, 40)),
        ("FULL_DECODE_ONLY", (), (6, 12, 18, 24, 36, 42, 48), (5, 10, 20, 25, 35, 40)),
    ],
)
def test_modes(mode, piecewise, full, drafter):
    """The mode decides which kinds exist; drafters have graphs only where decode has FULL graphs."""
    found = sets("V2", S9, 8, 5, "dspark", mode=mode)
    assert (found.piecewise, found.full, found.drafter_full) == (piecewise, full, drafter)


def test_one_draft_token_has_no_decode_manager():
    """MTP with one draft token drafts during prefill only."""
    assert sets("V2", S9, 8, 1, "mtp").drafter_decode_full is None
    assert sets("V2", S9, 8, 2, "mtp").drafter_decode_full == (1, 2, 4, 8)


def test_query_length_of_the_model():
    """A model may ask for another query length; DFlash has one token more than DSpark."""
    assert sets("V2", S9, 8, 5, "dspark", drafter_query_len=6) == sets("V2", S9, 8, 5, "dflash")


@pytest.mark.parametrize(
    "changed",
    [
        {"mode": "SOMETHING"}, {"runner": "V3"}, {"drafter": "medusa"}, {"unusual": "LoRA"}, {"sizes": (0, 1)},
        {"max_num_seqs": 0}, {"spec_tokens": -1}, {"spec_tokens": 0, "drafter": "dspark"},
    ],
)  # fmt: skip
def test_outside_the_rules(changed):
    """What the rules do not cover is unknown with a reason, never a guess."""
    arguments = {"runner": "V2", "mode": BOTH, "sizes": S9, "max_num_seqs": 8, "spec_tokens": 5, "drafter": "dspark"}
    found = expected_sets(**{**arguments, **changed})
    assert isinstance(found, Unknown)
    assert found.reason


def test_v1_without_a_multiple():
    """V1 keeps one size when rounding leaves none, and refuses to start when even that does not fit."""
    assert sets("V1", (5,), 8, 2, None) == GraphSets((3,), (3,))
    assert isinstance(sets("V1", (2,), 8, 3, None), Unknown)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((8, 0, 4096), S5),
        ((5, 0, 4096), (1, 2, 4, 5, 8)),
        ((8, 0, 12), (1, 2, 4, 8, 12)),
        ((256, 0, 8192), size_grid(512)),
        ((1024, 0, 8192), size_grid(512)),
    ],
)
def test_default_rule(arguments, expected):
    """The default grid: twice the decode tokens at most, with the token budget and the request count as members."""
    assert default_sizes(*arguments) == expected


def test_blackwell_ceiling():
    """Compute capability 10.x doubles the ceiling."""
    assert default_sizes(1024, 0, 8192, BLACKWELL_CAPTURE_CEILING)[-1] == 1024


def test_explicit_rules():
    """An explicit list is only cleaned; an explicit maximum gives the plain grid."""
    assert explicit_sizes([48, 1, 1, 9000], 4096) == (1, 48)
    assert size_grid(48) == S9


configurations = st.fixed_dictionaries(
    {
        "runner": st.sampled_from(list(Runner)),
        "mode": st.sampled_from(list(GraphMode)),
        "sizes": st.lists(st.integers(1, 600), min_size=1, max_size=20).map(tuple),
        "max_num_seqs": st.integers(1, 300),
        "spec_tokens": st.integers(0, 16),
    }
)


@settings(deadline=None)
@given(configurations, st.sampled_from([None, *Drafter]))
def test_rules_hold(configuration, drafter):
    """FULL sizes of a decode mode are multiples of the query length, within the requests and the largest size."""
    if drafter is not None and configuration["spec_tokens"] == 0:
        drafter = None
    found = expected_sets(**configuration, drafter=drafter)
    if isinstance(found, Unknown):
        assert configuration["runner"] is Runner.V1
        return
    query = configuration["spec_tokens"] + 1
    largest = max(configuration["sizes"])
    for members in (found.piecewise, found.full, found.drafter_full or (), found.drafter_decode_full or ()):
        assert list(members) == sorted(set(members))
        assert all(size <= round_up(largest, query) for size in members)
    if configuration["mode"] not in (GraphMode.FULL, GraphMode.NONE):
        assert all(size <= min(largest, configuration["max_num_seqs"] * query) for size in found.full)
        assert all(size % query == 0 for size in found.full)


@pytest.mark.parametrize(
    ("tokens", "uniform", "graph"),
    [
        (6, True, ("FULL", 6)),
        (30, True, ("FULL", 36)),
        (48, True, ("FULL", 48)),
        (30, False, ("PIECEWISE", 32)),
        (1, False, ("PIECEWISE", 1)),
        (49, False, ("NONE", 49)),
        (4096, False, ("NONE", 4096)),
    ],
)
def test_the_graph_of_a_step(tokens: int, uniform: bool, graph: tuple[str, int]) -> None:
    """A uniform decode takes the smallest FULL graph that fits, any other step the smallest PIECEWISE one."""
    found = sets(Runner.V2, S9, 8, 5, Drafter.DSPARK)
    assert isinstance(found, GraphSets)
    assert found.managers()["target"].chosen(tokens, uniform=uniform) == graph
