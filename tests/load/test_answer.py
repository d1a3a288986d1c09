# SPDX-License-Identifier: Apache-2.0
"""Documents and events fold into one answer; what is malformed is said and never raised."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from qualify.load.answer import Fold

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
KEYS = ("choices", "usage", "model", "error", "object")
CHOICE_KEYS = ("text", "delta", "message", "token_ids", "logprobs", "finish_reason", "index")


def event(*choices: dict[str, Any], **fields: Any) -> str:
    return json.dumps({"model": "m", "choices": list(choices), **fields})


def test_a_completion_stream_folds_to_its_answer() -> None:
    """Text, ids and log probabilities add up; usage comes from the last event; events are not tokens."""
    fold = Fold(streamed=True)
    fold.event(event({"text": "a", "token_ids": [1, 2], "logprobs": {"token_logprobs": [-1, -1]}}))
    fold.event(event({"text": "b", "token_ids": [3], "logprobs": {"token_logprobs": [-1]}, "finish_reason": "length"}))
    fold.event(event(usage={"prompt_tokens": 5, "completion_tokens": 3}))
    fold.event("[DONE]")
    answer = fold.answer()
    assert (answer.text, answer.token_ids, answer.logprobs) == ("ab", (1, 2, 3), 3)
    assert (answer.prompt_tokens, answer.completion_tokens, answer.events) == (5, 3, 2)
    assert (answer.finish_reason, answer.done, answer.error) == ("length", True, None)


def test_only_output_counts_as_output() -> None:
    """The role chunk, an empty delta and the usage event deliver nothing; reasoning and tool calls do."""
    fold = Fold(streamed=True)
    call = {"index": 0, "function": {"name": "f"}}
    delivered = [
        fold.event(event({"delta": {"role": "assistant", "content": ""}})),
        fold.event(event({"delta": {}})),
        fold.event(event({"delta": {"reasoning": "hm"}})),
        fold.event(event({"delta": {"tool_calls": [call]}})),
        fold.event(event({"delta": {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}})),
        fold.event(event({"delta": {"content": "x"}})),
        fold.event(event(usage={"completion_tokens": 4})),
    ]
    answer = fold.answer()
    assert delivered == [False, False, True, True, True, True, False]
    assert (answer.reasoning, answer.tool_calls, answer.text) == ("hm", 1, "x")


def test_a_whole_document_gives_the_same_fields() -> None:
    """Chat and completion documents; what the engine does not give stays unknown."""
    chat, plain = Fold(streamed=False), Fold(streamed=False)
    chat.document(event({"message": {"content": "x"}, "token_ids": [1], "finish_reason": "stop"}))
    plain.document(event({"text": "y", "finish_reason": "stop"}, usage={"completion_tokens": 1}))
    assert (chat.answer().text, chat.answer().token_ids, chat.answer().completion_tokens) == ("x", (1,), None)
    assert (plain.answer().text, plain.answer().token_ids, plain.answer().completion_tokens) == ("y", None, 1)
    assert chat.answer().done is None


@pytest.mark.parametrize(
    ("events", "words"),
    [
        (['{"error": {"message": "boom"}}'], "the engine reported: boom"),
        (['{"object": "error", "message": "boom"}'], "the engine reported: boom"),
        (["{"], "not JSON"),
        (["[]"], "not a JSON object"),
        (['{"choices": [{}, {}]}'], "exactly one choice"),
        (["[DONE]", event({"text": "x"})], "after the end mark"),
        ([event({"text": "x", "finish_reason": "stop"}), event({"text": "y"})], "after the finish reason"),
    ],
)
def test_each_defect_of_a_stream_is_named(events: list[str], words: str) -> None:
    """An error inside a stream of status 200 is an error, as is every event out of form or order."""
    fold = Fold(streamed=True)
    for one in events:
        fold.event(one)
    assert words in (fold.answer().error or "")


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS), json_values), st.dictionaries(st.sampled_from(CHOICE_KEYS), json_values))
def test_no_document_breaks_the_fold(fields: dict[str, Any], choice: dict[str, Any]) -> None:
    """Whatever JSON a server sends, the result is an answer or a named error."""
    for document in (fields, {"choices": [choice]}, {**fields, "choices": [choice]}):
        fold = Fold(streamed=True)
        fold.event(json.dumps(document))
        fold.answer()
