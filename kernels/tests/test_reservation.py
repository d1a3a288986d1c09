# SPDX-License-Identifier: Apache-2.0
"""Capacity arithmetic and the reservation's life: allocated in the profile, frozen afterwards."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm_qout.reservation import (
    DRAFT_LANE,
    Capacity,
    Reservation,
    ReservationError,
    SlotKey,
    capacity_of,
    microbatch_rows,
)


def split_sizes(tokens, microbatches):
    """The split rule of vLLM: cuts at multiples of tokens // n, the last part takes the rest."""
    share = tokens // microbatches
    return [share] * (microbatches - 1) + [tokens - share * (microbatches - 1)]


@given(capacity=st.integers(1, 700), microbatches=st.integers(1, 9), data=st.data())
def test_slots_cover_every_split(capacity, microbatches, data):
    """Every microbatch of every batch that fits the capacity fits its slot, split or unsplit."""
    rows = microbatch_rows(capacity, microbatches)
    tokens = data.draw(st.integers(1, capacity))
    assert len(rows) == microbatches
    assert tokens <= rows[0]
    assert all(part <= slot for part, slot in zip(split_sizes(tokens, microbatches), rows, strict=True))


@given(capacity=st.integers(2, 120), microbatches=st.integers(2, 6))
def test_slots_are_no_larger_than_some_split_needs(capacity, microbatches):
    """Each slot after the first is exactly the largest part that a split can give it."""
    parts = [split_sizes(tokens, microbatches) for tokens in range(1, capacity + 1)]
    largest = [max(sizes) for sizes in zip(*parts, strict=True)]
    slots = microbatch_rows(capacity, microbatches)
    assert slots[1:-1] == tuple(largest[1:-1])
    # Below one token a microbatch the bound is not reached; vLLM refuses such thresholds.
    if capacity >= microbatches:
        assert slots[-1] == largest[-1]


def test_the_split_rule_is_the_one_of_vllm():
    """The parts that vLLM itself cuts are the parts that the arithmetic assumes."""
    numpy = pytest.importorskip("numpy")
    ubatch_utils = pytest.importorskip("vllm.v1.worker.ubatch_utils")
    for microbatches in (2, 3, 4):
        for tokens in range(microbatches, 40):
            requests = numpy.array([tokens])
            _, padded = ubatch_utils.maybe_create_ubatch_slices(True, requests, tokens, 1, microbatches)
            assert [part.num_tokens for part in padded] == split_sizes(tokens, microbatches)


def test_impossible_capacity_is_refused():
    """Zero tokens or zero microbatches is a caller's mistake, not a buffer of no rows."""
    with pytest.raises(ValueError, match="got 0 tokens in 2 microbatches"):
        microbatch_rows(0, 2)


def config(tokens=96, seqs=8, dbo=False, dp=1, speculative=None):
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=tokens, max_num_seqs=seqs),
        parallel_config=SimpleNamespace(use_ubatching=dbo, num_ubatches=2 if dbo else 0, data_parallel_size=dp),
        speculative_config=speculative,
    )


def dspark(tokens, **hf):
    return SimpleNamespace(
        use_dspark=lambda: True,
        num_speculative_tokens=tokens,
        draft_model_config=SimpleNamespace(hf_config=SimpleNamespace(**hf)),
    )


@pytest.mark.parametrize(
    ("vllm_config", "expected"),
    [
        (config(), Capacity(96)),
        (config(dbo=True, dp=1), Capacity(96)),
        (config(dbo=True, dp=2), Capacity(96, microbatches=2)),
        (config(speculative=SimpleNamespace(use_dspark=lambda: False)), Capacity(96)),
        (config(speculative=dspark(5)), Capacity(96, draft_rows=40)),
        (config(speculative=dspark(5, sample_from_anchor=False)), Capacity(96, draft_rows=48)),
        (config(seqs=64, speculative=dspark(5)), Capacity(96, draft_rows=96)),
    ],
    ids=["plain", "dbo-alone", "dbo-dp", "other-draft", "dspark", "dspark-fill-in", "dspark-capped"],
)
def test_capacity_follows_the_configuration(vllm_config, expected):
    """Microbatches need data parallelism; the draft lane holds its query rows, at most the token budget."""
    assert capacity_of(vllm_config) == expected


def key(lane=0, microbatch=0, heads=8, device="cpu"):
    return SlotKey(device, lane, microbatch, heads, torch.bfloat16)


