# SPDX-License-Identifier: Apache-2.0
"""What every model that is made from a seed shares: the stream of numbers, the tokenizer, and an output matrix whose
greedy answers are plain words. The same seed gives the same bytes on every machine.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

Floats = np.ndarray[Any, np.dtype[np.float32]]

SPECIAL = ("<pad>", "<bos>", "<eos>", "<turn>", "</turn>")
PAD, BOS, EOS = 0, 1, 2

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "<turn>{{ message['role'] }}\n{{ message['content'] }}</turn>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)


def generation_config() -> dict[str, Any]:
    """Sampling defaults. Among the best 64 every logit is positive, so sampled answers do not end early either
    (see answer_words)."""
    return {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD, "top_k": 64}


def tokenizer_config(positions: int) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[BOS],
        "eos_token": SPECIAL[EOS],
        "pad_token": SPECIAL[PAD],
        "model_max_length": positions,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


class Randomness:
    """A stream of numbers that is the same on every machine and numpy version: only raw PCG64 output is used."""

    def __init__(self, seed: int, purpose: str) -> None:
        key = hashlib.sha256(f"{seed}/{purpose}".encode()).digest()
        self._bits = np.random.PCG64(int.from_bytes(key[:16], "little"))

    def below(self, limit: int) -> int:
        """An integer in [0, limit); the bias of the remainder is of no interest here."""
        return int(self._bits.random_raw()) % limit

    def bytes(self, count: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        raw: np.ndarray[Any, np.dtype[np.uint8]] = self._bits.random_raw(-(-count // 8)).astype("<u8").view(np.uint8)
        return raw[:count]

    def uniform(self, shape: tuple[int, ...], deviation: float) -> Floats:
        """Numbers of mean 0 and the given standard deviation, uniform, from 24 random bits each."""
        raw = self._bits.random_raw(int(np.prod(shape))) >> np.uint64(40)
        unit = raw.astype(np.float32) * np.float32(2.0**-23) - np.float32(1.0)
        return (unit * np.float32(deviation * 3.0**0.5)).reshape(shape)


def train_tokenizer(vocabulary: int, random: Randomness) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(random), trainer=trainer)
    if tokenizer.get_vocab_size() != vocabulary:
        raise AssertionError(f"the corpus gives {tokenizer.get_vocab_size()} tokens, not {vocabulary}")
    return tokenizer


SUBJECTS = ("a worker", "the scheduler", "one rank", "every block", "the cache", "this prompt", "a request", "a probe")
VERBS = ("holds", "stores", "reads", "counts", "restores", "drops", "hashes", "sends", "awaits", "compares")
OBJECTS = ("its keys", "two chunks", "the last page", "a table of blocks", "no bytes", "each value", "a digest")
JOINTS = ("and", "while", "because", "unless", "before", "after", "so that", "although")
SYLLABLES = (*(first + last for first in "bdfgklmnprstvz" for last in "aeio"), "gren", "stel", "dorn", "mund")


def _corpus(random: Randomness) -> Iterator[str]:
    """Plain sentences, invented words and numbers: enough variety for the trainer to fill its vocabulary."""

    def pick(words: tuple[str, ...]) -> str:
        return words[random.below(len(words))]

    for _ in range(6000):
        word = "".join(pick(SYLLABLES) for _ in range(2 + random.below(2)))
        clause = f"{pick(SUBJECTS)} {pick(VERBS)} {pick(OBJECTS)}"
        ending = f"{word} {pick(VERBS)} {pick(OBJECTS)}, {random.below(10000)} times"
        yield f"{clause.capitalize()} {pick(JOINTS)} {ending}.\n"


def answer_words(tokenizer: Tokenizer, count: int) -> list[int]:
    """The last `count` tokens that are plain words. An output matrix with random rows for them and zero for all else
    gives greedy answers that neither end early nor hold broken characters: a logit of 0 never wins against the
    largest of hundreds."""
    texts = ((token, tokenizer.decode([token])) for token in range(tokenizer.get_vocab_size()))
    words = [token for token, text in texts if re.fullmatch(r" [a-z]{2,}", text)][-count:]
    if len(words) != count:
        raise AssertionError(f"the tokenizer has {len(words)} plain words, not {count}")
    return words
