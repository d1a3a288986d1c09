# SPDX-License-Identifier: Apache-2.0
"""The stored files: read by name and digest, damaged for a control, and put back whatever happens."""

from __future__ import annotations

import hashlib

import kv_synthetic as synthetic
import pytest
from qualify.probes import kv_storage
from qualify.probes.kv_records import Arm, Case, Damage, Stored

TOKENS = 2000


@pytest.fixture
def storage(tmp_path):
    """Files whose bytes are the made-up chunk digests' own names, so that engine and files agree."""
    cold = synthetic.case(Arm.COLD, TOKENS)
    for capture in cold["ranks"]:
        for entry in capture["requests"][0]["chunks"]:
            number, chunk, digest = entry
            name = f"m@0x02{capture['rank']:02x}02{capture['rank']:02x}@{number:x}@{synthetic.digest('n', chunk)}.data"
            (tmp_path / name).write_bytes(digest.encode())
            entry[2] = hashlib.sha256(digest.encode()).hexdigest()
    files, strangers = kv_storage.listing(tmp_path, frozenset())
    stored = Stored(
        boot="cold",
        chunk_tokens=256,
        objects=((0,), (1,)),
        found_before=0,
        files=files,
        strangers=strangers,
    )
    return tmp_path, Case.model_validate(cold), stored


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_listing_reads_rank_object_group_and_chunk_from_the_name(storage):
    """Names are hexadecimal; the model part, which may be a path, is not kept."""
    _, _, stored = storage
    assert len(stored.files) == 2 * 2 * 7
    assert {(file.world, file.rank, file.object_group) for file in stored.files} == {
        (2, rank, number) for rank in (0, 1) for number in (0, 1)
    }
    assert "m@" not in stored.model_dump_json()


def test_unknown_names_are_listed_as_strangers(tmp_path):
    """A file that the cache server did not name is counted, and files that were there before are not."""
    (tmp_path / "old.data").write_bytes(b"old")
    before = kv_storage.names(tmp_path)
    (tmp_path / "new.data").write_bytes(b"new")
    assert kv_storage.listing(tmp_path, before) == ((), (hashlib.sha256(b"new").hexdigest(),))


def test_every_control_is_planned_and_undone(storage):
    """All six kinds of damage apply to this model; each changes the bytes it names and then restores them."""
    folder, cold, stored = storage
    whole = content(folder)
    steps = list(kv_storage.plan(cold, stored, folder, "distinct"))
    assert [step.fault.damage for step in steps] == [
        Damage.FLIP_IN_ENGINE,
        Damage.STALE_GROUP,
        Damage.STALE_GROUP,
        Damage.FLIP_IN_FILE,
        Damage.SWAPPED_RANKS,
        Damage.SWAPPED_CHUNKS,
        Damage.FLIP_OUTSIDE_WINDOW,
    ]
    for step in steps:
        with step.applied():
            changed = sum(whole[name] != now for name, now in content(folder).items())
        on_files = 2 if step.swap else 1 if step.flip else 0
        assert changed == on_files
        assert content(folder) == whole


def test_files_are_put_back_after_an_error(storage):
    """An engine that fails during a control must not leave damaged files for the next boot."""
    folder, cold, stored = storage
    whole = content(folder)
    step = next(s for s in kv_storage.plan(cold, stored, folder, "distinct") if s.swap)
    with pytest.raises(RuntimeError), step.applied():
        raise RuntimeError
    assert content(folder) == whole


def test_a_chunk_without_a_file_cannot_be_damaged(storage):
    """A control whose file is not to be found is listed as not run, never left out."""
    folder, cold, stored = storage
    fewer = stored.model_copy(update={"files": ()})
    steps = list(kv_storage.plan(cold, fewer, folder, "distinct"))
    on_files = [step for step in steps if step.in_engine is None]
    assert len(on_files) == 4
    assert all(step.fault.not_run for step in on_files)


def test_one_writer_serves_every_rank(storage):
    """Where ranks hold equal bytes, damage to rank 0's file shows on all ranks, and ranks cannot be swapped."""
    folder, cold, stored = storage
    steps = {step.fault.damage: step for step in kv_storage.plan(cold, stored, folder, "equal")}
    assert Damage.SWAPPED_RANKS not in steps
    assert steps[Damage.FLIP_IN_FILE].fault.ranks == (0, 1)


def test_object_groups_follow_the_servers_own_account():
    """Several kernel groups of one engine group count once; object groups keep the server's order."""
    rows = [(1, 1), (0, 0), (0, 0), (2, 1)]
    groups = [{"engine_group_idx": engine, "object_group_idx": number} for engine, number in rows]
    status = {"cache_context_meta": {"7": {"kv_cache_layout": {"kernel_groups": groups}}}}
    assert kv_storage.objects(status) == ((0,), (1, 2))
