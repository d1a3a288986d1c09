# SPDX-License-Identifier: Apache-2.0
"""What engine and cache server counted during one request. None is unknown: absent, ambiguous or reset."""

from __future__ import annotations

from dataclasses import dataclass

from qualify.observe import metrics
from qualify.probes.kv_records import Scrapes

ENGINES = {"engine", "model_name"}
"""Labels over which the engine's counters are summed; any other label is asked for by value."""


@dataclass(frozen=True)
class Counts:
    """Tokens, except `finished` (requests), `dropped_events`, and start times in Unix seconds."""

    external_hits: float | None = None
    external_source: float | None = None
    local_compute: float | None = None
    local_hits: float | None = None
    finished: float | None = None
    lookup_hits: float | None = None
    memory_hits: float | None = None
    disk_hits: float | None = None
    dropped_events: float | None = None
    engine_start: float | None = None
    cache_start: float | None = None


def read_counts(scrapes: Scrapes | None) -> Counts:
    if scrapes is None:
        return Counts()
    before, after = metrics.parse(scrapes.engine_before), metrics.parse(scrapes.engine_after)
    engine = metrics.delta(before, after)
    source = "vllm:prompt_tokens_by_source_total"
    cache = _Cache(scrapes)
    return Counts(
        external_hits=engine.total("vllm:external_prefix_cache_hits_total", ENGINES).value,
        external_source=engine.total(source, ENGINES, source="external_kv_transfer").value,
        local_compute=engine.total(source, ENGINES, source="local_compute").value,
        local_hits=engine.total("vllm:prefix_cache_hits_total", ENGINES).value,
        finished=engine.total("vllm:request_success_total", {*ENGINES, "finished_reason"}).value,
        lookup_hits=cache.growth("lmcache_mp_lookup_hit_tokens_total"),
        memory_hits=cache.growth("lmcache_mp_lookup_hit_l1_tokens_total"),
        disk_hits=cache.growth("lmcache_mp_lookup_hit_l2_tokens_total"),
        dropped_events=cache.growth("lmcache_mp_event_bus_dropped_events_total"),
        engine_start=after.process_start_time,
        cache_start=cache.start,
    )


class _Cache:
    """The cache server's counters. A counter appears with its first event, so one that is new on the second page of
    the same process began at zero.
    """

    def __init__(self, scrapes: Scrapes) -> None:
        self.before = metrics.parse(scrapes.cache_before or "")
        self.after = metrics.parse(scrapes.cache_after or "")
        restarted = metrics.delta(self.before, self.after).invalid is not None
        self.usable = not restarted and self.after.process_start_time is not None

    @property
    def start(self) -> float | None:
        return self.after.process_start_time

    def growth(self, name: str) -> float | None:
        last = self._sum(self.after, name)
        if not self.usable or last is None:
            return None
        if not self.before.series(name):
            return last
        first = self._sum(self.before, name)
        return None if first is None else last - first

    @staticmethod
    def _sum(page: metrics.Scrape, name: str) -> float | None:
        """Over all labels: one cache server serves one model here."""
        return page.total(name, {key for labels in page.series(name) for key, _ in labels}).value
