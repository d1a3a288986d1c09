# SPDX-License-Identifier: Apache-2.0
"""Prometheus text and OpenMetrics pages: exact names, labels, and differences that admit a restart.

A series that is absent, ambiguous or reset is unknown with a reason. It is never 0: 0 is a measurement.
Labels are keywords of the methods here; the other parameters are positional, since a label may have any name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

RENAMED = {
    "vllm:gpu_cache_usage_perc": "vllm:kv_cache_usage_perc",
    "vllm:gpu_prefix_cache_queries": "vllm:prefix_cache_queries",
    "vllm:gpu_prefix_cache_hits": "vllm:prefix_cache_hits",
    "vllm:time_per_output_token_seconds": "vllm:inter_token_latency_seconds",
}
"""Family names of older vLLM versions and what they are called since. Units and meaning are unchanged."""

START_TIME = "process_start_time_seconds"
MAX_PROBLEMS = 20

Labels = tuple[tuple[str, str], ...]
Key = tuple[str, Labels]

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_QUOTED = r'"(?:[^"\\]|\\.)*"'
_SAMPLE = re.compile(
    rf"(?P<name>{_NAME})?\s*(?:\{{(?P<labels>(?:[^\"}}]|{_QUOTED})*)\}})?\s+(?P<value>\S+)"
    r"(?:\s+(?P<time>[-+0-9.eE]+))?(?:\s+#\s.*)?\s*"
)
_LABEL = re.compile(rf"\s*(?P<name>{_NAME}|{_QUOTED})\s*(?:=\s*(?P<value>{_QUOTED}))?\s*(?:,|$)")
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?[Ii]nf(?:inity)?|[Nn]a[Nn]")
_ESCAPES = {"n": "\n", "\\": "\\", '"': '"'}
_SUFFIXES = ("_total", "_created", "_count", "_sum", "_bucket", "_info")


@dataclass(frozen=True, slots=True)
class Reading:
    """A value, or the reason why there is none."""

    value: float | None
    reason: str | None = None

    @classmethod
    def unknown(cls, reason: str) -> Reading:
        return cls(None, reason)


@dataclass(frozen=True, slots=True)
class Histogram:
    """Cumulative counts by upper bound (the last one is infinity), sum of observations and their count."""

    buckets: tuple[tuple[float, float], ...]
    total: float
    count: float


@dataclass(frozen=True)
class Scrape:
    """One page of metrics. `kinds` maps family to its declared type; `problems` lists lines that were refused."""

    samples: Mapping[Key, float]
    kinds: Mapping[str, str]
    problems: tuple[str, ...] = ()
    conflicts: frozenset[Key] = frozenset()
    """Series that the page gives twice with different values."""

    @cached_property
    def by_name(self) -> Mapping[str, tuple[Labels, ...]]:
        names: dict[str, list[Labels]] = {}
        for name, labels in self.samples:
            names.setdefault(name, []).append(labels)
        return {name: tuple(found) for name, found in names.items()}

    @property
    def process_start_time(self) -> float | None:
        """Unix time at which the scraped process started, in seconds."""
        return self.value(START_TIME)

    def names(self) -> frozenset[str]:
        return frozenset(self.by_name)

    def series(self, name: str, /, **labels: str) -> tuple[Labels, ...]:
        """Label sets of the series called exactly `name` that carry `labels`; older names count as well."""
        wanted = set(labels.items())
        for candidate in _spellings(name):
            found = self.by_name.get(candidate)
            if found:
                return tuple(one for one in found if wanted <= set(one))
        return ()

    def value(self, name: str, /, **labels: str) -> float | None:
        return self.reading(name, **labels).value

    def reading(self, name: str, /, **labels: str) -> Reading:
        """The one series called `name` with these labels; several matching series are ambiguous."""
        found = self.series(name, **labels)
        if not found:
            return Reading.unknown(_absent(name, labels))
        if len(found) > 1:
            return Reading.unknown(f"{name}: {len(found)} series match; name more labels or sum explicitly")
        return self._at(name, found[0])

    def total(self, name: str, over: Collection[str], /, **labels: str) -> Reading:
        """Sum over the labels in `over`, for example `{"engine"}`; any other difference is ambiguous."""
        found = self.series(name, **labels)
        if not found:
            return Reading.unknown(_absent(name, labels))
        apart = {tuple(pair for pair in one if pair[0] not in over) for one in found}
        if len(apart) > 1:
            return Reading.unknown(f"{name}: series differ in more than {', '.join(sorted(over))}")
        return _sum(self._at(name, one) for one in found)

    def info(self, name: str, label: str, /, **labels: str) -> str | None:
        """A label value of an information series such as `vllm:cache_config_info`; None when ambiguous."""
        values = {dict(one).get(label) for one in self.series(name, **labels)}
        return values.pop() if len(values) == 1 else None

    def histogram(self, family: str, /, **labels: str) -> Histogram | None:
        total, count = self.value(f"{family}_sum", **labels), self.value(f"{family}_count", **labels)
        bounds: list[tuple[float, float]] = []
        for one in self.series(f"{family}_bucket", **labels):
            reading = self._at(f"{family}_bucket", one)
            bound = _number(dict(one).get("le", ""))
            if reading.value is None or bound is None:
                return None
            bounds.append((bound, reading.value))
        bounds.sort()
        repeated = len({bound for bound, _ in bounds}) != len(bounds)
        if total is None or count is None or repeated or not bounds or not math.isinf(bounds[-1][0]):
            return None
        return Histogram(tuple(bounds), total, count)

    def kind(self, name: str) -> str | None:
        """Declared type of the family that the sample `name` belongs to."""
        for family in (name, *(name.removesuffix(suffix) for suffix in _SUFFIXES if name.endswith(suffix))):
            if family in self.kinds:
                return self.kinds[family]
        return None

    def _at(self, name: str, labels: Labels) -> Reading:
        for candidate in _spellings(name):
            key = (candidate, labels)
            if key in self.conflicts:
                return Reading.unknown(f"{candidate}: the page gives this series twice with different values")
            if key in self.samples:
                value = self.samples[key]
                return Reading.unknown(f"{candidate} is NaN") if math.isnan(value) else Reading(value)
        return Reading.unknown(_absent(name, dict(labels)))


@dataclass(frozen=True)
class Delta:
    """Difference of two scrapes of one process. `invalid` says why the whole window proves nothing."""

    before: Scrape = field(repr=False)
    after: Scrape = field(repr=False)
    invalid: str | None

    def value(self, name: str, /, **labels: str) -> float | None:
        return self.reading(name, **labels).value

    def reading(self, name: str, /, **labels: str) -> Reading:
        """Increase of the one series with this name and these labels."""
        if self.invalid is not None:
            return Reading.unknown(self.invalid)
        return _difference(self.before.reading(name, **labels), self.after.reading(name, **labels))

    def total(self, name: str, over: Collection[str], /, **labels: str) -> Reading:
        """Increase summed over the labels in `over`; a series that only one scrape has makes it unknown."""
        if self.invalid is not None:
            return Reading.unknown(self.invalid)
        first, last = set(self.before.series(name, **labels)), set(self.after.series(name, **labels))
        if first != last:
            return Reading.unknown(f"{name}: the two scrapes have different series")
        return _difference(self.before.total(name, over, **labels), self.after.total(name, over, **labels))

    def histogram(self, family: str, /, **labels: str) -> Histogram | None:
        """Observations of the window alone."""
        if self.invalid is not None:
            return None
        first, last = self.before.histogram(family, **labels), self.after.histogram(family, **labels)
        if first is None or last is None or [b for b, _ in first.buckets] != [b for b, _ in last.buckets]:
            return None
        pairs = zip(first.buckets, last.buckets, strict=True)
        buckets = tuple((bound, end - start) for (bound, start), (_, end) in pairs)
        return Histogram(buckets, last.total - first.total, last.count - first.count)


def parse(text: str | bytes) -> Scrape:
    """Read a page in Prometheus text format 0.0.4 or OpenMetrics 1.0.

    A last line without its line feed may be cut anywhere, so it is refused, not read.
    """
    page = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
    reader = _Reader()
    lines = page.split("\n")
    if lines[-1].strip() not in ("", "# EOF"):
        reader.refuse(len(lines), "the page ends inside a line")
        lines[-1] = ""
    for number, line in enumerate(lines, 1):
        reader.line(number, line.strip())
    return Scrape(reader.samples, reader.kinds, tuple(reader.problems), frozenset(reader.conflicts))


def delta(a: Scrape, b: Scrape) -> Delta:
    """Difference `b - a`; a restart between the scrapes makes every value of it unknown."""
    return Delta(a, b, _restart(a, b))


def canonical(name: str) -> str:
    """The current spelling of a metric name from any vLLM version."""
    for suffix in ("", *_SUFFIXES):
        family = name.removesuffix(suffix) if suffix else name
        if name.endswith(suffix) and family in RENAMED:
            return RENAMED[family] + suffix
    return name


class _Reader:
    def __init__(self) -> None:
        self.samples: dict[Key, float] = {}
        self.kinds: dict[str, str] = {}
        self.problems: list[str] = []
        self.conflicts: set[Key] = set()

    def refuse(self, number: int, why: str) -> None:
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(f"line {number}: {why}")

    def line(self, number: int, line: str) -> None:
        if not line:
            return
        if line.startswith("#"):
            words = line.split(None, 3)
            if len(words) == 4 and words[1] == "TYPE":
                self.kinds[words[2]] = words[3]
            return
        sample = _SAMPLE.fullmatch(line)
        value = _number(sample["value"]) if sample else None
        labels = _labels(sample["labels"] or "") if sample else None
        if sample is None or value is None or labels is None:
            self.refuse(number, "not a sample")
            return
        name, pairs = labels
        if (sample["name"] is None) == (name is None):
            self.refuse(number, "a sample has one name")
            return
        self.keep((sample["name"] or name or "", pairs), value)

    def keep(self, key: Key, value: float) -> None:
        known = self.samples.get(key)
        if known is not None and known != value and not (math.isnan(known) and math.isnan(value)):
            self.conflicts.add(key)
        self.samples[key] = value


def _labels(text: str) -> tuple[str | None, Labels] | None:
    """Quoted metric name (None when the name stands before the brace) and sorted pairs; None: malformed."""
    quoted_name: str | None = None
    pairs: dict[str, str] = {}
    position = 0
    text = text.strip()
    while position < len(text):
        found = _LABEL.match(text, position)
        if found is None:
            return None
        name, value = found["name"], found["value"]
        key = _unquote(name) if name.startswith('"') else name
        if value is None:
            if quoted_name is not None or not name.startswith('"'):
                return None
            quoted_name = key
        elif key in pairs:
            return None
        else:
            pairs[key] = _unquote(value)
        position = found.end()
    return quoted_name, tuple(sorted(pairs.items()))


def _unquote(text: str) -> str:
    return re.sub(r"\\(.)", lambda match: _ESCAPES.get(match[1], match[0]), text[1:-1], flags=re.DOTALL)


def _number(text: str) -> float | None:
    return float(text) if _NUMBER.fullmatch(text) else None


def _spellings(name: str) -> Iterator[str]:
    """The name as asked for, then what the same quantity was called in other versions."""
    yield name
    current = canonical(name)
    if current != name:
        yield current
    for suffix in ("", *_SUFFIXES):
        family = current.removesuffix(suffix) if suffix else current
        if not current.endswith(suffix):
            continue
        for old, new in RENAMED.items():
            if new == family and old + suffix != name:
                yield old + suffix


def _absent(name: str, labels: Mapping[str, str]) -> str:
    wanted = ", ".join(f"{key}={value}" for key, value in sorted(labels.items()))
    return f"{name}{{{wanted}}} is absent" if wanted else f"{name} is absent"


def _sum(readings: Iterable[Reading]) -> Reading:
    total = 0.0
    for reading in readings:
        if reading.value is None:
            return reading
        total += reading.value
    return Reading(total)


def _difference(first: Reading, last: Reading) -> Reading:
    if last.value is None:
        return last
    if first.value is None:
        return Reading.unknown(f"first scrape: {first.reason}")
    difference = last.value - first.value
    return Reading(difference) if math.isfinite(difference) else Reading.unknown("the difference is not finite")


def _restart(before: Scrape, after: Scrape) -> str | None:
    first, last = before.process_start_time, after.process_start_time
    if (first is None) != (last is None):
        return f"only one of the two scrapes has {START_TIME}: they may come from different processes"
    if first != last:
        return f"the process restarted between the scrapes ({START_TIME} {first} -> {last})"
    for key, start in before.samples.items():
        name, labels = key
        end = after.samples.get(key)
        if end is None:
            if _is_counter(before, name):
                return f"the counter {name} vanished between the scrapes"
        elif name.endswith("_created") and end != start and _is_created(before, name):
            return f"the series {name}{dict(labels)} was created anew between the scrapes"
        elif end < start and _is_counter(before, name):
            return f"the counter {name} fell from {start:g} to {end:g} between the scrapes"
    return None


def _is_counter(scrape: Scrape, name: str) -> bool:
    """Whether the series may only grow: counters, and counts (not sums) of histograms and summaries."""
    kind = scrape.kind(name)
    if kind in ("histogram", "summary"):
        return name.endswith(("_count", "_bucket"))
    return kind == "counter" and not name.endswith("_created")


def _is_created(scrape: Scrape, name: str) -> bool:
    family = name.removesuffix("_created")
    kinds = (scrape.kinds.get(family), scrape.kinds.get(f"{family}_total"))
    return any(kind in ("counter", "histogram", "summary") for kind in kinds)
