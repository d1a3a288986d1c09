# SPDX-License-Identifier: Apache-2.0
"""A small DeepSeek-V4 made from a seed: the attention of DeepSeek-V4-Flash in 4 layers, with its DSpark drafter.

Names, shapes and number formats are those of the published checkpoints as vLLM 0.32.0 loads them: matrices in FP8
(e4m3) with one e8m0 scale a block of 128 x 128, experts in packed FP4 (e2m1) with one e8m0 scale for 32 numbers, the
rest in bfloat16 and float32. Everything is written to disk, so every boot serves the same model, and the weights that
tensor parallelism shards differ between the ranks.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from qualify.seeded import BOS, EOS, PAD, Floats, Randomness, answer_words

FP8_BLOCK = 128
FP4_BLOCK = 32
FP4_DEVIATION = 2.93
"""Of the 16 e2m1 numbers, each as likely as the others."""


class Recipe(NamedTuple):
    """Sizes of the model. A change of any value is another model, and another digest."""

    name: str = "ds4-mini"
    revision: int = 1
    """Raised whenever the code below makes other bytes from the same sizes."""
    ratios: tuple[int, ...] = (0, 4, 128, 4)
    """Compression of each layer: none, with indexer, and without; all three that the architecture has."""
    vocabulary: int = 4096
    hidden: int = 4096
    heads: int = 64
    head_size: int = 512
    rope_size: int = 64
    query_rank: int = 1024
    output_rank: int = 1024
    output_groups: int = 8
    experts: int = 16
    experts_of_a_token: int = 6
    intermediate: int = 2048
    hash_layers: int = 1
    streams: int = 4
    """Parallel residual streams (hyper-connections)."""
    index_heads: int = 64
    index_size: int = 128
    index_tokens: int = 512
    window: int = 128
    positions: int = 65536
    draft_layers: int = 3
    draft_tokens: int = 5
    markov_rank: int = 256
    """Also how many features of the residual stream the output matrix reads: the drafter's table of transitions then
    holds what a token itself says of its successor, and is right about some of them."""
    answer_tokens: int = 256
    """How many tokens, all plain words, can ever be an answer."""

    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self._asdict(), sort_keys=True).encode()).hexdigest()

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["DeepseekV4ForCausalLM"],
            "model_type": "deepseek_v4",
            "torch_dtype": "bfloat16",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "moe_intermediate_size": self.intermediate,
            "num_hidden_layers": len(self.ratios),
            "num_attention_heads": self.heads,
            "num_key_value_heads": 1,
            "head_dim": self.head_size,
            "qk_rope_head_dim": self.rope_size,
            "q_lora_rank": self.query_rank,
            "o_lora_rank": self.output_rank,
            "o_groups": self.output_groups,
            "n_routed_experts": self.experts,
            "n_shared_experts": 1,
            "num_experts_per_tok": self.experts_of_a_token,
            "norm_topk_prob": True,
            "scoring_func": "sqrtsoftplus",
            "topk_method": "noaux_tc",
            "routed_scaling_factor": 1.5,
            "swiglu_limit": 10.0,
            "expert_dtype": "fp4",
            "hc_mult": self.streams,
            "hc_eps": 1e-6,
            "hc_sinkhorn_iters": 20,
            "num_hash_layers": self.hash_layers,
            "index_n_heads": self.index_heads,
            "index_head_dim": self.index_size,
            "index_topk": self.index_tokens,
            "sliding_window": self.window,
            "compress_ratios": [*self.ratios, 0],
            "rope_theta": 10000,
            "compress_rope_theta": 160000,
            "rope_scaling": {
                "type": "yarn",
                "rope_type": "yarn",
                "factor": 16,
                "original_max_position_embeddings": 4096,
                "beta_fast": 32,
                "beta_slow": 1,
            },
            "max_position_embeddings": self.positions,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "tie_word_embeddings": False,
            "use_cache": True,
            "bos_token_id": BOS,
            "eos_token_id": EOS,
            "pad_token_id": PAD,
            "quantization_config": {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
                "scale_fmt": "ue8m0",
                "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
            },
            "num_nextn_predict_layers": 1,
            "n_mtp_layers": self.draft_layers,
            "dspark_target_layer_ids": list(range(1, len(self.ratios))),
            "dspark_block_size": self.draft_tokens,
            "dspark_markov_rank": self.markov_rank,
            "dspark_noise_token_id": PAD,
        }


class Tensor(NamedTuple):
    """One tensor of the file."""

    name: str
    kind: str
    """As safetensors names it: F32, I32, BF16, F8_E4M3, F8_E8M0, or U8 for packed FP4."""
    shape: tuple[int, ...]
    make: Callable[[int], bytes]
    """Its bytes, from the seed."""


SIZES = {"F32": 4, "I32": 4, "BF16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "U8": 1}


def write(recipe: Recipe, seed: int, tokenizer: Tokenizer, path: Path) -> None:
    """Write all weights as one safetensors file (2.4 GB), one tensor after the other."""
    found = list(tensors(recipe, answer_words(tokenizer, recipe.answer_tokens)))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in found:
        size = SIZES[tensor.kind] * math.prod(tensor.shape)
        header[tensor.name] = {"dtype": tensor.kind, "shape": tensor.shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in found:
            file.write(tensor.make(seed))


def tensors(recipe: Recipe, words: list[int]) -> Iterator[Tensor]:
    """Every tensor of the checkpoint, in file order. `words` are the tokens that can be an answer."""
    hidden, rank, vocabulary = recipe.hidden, recipe.markov_rank, recipe.vocabulary
    last = f"mtp.{recipe.draft_layers - 1}"
    yield Tensor("embed.weight", "BF16", (vocabulary, hidden), lambda seed: _bf16(_embedding(recipe, seed)))
    yield Tensor("head.weight", "BF16", (vocabulary, hidden), lambda seed: _bf16(_output(recipe, words, seed)))
    yield _ones("norm.weight", hidden)
    yield from _merge(recipe, "hc_head")
    for layer, ratio in enumerate(recipe.ratios):
        yield from _layer(recipe, f"layers.{layer}", ratio, hashed=layer < recipe.hash_layers)
    for layer in range(recipe.draft_layers):
        yield from _layer(recipe, f"mtp.{layer}", 0, hashed=False)
    yield from _fp8("mtp.0.main_proj", hidden, hidden * (len(recipe.ratios) - 1))
    yield _ones("mtp.0.main_norm.weight", hidden)
    yield _ones(f"{last}.norm.weight", hidden)
    yield from _merge(recipe, f"{last}.hc_head")
    markov = f"{last}.markov_head.markov_w"
    yield Tensor(
        f"{markov}1.weight", "BF16", (vocabulary, rank), lambda seed: _bf16(_embedding(recipe, seed)[:, :rank])
    )
    yield Tensor(
        f"{markov}2.weight", "BF16", (vocabulary, rank), lambda seed: _bf16(_output(recipe, words, seed)[:, :rank])
    )
    yield _float32(f"{last}.confidence_head.proj.weight", (1, hidden + rank))


def _layer(recipe: Recipe, at: str, ratio: int, *, hashed: bool) -> Iterator[Tensor]:
    """A decoder layer. `ratio` 0 has no compressor, 4 also an indexer; a hashed one picks experts by token."""
    hidden, wide = recipe.hidden, recipe.streams * recipe.hidden
    yield _ones(f"{at}.attn_norm.weight", hidden)
    yield _ones(f"{at}.ffn_norm.weight", hidden)
    mixes = (2 + recipe.streams) * recipe.streams
    for part in ("attn", "ffn"):
        yield _float32(f"{at}.hc_{part}_fn", (mixes, wide))
        yield _float32(f"{at}.hc_{part}_base", (mixes,), deviation=0.1)
        yield _float32(f"{at}.hc_{part}_scale", (3,), deviation=0.1, mean=1.0)
    yield from _attention(recipe, f"{at}.attn", ratio)
    yield from _experts(recipe, f"{at}.ffn", hashed=hashed)


def _attention(recipe: Recipe, at: str, ratio: int) -> Iterator[Tensor]:
    hidden, queries = recipe.hidden, recipe.heads * recipe.head_size
    outputs = recipe.output_groups * recipe.output_rank
    yield _float32(f"{at}.attn_sink", (recipe.heads,), deviation=0.1)
    yield from _fp8(f"{at}.wq_a", recipe.query_rank, hidden)
    yield _ones(f"{at}.q_norm.weight", recipe.query_rank)
    yield from _fp8(f"{at}.wq_b", queries, recipe.query_rank)
    yield from _fp8(f"{at}.wkv", recipe.head_size, hidden)
    yield _ones(f"{at}.kv_norm.weight", recipe.head_size)
    yield from _fp8(f"{at}.wo_a", outputs, queries // recipe.output_groups)
    yield from _fp8(f"{at}.wo_b", hidden, outputs)
    if ratio:
        yield from _compressor(recipe, f"{at}.compressor", ratio, recipe.head_size)
    if ratio == 4:
        yield from _fp8(f"{at}.indexer.wq_b", recipe.index_heads * recipe.index_size, recipe.query_rank)
        yield _bfloat16(f"{at}.indexer.weights_proj.weight", (recipe.index_heads, hidden))
        yield from _compressor(recipe, f"{at}.indexer.compressor", ratio, recipe.index_size)


def _compressor(recipe: Recipe, at: str, ratio: int, size: int) -> Iterator[Tensor]:
    """At ratio 4 the windows overlap, and each token takes part in two."""
    width = size * (2 if ratio == 4 else 1)
    yield _float32(f"{at}.ape", (ratio, width), deviation=0.1)
    yield _bfloat16(f"{at}.wkv.weight", (width, recipe.hidden))
    yield _bfloat16(f"{at}.wgate.weight", (width, recipe.hidden))
    yield _ones(f"{at}.norm.weight", size)


def _experts(recipe: Recipe, at: str, *, hashed: bool) -> Iterator[Tensor]:
    hidden, inner = recipe.hidden, recipe.intermediate
    yield _bfloat16(f"{at}.gate.weight", (recipe.experts, hidden))
    if hashed:
        shape = (recipe.vocabulary, recipe.experts_of_a_token)
        yield Tensor(f"{at}.gate.tid2eid", "I32", shape, lambda seed: _hashed_experts(recipe, seed))
    else:
        yield _float32(f"{at}.gate.bias", (recipe.experts,), deviation=0.01)
    for name, rows, columns in (("w1", inner, hidden), ("w2", hidden, inner), ("w3", inner, hidden)):
        yield from _fp8(f"{at}.shared_experts.{name}", rows, columns)
        for expert in range(recipe.experts):
            yield from _fp4(f"{at}.experts.{expert}.{name}", rows, columns)


def _merge(recipe: Recipe, at: str) -> Iterator[Tensor]:
    """What makes one stream of the parallel ones."""
    yield _float32(f"{at}_fn", (recipe.streams, recipe.streams * recipe.hidden))
    yield _float32(f"{at}_base", (recipe.streams,), deviation=0.1)
    yield _float32(f"{at}_scale", (1,), deviation=0.1, mean=1.0)


def _embedding(recipe: Recipe, seed: int) -> Floats:
    """Of unit variance, and twice that strong in the features that the output matrix reads."""
    table = Randomness(seed, "embed").uniform((recipe.vocabulary, recipe.hidden), deviation=1.0)
    table[:, : recipe.markov_rank] *= np.float32(2.0)
    return table


def _output(recipe: Recipe, words: list[int], seed: int) -> Floats:
    rank = recipe.markov_rank
    table = np.zeros((recipe.vocabulary, recipe.hidden), dtype=np.float32)
    table[words, :rank] = Randomness(seed, "head").uniform((len(words), rank), deviation=rank**-0.5)
    return table


def _hashed_experts(recipe: Recipe, seed: int) -> bytes:
    """Different experts for each token: a start and then every n-th of them, n odd."""
    start, step = Randomness(seed, "tid2eid").bytes(2 * recipe.vocabulary).reshape(2, recipe.vocabulary, 1)
    ordinal = np.arange(recipe.experts_of_a_token, dtype=np.int32)
    chosen = (start.astype(np.int32) + (step.astype(np.int32) | 1) * ordinal) % recipe.experts
    return chosen.astype("<i4").tobytes()


def _ones(name: str, size: int) -> Tensor:
    return Tensor(name, "BF16", (size,), lambda seed: _bf16(np.ones(size, dtype=np.float32)))


def _float32(name: str, shape: tuple[int, ...], deviation: float | None = None, mean: float = 0.0) -> Tensor:
    """Random numbers; without a deviation they keep the variance of what is multiplied with them."""
    spread = shape[-1] ** -0.5 if deviation is None else deviation

    def make(seed: int) -> bytes:
        return (Randomness(seed, name).uniform(shape, spread) + np.float32(mean)).astype("<f4").tobytes()

    return Tensor(name, "F32", shape, make)


def _bfloat16(name: str, shape: tuple[int, int]) -> Tensor:
    return Tensor(name, "BF16", shape, lambda seed: _bf16(Randomness(seed, name).uniform(shape, shape[1] ** -0.5)))


def _bf16(values: Floats) -> bytes:
    """The upper half of each float32."""
    return (np.ascontiguousarray(values).view(np.uint32) >> np.uint32(16)).astype("<u2").tobytes()


def _fp8(name: str, rows: int, columns: int) -> Iterator[Tensor]:
    """A matrix that keeps the variance of its input: e4m3 numbers spread over [-1, 1] and one scale a block."""
    blocks = (rows // FP8_BLOCK, columns // FP8_BLOCK)
    exponent = round(math.log2((3.0 / columns) ** 0.5))

    def make(seed: int) -> bytes:
        return Randomness(seed, name).bytes(rows * columns).tobytes().translate(_e4m3())

    yield Tensor(f"{name}.weight", "F8_E4M3", (rows, columns), make)
    yield Tensor(f"{name}.scale", "F8_E8M0", blocks, lambda seed: _scales(seed, name, math.prod(blocks), exponent))


def _fp4(name: str, rows: int, columns: int) -> Iterator[Tensor]:
    """Two e2m1 numbers a byte, of which every bit pattern is one, and one scale for FP4_BLOCK of a row."""
    exponent = round(math.log2(columns**-0.5 / FP4_DEVIATION))
    shape = (rows, columns // FP4_BLOCK)
    packed = (rows, columns // 2)
    yield Tensor(f"{name}.weight", "U8", packed, lambda seed: Randomness(seed, name).bytes(math.prod(packed)).tobytes())
    yield Tensor(f"{name}.scale", "F8_E8M0", shape, lambda seed: _scales(seed, name, math.prod(shape), exponent))


def _scales(seed: int, name: str, count: int, exponent: int) -> bytes:
    """e8m0: powers of two, here 2**exponent or half of it."""
    halved = Randomness(seed, f"{name}.scale").bytes(count) & np.uint8(1)
    return bytes((np.uint8(127 + exponent) - halved).tobytes())


@cache
def _e4m3() -> bytes:
    """For each byte value the e4m3 code nearest to one of 256 numbers spread evenly over [-1, 1]."""
    codes = np.arange(127)  # without the sign; 127 is not a number
    exponent, fraction = codes >> 3, (codes & 7) / 8.0
    values = np.where(exponent == 0, fraction * 2.0**-6, (1.0 + fraction) * 2.0 ** (exponent - 7.0))
    wanted = (2.0 * np.arange(256) - 255.0) / 255.0
    nearest = np.abs(values[None, :] - np.abs(wanted)[:, None]).argmin(axis=1)
    return bytes((nearest + 128 * (wanted < 0)).astype(np.uint8))
