# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from qualify import models
from qualify.errors import UsageError
from qualify.records import ModelFiles
from safetensors.numpy import load_file
from tokenizers import Tokenizer

INDEX = "model.safetensors.index.json"


def make(cache: Path, seed: int = 7) -> Path:
    return models.ensure(cache, "tiny-hybrid", seed, lambda _: None)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("cache"))


def files(folder: Path) -> dict[str, str]:
    return {file.path: file.sha256 for file in models.describe(folder).files}


def test_the_same_seed_gives_the_same_bytes(made: Path, tmp_path: Path) -> None:
    """Two makings from one seed agree in every file; another seed gives other weights."""
    assert files(made) == files(make(tmp_path))
    assert files(made)["model.safetensors"] != files(make(tmp_path, seed=8))["model.safetensors"]


def test_a_whole_model_is_not_made_again(made: Path) -> None:
    """The second call finds the first one's files untouched."""
    before = (made / "model.safetensors").stat().st_mtime_ns
    assert make(made.parents[1]) == made
    assert (made / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json is missing"),
        (lambda folder: (folder / "config.json").write_text("{}"), "config.json is damaged"),
        (lambda folder: (folder / "extra.py").write_text(""), "extra.py does not belong there"),
        (lambda folder: (folder / models.LISTING).write_text("{"), "missing or unreadable"),
    ],
)
def test_damage_is_named_and_repaired(tmp_path: Path, damage: object, words: str) -> None:
    """A cached model that is not whole is noticed, its first bad file named, and it is made anew."""
    folder = make(tmp_path)
    whole = files(folder)
    assert callable(damage)
    damage(folder)
    said: list[str] = []
    assert models.ensure(tmp_path, "tiny-hybrid", 7, said.append) == folder
    assert words in said[0]
    assert files(folder) == whole


def test_one_changed_weight_is_damage(tmp_path: Path) -> None:
    """A single flipped bit in the weights does not pass."""
    folder = make(tmp_path)
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(UsageError, match=r"model.safetensors is damaged"):
        models.describe(folder)


def test_ranks_get_different_weights(made: Path) -> None:
    """The halves of the key and value projections that two ranks load differ in every row."""
    for name, matrix in load_file(made / "model.safetensors").items():
        if ".k_proj." in name or ".v_proj." in name:
            first, second = np.split(matrix, 2)
            assert not (first == second).all(axis=1).any(), name


def test_weights_keep_the_variance_of_their_input(made: Path) -> None:
    """Projections are random with standard deviation 1/sqrt(input size), so activations neither vanish nor explode."""
    for name, matrix in load_file(made / "model.safetensors").items():
        if "_proj." in name:
            assert np.isclose(matrix.std(), matrix.shape[1] ** -0.5, rtol=0.02), name
            assert abs(matrix.mean()) < 0.02 * matrix.std() * 5, name


def test_answers_are_plain_words(made: Path) -> None:
    """Only tokens that decode to a word have a non-zero output row: no special token and no broken character wins."""
    head = load_file(made / "model.safetensors")["lm_head.weight"]
    tokenizer = Tokenizer.from_file(str(made / "tokenizer.json"))
    answers = [int(token) for token in np.flatnonzero(head.any(axis=1))]
    assert len(answers) == models.RECIPES["tiny-hybrid"].answer_tokens
    assert all(re.fullmatch(r" [a-z]{2,}", tokenizer.decode([token])) for token in answers)


@pytest.mark.parametrize("text", ["plain words, 12 times.\n", "Grüße, 世界 🌍", "", "\t\x00\x7f"])
def test_the_tokenizer_loses_nothing(made: Path, text: str) -> None:
    """Byte-level: any text comes back from its tokens."""
    tokenizer = Tokenizer.from_file(str(made / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_several_kinds_of_attention(made: Path) -> None:
    """The config asks for sliding-window and full attention, which is what makes several KV-cache groups."""
    config = json.loads((made / "config.json").read_text())
    assert set(config["layer_types"]) == {"sliding_attention", "full_attention"}
    assert len(config["layer_types"]) == config["num_hidden_layers"]


def test_unknown_recipe_is_a_usage_error(tmp_path: Path) -> None:
    """A recipe that does not exist is refused, and the known ones are named."""
    with pytest.raises(UsageError, match="tiny-hybrid"):
        models.ensure(tmp_path, "huge", 0, lambda _: None)


def given(folder: Path) -> Path:
    """A user's model directory: the tiny model's files without our listing."""
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["Some"]}')
    header = json.dumps({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"abcd")
    return folder


def test_a_given_model_is_described_by_its_files(tmp_path: Path) -> None:
    """Any directory with a config and whole weights has an identity: every file's size and digest, no recipe."""
    described = models.describe(given(tmp_path / "mine"))
    assert isinstance(described, ModelFiles)
    assert (described.name, described.recipe, described.seed) == ("mine", None, None)
    assert [file.path for file in described.files] == ["config.json", "model.safetensors"]


def _cut(folder: Path, size: int) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:size])


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json is not JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "config.json is not a JSON object"),
        (lambda folder: (folder / "config.json").write_text("{}"), "names no architectures"),
        (lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe"), "config.json is not JSON"),
        (lambda folder: _cut(folder, 4), "model.safetensors is cut short"),
        (lambda folder: _cut(folder, 20), "model.safetensors is cut short"),
        (lambda folder: _cut(folder, -1), "its header names"),
        (
            lambda folder: (folder / "model.safetensors").write_bytes((3).to_bytes(8, "little") + b"{x}"),
            "no readable safetensors header",
        ),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text(
                '{"weight_map": {"a": "b.safetensors"}}'
            ),
            "b.safetensors is missing",
        ),
    ],
)
def test_a_broken_model_is_refused_by_file(tmp_path: Path, spoil: object, named: str) -> None:
    """A directory that the engine could not load is a usage error that names the file."""
    folder = given(tmp_path / "mine")
    assert callable(spoil)
    spoil(folder)
    with pytest.raises(UsageError, match=re.escape(named)):
        models.describe(folder)


def test_a_missing_directory_is_a_usage_error(tmp_path: Path) -> None:
    """A path that is no directory is refused."""
    with pytest.raises(UsageError, match="does not exist"):
        models.describe(tmp_path / "none")
