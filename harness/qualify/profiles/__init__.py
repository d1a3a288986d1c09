# SPDX-License-Identifier: Apache-2.0
"""Profiles: what a qualification promises, fixed before the run and named by digest.

`docs/profile-reference.md` lists every key; a test holds the page and this model together.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from qualify.claims.model import ClaimId
from qualify.errors import UsageError
from qualify.observe.graphs import GraphMode, Runner

FOLDER = Path(__file__).parent

PREFILL_FROM = 1024
"""Tokens of a request from which on the lengths of the prefill probe are far enough apart to be different."""

PositiveInt = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]*$")]


class Section(BaseModel):
    """TOML keys are snake_case; an unknown key is an error, never ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Pins(Section):
    vllm: str
    torch: str
    lmcache: str


class Graphs(Section):
    """CUDA graphs that every boot must capture and replay."""

    mode: GraphMode
    sizes: tuple[PositiveInt, ...] = ()
    """Tokens, ascending; empty: those that the engine chooses by itself."""
    runner: Runner = Runner.V2


class Engine(Section):
    kind: Literal["cpu", "cuda"]
    tensor_parallel: PositiveInt
    dtype: str
    max_model_len: PositiveInt
    max_num_seqs: PositiveInt
    max_num_batched_tokens: PositiveInt
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = Field(default_factory=dict)
    graphs: Graphs | None = None
    pins: Pins


class Model(Section):
    recipe: Name
    seed: int = 0
    min_kv_groups: PositiveInt = 1


class Cache(Section):
    """The LMCache server beside the engine."""

    transfer_mode: Literal["lmcache_driven", "engine_driven"]
    chunk_tokens: PositiveInt
    memory_gigabytes: PositiveInt
    arguments: tuple[str, ...] = ()


class Speculation(Section):
    method: str
    tokens: PositiveInt
    config: dict[str, Any] = Field(default_factory=dict)


class Probe(StrEnum):
    """What a boot is used for, in the order in which the probes run."""

    SERVE = "serve"
    PREFILL = "prefill"
    KV_CONTROL = "kv.control"
    KV_COLD = "kv.cold"
    KV_RESTORE = "kv.restore"
    KV_RESTART = "kv.restart"
    KV_CONTROLS = "kv.negative-controls"
    THROUGHPUT = "throughput"


class Storage(StrEnum):
    """The LMCache server of a boot: none, a new one with empty storage, or a new one on the storage that was left."""

    NONE = "none"
    EMPTY = "empty"
    KEPT = "kept"


class Boot(Section):
    """One start of the engine until its stop."""

    name: Name
    cache: Storage = Storage.NONE
    speculation: bool = False
    plugin: bool = True
    """Without the vllm_qout plugin where false. The CPU engine never uses it."""
    probes: tuple[Probe, ...]


class Kv(Section):
    prompt_tokens: tuple[PositiveInt, ...]
    max_tokens: PositiveInt = 4
    ranks: Literal["distinct", "equal"] = "distinct"
    """What the cold bytes of the ranks must be; `equal` only where one rank writes for all (latent attention)."""


class Throughput(Section):
    concurrency: tuple[PositiveInt, ...]
    window_seconds: Seconds
    warmup_requests: PositiveInt = 2
    prompt_tokens: PositiveInt
    output_tokens: PositiveInt
    batches: Annotated[int, Field(ge=5)] = 10
    stall_seconds: Seconds = 5.0


class Memory(Section):
    min_kv_tokens: PositiveInt


class Timeouts(Section):
    start_seconds: Seconds
    request_seconds: Seconds
    stop_seconds: Seconds = 30.0


class Claims(Section):
    required: tuple[ClaimId, ...]
    optional: tuple[ClaimId, ...] = ()


