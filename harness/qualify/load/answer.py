# SPDX-License-Identifier: Apache-2.0
"""What an engine answered: whole JSON documents and streams of events fold into the same record."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from qualify.model import Record

DONE = "[DONE]"


class Answer(Record):
    """One answer. Token counts come from `usage`; events are counted apart, because an event is not a token."""

    status: int | None = None
    """HTTP status; None when no response arrived."""
    error: str | None = None
    """Why the answer is not whole, in one line."""
    model: str | None = None
    text: str = ""
    reasoning: str = ""
    tool_calls: int = 0
    token_ids: tuple[int, ...] | None = None
    """Ids as delivered; None when the engine gave none."""
    logprobs: int | None = None
    """Tokens that came with a log probability; None when the engine gave none."""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    events: int = 0
    """Stream events that carried a choice; 0 for an answer in one document."""
    done: bool | None = None
    """Whether the stream ended with its end mark; None for an answer in one document."""


@dataclass
class Fold:
    """Folds documents and events into an Answer. Malformed input sets `error` and is never raised."""

    streamed: bool
    status: int | None = None
    error: str | None = None
    model: str | None = None
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    tool_calls: set[int] = field(default_factory=set)
    token_ids: list[int] | None = None
    logprobs: int | None = None
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    events: int = 0
    done: bool = False

    def event(self, data: str) -> bool:
        """Take one stream event; True if it delivered output (text, reasoning, a tool call or token ids)."""
        if self.done:
            self.fail("an event came after the end mark")
            return False
        if data.strip() == DONE:
            self.done = True
            return False
        return self.document(data)

    def document(self, text: str) -> bool:
        """Take one JSON document; True if it delivered output."""
        try:
            value = json.loads(text)
        except (json.JSONDecodeError, RecursionError):
            self.fail(f"not JSON: {text[:80]!r}")
            return False
        if not isinstance(value, dict):
            self.fail(f"not a JSON object: {text[:80]!r}")
            return False
        if value.get("error") or value.get("object") == "error":
            self.fail(f"the engine reported: {_message(value)}")
            return False
        self.model = _string(value.get("model")) or self.model
        if isinstance(value.get("usage"), dict):
            self.usage = value["usage"]
        choices = value.get("choices")
        if not isinstance(choices, list) or len(choices) > 1:
            self.fail("an answer without exactly one choice")
            return False
        return bool(choices) and isinstance(choices[0], dict) and self._choice(choices[0])

    def fail(self, error: str) -> None:
        """Keep the first error; later ones follow from it."""
        self.error = self.error or error

    def answer(self) -> Answer:
        return Answer(
            status=self.status,
            error=self.error,
            model=self.model,
            text="".join(self.text),
            reasoning="".join(self.reasoning),
            tool_calls=len(self.tool_calls),
            token_ids=None if self.token_ids is None else tuple(self.token_ids),
            logprobs=self.logprobs,
            finish_reason=self.finish_reason,
            prompt_tokens=_count(self.usage.get("prompt_tokens")),
            completion_tokens=_count(self.usage.get("completion_tokens")),
            events=self.events,
            done=self.done if self.streamed else None,
        )

    def _choice(self, choice: dict[str, Any]) -> bool:
        if self.streamed:
            self.events += 1
        if self.finish_reason is not None:
            self.fail("a choice came after the finish reason")
        self.finish_reason = _string(choice.get("finish_reason"))
        self._logprobs(choice.get("logprobs"))
        # Every part has to run, whatever the one before it delivered.
        return any([self._pieces(choice), self._ids(choice.get("token_ids"))])

    def _pieces(self, choice: dict[str, Any]) -> bool:
        """Completions carry `text`; chat carries `message`, or in a stream `delta`."""
        found = choice.get("delta") or choice.get("message") or {}
        part: dict[str, Any] = found if isinstance(found, dict) else {}
        text = _string(choice.get("text")) or _string(part.get("content")) or ""
        reasoning = _string(part.get("reasoning")) or _string(part.get("reasoning_content")) or ""
        calls = set(_call_indexes(part.get("tool_calls")))
        self.text.append(text)
        self.reasoning.append(reasoning)
        self.tool_calls |= calls
        return bool(text or reasoning or calls)

    def _ids(self, ids: Any) -> bool:
        if not isinstance(ids, list):
            return False
        if not all(isinstance(one, int) for one in ids):
            self.fail("token ids that are no numbers")
            return False
        self.token_ids = (self.token_ids or []) + ids
        return bool(ids)

    def _logprobs(self, logprobs: Any) -> None:
        if not isinstance(logprobs, dict):
            return
        entries = logprobs.get("token_logprobs", logprobs.get("content"))
        if isinstance(entries, list):
            self.logprobs = (self.logprobs or 0) + len(entries)


def _call_indexes(calls: Any) -> Iterator[int]:
    for position, call in enumerate(calls if isinstance(calls, list) else []):
        index = call.get("index", position) if isinstance(call, dict) else position
        yield index if isinstance(index, int) else position


def _message(value: dict[str, Any]) -> str:
    error = value.get("error")
    message = error.get("message") if isinstance(error, dict) else error or value.get("message")
    return str(message)[:300]


def _string(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
