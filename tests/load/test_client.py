# SPDX-License-Identifier: Apache-2.0
"""The client against the stand-in engine: exact answers, named failures, busy slots."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator
from contextlib import closing

import pytest
from fake_engine import FakeEngine, Faults
from fake_engine.engine import piece, token
from fake_engine.server import Transport
from qualify.load import ceiling
from qualify.load.client import CHAT, COMPLETIONS, Asker, ClosedLoop, Reply, Request, monotonic_clock
from qualify.load.prompts import TOKEN_IDS, token_prompt

MESSAGES = [{"role": "user", "content": "hello"}]


def request(path: str = COMPLETIONS, *, stream: bool = True, tokens: int = 20, number: int = 0) -> Request:
    asks = {"prompt": token_prompt(8, number)} if path == COMPLETIONS else {"messages": MESSAGES}
    body = {"model": "fake", **asks, "max_tokens": tokens, "temperature": 0, "return_token_ids": True, "logprobs": True}
    return Request(path, {**body, "stream": True} if stream else body)


def ask(engine: FakeEngine, wanted: Request, timeout: float = 10.0) -> Reply:
    with closing(Asker(engine.url, monotonic_clock(), timeout)) as asker:
        return asker.ask(wanted)


@pytest.mark.parametrize("transport", ["whole", "split", "merged"])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("drafter", [None, 3])
def test_streamed_and_whole_answers_are_equal(transport: Transport, path: str, drafter: int | None) -> None:
    """The same request gives the same tokens, text, counts and finish reason however its bytes travel."""
    with FakeEngine(transport=transport, drafter=drafter) as engine:
        whole = ask(engine, request(path, stream=False)).answer
        streamed = ask(engine, request(path)).answer
    assert streamed.error is None
    assert whole.error is None
    same = {"text", "token_ids", "logprobs", "finish_reason", "prompt_tokens", "completion_tokens", "model"}
    assert streamed.model_dump(include=same) == whole.model_dump(include=same)
    assert (whole.completion_tokens, len(whole.token_ids or ())) == (20, 20)
    assert whole.text == "".join(piece(one) for one in whole.token_ids or ())


def test_events_are_not_tokens() -> None:
    """With a drafter an event carries several tokens: fewer events than tokens, and the count is that of usage."""
    with FakeEngine(drafter=3) as engine:
        answer = ask(engine, request(tokens=64)).answer
    assert answer.completion_tokens == 64
    assert answer.events < 64


def test_times_are_in_order() -> None:
    """Sent, first token and end follow each other, and a closed loop is due when the last answer ended."""
    with FakeEngine() as engine:
        times = ask(engine, request()).times
        assert times.first_token is not None
        assert times.intended <= times.sent <= times.first_token <= times.ended
        supply = ((False, request(number=number)) for number in itertools.count())
        with ClosedLoop(engine.url, [supply], monotonic_clock(), 10.0) as loop:
            loop.wait_until_decoding()
            turns = loop.finish()
    for earlier, later in itertools.pairwise(turns):
        assert later.reply.times.intended == earlier.reply.times.ended


@pytest.mark.parametrize(
    ("faults", "words", "status"),
    [
        (Faults(refuse=1), "HTTP 400", 400),
        (Faults(fail=1), "HTTP 500", 500),
        (Faults(cut_stream=1), "without its end mark", 200),
        (Faults(error_event=1), "the engine reported: failed by a fault", 200),
        (Faults(drop=1), "RemoteProtocolError", 200),
        (Faults(hang=1), "no byte for", None),
        (Faults(die_at_step=4), "RemoteProtocolError", 200),
        (Faults(stall_at_step=3, stall_seconds=1.0), "no byte for", 200),
    ],
)
def test_each_failure_of_a_stream_is_named(faults: Faults, words: str, status: int | None) -> None:
    """Every way in which an answer stays unfinished is in its error, and never passes for an answer."""
    with FakeEngine(faults=faults) as engine:
        answer = ask(engine, request(), timeout=0.5).answer
    assert words in (answer.error or "")
    assert answer.status == status


def test_a_stream_that_trickles_forever_ends_at_the_deadline() -> None:
    """Bytes that keep coming do not extend the time of a request."""
    with FakeEngine(step_seconds=0.02) as engine:
        answer = ask(engine, request(tokens=500), timeout=0.3).answer
    assert "did not end within 0.3 s" in (answer.error or "")


def test_a_server_that_is_not_there_is_named() -> None:
    """A refused connection is an error without a status."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with closing(Asker(url, monotonic_clock(), 1.0)) as asker:
            answer = asker.ask(request()).answer
    assert answer.status is None
    assert "ConnectError" in (answer.error or "")


