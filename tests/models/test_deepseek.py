# SPDX-License-Identifier: Apache-2.0
"""The small DeepSeek-V4, in sizes of a few hundred kilobytes."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from qualify import deepseek
from qualify.models import _check_safetensors
from qualify.seeded import Randomness, answer_words, train_tokenizer

TINY = deepseek.Recipe(
    hidden=256,
    heads=4,
    head_size=64,
    query_rank=128,
    output_rank=128,
    output_groups=2,
    intermediate=128,
    index_heads=2,
    index_size=64,
    positions=4096,
    markov_rank=32,
)
TOKENIZER = train_tokenizer(TINY.vocabulary, Randomness(1, "corpus"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    deepseek.write(TINY, 1, TOKENIZER, path)
    return path


def header(path: Path) -> tuple[dict[str, Any], int]:
    with path.open("rb") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        return json.loads(file.read(length)), 8 + length


def content(path: Path, name: str) -> bytes:
    entries, start = header(path)
    begin, end = entries[name]["data_offsets"]
    return path.read_bytes()[start + begin : start + end]


def bfloat16(path: Path, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    shape = header(path)[0][name]["shape"]
    return (np.frombuffer(content(path, name), "<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)


def test_the_file_is_whole(made: Path) -> None:
    """Every tensor has exactly the bytes that its type and shape ask for."""
    _check_safetensors(made)
    for name, entry in header(made)[0].items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            assert end - begin == deepseek.SIZES[entry["dtype"]] * math.prod(entry["shape"]), name
            assert len(content(made, name)) == end - begin, name


def test_the_same_seed_gives_the_same_bytes(made: Path, tmp_path: Path) -> None:
    """Two makings agree in every byte; another seed gives other weights."""
    deepseek.write(TINY, 1, TOKENIZER, tmp_path / "same")
    deepseek.write(TINY, 2, TOKENIZER, tmp_path / "other")
    assert (tmp_path / "same").read_bytes() == made.read_bytes()
    assert content(tmp_path / "other", "layers.0.attn.wq_a.weight") != content(made, "layers.0.attn.wq_a.weight")


def test_no_two_experts_are_alike(made: Path) -> None:
    """Experts and their packed numbers are random, not a pattern: a mix-up changes the output."""
    packed = {content(made, name) for name in header(made)[0] if ".experts." in name and name.endswith(".weight")}
    assert len(packed) == (len(TINY.ratios) + TINY.draft_layers) * 3 * TINY.experts


def test_fp8_numbers_are_numbers(made: Path) -> None:
    """Neither of the two e4m3 codes that are no number occurs, and both signs do."""
    for name, entry in header(made)[0].items():
        if name != "__metadata__" and entry["dtype"] == "F8_E4M3":
            codes = np.frombuffer(content(made, name), np.uint8)
            assert not np.isin(codes, (0x7F, 0xFF)).any(), name
            assert 0.4 < (codes >> 7).mean() < 0.6, name


@pytest.mark.parametrize(("code", "value"), [(0, -1.0), (255, 1.0), (191, 0.5), (128, 0.0)])
def test_the_e4m3_table(code: int, value: float) -> None:
    """255 codes lie evenly over [-1, 1], each at the nearest e4m3 number."""
    found = deepseek._e4m3()[code]
    exponent, fraction = (found & 127) >> 3, (found & 7) / 8
    magnitude = (1 + fraction) * 2.0 ** (exponent - 7) if exponent else fraction * 2.0**-6
    assert abs(math.copysign(magnitude, -1 if found & 128 else 1) - value) < 0.04


def test_matrices_keep_the_variance_of_their_input(made: Path) -> None:
    """Number and scale together have about the deviation 1 / sqrt(columns)."""
    entry = header(made)[0]["layers.0.attn.wq_b.weight"]
    codes = np.frombuffer(content(made, "layers.0.attn.wq_b.weight"), np.uint8)
    exponent, fraction = ((codes & 127) >> 3).astype(float), (codes & 7) / 8
    values = np.where(exponent > 0, (1 + fraction) * 2.0 ** (exponent - 7), fraction * 2.0**-6)
    scales = 2.0 ** (np.frombuffer(content(made, "layers.0.attn.wq_b.scale"), np.uint8).astype(float) - 127)
    deviation = values.std() * scales.mean() * entry["shape"][1] ** 0.5
    assert 0.2 < deviation < 2.0


def test_hashed_experts_of_a_token_differ(made: Path) -> None:
    """The first layer picks experts by token: six different ones that exist."""
    shape = (TINY.vocabulary, TINY.experts_of_a_token)
    table = np.frombuffer(content(made, "layers.0.ffn.gate.tid2eid"), "<i4").reshape(shape)
    assert table.min() >= 0
    assert table.max() < TINY.experts
    assert all(len(set(row)) == TINY.experts_of_a_token for row in table.tolist())


def test_only_words_are_answers_and_the_drafter_knows_their_order(made: Path) -> None:
    """The output matrix has rows for plain words only, and the drafter's tables are the target's own features."""
    head, rank = bfloat16(made, "head.weight"), TINY.markov_rank
    assert set(np.flatnonzero(head.any(axis=1))) == set(answer_words(TOKENIZER, TINY.answer_tokens))
    assert not head[:, rank:].any()
    last = f"mtp.{TINY.draft_layers - 1}.markov_head.markov_w"
    assert np.array_equal(bfloat16(made, f"{last}2.weight"), head[:, :rank])
    assert np.array_equal(bfloat16(made, f"{last}1.weight"), bfloat16(made, "embed.weight")[:, :rank])


def test_every_kind_of_layer_has_its_own_tensors(made: Path) -> None:
    """Ratio 0 compresses nothing, 128 has a compressor, 4 an indexer too; draft layers compress nothing."""
    names = header(made)[0]
    layers = {at: {name for name in names if name.startswith(f"{at}.")} for at in ("layers.0", "layers.1", "layers.2")}
    assert not any("compressor" in name for name in layers["layers.0"])
    assert any(".indexer.compressor." in name for name in layers["layers.1"])
    assert any(".attn.compressor." in name for name in layers["layers.2"])
    assert not any("indexer" in name for name in layers["layers.2"])
    assert not any("compressor" in name for name in names if name.startswith("mtp."))
