# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501 - metric pages stand here as a server writes them
"""Metric pages: exact names, labels, restarts, and unknown instead of 0."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from qualify.observe.metrics import canonical, delta, parse

START = "process_start_time_seconds 1000\n"


def page(text, start=1000.0):
    return parse(f"process_start_time_seconds {start}\n# TYPE vllm:n counter\n# TYPE vllm:g gauge\n{text}\n")


names = st.from_regex(r"[a-zA-Z_:][a-zA-Z0-9_:]{0,30}", fullmatch=True)
texts = st.text(st.characters(blacklist_categories=["Cs"]), max_size=30)
series = st.dictionaries(
    st.tuples(names, st.dictionaries(names, texts, max_size=4).map(lambda found: tuple(sorted(found.items())))),
    st.floats(allow_nan=False),
    max_size=20,
)


def escape(text):
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def write(samples):
    lines = []
    for (name, labels), value in samples.items():
        inside = ",".join(f'{key}="{escape(text)}"' for key, text in labels)
        number = {math.inf: "+Inf", -math.inf: "-Inf"}.get(value, repr(value))
        lines.append(f"{name}{{{inside}}} {number}\n")
    return "".join(lines)


@settings(deadline=None)
@given(series)
def test_round_trip(samples):
    """Any names, label values and numbers survive writing and reading."""
    # Carriage returns are line ends to some readers; here only the line feed ends a line.
    read = parse(write(samples))
    assert read.problems == ()
    assert dict(read.samples) == samples


@settings(deadline=None)
@given(st.binary(max_size=2000))
def test_any_bytes(data):
    """Any bytes are read without error, and what is refused is listed."""
    read = parse(data)
    delta(read, read)


def test_created_is_not_the_counter():
    """`_created` gauges hold Unix times and never answer for their counter."""
    read = page("vllm:n_created 1.796e9\nvllm:n_total 7")
    assert (read.value("vllm:n_total"), read.value("vllm:n")) == (7, None)


def test_several_engines():
    """Several series are ambiguous until labels are named or summed explicitly."""
    read = page('vllm:n_total{engine="0",m="a"} 1\nvllm:n_total{engine="1",m="a"} 2\nvllm:n_total{engine="0",m="b"} 4')
    assert read.value("vllm:n_total") is None
    assert read.value("vllm:n_total", engine="1") == 2
    assert read.total("vllm:n_total", {"engine"}, m="a").value == 3
    assert read.total("vllm:n_total", {"engine"}).value is None
    assert read.total("vllm:n_total", {"engine", "m"}).value == 7


def test_any_label_can_be_named():
    """A label may be called as a parameter is; the series is found all the same."""
    labels = dict.fromkeys(("name", "self", "over", "label", "family"), "x")
    inside = ",".join(f'{label}="x"' for label in labels)
    read = page(
        f"vllm:n_total{{{inside}}} 7\n"
        f'vllm:h_bucket{{{inside},le="+Inf"}} 2\nvllm:h_sum{{{inside}}} 3\nvllm:h_count{{{inside}}} 2'
    )
    window = delta(read, read)
    assert (read.value("vllm:n_total", **labels), window.value("vllm:n_total", **labels)) == (7, 0)
    assert read.total("vllm:n_total", {"engine"}, **labels).value == 7
    assert window.total("vllm:n_total", {"engine"}, **labels).value == 0
    assert read.info("vllm:n_total", "over", **labels) == "x"
    assert read.histogram("vllm:h", **labels).count == 2
    assert window.histogram("vllm:h", **labels).count == 0


def test_absent_is_unknown():
    """Absent series have a reason, never 0."""
    window = delta(page("vllm:n_total 1"), page("vllm:n_total 3"))
    assert window.value("vllm:n_total") == 2
    assert window.reading("vllm:other_total").value is None
    assert "absent" in window.reading("vllm:other_total").reason


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (page("vllm:n_total 5"), page("vllm:n_total 3"), "fell"),
        (page("vllm:n_total 5"), page("vllm:n_total 9", start=2000.0), "restarted"),
        (page("vllm:n_total 5"), parse("vllm:n_total 9\n"), "only one"),
        (page("vllm:n_total 5"), page("vllm:g 1"), "vanished"),
        (page("vllm:n_total 5\nvllm:n_created 10"), page("vllm:n_total 9\nvllm:n_created 11"), "anew"),
    ],
)
def test_restart_voids_the_window(before, after, reason):
    """A reset counter or a new process makes every value of the window unknown."""
    window = delta(before, after)
    assert reason in window.invalid
    assert window.value("vllm:n_total") is None
    assert window.total("vllm:g", {"engine"}).value is None


def test_gauges_may_fall():
    """A gauge that falls is no restart."""
    assert delta(page("vllm:g 5"), page("vllm:g 3")).value("vllm:g") == -2


def test_new_series_is_unknown():
    """A series that appears inside the window has no known start value."""
    window = delta(page('vllm:n_total{r="a"} 1'), page('vllm:n_total{r="a"} 1\nvllm:n_total{r="b"} 4'))
    assert window.value("vllm:n_total", r="b") is None
    assert window.total("vllm:n_total", {"r"}).value is None


def test_contradiction():
    """A series given twice with different values is unknown; twice with one value is one series."""
    assert page("vllm:n_total 1\nvllm:n_total 2").value("vllm:n_total") is None
    assert page("vllm:n_total 2\nvllm:n_total 2").value("vllm:n_total") == 2
    assert page("vllm:n_total NaN").value("vllm:n_total") is None


def test_cut_page():
    """A page that ends inside a line loses that line: 12 may have been 1234."""
    read = parse(START + "a 1\nb 12")
    assert (read.value("a"), read.value("b")) == (1, None)
    assert "ends inside a line" in read.problems[0]


@pytest.mark.parametrize(
    "line", ["a", "a b", "a{", 'a{x="1" 2', "a{x=1} 2", "{} 1", 'a{x="1",x="2"} 3', "a 1_000", "1a 2", "a 0x10"]
)
def test_malformed_lines(line):
    """A malformed line is refused and named, and the others are read."""
    read = parse(f"{line}\nb 1\n")
    assert read.problems == ("line 1: " + read.problems[0].removeprefix("line 1: "),)
    assert dict(read.samples) == {("b", ()): 1.0}


def test_openmetrics():
    """Exemplars, timestamps, quoted names and the end mark of OpenMetrics."""
    text = (
        '# TYPE h histogram\n# UNIT h seconds\nh_bucket{le="1.0"} 3 # {trace_id="a # b"} 0.5 1.5\nh_bucket{le="+Inf"} 4\n'
        'h_sum 9.5\nh_count 4 1700000000.123\n{"a.b", x="y"} 2\n# EOF'
    )
    read = parse(text)
    assert read.problems == ()
    assert read.histogram("h").buckets == ((1.0, 3.0), (math.inf, 4.0))
    assert (read.histogram("h").total, read.histogram("h").count) == (9.5, 4)
    assert read.value("a.b", x="y") == 2


def test_histogram_window():
    """The window of a histogram is the difference of its buckets; different bounds have none."""

    def text(low, high, bound="1.0"):
        return page(
            f'# TYPE h histogram\nh_bucket{{le="{bound}"}} {low}\nh_bucket{{le="+Inf"}} {high}\nh_sum {high}\nh_count {high}'
        )

    found = delta(text(1, 2), text(4, 7)).histogram("h")
    assert (found.buckets, found.total, found.count) == (((1.0, 3.0), (math.inf, 5.0)), 5, 5)
    assert delta(text(1, 2), text(4, 7, bound="2.0")).histogram("h") is None
    assert text(1, 2).histogram("absent") is None


def test_iteration_tokens_is_a_histogram():
    """`vllm:iteration_tokens_total` is a histogram despite its name; its sum is no counter."""
    text = "# TYPE vllm:iteration_tokens_total histogram\nvllm:iteration_tokens_total_sum {}\nvllm:iteration_tokens_total_count {}"
    window = delta(page(text.format(9, 2)), page(text.format(8, 3)))
    assert window.invalid is None
    assert window.value("vllm:iteration_tokens_total_count") == 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("vllm:gpu_cache_usage_perc", "vllm:kv_cache_usage_perc"),
        ("vllm:gpu_prefix_cache_hits_total", "vllm:prefix_cache_hits_total"),
        ("vllm:time_per_output_token_seconds_count", "vllm:inter_token_latency_seconds_count"),
    ],
)
def test_renamed(old, new):
    """A quantity is found under its current name on pages of either version; the exact name comes first."""
    assert canonical(old) == new
    assert canonical(new) == new
    assert page(f"{old} 4").value(new) == 4
    assert page(f"{new} 4").value(old) == 4
    assert page(f"{old} 4\n{new} 5").value(new) == 5
    assert canonical("vllm:generation_tokens_total") == "vllm:generation_tokens_total"
