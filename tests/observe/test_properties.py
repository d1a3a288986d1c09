# SPDX-License-Identifier: Apache-2.0
"""A log means the same in any transport and any cut; what a cut takes away is unknown, never wrong."""

from __future__ import annotations

import gzip
import io
import json
import random
from dataclasses import fields, is_dataclass
from itertools import pairwise, product

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from qualify.observe.facts import Fact, Source
from qualify.observe.log import read, read_file
from qualify.observe.triage import triage

NAMES = (
    "h200x2-tp2-plain.log",
    "h200x2-tp2-dspark-k5.log",
    "h200x2-tp2-lmcache-mp.log",
    "h200x2-tp2-first-boot-unfinished.log",
    "cpu-tp2-no-graphs-stopped.log",
    "mp-server-fs-l2.log",
)
relaxed = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
TRANSPORT = {"label", "extent", "envelopes", "bare_bars", "end"}


def meaning(value):
    """Facts without places and transport: what must not depend on how the log was carried."""
    if isinstance(value, Source):
        return "somewhere"
    if is_dataclass(value):
        return {one.name: meaning(getattr(value, one.name)) for one in fields(value) if one.name not in TRANSPORT}
    if isinstance(value, dict):
        return {key: meaning(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [meaning(item) for item in value]
    return value


def compose(line, rng):
    return b"vllm-1  | " + line


def stamps(line, rng):
    return b"2026-01-31T10:00:00.123456789Z " + line


def syslog(line, rng):
    return b"Nov 30 04:00:01 gpu-host vllm[12]: " + line


def docker(line, rng):
    return encode(line + b"\n")


def encode(part):
    return json.dumps({"log": part.decode(), "stream": "stderr", "time": "2026-01-31T10:00:00Z"}).encode()


def docker_split(line, rng):
    text = line.decode()
    cut = rng.randint(0, len(text))
    return b"\n".join([encode(text[:cut].encode()), encode(text[cut:].encode() + b"\n")]) if cut else docker(line, rng)


def cri(line, rng):
    cut = rng.randint(0, len(line))
    stamp = b"2026-01-31T10:00:00.1Z stdout "
    return stamp + b"P " + line[:cut] + b"\n" + stamp + b"F " + line[cut:]


COLOURS = [b"\x1b[0;36m", b"\x1b[0m", b"\x1b[32;20m", b"\x1b[3m", b"\x1b[K"]


def coloured(line, rng):
    starts = [at for at, byte in enumerate(line) if not 0x80 <= byte < 0xC0]  # not inside a character
    for at in sorted((rng.choice(starts) for _ in range(rng.randint(0, 4)) if starts), reverse=True):
        line = line[:at] + rng.choice(COLOURS) + line[at:]
    return line


def returned(line, rng):
    return line + b"\r"


LAYERS = [[], [compose], [stamps], [syslog], [docker], [docker_split], [cri], [stamps, compose]]


@pytest.mark.parametrize("name", NAMES)
@relaxed
@given(layers=st.sampled_from(LAYERS), colour=st.booleans(), ends=st.booleans(), seed=st.integers(0, 1 << 32))
def test_any_transport(sample_path, sample_facts, name, layers, colour, ends, seed):
    """Envelopes, colours and carriage returns change no fact."""
    rng = random.Random(seed)
    lines = sample_path(name).read_bytes().removesuffix(b"\n").split(b"\n")
    for layer in [*([coloured] if colour else []), *([returned] if ends else []), *layers]:
        lines = [part for line in lines for part in layer(line, rng).split(b"\n")]
    assert meaning(read([b"\n".join(lines) + b"\n"])) == meaning(sample_facts(name))


ODD = [
    b"(EngineCore pid=7) INFO 11-30 03:57:55 [a.py:1] hello",
    b"(EngineCore pid=7) INFO 11-30 03:57:55 [a.py:1] hello(Worker_TP0 pid=8) ERROR 11-30 03:57:55 [a.py:1] bad",
    b"(EngineCore pid=7) INFO 11-30 03:57:55 [a.py:1] the engine core exited unexpectedly",
    b"(EngineCore pid=7) ERROR 11-30 03:57:55 [a.py:1] Traceback (most recent call last):",
    b"(EngineCore pid=7) ERROR 11-30 03:57:55 [a.py:1] ValueError: x",
    b"Traceback (most recent call last):",
    b"ValueError: x",
    b"INFO 11-30 03:57:55 [a.py:1] hello",
    b'INFO 11-30 03:57:55 [a.py:1] 127.0.0.1:4 - "GET /health HTTP/1.1" 500',
    b"[2026-11-30 03:57:55,100] LMCache INFO: hello",
    b"[2026-11-30 03:57:55,100] LMCache INFO: this is LMCache v0.5.6",
    b"[2026-11-30 03:57:55,100] LMCache INFO: with hash_algorithm = blake3",
    b"\x1b[32;20m[2026-11-30 03:57:55,100] LMCache INFO:\x1b[0m now Stored 256 tokens in 1 s\x1b[3m(a.py:1)\x1b[0m",
    b"(EngineCore pid=7) WARNING 11-30 03:57:55 [a.py:1] leaked semaphore",
    b"(EngineCore pid=7) WARNING 11-30 03:57:55 [a.py:1] Using V2 Model Runner",
    b"2026-11-30 03:57:55,100 - INFO - a.py:1 - Building JIT module x; INFO 11-30 03:57:55 [a.py:1] hello",
]


def test_the_short_ways():
    """The short ways past the layers give what the long way gives, which an envelope forces."""
    for lines in product(ODD, repeat=3):
        short, long = b"\n".join(lines), b"\n".join(compose(line, None) for line in lines)
        assert meaning(read([short])) == meaning(read([long])), lines


@pytest.mark.parametrize("end", [b"", b"\n", b"\r", b"\r\n"])
def test_the_last_message_is_text(end):
    """What a file ends with is the last text in it, not the nothing behind a carriage return."""
    assert read([b"first\r\nlast" + end]).end.last_message == "last"


@pytest.mark.parametrize("name", NAMES)
@relaxed
@given(cuts=st.lists(st.integers(min_value=0, max_value=60_000), max_size=40))
def test_any_chunks(sample_path, sample_facts, name, cuts):
    """Where chunks are cut changes nothing, not even a line number or an offset."""
    data = sample_path(name).read_bytes()
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    chunks = [data[first:last] for first, last in pairwise(edges)]
    assert read(chunks, name) == sample_facts(name)


def singles(facts):
    """Facts that a log states once and for all, by name."""
    found = {one.name: getattr(facts, one.name) for one in fields(facts)}
    return {name: fact.value for name, fact in found.items() if isinstance(fact, Fact) and name not in CHANGING}


CHANGING = {"last_bar"}


@pytest.mark.parametrize("name", NAMES)
@relaxed
@given(data=st.data())
def test_any_truncation(sample_path, sample_facts, name, data):
    """A log cut at any byte is read without error, and states nothing that the whole log does not."""
    whole = sample_path(name).read_bytes()
    cut = data.draw(st.integers(min_value=0, max_value=len(whole)))
    facts = read([whole[:cut]])
    complete = singles(sample_facts(name))
    for key, value in singles(facts).items():
        assert complete[key] == value, key
    assert facts.extent.bytes == cut
    assert all(fact.value.captured <= fact.value.total for fact in facts.captures)
    assert sum(facts.http.values()) <= sum(sample_facts(name).http.values())
    triage(facts, stop_requested_at=None, exit_status=None)


def test_cut_number_is_unknown():
    """A number in the last characters of a file without line end may be cut, so it is not read."""
    text = b"(Worker pid=7) INFO 11-30 10:00:00 [pynccl.py:1] vLLM is using nccl==2.2"
    assert read([text]).nccl is None
    assert read([text + b"9.7\n"]).nccl.value == "2.29.7"


@pytest.mark.parametrize("name", NAMES)
@relaxed
@given(data=st.data())
def test_damage_never_raises(sample_path, name, data):
    """Bytes that are not text, anywhere, are read without error."""
    whole = bytearray(sample_path(name).read_bytes())
    for _ in range(data.draw(st.integers(1, 20))):
        at = data.draw(st.integers(0, len(whole) - 1))
        whole[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=6))
    facts = read([bytes(whole)])
    triage(facts, stop_requested_at=None, exit_status=1, kernel_log="", deadline_expired=True)


@relaxed
@given(text=st.binary(max_size=4000))
def test_any_bytes(text):
    """Any bytes are a log."""
    facts = read([text])
    assert facts.extent.bytes == len(text)
    triage(facts, stop_requested_at=None, exit_status=None)


def test_gzip(sample_path, sample_facts, tmp_path):
    """A packed log reads like the plain one; a damaged one says where it stopped."""
    name = NAMES[0]
    packed = gzip.compress(sample_path(name).read_bytes())
    assert read_file(io.BytesIO(packed), name) == sample_facts(name)
    path = tmp_path / name
    path.write_bytes(packed[: len(packed) // 2])
    facts = read(path)
    assert facts.extent.truncated is not None
    assert facts.version.value == "0.32.0"


def test_endless_line():
    """A line without end is bounded: bars in it are followed, other text is clipped, and the next line is read."""
    states = b"".join(
        b"\rCapturing CUDA graphs (FULL):  1%%|x| %d/90000 [00:01<01:00, 1it/s]" % n for n in range(20_000)
    )
    noise = b"x" * 5_000_000
    tail = b"\n(Worker pid=7) INFO 11-30 10:00:00 [pynccl.py:1] vLLM is using nccl==2.29.7\n"
    chunks = [
        (states + b"\n" + noise + tail)[at : at + 65_536] for at in range(0, len(states) + len(noise) + 200, 65_536)
    ]
    facts = read(chunks)
    assert (facts.captures[0].value.captured, facts.captures[0].value.total) == (19_999, 90_000)
    assert facts.extent.clipped >= 1
    assert (facts.nccl.value, facts.nccl.source.line) == ("2.29.7", 3)
    assert facts.nccl.source.offset == len(states) + 1 + len(noise) + 1
    assert facts.extent.lines == 3


def test_many_bars_in_one_segment():
    """Bars that no carriage return separates are each read, however many there are."""
    line = b"".join(b"Capturing CUDA graphs (FULL):  10%%|x| %d/3000 [00:01<01:00, 1it/s]" % n for n in range(900))
    (capture,) = (fact.value for fact in read([line + b"\n"]).captures)
    assert (capture.captured, capture.total) == (899, 3000)


def test_error_before_an_access_line():
    """A record to which an access line is glued is still an error, and the answer still counts."""
    access = b'INFO:     127.0.0.1:1 - "GET /metrics HTTP/1.1" 200 OK\n'
    error = b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB."
    facts = read([access + error + access + access])
    assert [record.kind for record in facts.errors] == ["out_of_memory"]
    assert facts.http == {200: 3}


def test_access_lines_of_a_logger():
    """Access lines count with a logger header as well as without."""
    line = b'INFO 11-30 10:00:00 [impl.py:481] 127.0.0.1:1 - "POST /v1/completions HTTP/1.1" 400\n'
    assert read([line]).http == {400: 1}