def supply(slot: int, warmups: int = 1) -> Iterator[tuple[bool, Request]]:
    for number in itertools.count():
        yield number < warmups, request(number=1000 * slot + number)


def test_the_loop_keeps_its_slots_busy_and_drains() -> None:
    """C slots send C supplies, warm-up first; after `finish` every request has ended, and the engine is idle."""
    with FakeEngine() as engine:
        with ClosedLoop(engine.url, [supply(slot) for slot in range(3)], monotonic_clock(), 10.0) as loop:
            loop.wait_until_decoding()
            turns = loop.finish()
        assert engine.engine.running == 0
        counted = engine.engine.counters["vllm:generation_tokens_total"]
    assert {turn.slot for turn in turns} == {0, 1, 2}
    assert sum(turn.warmup for turn in turns) == 3
    assert all(turn.reply.answer.error is None for turn in turns)
    assert counted == sum(turn.reply.answer.completion_tokens or 0 for turn in turns)


def test_a_failed_slot_stops_and_says_why() -> None:
    """A slot does not hammer a server that refuses it."""
    with (
        FakeEngine(faults=Faults(fail=3)) as engine,
        ClosedLoop(engine.url, [supply(0)], monotonic_clock(), 10.0) as loop,
    ):
        loop.wait_until_decoding()
        while loop.failure() is None:
            pass
        turns = loop.finish()
    assert "HTTP 500" in (loop.failure() or "")
    assert len(turns) == 3


def test_a_defect_of_the_supply_is_a_failure() -> None:
    """A slot whose supply breaks is not mistaken for an idle one."""

    def broken() -> Iterator[tuple[bool, Request]]:
        raise RuntimeError("no more prompts")
        yield False, request()

    with FakeEngine() as engine, ClosedLoop(engine.url, [broken()], monotonic_clock(), 10.0) as loop:
        loop.wait_until_decoding()
        assert "no more prompts" in (loop.failure() or "no failure")


def test_the_client_outruns_a_null_server() -> None:
    """The ceiling is measured with the client's own code, counts tokens by usage, and ends its server."""
    with ceiling.null_engine() as url:
        found = ceiling.measure(url, 2, supply, 0.05)
        assert found.concurrency == 2
        assert found.tokens % 20 == 0
        assert found.tokens_per_second == pytest.approx(found.tokens / found.seconds, rel=1e-3)
    with closing(Asker(url, monotonic_clock(), 1.0)) as asker:
        assert asker.ask(request()).answer.status is None


def test_prompts_depend_on_their_parts_only() -> None:
    """The same parts give the same ids, others give others, and all are valid for a vocabulary of bytes."""
    assert token_prompt(64, 1, "c1", 0) == token_prompt(64, 1, "c1", 0)
    assert token_prompt(64, 1, "c1", 0) != token_prompt(64, 1, "c1", 1)
    assert set(token_prompt(5000, 1)) == set(TOKEN_IDS)


def test_the_stand_in_is_deterministic() -> None:
    """Tokens follow from prompt, sampling and position."""
    assert token("key", 3) == token("key", 3)
    assert len({token("key", index) for index in range(50)}) > 40