class Profile(Section):
    format: Literal[1]
    name: Name
    purpose: str
    engine: Engine
    model: Model
    cache: Cache
    speculation: Speculation
    boots: tuple[Boot, ...]
    kv: Kv
    throughput: Throughput
    memory: Memory
    timeouts: Timeouts
    claims: Claims

    @model_validator(mode="after")
    def _no_contradictions(self) -> Profile:
        self._no_gpu_claims_without_gpu()
        names = [boot.name for boot in self.boots]
        if len(set(names)) != len(names):
            raise ValueError("boots: two boots have the same name")
        both = set(self.claims.required) & set(self.claims.optional)
        if both:
            raise ValueError(f"claims: {sorted(both)[0]} is required and optional at once")
        if max(self.kv.prompt_tokens) + self.kv.max_tokens > self.engine.max_model_len:
            raise ValueError("kv.prompt_tokens: longer than engine.max_model_len allows")
        if self.throughput.prompt_tokens + self.throughput.output_tokens > self.engine.max_model_len:
            raise ValueError("throughput.output_tokens: longer than engine.max_model_len allows")
        if max(self.throughput.concurrency) > self.engine.max_num_seqs:
            raise ValueError("throughput.concurrency: above engine.max_num_seqs, so requests would queue")
        for boot in self.boots:
            cached = {Probe.KV_COLD, Probe.KV_RESTORE, Probe.KV_RESTART, Probe.KV_CONTROLS} & set(boot.probes)
            if cached and boot.cache is Storage.NONE:
                raise ValueError(f"boots: {boot.name!r} runs {sorted(cached)[0]} without a cache")
            if Probe.PREFILL in boot.probes and self.engine.kind == "cpu":
                raise ValueError(f"boots: {boot.name!r} runs prefill, and the CPU engine's memory is not measured")
            if Probe.PREFILL in boot.probes and self.engine.max_model_len < PREFILL_FROM:
                raise ValueError(f"boots: {boot.name!r} runs prefill, and engine.max_model_len is below {PREFILL_FROM}")
            if Probe.KV_CONTROL in boot.probes and boot.cache is not Storage.NONE:
                raise ValueError(f"boots: {boot.name!r} runs kv.control with a cache")
            if Probe.KV_RESTART in boot.probes and boot.cache is not Storage.KEPT:
                raise ValueError(f"boots: {boot.name!r} runs kv.restart without kept storage")
        return self

    def _no_gpu_claims_without_gpu(self) -> None:
        asked = (*self.claims.required, *self.claims.optional)
        if self.engine.graphs is not None and self.engine.kind == "cpu":
            raise ValueError("engine.graphs: the CPU engine records no CUDA graphs")
        if ClaimId.GRAPHS_CAPTURE in asked and self.engine.graphs is None:
            raise ValueError("engine.graphs: missing, and graphs.capture is asked for")
        if ClaimId.PLUGIN_ACTIVE in asked and self.engine.kind == "cpu":
            raise ValueError("engine.kind: plugin.active is asked for, and the CPU engine never uses the plugin")

    def resolved(self) -> bytes:
        """The profile as a receipt holds it: JSON with every default written out, without formatting and comments.

        An older receipt has no field that was added since. It stays out here, so that the digest holds; so a new field
        must default to what was done without it.
        """
        return self.model_dump_json(exclude_unset=True).encode()

    def digest(self) -> str:
        """sha256 over the resolved profile."""
        return hashlib.sha256(self.resolved()).hexdigest()


def names() -> tuple[str, ...]:
    """The profiles that ship with the package."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


def load(name_or_path: str) -> Profile:
    """A shipped profile by name, or a TOML file by path. Raises UsageError naming line and key."""
    path = FOLDER / f"{name_or_path}.toml"
    if not path.is_file():
        path = Path(name_or_path)
    if not path.is_file():
        raise UsageError(
            f"there is no profile {name_or_path!r}", remedy=f"use a TOML file or one of: {', '.join(names())}"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"profile {path} cannot be read: {error}", remedy="give a UTF-8 TOML file") from None
    return parse(text, str(path))


def parse(text: str, label: str) -> Profile:
    """The profile in `text`. Raises UsageError with `label`, line and key of the first error."""
    data = _table(text, label)
    try:
        given = Profile.model_validate(data)
        return Profile.model_validate_json(given.model_dump_json())  # every default is now set, see `resolved`
    except ValidationError as error:
        first = error.errors()[0]
        key = [str(part) for part in first["loc"]]
        message = first["msg"].removeprefix("Value error, ")
        if not key and ":" in message:
            key, message = message.split(":", 1)[0].split("."), message.split(":", 1)[1].strip()
        line = _line_of(text, key)
        raise UsageError(
            f"profile {label}, line {line}, {'.'.join(key)}: {message}",
            remedy="see docs/profile-reference.md",
        ) from None


def _table(text: str, label: str) -> dict[str, Any]:
    """The keys that `text` sets, over those of the shipped profile that it changes. Raises UsageError."""
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also for numbers and nesting that no profile has
        raise UsageError(f"profile {label} is not TOML: {error}", remedy="see docs/profile-reference.md") from None
    base = data.pop("base", None)
    if base is None:
        return data
    if base not in names():
        raise UsageError(
            f"profile {label}, line {_line_of(text, ['base'])}, base: there is no profile {base!r}",
            remedy=f"use one of: {', '.join(names())}",
        )
    return _merged(_table((FOLDER / f"{base}.toml").read_text(encoding="utf-8"), base), data)


def _merged(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """`own` over `base`: tables key by key, lists and values as a whole."""
    both = {key: _merged(base[key], own[key]) for key in base.keys() & own.keys() if _tables(base[key], own[key])}
    return {**base, **own, **both}


def _tables(*values: object) -> bool:
    return all(isinstance(value, dict) for value in values)


def _line_of(text: str, key: list[str]) -> int:
    """The line of a key, or of the table that should hold it; 1 if neither is there."""
    best, here = 1, list[str]()
    arrays: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*(\[\[?)\s*([\w.-]+)\s*\]", line):
            name = header[2]
            here = name.split(".")
            if header[1] == "[[":
                arrays[name] = arrays.get(name, -1) + 1
                here.append(str(arrays[name]))
            if key[: len(here)] == here:
                best = number
        pair = re.match(r"\s*([\w-]+)\s*=", line)
        if pair and key[: len(here) + 1] == [*here, pair[1]]:
            return number
    return best
