# SPDX-License-Identifier: Apache-2.0
"""A fixed set of requests, one at a time: completion and chat, streamed and not, greedy and sampled."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from qualify.errors import TargetError
from qualify.load.client import CHAT, COMPLETIONS, Asker, Request, monotonic_clock
from qualify.load.prompts import token_prompt
from qualify.probes.load_records import SERVE, Served, ServedRequest
from qualify.session import Session

PROMPT_TOKENS = 48
MAX_TOKENS = 32
TEXT = "The night train left the harbour at seven, and every passenger carried"
QUESTIONS = ("Name three rivers and the seas they reach.", "How does a lighthouse keeper spend a winter day?")


@dataclass(frozen=True)
class Planned:
    """One request of the set; those with the same subject ask for the same tokens."""

    name: str
    subject: str
    path: str
    asks: dict[str, Any]
    """The prompt or the messages."""
    stream: bool = False
    seed: int | None = None
    """Sampled with this seed at temperature 1; greedy without one."""

    def request(self, model: str) -> Request:
        body = {
            "model": model,
            **self.asks,
            "max_tokens": MAX_TOKENS,
            "temperature": 0 if self.seed is None else 1,
            "ignore_eos": True,
            "return_token_ids": True,
            "logprobs": 1 if self.path == COMPLETIONS else True,
            # No two requests share cached blocks: a prompt whose beginning was cached is computed in other shapes, and
            # rounds otherwise, so equal answers could not be asked of it.
            "cache_salt": self.name,
        }
        if self.seed is not None:
            body["seed"] = self.seed
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return Request(self.path, body)


def plan(seed: int) -> Iterator[Planned]:
    """The set. The first request is also sent again, so that it is known whether greedy answers repeat."""
    prompt = {"prompt": token_prompt(PROMPT_TOKENS, seed, "serve")}
    yield Planned("completion", "completion", COMPLETIONS, prompt)
    yield Planned("completion-again", "completion", COMPLETIONS, prompt)
    yield Planned("completion-stream", "completion", COMPLETIONS, prompt, stream=True)
    yield Planned("completion-text", "completion-text", COMPLETIONS, {"prompt": TEXT})
    for number in (1, 2):
        subject = f"completion-sampled-{number}"
        yield Planned(subject, subject, COMPLETIONS, prompt, seed=number)
        yield Planned(f"{subject}-stream", subject, COMPLETIONS, prompt, stream=True, seed=number)
    for number, question in enumerate(QUESTIONS, 1):
        messages = {"messages": [{"role": "user", "content": question}]}
        for subject, drawn in ((f"chat-{number}", None), (f"chat-sampled-{number}", number)):
            yield Planned(subject, subject, CHAT, messages, seed=drawn)
            yield Planned(f"{subject}-stream", subject, CHAT, messages, stream=True, seed=drawn)


def collect(session: Session) -> None:
    """Write serve.json. Raises TargetError when the engine stops answering; what was answered is kept."""
    asker = Asker(session.engine.base_url, monotonic_clock(), session.profile.timeouts.request_seconds)
    served: list[ServedRequest] = []
    models = _models(session)
    with contextlib.closing(asker):
        for planned in plan(session.profile.model.seed):
            session.progress(planned.name)
            served.append(_serve(session, asker, planned))
    found = Served(boot=session.boot.name, model=session.model, models=models, requests=tuple(served))
    session.evidence.record(SERVE, found)
    if any(request.answer.error for request in served):
        session.engine.get("/health")  # raises if the engine is gone; a failed request alone is evidence


def _serve(session: Session, asker: Asker, planned: Planned) -> ServedRequest:
    request = planned.request(session.model)
    reply = asker.ask(request)
    session.note(planned.path, reply)
    return ServedRequest(
        name=planned.name,
        subject=planned.subject,
        endpoint=planned.path,
        stream=planned.stream,
        greedy=planned.seed is None,
        seed=planned.seed,
        max_tokens=request.body["max_tokens"],
        answer=reply.answer,
        times=reply.times,
    )


def _models(session: Session) -> tuple[str, ...]:
    try:
        listing = json.loads(session.engine.get("/v1/models"))
        return tuple(str(entry["id"]) for entry in listing["data"])
    except (ValueError, KeyError, TypeError):
        raise TargetError("GET /v1/models answered no list of models", phase=session.engine.phase) from None
