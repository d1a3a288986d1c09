# SPDX-License-Identifier: Apache-2.0
"""The arithmetic under the claim: what must be restored, and what chunk a block belongs to."""

from __future__ import annotations

import kv_synthetic as synthetic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from qualify.claims.kv_compare import Place, compare, compare_boots, needed_places, within_chunks
from qualify.probes.kv_records import Arm, Case, RankCapture, expected_external, prompt


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(1, 0), (255, 0), (256, 255), (1023, 768), (1024, 1023), (1025, 1024), (2000, 1792), (9000, 8960)],
)
def test_expected_external_tokens(tokens, expected):
    """Whole chunks of 256, never the last token."""
    assert expected_external(tokens, 256) == expected


@given(st.integers(1, 10_000), st.integers(1, 4096))
def test_expected_external_leaves_a_token_to_compute(tokens, chunk):
    """For any prompt and chunk: below the prompt's length, and less than a chunk below it."""
    external = expected_external(tokens, chunk)
    assert 0 <= external < tokens
    assert tokens - external <= max(chunk, 1)


@given(st.integers(0, 1500), st.sampled_from([64, 128]), st.sampled_from([None, 1, 100, 128, 256, 1000]))
def test_needed_places_cover_what_attention_reads(computed, size, window):
    """Exactly the blocks with a token that attention reads of the first `computed` tokens, the last one cut there."""
    tensor = {**synthetic.tensors()[0], "window": window, "tokensPerBlock": size}
    capture = synthetic.capture(Arm.DISK, 0, 2000, 1792)
    capture["tensors"], capture["requests"][0]["computedTokens"] = [tensor], computed
    places = needed_places(RankCapture.model_validate(capture))
    read = [t for t in range(computed) if window is None or t > computed - window]
    expected = {t // size: min(size, computed - t // size * size) for t in read}
    assert {place.block: place.tokens for place in places} == expected


@given(st.sets(st.integers(0, 40)), st.sets(st.integers(0, 20)), st.sampled_from([64, 128, 256]))
def test_blocks_of_chunks(blocks, chunks, size):
    """A block belongs to the chunk that its first token is in."""
    places = {Place(0, 0, "l", 0, block, size) for block in blocks}
    found = within_chunks(places, chunks, 256, {0: size})
    assert {place.block for place in found} == {block for block in blocks if block * size // 256 in chunks}


def test_a_group_that_is_never_cached_is_not_compared():
    """The engine computes such a group anew, so its bytes are no restored ones."""
    cold, restored = synthetic.case(Arm.COLD, 2000), synthetic.case(Arm.DISK, 2000)
    for case in (cold, restored):
        for capture in case["ranks"]:
            for tensor in capture["tensors"]:
                tensor["cacheable"] = tensor["group"] != 0
    for capture in restored["ranks"]:
        for entry in capture["requests"][0]["restored"]:
            entry[3] = synthetic.digest("other") if entry[0] < 2 else entry[3]
    result = compare(Case.model_validate(cold), Case.model_validate(restored))
    assert not result.differing and not result.short
    assert {place.group for place in result.restored} == {1}


def test_prompts_are_fixed_varied_and_share_no_beginning():
    """The same ids on every call, many different ones, and no common first block between two lengths."""
    assert prompt(1024) == prompt(1024)
    assert len(set(prompt(1024))) > 300
    assert prompt(1024)[:16] != prompt(1025)[:16]


SPARSE = (
    # (group, layer, tokens of a block, its rows)
    (0, "model.layers.0.attn.swa_cache", 64, 64),
    (1, "model.layers.1.attn.indexer.k_cache", 256, 64),
    (1, "model.layers.1.attn", 256, 64),
    (0, "model.layers.2.attn.swa_cache", 64, 64),
    (1, "model.layers.3.attn.indexer.k_cache", 256, 64),
    (2, "model.layers.3.attn.compressor.state_cache", 4, 4),
)


def sparse(other: Place | None = None, layers=SPARSE) -> Case:
    """A computed prompt of 3000 tokens; at `other` its bytes are different ones."""
    tree = synthetic.case(Arm.CONTROL, 2000)
    for rank, capture in enumerate(tree["ranks"]):
        capture["tensors"] = [
            {**synthetic.tensors()[1], "group": g, "layer": name, "tokensPerBlock": size, "shape": [9, rows, 584]}
            for g, name, size, rows in layers
        ]
        capture["requests"][0]["cold"] = [
            [i, block, size, synthetic.digest(i, block, Place(rank, g, name, 0, block, size) == other)]
            for i, (g, name, size, _) in enumerate(layers)
            for block in range(3000 // size)
        ]
    return Case.model_validate(tree)


@pytest.mark.parametrize(
    ("place", "counts"),
    [
        (Place(0, 0, "model.layers.0.attn.swa_cache", 0, 45, 64), True),
        (Place(1, 1, "model.layers.1.attn.indexer.k_cache", 0, 10, 256), True),
        (Place(0, 1, "model.layers.1.attn", 0, 10, 256), True),
        (Place(0, 0, "model.layers.2.attn.swa_cache", 0, 31, 64), True),
        (Place(0, 0, "model.layers.2.attn.swa_cache", 0, 32, 64), False),
        (Place(1, 1, "model.layers.3.attn.indexer.k_cache", 0, 7, 256), True),
        (Place(1, 1, "model.layers.3.attn.indexer.k_cache", 0, 8, 256), False),
        (Place(0, 2, "model.layers.3.attn.compressor.state_cache", 0, 511, 4), True),
        (Place(0, 2, "model.layers.3.attn.compressor.state_cache", 0, 512, 4), False),
    ],
)
def test_boots_must_agree_until_a_sparse_indexer_has_to_choose(place, counts):
    """Layers behind the first indexer are left open from token 2048 on, when 512 rows of 4 tokens are not all of them;
    everything else counts, and what is left open is still told.
    """
    two = compare_boots(sparse(), sparse(place))
    assert (two.differing, two.open_differing) == (((place,), 0) if counts else ((), 1))
    assert two.settled + two.open_places == 2 * sum(3000 // size for _, _, size, _ in SPARSE)


def test_without_an_indexer_every_byte_counts():
    """No other layer is excused, whatever its number."""
    layers = tuple(one for one in SPARSE if "indexer" not in one[1])
    place = Place(0, 2, "model.layers.3.attn.compressor.state_cache", 0, 700, 4)
    two = compare_boots(sparse(layers=layers), sparse(place, layers))
    assert (two.differing, two.open_places) == ((place,), 0)
