# SPDX-License-Identifier: Apache-2.0
"""What a profile predicts before any run. The claims compare with these same functions."""

from __future__ import annotations

from qualify.claims.model import ClaimId
from qualify.model import Record
from qualify.profiles import Boot, Profile


def external_tokens(prompt_tokens: int, chunk_tokens: int) -> int:
    """Prompt tokens that a restore takes from the cache: whole chunks, but the last token is always computed."""
    return min(prompt_tokens // chunk_tokens * chunk_tokens, prompt_tokens - 1)


class ExpectedRestore(Record):
    prompt_tokens: int
    external_tokens: int
    computed_tokens: int


class ExpectedBoot(Record):
    name: str
    cache: str
    speculation: str | None
    probes: tuple[str, ...]


class Expectation(Record):
    """What `qualify expect` prints."""

    profile: str
    digest: str
    tensor_parallel: int
    boots: tuple[ExpectedBoot, ...]
    restores: tuple[ExpectedRestore, ...]
    graphs: str
    """Why no capture sets are predicted."""
    required: tuple[str, ...]
    optional: tuple[str, ...]
    not_asked: tuple[str, ...]


def expect(profile: Profile) -> Expectation:
    """The prediction, from the profile alone."""
    asked = (*profile.claims.required, *profile.claims.optional)
    return Expectation(
        profile=profile.name,
        digest=profile.digest(),
        tensor_parallel=profile.engine.tensor_parallel,
        boots=tuple(_boot(profile, boot) for boot in profile.boots),
        restores=tuple(_restore(tokens, profile.cache.chunk_tokens) for tokens in profile.kv.prompt_tokens),
        graphs="the CPU engine records no CUDA graphs" if profile.engine.kind == "cpu" else "not predicted yet",
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
    lines.append("restored tokens (prompt: from the cache + computed):")
    lines += [
        f"  {restore.prompt_tokens}: {restore.external_tokens} + {restore.computed_tokens}"
        for restore in expectation.restores
    ]
    lines.append(f"graphs: {expectation.graphs}")
    lines.append(f"claims required: {', '.join(expectation.required)}")
    if expectation.optional:
        lines.append(f"claims optional: {', '.join(expectation.optional)}")
    lines.append(f"claims not asked for: {', '.join(expectation.not_asked) or 'none'}")
    return "\n".join(lines)


def _boot(profile: Profile, boot: Boot) -> ExpectedBoot:
    drafter = f"{profile.speculation.method} K{profile.speculation.tokens}" if boot.speculation else None
    return ExpectedBoot(name=boot.name, cache=boot.cache, speculation=drafter, probes=boot.probes)


def _restore(prompt_tokens: int, chunk_tokens: int) -> ExpectedRestore:
    external = external_tokens(prompt_tokens, chunk_tokens)
    return ExpectedRestore(
        prompt_tokens=prompt_tokens, external_tokens=external, computed_tokens=prompt_tokens - external
    )
