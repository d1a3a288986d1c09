# SPDX-License-Identifier: Apache-2.0
"""Progress bars: `label: p%|blocks| n/N [elapsed<left, rate, postfix]`, many states in one physical line."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from qualify.observe.facts import Bar, Role
from qualify.observe.graphs import Runner

_BAR = re.compile(
    rb"(?P<label>[^\r\n|%]{0,200}): +\d{1,3}%\|[^|]{0,400}\| (?P<done>\d{1,9})/(?P<total>\d{1,9})"
    rb" \[(?P<elapsed>[\d:?]{1,20})<[^\]]{0,200}\]?"
)
_CAPTURE_START = re.compile(rb"Capturing (?:[\w-]+ ){0,4}CUDA graph|Profiling CUDA graph memory|JIT kernel warmup")
_CAPTURE = re.compile(r"Capturing (?P<who>(?:[\w-]+ )*?)CUDA graphs? ?(?:shapes)?(?: ?\((?P<mode>[^)]*)\))?$")
_PROFILING = re.compile(r"Profiling CUDA graph memory \((?P<kind>\w+)\)$")
JIT_WARMUP = "JIT kernel warmup"


def find_bar(segment: bytes) -> tuple[Bar, bytes, bytes] | None:
    """One state of a bar in a segment between two carriage returns, with the text glued before and behind it."""
    if b"%|" not in segment:
        return None
    match = _BAR.search(segment)
    if match is None:
        return None
    label = match["label"]
    known = _CAPTURE_START.search(label)
    cut = known.start() if known else _behind_prefix(label)
    bar = Bar(
        label[cut:].strip().decode("utf-8", "replace"),
        int(match["done"]),
        int(match["total"]),
        match["elapsed"].decode(),
    )
    return bar, segment[: match.start()] + label[:cut], segment[match.end() :]


def _behind_prefix(label: bytes) -> int:
    """Start of a label of unknown kind: behind a process prefix, else at its beginning."""
    return label.rfind(b") ") + 2 if b"pid=" in label and b") " in label else 0


@dataclass(frozen=True, slots=True)
class CaptureLabel:
    """What a capture label means. `kind` None: the label does not state it."""

    kind: str | None
    role: Role
    runner: Runner | None
    profiling: bool = False


@lru_cache(maxsize=64)
def capture_label(label: str) -> CaptureLabel | None:
    """Meaning of a bar label; None when the bar is not about graph capture."""
    profiling = _PROFILING.fullmatch(label)
    if profiling is not None:
        return CaptureLabel(profiling["kind"], Role.TARGET, Runner.V2, profiling=True)
    match = _CAPTURE.fullmatch(label)
    if match is None:
        return None
    who, mode = match["who"].strip(), match["mode"]
    if mode is None:
        return CaptureLabel(None, Role.TARGET, Runner.V1)
    kind = mode.rsplit(",", 1)[-1].strip()
    if "," in mode:
        early_v2 = mode.startswith("mixed,")
        return CaptureLabel(kind, Role.TARGET, Runner.V2 if early_v2 else Runner.V1)
    return CaptureLabel(kind, _role(who), Runner.V2)


def _role(who: str) -> Role:
    if not who:
        return Role.TARGET
    if "context-KV" in who:
        return Role.CONTEXT_KV
    by_word = {"prefill": Role.DRAFTER_PREFILL, "decode": Role.DRAFTER_DECODE}
    return by_word.get(who, Role.DRAFTER)
