# SPDX-License-Identifier: Apache-2.0
"""Waiting for the cache server: nothing is read before stores, locks and counters stand still, and never forever."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from qualify.errors import TargetError
from qualify.probes import kv


def page(lookups, submitted, finished, written):
    return (
        f"process_start_time_seconds 1.0\nlmcache_mp_lookups_requests_total {lookups}\n"
        f"lmcache_mp_num_submitted_stores_total {submitted}\nlmcache_mp_num_finished_stores_total {finished}\n"
        f"lmcache_mp_l2_store_submitted_objects_chunks_total {written}\n"
        f"lmcache_mp_l2_store_completed_objects_chunks_total {written}\n"
    )


def status(locked):
    memory = {"write_locked_count": locked, "temporary_count": 0, "total_object_count": 4, "memory_used_bytes": 9}
    group = {"kernel_group_idx": 0, "engine_group_idx": 0, "object_group_idx": 0, "num_layers": 2}
    return {
        "chunk_size": 256,
        "hash_algorithm": "blake3",
        "storage_manager": {
            "l1_manager": memory,
            "store_controller": {"pending_keys_count": 0, "in_flight_task_count": 0},
            "prefetch_controller": {"in_flight_request_count": 0},
        },
        "cache_context_meta": {"7": {"world_size": 2, "kv_cache_layout": {"kernel_groups": [group]}}},
    }


class Server:
    """Plays pages and statuses in order; the last one of each stays."""

    def __init__(self, pages, statuses):
        self.pages, self.statuses, self.phase, self.asked = pages, statuses, "kv.cold", []

    def get(self, path):
        self.asked.append(path)
        left = self.pages if path == "/metrics" else self.statuses
        value = left.pop(0) if len(left) > 1 else left[0]
        return value if isinstance(value, str) else json.dumps(value)


def session_of(server, seconds=5.0):
    timeouts = SimpleNamespace(request_seconds=seconds)
    return SimpleNamespace(
        engine=SimpleNamespace(phase="kv.cold"), cache=server, profile=SimpleNamespace(timeouts=timeouts)
    )


def test_waits_for_lookup_stores_locks_and_stillness(monkeypatch):
    """The page that is returned is one of three equal ones after everything was finished, with no lock held."""
    monkeypatch.setattr(kv, "POLL_SECONDS", 0)
    start = page(0, 0, 0, 0)
    moving = [start, page(1, 0, 0, 0), page(1, 2, 1, 2), page(1, 2, 2, 3), page(1, 2, 2, 4)]
    server = Server(moving, [status(1), status(0)])
    found, excerpt = kv._cache_quiescent(session_of(server), server, start, 4)
    assert found == page(1, 2, 2, 4)
    assert excerpt["busy"]["write_locked"] == 0
    assert server.asked.count("/status") == 2


def test_a_wait_without_end_is_refused_with_its_reason(monkeypatch):
    """After its bound the wait names the phase and what it waited for."""
    monkeypatch.setattr(kv, "POLL_SECONDS", 0)
    start = page(0, 0, 0, 0)
    server = Server([page(1, 2, 1, 4)], [status(0)])
    with pytest.raises(TargetError, match="num_finished_stores_total 1 to reach") as caught:
        kv._cache_quiescent(session_of(server, 0.05), server, start, 0)
    assert caught.value.phase == "kv.cold"


def test_an_unknown_status_is_refused():
    """A status page of another version ends the probe in words."""
    server = Server([""], [{"something": "else"}])
    with pytest.raises(TargetError, match="not of the known form"):
        kv._status(session_of(server))