def reservation(capacity, device="cpu"):
    calls = []

    def allocate(name, shape, dtype):
        calls.append((name, shape))
        return torch.empty(shape, dtype=dtype, device=device)

    return Reservation(capacity, allocate), calls


def test_one_row_profile_reserves_the_whole_capacity_of_every_microbatch():
    """A profile call of any size allocates all slots of its lane at full size, once."""
    reserved, calls = reservation(Capacity(11, microbatches=2))
    view = reserved.reserve(key(), 1)
    assert view.shape == (1, 8, 512)
    assert [shape for _, shape in calls] == [(11, 8, 512), (6, 8, 512)]
    assert len({name for name, _ in calls}) == 2
    assert reserved.reserved_bytes() == 17 * 8 * 512 * 2
    reserved.reserve(key(microbatch=1), 6)
    assert len(calls) == 2


def test_calls_get_the_same_address_in_every_phase():
    """Profile, capture and live steps of one slot see one address, and the report shows it."""
    reserved, _ = reservation(Capacity(11))
    reserved.reserve(key(), 3)
    reserved.take(key(), 11, capturing=True)
    reserved.take(key(), 1, capturing=False)
    assert reserved.take(key(), 0, capturing=False).shape[0] == 0
    (row,) = reserved.report()
    assert row["addresses"] == {phase: [row["address"]] for phase in ("profile", "capture", "live")}
    assert (row["rows"], row["bytes"], row["lane"], row["ubatch"]) == (11, 11 * 8 * 1024, 0, 0)


def test_nothing_is_allocated_after_the_first_real_forward():
    """Once a real forward has run, a missing slot is refused, in a real forward and in a later profile."""
    reserved, calls = reservation(Capacity(11, draft_rows=4))
    reserved.reserve(key(), 11)
    reserved.take(key(), 11, capturing=False)
    with pytest.raises(ReservationError, match=r"lane 1.*needs vLLM's memory profile to run first"):
        reserved.take(key(lane=DRAFT_LANE), 1, capturing=False)
    with pytest.raises(ReservationError, match="after the first real forward"):
        reserved.reserve(key(lane=DRAFT_LANE), 1)
    reserved.reserve(key(), 11)
    assert len(calls) == 1


@pytest.mark.parametrize("call", ["reserve", "take"])
def test_too_many_rows_are_refused_with_both_numbers(call):
    """A batch beyond the capacity fails, in the profile as well, so a too small capacity stops the start."""
    reserved, _ = reservation(Capacity(4))
    reserved.reserve(key(), 4)
    with pytest.raises(ReservationError, match="got 5 query rows, the buffer of lane 0 microbatch 0 holds 4"):
        reserved.reserve(key(), 5) if call == "reserve" else reserved.take(key(), 5, capturing=False)


def test_real_forward_without_a_profile_is_refused():
    """A real forward never allocates for itself."""
    reserved, calls = reservation(Capacity(4))
    with pytest.raises(ReservationError, match="no reserved query buffer for a real forward"):
        reserved.take(key(), 1, capturing=False)
    assert not calls


def test_lanes_and_head_counts_do_not_share_memory():
    """Target and draft, and two head counts, have buffers of their own."""
    reserved, _ = reservation(Capacity(8, draft_rows=4))
    views = [
        reserved.reserve(key(), 4),
        reserved.reserve(key(lane=DRAFT_LANE), 4),
        reserved.reserve(key(heads=16), 4),
    ]
    assert len({view.untyped_storage().data_ptr() for view in views}) == 3


def test_unknown_lane_is_refused():
    """A lane that the configuration does not have is an error, not a new buffer."""
    reserved, _ = reservation(Capacity(8))
    with pytest.raises(ReservationError, match="got workspace lane 1"):
        reserved.reserve(key(lane=DRAFT_LANE), 4)


def test_workspace_on_another_device_is_refused():
    """The buffer must be where the query is."""
    reserved, _ = reservation(Capacity(8), device="meta")
    with pytest.raises(ReservationError, match="got a workspace on meta, needs cpu"):
        reserved.reserve(key(), 4)


def test_buffer_can_be_written_inside_and_outside_inference_mode():
    """vLLM profiles in inference mode; the buffer is no inference tensor, which would forbid other writes."""
    reserved, _ = reservation(Capacity(8))
    with torch.inference_mode():
        reserved.reserve(key(), 4).zero_()
    reserved.take(key(), 4, capturing=False).zero_()
