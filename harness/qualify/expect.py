# SPDX-License-Identifier: Apache-2.0
"""What a profile predicts before any run. The claims compare with these same functions."""

from __future__ import annotations

from qualify.claims.model import ClaimId
from qualify.model import Record
from qualify.observe.graphs import GraphSets, Runner, Unknown, default_sizes, expected_sets, explicit_sizes
from qualify.profiles import Boot, Profile, Storage

WITHOUT_MODEL = frozenset({"ngram", "ngram_gpu", "suffix"})
"""Drafters that have no model, and so no graphs of their own."""

NO_GRAPHS = "the CPU engine records no CUDA graphs"

Q_OUT_BYTES = 1024
"""Bytes of one row and padded head of q_out: 512 values of two bytes."""

PREFILL_LENGTHS, PREFILL_SHORTEST, PREFILL_ANSWER_TOKENS = 24, 64, 16


def external_tokens(prompt_tokens: int, chunk_tokens: int) -> int:
    """Prompt tokens that a restore takes from the cache: whole chunks, but the last token is always computed."""
    return min(prompt_tokens // chunk_tokens * chunk_tokens, prompt_tokens - 1)


def spec_tokens(profile: Profile, boot: Boot) -> int:
    """Draft tokens of a step in this boot."""
    return profile.speculation.tokens if boot.speculation else 0


def drafter(profile: Profile, boot: Boot) -> str | None:
    """The drafter of this boot that runs a model."""
    return profile.speculation.method if boot.speculation and profile.speculation.method not in WITHOUT_MODEL else None


def capture_sizes(profile: Profile, boot: Boot) -> tuple[int, ...]:
    """The sizes that the engine is to hold, before the V1 runner rounds them. Those that it chooses by itself are not
    known for compute capability 10.x, where it goes further.
    """
    engine = profile.engine
    if engine.graphs is not None and engine.graphs.sizes:
        return explicit_sizes(engine.graphs.sizes, engine.max_num_batched_tokens)
    return default_sizes(engine.max_num_seqs, spec_tokens(profile, boot), engine.max_num_batched_tokens)


def graph_sets(profile: Profile, boot: Boot, runner: Runner | None = None) -> GraphSets | Unknown:
    """The graphs that every rank must hold in this boot; with `runner`, those that another model runner would hold."""
    graphs = profile.engine.graphs
    if graphs is None:
        return Unknown("the profile promises nothing about graphs")
    return expected_sets(
        runner=runner or graphs.runner,
        mode=graphs.mode,
        sizes=capture_sizes(profile, boot),
        max_num_seqs=profile.engine.max_num_seqs,
        spec_tokens=spec_tokens(profile, boot),
        drafter=drafter(profile, boot),
    )


def query_lengths(profile: Profile, boot: Boot) -> dict[str, int]:
    """Tokens of one request in a uniform decode step, by manager. DSpark samples from its anchor."""
    tokens = spec_tokens(profile, boot)
    own = tokens if drafter(profile, boot) == "dspark" else tokens + 1
    return {"target": tokens + 1, "drafter": own, "drafterPrefill": tokens + 1, "drafterDecode": 1}


def reserved_rows(profile: Profile, boot: Boot) -> dict[int, int]:
    """Rows of q_out by workspace lane: 0 the target's, 1 the DSpark draft's. Without dual-batch overlap."""
    engine = profile.engine
    rows = {0: engine.max_num_batched_tokens}
    if drafter(profile, boot) == "dspark":
        rows[1] = min(engine.max_num_batched_tokens, engine.max_num_seqs * query_lengths(profile, boot)["drafter"])
    return rows


def fullest_step(profile: Profile, boot: Boot) -> int:
    """Tokens of the largest step that one request can fill: drafters in parallel keep slots of it for their drafts.

    Source: `SpeculativeConfig.max_num_new_slots_for_drafting` and the scheduler of vLLM 0.32.0.
    """
    tokens = spec_tokens(profile, boot)
    slots = {"dspark": tokens - 1, "dflash": tokens, "draft_model": 1}.get(drafter(profile, boot) or "", 0)
    return profile.engine.max_num_batched_tokens - slots


def prefill_lengths(profile: Profile) -> tuple[int, ...]:
    """Prompt lengths of the prefill probe in tokens: by equal factors, up to the longest that the engine takes."""
    whole = (profile.engine.max_model_len - PREFILL_ANSWER_TOKENS) / PREFILL_SHORTEST
    steps = PREFILL_LENGTHS - 1
    return tuple(round(PREFILL_SHORTEST * whole ** (step / steps)) for step in range(PREFILL_LENGTHS))


def pairs(profile: Profile) -> tuple[tuple[Boot, Boot], ...]:
    """(with the plugin, without it): boots that differ in nothing else that the engine is given."""
    found = []
    for off in profile.boots:
        equal = (b for b in profile.boots if b.plugin and (b.cache, b.speculation) == (off.cache, off.speculation))
        if not off.plugin and off.cache is not Storage.KEPT and (on := next(equal, None)) is not None:
            found.append((on, off))
    return tuple(found)


class ExpectedRestore(Record):
    prompt_tokens: int
    external_tokens: int
    computed_tokens: int


class ExpectedBoot(Record):
    name: str
    cache: str
    speculation: str | None
    probes: tuple[str, ...]
    graphs: dict[str, dict[str, tuple[int, ...]]] | None
    """Capture sizes in tokens by manager and mode."""
    graphs_unknown: str | None
    """Why no sizes are predicted."""
    other_runner: dict[str, dict[str, tuple[int, ...]]] | None
    """What the model runner that the profile does not name would capture from the same settings."""
    plugin: bool
    reserved_rows: dict[int, int]
    """Rows of q_out by workspace lane; empty where the plugin is off or never used."""


class Expectation(Record):
    """What `qualify expect` prints."""

    profile: str
    digest: str
    tensor_parallel: int
    boots: tuple[ExpectedBoot, ...]
    restores: tuple[ExpectedRestore, ...]
    required: tuple[str, ...]
    optional: tuple[str, ...]
    not_asked: tuple[str, ...]


def expect(profile: Profile) -> Expectation:
    """The prediction, from the profile alone."""
    asked = (*profile.claims.required, *profile.claims.optional)
    cached = any(boot.cache is not Storage.NONE for boot in profile.boots)
    return Expectation(
        profile=profile.name,
        digest=profile.digest(),
        tensor_parallel=profile.engine.tensor_parallel,
        boots=tuple(_boot(profile, boot) for boot in profile.boots),
        restores=tuple(_restore(tokens, profile.cache.chunk_tokens) for tokens in profile.kv.prompt_tokens if cached),
        required=profile.claims.required,
        optional=profile.claims.optional,
        not_asked=tuple(claim for claim in ClaimId if claim not in asked),
    )


def render(expectation: Expectation) -> str:
    """Plain text, one fact a line."""
    lines = [
        f"profile {expectation.profile} ({expectation.digest[:12]}), tensor parallel {expectation.tensor_parallel}",
        "boots:",
    ]
    for boot in expectation.boots:
        drafter = f", drafter {boot.speculation}" if boot.speculation else ""
        lines.append(f"  {boot.name}: cache {boot.cache}{drafter}; {', '.join(boot.probes)}")
        lines += [f"    {line}" for line in _device_lines(boot)]
    if all(boot.graphs is None for boot in expectation.boots):
        lines.append(f"graphs: {expectation.boots[0].graphs_unknown if expectation.boots else 'no boot'}")
    if expectation.restores:
        lines.append("restored tokens (prompt: from the cache + computed):")
    lines += [
        f"  {restore.prompt_tokens}: {restore.external_tokens} + {restore.computed_tokens}"
        for restore in expectation.restores
    ]
    lines.append(f"claims required: {', '.join(expectation.required)}")
    if expectation.optional:
        lines.append(f"claims optional: {', '.join(expectation.optional)}")
    lines.append(f"claims not asked for: {', '.join(expectation.not_asked) or 'none'}")
    return "\n".join(lines)


def _graph_lines(graphs: dict[str, dict[str, tuple[int, ...]]], whose: str) -> list[str]:
    return [
        f"{whose}{manager} {mode}: {len(sizes)}: {', '.join(map(str, sizes))}"
        for manager, modes in graphs.items()
        for mode, sizes in modes.items()
        if sizes
    ]


def _device_lines(boot: ExpectedBoot) -> list[str]:
    graphs, other = boot.graphs or {}, boot.other_runner or {}
    lines = _graph_lines(graphs, "")
    if graphs.get("target") != other.get("target"):
        lines += _graph_lines(other, "the other runner's ")
    if not boot.plugin:
        lines.append("plugin off: stock vLLM")
    lines += [
        f"q_out lane {lane}: {rows} rows, {rows * Q_OUT_BYTES} bytes a padded head"
        for lane, rows in boot.reserved_rows.items()
    ]
    return lines


def _boot(profile: Profile, boot: Boot) -> ExpectedBoot:
    drafter = f"{profile.speculation.method} K{profile.speculation.tokens}" if boot.speculation else None
    sets = graph_sets(profile, boot)
    on_cuda = profile.engine.kind == "cuda"
    return ExpectedBoot(
        name=boot.name,
        cache=boot.cache,
        speculation=drafter,
        probes=boot.probes,
        graphs=_by_mode(sets),
        graphs_unknown=None if isinstance(sets, GraphSets) else sets.reason if on_cuda else NO_GRAPHS,
        other_runner=_by_mode(graph_sets(profile, boot, _other(profile))),
        plugin=boot.plugin,
        reserved_rows=reserved_rows(profile, boot) if on_cuda and boot.plugin else {},
    )


def _other(profile: Profile) -> Runner:
    named = profile.engine.graphs.runner if profile.engine.graphs else Runner.V2
    return Runner.V1 if named is Runner.V2 else Runner.V2


def _by_mode(sets: GraphSets | Unknown) -> dict[str, dict[str, tuple[int, ...]]] | None:
    if isinstance(sets, Unknown):
        return None
    return {name: {"PIECEWISE": one.piecewise, "FULL": one.full} for name, one in sets.managers().items()}


def _restore(prompt_tokens: int, chunk_tokens: int) -> ExpectedRestore:
    external = external_tokens(prompt_tokens, chunk_tokens)
    return ExpectedRestore(
        prompt_tokens=prompt_tokens, external_tokens=external, computed_tokens=prompt_tokens - external
    )
