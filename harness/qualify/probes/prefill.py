# SPDX-License-Identifier: Apache-2.0
"""Prompts of many lengths, so that memory is asked for in many sizes: each longer than all before, then all at once.

A caching allocator may have no block that fits a size it has not seen; the second round mixes prompts, parts of
prompts and answers in one step. `expect.prefill_lengths` says which lengths.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from qualify.expect import PREFILL_ANSWER_TOKENS, prefill_lengths
from qualify.load.client import COMPLETIONS, Asker, ClosedLoop, Reply, Request, monotonic_clock
from qualify.load.prompts import token_prompt
from qualify.probes.load_records import PREFILL, Prefill, PrefillRequest
from qualify.session import Session


def collect(session: Session) -> None:
    """Write prefill.json. Raises TargetError when the engine stops answering; what was answered is kept."""
    lengths = prefill_lengths(session.profile)
    clock, timeout = monotonic_clock(), session.profile.timeouts.request_seconds
    url = session.engine.base_url
    asked = list(_one_by_one(session, lengths, Asker(url, clock, timeout)))
    if asked[-1].error is None:
        session.progress(f"{len(lengths)} prompts at once")
        supplies = [iter([(False, _request(session, tokens, together=True))]) for tokens in lengths]
        with ClosedLoop(url, supplies, clock, timeout, lambda turn: session.note(COMPLETIONS, turn.reply)) as loop:
            turns = loop.finish()
        asked += [_asked(lengths[turn.slot], turn.reply, together=True) for turn in turns]
    session.evidence.record(PREFILL, Prefill(boot=session.boot.name, requests=tuple(asked)))
    if any(request.error for request in asked):
        session.engine.get("/health")  # raises if the engine is gone; a failed request alone is evidence


def _one_by_one(session: Session, lengths: tuple[int, ...], asker: Asker) -> Iterator[PrefillRequest]:
    """Ends with the first request that fails: where it does, every later one may take its whole time to fail."""
    with contextlib.closing(asker):
        for tokens in lengths:
            session.progress(f"a prompt of {tokens} tokens")
            reply = asker.ask(_request(session, tokens, together=False))
            session.note(COMPLETIONS, reply)
            yield (asked := _asked(tokens, reply, together=False))
            if asked.error is not None:
                return


def _request(session: Session, tokens: int, together: bool) -> Request:
    prompt = token_prompt(tokens, session.profile.model.seed, "prefill", together, tokens)
    body = {"model": session.model, "prompt": prompt, "max_tokens": PREFILL_ANSWER_TOKENS, "temperature": 0}
    return Request(COMPLETIONS, {**body, "ignore_eos": True})


def _asked(tokens: int, reply: Reply, together: bool) -> PrefillRequest:
    answer = reply.answer
    return PrefillRequest(
        tokens=tokens,
        together=together,
        times=reply.times,
        status=answer.status,
        error=answer.error,
        prompt_tokens=answer.prompt_tokens,
        completion_tokens=answer.completion_tokens,
    )
