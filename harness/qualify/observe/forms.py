# SPDX-License-Identifier: Apache-2.0
"""Message forms of vLLM 0.8.3 to 0.32 and LMCache 0.5, and what each says about a boot.

The text decides; source file and line number do not, because they differ in every build.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from qualify.observe.boot import MAX_FACTS, MAX_NAMES, Boot
from qualify.observe.facts import (
    CaptureFinished,
    Concurrency,
    ConfiguredCounts,
    Heartbeats,
    MemorySummary,
    Plugins,
    PoolMemory,
    Prefetch,
    Refusal,
    Reservation,
    Source,
    SpecDecode,
    Throughput,
)
from qualify.observe.graphs import Runner
from qualify.observe.layers import PLAIN, Record
from qualify.observe.needles import Needles

Match = re.Match[bytes]
Handler = Callable[[Boot, Record, bytes], None]


@dataclass(frozen=True, slots=True)
class Form:
    """A kind of message: it starts with `start` and always contains `needle`."""

    start: str
    needle: bytes
    pattern: re.Pattern[bytes]
    handler: Handler


_FORMS: list[Form] = []


def _form(start: str, needle: str) -> Callable[[Handler], Handler]:
    """Register a handler for messages in which the pattern `start` begins."""

    def register(handler: Handler) -> Handler:
        _FORMS.append(Form(start, needle.encode(), re.compile(start.encode()), handler))
        return handler

    return register


def _matched(start: str, needle: str, pattern: bytes) -> Callable[[Callable[[Boot, Record, Match], None]], Handler]:
    """As `_form`, for a handler that takes the match of the pattern with the message; others say nothing."""
    compiled = re.compile(pattern)

    def register(handler: Callable[[Boot, Record, Match], None]) -> Handler:
        def handle(boot: Boot, record: Record, text: bytes) -> None:
            found = compiled.match(text)
            if found is not None:
                handler(boot, record, found)

        return _form(start, needle)(handle)

    return register


def _gib(name: str, start: str, needle: str, number: bytes) -> None:
    """Register a form that states GiB of one rank, behind its start."""

    @_matched(start, needle, start.encode() + rb"(" + number + rb") GiB")
    def _add(boot: Boot, record: Record, found: Match) -> None:
        boot.add(name, float(found[1]), record, "GiB")


_NUMBER = rb"\d{1,15}(?:\.\d{1,9})?"


def _int(text: bytes) -> int:
    return int(text.replace(b",", b""))


def _numbers(text: bytes) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(rb"\d{1,15}", text)[:MAX_FACTS])


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")


_VERSION = re.compile(rb"version (\S+)")
_ENGINE = re.compile(rb"engine \(v([^)\s]+)\)")
_DUMP = {
    "model": re.compile(rb"\bmodel='([^']*)'"),
    "tensor_parallel": re.compile(rb"\btensor_parallel_size=(\d{1,15})"),
    "drafter": re.compile(rb"SpeculativeConfig\(method='([^']+)'"),
    "spec_tokens": re.compile(rb"num_spec_tokens=(\d{1,15})"),
    "configured_mode": re.compile(rb"cudagraph_mode['\"]?[:=] ?['\"<]?(?:CUDAGraphMode\.)?([A-Z_]+)['\":,>)} ]"),
}
_SIZES = re.compile(rb"(?<!_)cudagraph_capture_sizes['\"]?[:=] ?\[([\d, ]*)\]")
_EAGER = re.compile(rb"enforce_eager=(True|False)")
_NUMERIC = frozenset({"tensor_parallel", "spec_tokens"})


@_form(r"Initializing (?:a|an) (?:V[01] )?LLM engine ", "LLM engine ")
def _engine(boot: Boot, record: Record, text: bytes) -> None:
    version = _ENGINE.search(text[:200])
    if version is not None:
        boot.set("version", _text(version[1]), record)
    for name, pattern in _DUMP.items():
        found = pattern.search(text)
        if found is not None:
            boot.set_first(name, int(found[1]) if name in _NUMERIC else _text(found[1]), record)
    sizes = _SIZES.search(text)
    if sizes is not None:
        boot.set("configured_sizes", _numbers(sizes[1]), record)
    eager = _EAGER.search(text)
    if eager is not None:
        boot.set("eager", eager[1] == b"True", record)


@_form(r"vLLM API server version ", "API server version ")
def _api_version(boot: Boot, record: Record, text: bytes) -> None:
    boot.api_seen = True
    found = _VERSION.search(text)
    if found is not None:
        boot.set_first("version", _text(found[1]), record)


# The banner draws its version behind block characters.
@_form(r"(?<=\xe2\x96\x88)  version (?=\d)", "  version ")
def _banner(boot: Boot, record: Record, text: bytes) -> None:
    boot.api_seen = True
    found = _VERSION.search(text)
    if found is not None:
        boot.set_first("version", _text(found[1]), record)


@_form(r"Using V2 Model Runner", "V2 Model Runner")
def _runner_v2(boot: Boot, record: Record, _: bytes) -> None:
    boot.set("runner", Runner.V2, record)


@_form(r"Model Runner V2 (?:requires|does not)", "Model Runner V2")
def _runner_v1(boot: Boot, record: Record, text: bytes) -> None:
    if b"using the V1 model runner" in text:
        boot.set("runner", Runner.V1, record)


@_matched(r"world_size=\d+", "world_size=", rb"world_size=(\d{1,5}),? rank=(\d{1,5})\b.*?(?:backend=(\w+)|$)")
def _world(boot: Boot, record: Record, found: Match) -> None:
    boot.set("world_size", int(found[1]), record)
    if len(boot.announced_ranks) < MAX_FACTS:
        boot.announced_ranks.add(int(found[2]))
    boot.assign(record.pid, int(found[2]))
    if found[3]:
        boot.set("distributed_backend", _text(found[3]), record)


@_matched(r"rank \d+ in world size ", "in world size ", rb"rank (\d{1,5}) in world size (\d{1,5}) is assigned")
def _assigned(boot: Boot, record: Record, found: Match) -> None:
    boot.set("world_size", int(found[2]), record)
    boot.assign(record.pid, int(found[1]))


@_matched(r"vLLM is using nccl==", "using nccl==", rb"vLLM is using nccl==([\w.+-]+)")
def _nccl(boot: Boot, record: Record, found: Match) -> None:
    boot.set("nccl", _text(found[1]).rstrip("."), record)


_ALL_REDUCE = re.compile(rb"Using \[([^\]]*)\] all-reduce backends .{0,80}?group '([^']+)'")
_BACKEND_NAMES = (
    rb"FLASH_ATTN\w*|FLASHINFER\w*|FLASHMLA\w*|TRITON_\w+|XFORMERS|TORCH_SDPA|FLEX_ATTENTION|CUTLASS_MLA"
    rb"|ROCM_\w+|CPU_ATTN"
)
_ATTENTION = (
    re.compile(rb"Using (\w+) attention backend out of"),
    re.compile(rb"Using ([\w ]{1,40}?) backend on V[01] engine"),
    re.compile(rb"Using (" + _BACKEND_NAMES + rb") backend"),
)


_HASH_NAME = re.compile(rb"Using (\w+) hash function")


@_form(r"Using ", "Using ")
def _using(boot: Boot, record: Record, text: bytes) -> None:
    all_reduce = _ALL_REDUCE.match(text)
    if all_reduce is not None:
        names = tuple(name.strip(" '\"") for name in _text(all_reduce[1]).split(",") if name.strip())
        if len(boot.all_reduce) < MAX_FACTS:
            boot.all_reduce[_text(all_reduce[2])] = boot.fact(names, record)
        return
    for pattern in _ATTENTION:
        backend = pattern.match(text)
        if backend is not None:
            boot.set("attention_backend", _text(backend[1]), record)
            return
    hash_name = _HASH_NAME.match(text)
    if hash_name is not None:
        boot.cache = replace(boot.cache_server(), hash_algorithm=boot.fact(_text(hash_name[1]), record))


_gib("model_memory", r"Model loading took ", "Model loading took", _NUMBER)
_gib("available_kv", r"Available KV cache memory: ", "Available KV", rb"-?" + _NUMBER)
_gib("graph_estimate", r"Estimated CUDA graph memory: ", "Estimated CUDA", rb"-?" + _NUMBER)


@_matched(
    r"Initial free memory ",
    "Initial free memory",
    rb"Initial free memory (" + _NUMBER + rb") GiB, reserved (" + _NUMBER + rb") GiB memory for KV",
)
def _reserved(boot: Boot, record: Record, found: Match) -> None:
    boot.add("kv_reservation", Reservation(float(found[2]), float(found[1])), record, "GiB")


@_matched(
    r"Explicitly set \(",
    "Explicitly set",
    rb"Explicitly set \((" + _NUMBER + rb")/(" + _NUMBER + rb")\) GiB for KV cache",
)
def _explicit(boot: Boot, record: Record, found: Match) -> None:
    boot.add("kv_reservation", Reservation(float(found[1]), float(found[2])), record, "GiB")


_KV_SIZE = re.compile(rb"(GPU|CPU|XPU|TPU|HPU|GPU \+ host|[\w+ ]{1,20}?) KV cache size: (\d[\d,]{0,20}) tokens")
_CONCURRENCY = re.compile(
    rb"Maximum concurrency for (\d[\d,]{0,20}) tokens per request: (\d[\d,]{0,20}(?:\.\d{1,9})?)x"
)


@_form(r"(?:GPU(?: \+ host)?|CPU|XPU|TPU|HPU) KV cache size: ", "KV cache size: ")
def _kv_size(boot: Boot, record: Record, text: bytes) -> None:
    found = _KV_SIZE.match(text)
    if found is None:
        return
    boot.kv_seen = True
    boot.set("kv_tokens", _int(found[2]), record, "tokens")
    boot.set("kv_device", _text(found[1]), record)
    _concurrency(boot, record, text)


@_form(r"Maximum concurrency for ", "Maximum concurrency")
def _concurrency(boot: Boot, record: Record, text: bytes) -> None:
    found = _CONCURRENCY.search(text)
    if found is not None:
        value = Concurrency(float(found[2].replace(b",", b"")), _int(found[1]))
        boot.set("concurrency", value, record)


@_form(r"kv cache group sizes ", "kv cache group")
def _group_sizes(boot: Boot, record: Record, text: bytes) -> None:
    sizes = _numbers(text[:4000])
    boot.set("kv_group_block_sizes", sizes, record, "tokens")


_NEEDED = re.compile(rb"\((\d{1,15})\),? \(?(" + _NUMBER + rb") GiB KV cache is needed")
_HAS = re.compile(rb"available KV cache memory \((-?\d{1,15}(?:\.\d{1,9})?) GiB")
_ESTIMATED = re.compile(rb"estimated maximum model length is (\d{1,15})")
_TOKENS_STORED = re.compile(
    rb"max seq len \((\d{1,15})\) is larger than the maximum number of tokens .{0,60}\((\d{1,15})\)"
)


def refuse(boot: Boot, record: Record, text: bytes) -> None:
    """Numbers of a refused KV admission."""
    needed, has, estimated = _NEEDED.search(text), _HAS.search(text), _ESTIMATED.search(text)
    stored = _TOKENS_STORED.search(text)
    length = needed or stored
    refusal = Refusal(
        max_model_len=int(length[1]) if length else None,
        needed_gib=float(needed[2]) if needed else None,
        available_gib=float(has[1]) if has else None,
        estimated_max_len=int(estimated[1]) if estimated else int(stored[2]) if stored else None,
    )
    boot.set_first("kv_refusal", refusal, record)


@_matched(
    r"Overriding num_gpu_blocks=",
    "Overriding num_gpu",
    rb"Overriding num_gpu_blocks=.*?num_gpu_blocks_override=(\d{1,15})",
)
def _override(boot: Boot, record: Record, found: Match) -> None:
    boot.add("profiling_blocks", int(found[1]), record, "blocks")


_SUMMARY = re.compile(
    rb"(\d\d{0,14}(?:\.\d{1,9})?) GiB for (consumed memory|weight|non-torch memory|peak activation|CUDAGraph memory)"
)
_SUMMARY_KV = re.compile(rb"[Cc]urrent kv cache memory in use is (\d{1,15}(?:\.\d{1,9})?) GiB")


@_form(r"Free memory on device ", "Free memory on")
def _summary(boot: Boot, record: Record, text: bytes) -> None:
    gib: dict[bytes, float] = {}
    for found in _SUMMARY.finditer(text):
        # The driver may give memory back during the capture: then the graphs' share is negative.
        negative = found[2] == b"CUDAGraph memory" and text[found.start() - 1 : found.start()] == b"-"
        gib.setdefault(found[2], -float(found[1]) if negative else float(found[1]))
    kv = _SUMMARY_KV.search(text)
    value = MemorySummary(
        consumed_gib=gib.get(b"consumed memory"),
        weights_gib=gib.get(b"weight"),
        non_torch_gib=gib.get(b"non-torch memory"),
        peak_activation_gib=gib.get(b"peak activation"),
        graph_gib=gib.get(b"CUDAGraph memory"),
        kv_gib=float(kv[1]) if kv else None,
    )
    boot.add("memory_summary", value, record, "GiB")


@_matched(
    r"Graph capturing finished in ",
    "capturing finished",
    rb"Graph capturing finished in (\d{1,15}) secs?, took (-?" + _NUMBER + rb") GiB",
)
def _finished(boot: Boot, record: Record, found: Match) -> None:
    if len(boot.finished) < MAX_FACTS:
        gib = float(found[2])
        value = CaptureFinished(float(found[1]), gib, memory_known=gib >= 0)
        boot.finished.append((boot.fact(value, record), boot.kv_seen))


@_matched(
    r"CUDA graph pool memory: ",
    "graph pool memory",
    rb"CUDA graph pool memory: (-?" + _NUMBER + rb") GiB \(actual\), (-?" + _NUMBER + rb") GiB \(estimated\)",
)
def _pool(boot: Boot, record: Record, found: Match) -> None:
    boot.add("pool", PoolMemory(float(found[1]), float(found[2])), record, "GiB")


@_form(r"Profiling CUDA graph memory: ", "Profiling CUDA")
def _configured(boot: Boot, record: Record, text: bytes) -> None:
    piecewise, full = re.search(rb"PIECEWISE=(\d{1,15})", text), re.search(rb"FULL=(\d{1,15})", text)
    value = ConfiguredCounts(int(piecewise[1]) if piecewise else None, int(full[1]) if full else None)
    boot.add("configured_counts", value, record)


@_matched(r"Capturing model for ", "Capturing model", rb"Capturing model for ([\w -]+?) speculator")
def _drafter(boot: Boot, record: Record, found: Match) -> None:
    boot.set("drafter_announced", _text(found[1]), record)


@_form(r"Enforce eager set", "Enforce eager")
def _eager(boot: Boot, record: Record, _: bytes) -> None:
    boot.set("eager", True, record)


@_form(r"(?i:cudagraph) dispatching keys are not initialized", "dispatching keys")
def _keys(boot: Boot, record: Record, _: bytes) -> None:
    boot.set("dispatch_keys_missing", True, record)


@_matched(r"init engine \(", "init engine (", rb"init engine \([^)]*\) took (" + _NUMBER + rb") s")
def _init(boot: Boot, record: Record, found: Match) -> None:
    boot.set("init_seconds", float(found[1]), record, "s")


@_matched(r"Started server process \[", "Started server", rb"Started server process \[(\d{1,15})\]")
def _started(boot: Boot, record: Record, found: Match) -> None:
    if len(boot.started) < MAX_FACTS:
        pid = int(found[1])
        boot.started.append(boot.fact(pid, record))
        boot.pending_startups.append(pid)


@_form(r"Application startup complete", "Application startup")
def _ready(boot: Boot, record: Record, _: bytes) -> None:
    pending = boot.pending_startups
    boot.completions += 1
    if record.pid is not None and record.pid in pending:
        done = [record.pid]
    elif len(pending) == 1 or boot.completions >= len(pending):
        done = list(pending)
    else:
        # Two servers in one file: which of them is complete shows only when both are.
        return
    boot.pending_startups = [pid for pid in pending if pid not in done]
    boot.completions = 0
    ours = [pid for pid in done if pid in boot.api_pids]
    unnamed = not boot.api_pids and not boot.cache_server_seen
    if ours or (unnamed and (done or boot.api_seen)):
        boot.ready_source = boot.ready_source or boot.source(record)


@_form(r"\[shutdown\] (?:API server: shutdown triggered|EngineCore: trigger received)", "[shutdown]")
def _shutdown(boot: Boot, record: Record, text: bytes) -> None:
    boot.set_first("shutdown_requested", _text(text[:200]), record)
    boot.shutdown = True
    if boot.http_at_stop is None:
        boot.http_at_stop = dict(boot.http)


@_form(r"\[shutdown\] MPClient: engine core exited unexpectedly", "exited unexpectedly")
def _exited(boot: Boot, record: Record, text: bytes) -> None:
    boot.set_first("core_exited", _text(text[:200]), record)


_PAIR = re.compile(rb"([A-Za-z][A-Za-z0-9_ +-]*): (-?\d{1,15}(?:\.\d{1,9})?|nan|inf)\s*(%|tokens/s|reqs|tokens)?")
_ENGINE_NAME = re.compile(rb"(?:Engine (\d{1,15})|(\d+ Engines Aggregated)):? ")


@_form(r"(?:(?:Engine \d+|\d+ Engines Aggregated):? )?Avg prompt throughput: ", "prompt throughput")
def _throughput(boot: Boot, record: Record, text: bytes) -> None:
    name = _ENGINE_NAME.match(text)
    engine = _text(name[1] or name[2]) if name else None
    pairs = {key.strip(): (value, unit) for key, value, unit in _PAIR.findall(text[name.end() if name else 0 :][:2000])}
    usage = next((pairs[key] for key in pairs if key.endswith(b"KV cache usage")), None)
    value = Throughput(
        engine,
        _rate(pairs.get(b"Avg prompt throughput")),
        _rate(pairs.get(b"Avg generation throughput")),
        _count(pairs.get(b"Running")),
        _count(pairs.get(b"Waiting")),
        _ratio(usage),
        _ratio(pairs.get(b"Prefix cache hit rate")),
        _ratio(pairs.get(b"External prefix cache hit rate")),
    )
    boot.throughput_count += 1
    boot.throughput_last.append(boot.fact(value, record))
    if value.generation_rate is not None:
        boot.max_generation = max(boot.max_generation or 0.0, value.generation_rate)
    _follow_stall(boot, value, boot.source(record))


def _follow_stall(boot: Boot, value: Throughput, source: Source) -> None:
    if not value.stalled:
        boot.stalls.pop(value.engine, None)
        return
    if value.engine not in boot.stalls and len(boot.stalls) >= MAX_FACTS:
        return
    length, start = boot.stalls.get(value.engine, (0, source))
    boot.stalls[value.engine] = (length + 1, start)
    if length + 1 > boot.longest_stall[0]:
        boot.longest_stall = (length + 1, start)


def _rate(pair: tuple[bytes, bytes] | None) -> float | None:
    return _finite(pair[0]) if pair else None


def _count(pair: tuple[bytes, bytes] | None) -> int | None:
    value = _rate(pair)
    return None if value is None else int(value)


def _ratio(pair: tuple[bytes, bytes] | None) -> float | None:
    value = _rate(pair)
    if value is None or pair is None:
        return None
    return value / 100 if pair[1] == b"%" else value


def _finite(text: bytes) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if value == value and abs(value) != float("inf") else None


_POSITIONS = re.compile(rb"Per-position acceptance rate: ([\d., a-z]*\d)")


@_form(r"Spec(?:Decoding|ulative) metrics: ", "Spec")
def _spec(boot: Boot, record: Record, text: bytes) -> None:
    body = text.split(b"metrics: ", 1)[1][:4000]
    positions = _POSITIONS.search(body)
    listed = positions[1].split(b",") if positions else []
    if positions is not None:
        body = body[: positions.start()] + body[positions.end() :]
    pairs = {key.strip(): (value, unit) for key, value, unit in _PAIR.findall(body)}
    numbers = [_finite(item.strip()) for item in listed]
    value = SpecDecode(
        _rate(pairs.get(b"Mean acceptance length")),
        _ratio(pairs.get(b"Avg Draft acceptance rate") or pairs.get(b"Draft acceptance rate")),
        _count(pairs.get(b"Accepted")),
        _count(pairs.get(b"Drafted")),
        tuple(number for number in numbers if number is not None),
    )
    boot.spec_count += 1
    boot.spec_last.append(boot.fact(value, record))


@_form(r"- \S+ -> \S+:", " -> ")
@_form(r"(?:Available plugins for|All plugins in this|Loading plugin|Failed to load plugin)", "plugin")
def _plugin(boot: Boot, _: Record, text: bytes) -> None:
    plugins = boot.plugins or Plugins((), (), ())
    listed = re.match(rb"- (\S+) -> ", text)
    loading = re.match(rb"Loading plugin ([\w.-]+)", text)
    failed = re.match(rb"Failed to load plugin ([\w.-]+)", text)
    boot.plugins = Plugins(
        _with(plugins.available, listed), _with(plugins.loaded, loading), _with(plugins.failed, failed)
    )


def _with(names: tuple[str, ...], found: Match | None) -> tuple[str, ...]:
    if found is None or len(names) >= MAX_NAMES:
        return names
    name = _text(found[1])
    return names if name in names else (*names, name)


@_form(r"No available (?:shared memory broadcast )?block found in \d+ second", "block found in")
def _heartbeat(boot: Boot, record: Record, _: bytes) -> None:
    source, known = boot.source(record), boot.heartbeats
    if known is None:
        boot.heartbeats = Heartbeats(1, source, source, 1)
        boot.heartbeat_at = boot.events
        return
    # Nothing else happened between the two reports.
    run = known.trailing + 1 if boot.events == boot.heartbeat_at + 1 else 1
    boot.heartbeats = Heartbeats(known.count + 1, known.first, source, run)
    boot.heartbeat_at = boot.events


@_form(r"TileLang (?:begins|completes) to compile", "TileLang ")
def _tilelang(boot: Boot, record: Record, text: bytes) -> None:
    begins = text.startswith(b"TileLang begins")
    boot.jit(record, begun=int(begins), completed=int(not begins))


@_form(r"Building JIT module ", "Building JIT")
def _module(boot: Boot, record: Record, text: bytes) -> None:
    found = re.match(rb"Building JIT module ([\w.-]+)", text)
    if found is not None and len(boot.jit_modules) < MAX_NAMES:
        boot.jit_modules.append(_text(found[1]).rstrip("."))
    boot.jit(record)


@_form(r"JIT kernel warmup starting", "warmup starting")
def _warmup(boot: Boot, record: Record, _: bytes) -> None:
    boot.jit_warmup = True
    boot.jit(record)


@_form(r"Kernel JIT monitor activated", "JIT monitor")
def _monitor(boot: Boot, _: Record, __: bytes) -> None:
    boot.jit_monitor = True


@_form(r"(?:\S+ )?JIT compilation during inference", "JIT compilation")
def _late_jit(boot: Boot, record: Record, _: bytes) -> None:
    boot.jit_during_inference += 1
    boot.jit(record)


@_matched(r"LMCache v\d", "LMCache v", rb"LMCache v([\w.+-]+(?: \([\w]+\))?)")
def _lmcache_version(boot: Boot, record: Record, found: Match) -> None:
    boot.cache = replace(boot.cache_server(), version=boot.fact(_text(found[1]), record))


@_form(r"Starting LMCache HTTP server", "LMCache HTTP")
def _lmcache_http(boot: Boot, _: Record, __: bytes) -> None:
    boot.cache_server_seen = True
    boot.cache_server()


@_form(r"(?:lmcache\.mp\.)?hash_algorithm ?= ?", "hash_algorithm")
@_form(r"TokenHasher initialized: ", "TokenHasher")
def _hasher(boot: Boot, record: Record, text: bytes) -> None:
    name = re.search(rb"hash_algorithm ?= ?(\w+)", text[:400])
    chunk = re.search(rb"chunk_size=(\d{1,15})", text[:400])
    cache = boot.cache_server()
    boot.cache = replace(
        cache,
        hash_algorithm=boot.fact(_text(name[1]), record) if name else cache.hash_algorithm,
        chunk_tokens=boot.fact(int(chunk[1]), record, "tokens") if chunk else cache.chunk_tokens,
    )


@_form(r"Supported transfer mode: |Creating transfer context ", "ransfer ")
def _transfer(boot: Boot, record: Record, text: bytes) -> None:
    found = re.search(rb"mode(?:=|: )(\w+)", text[:200])
    if found is not None:
        boot.cache = replace(boot.cache_server(), transfer_mode=boot.fact(_text(found[1]), record))


@_form(r"Registered KV cache for ", "Registered KV")
def _registered(boot: Boot, record: Record, text: bytes) -> None:
    found = re.search(rb"with (\d{1,15}) layers", text[:200])
    cache = boot.cache_server()
    if found is not None and len(cache.registered_layers) < MAX_FACTS:
        layers = (*cache.registered_layers, boot.fact(int(found[1]), record, "layers"))
        boot.cache = replace(cache, registered_layers=layers)


@_form(r"KV layer groups: ", "layer groups")
def _groups(boot: Boot, _: Record, __: bytes) -> None:
    boot.group_dump = []


@_form(r"KernelGroupInfo\(", "KernelGroupInfo")
def _kernel_group(boot: Boot, _: Record, text: bytes) -> None:
    if boot.group_dump is None or len(boot.group_dump) >= MAX_FACTS:
        return
    found = re.search(rb"engine_group_idx=(\d{1,15})", text)
    boot.group_dump.append(int(found[1]) if found else -1)
    engine_groups = len(set(boot.group_dump)) if -1 not in boot.group_dump else None
    boot.cache = replace(boot.cache_server(), kernel_groups=len(boot.group_dump), engine_groups=engine_groups)


@_matched(r"Stored \d+ tokens in ", " tokens in ", rb"Stored (\d{1,15}) tokens in ")
def _stored(boot: Boot, record: Record, found: Match) -> None:
    cache, tokens = boot.cache_server(), int(found[1])
    boot.cache = replace(
        cache,
        stored_lines=cache.stored_lines + 1,
        stored_tokens=cache.stored_tokens + tokens,
        stored=(*cache.stored, boot.fact(tokens, record, "tokens"))[-MAX_NAMES:],
    )


@_matched(r"Retrieved \d+ tokens in ", " tokens in ", rb"Retrieved (\d{1,15}) tokens in ")
def _retrieved(boot: Boot, record: Record, found: Match) -> None:
    cache, tokens = boot.cache_server(), int(found[1])
    boot.cache = replace(
        cache,
        retrieved_lines=cache.retrieved_lines + 1,
        retrieved_tokens=cache.retrieved_tokens + tokens,
        retrieved=(*cache.retrieved, boot.fact(tokens, record, "tokens"))[-MAX_NAMES:],
    )


@_matched(
    r"Prefetch request completed ",
    "Prefetch request",
    rb"Prefetch request completed .{0,40}?(\d{1,15})/(\d{1,15}) retained keys"
    rb" \((\d{1,15}) L1, (\d{1,15}) L2\)",
)
def _prefetched(boot: Boot, record: Record, found: Match) -> None:
    cache = boot.cache_server()
    value = Prefetch(int(found[1]), int(found[2]), int(found[3]), int(found[4]))
    boot.cache = replace(cache, prefetches=(*cache.prefetches, boot.fact(value, record))[-MAX_NAMES:])


UNKNOWN_START = (b" ", b"\xe2")
"""A message may be drawn or indented: then a form begins anywhere in it."""
STARTERS = frozenset({b"LLM engine ", b"API server version ", b"  version "})
"""Needles of the forms that a process prints once, when it starts."""
_STARTS = "|".join(f"(?:{form.start})(?P<f{index}>)" for index, form in enumerate(_FORMS)).encode()
_GATE = re.compile(_STARTS)
HEADED = re.compile(PLAIN + b"(?P<at>)(?:(?P<drawn>[ \xe2])|" + _STARTS + b")?")
"""A record that begins a line. Its last group is `at`, where the message begins, if no form begins there."""
ANY_FORM = Needles([(form.needle, (index, form)) for index, form in enumerate(_FORMS)])


def form_at(message: bytes) -> Form | None:
    """The form of a message whose beginning is known."""
    found = _GATE.match(message)
    return None if found is None else form_of(found)


def form_of(found: Match) -> Form:
    """The form that the last group of a match names."""
    return _FORMS[int((found.lastgroup or "")[1:])]


def form_anywhere(message: bytes) -> tuple[Form, int] | None:
    """The first form in text whose beginning is not known, with its position."""
    first = form_at(message)
    if first is not None:
        return first, 0
    candidates = ANY_FORM.found(message)
    found = [(match.start(), index) for index, form in candidates if (match := form.pattern.search(message))]
    if not found:
        return None
    start, index = min(found)
    return _FORMS[index], start
