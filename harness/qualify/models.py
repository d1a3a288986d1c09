# SPDX-License-Identifier: Apache-2.0
"""Models: those that are made from a seed, and the identity of any model directory.

The recipe here has the shape of Gemma 3, another is in deepseek.py: sliding-window and full-attention layers, so that
the engine forms several KV-cache groups. Its weights are real random numbers, so tensor-parallel ranks hold different
KV and a mix-up of ranks cannot pass. Everything follows from the seed through integer arithmetic: the same seed gives
the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import ValidationError
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from qualify import deepseek
from qualify.errors import PreflightError, UsageError
from qualify.records import ModelFile, ModelFiles
from qualify.seeded import (
    BOS,
    EOS,
    PAD,
    Floats,
    Randomness,
    answer_words,
    generation_config,
    tokenizer_config,
    train_tokenizer,
)

LISTING = "qualify-files.json"
"""The digests of a model that was made here; it lies beside the files it lists."""

Progress = Callable[[str], None]


class Recipe(NamedTuple):
    """Sizes of the tiny hybrid model. A change of any value is another model, and another digest."""

    name: str = "tiny-hybrid"
    revision: int = 2
    """Raised whenever the code below makes other bytes from the same sizes."""
    layers: str = "ssfssf"
    """One letter a layer: s = sliding window, f = full attention."""
    window: int = 256
    vocabulary: int = 4096
    hidden: int = 256
    intermediate: int = 512
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 64
    positions: int = 8192
    query_gain: float = 3.0
    """Scale of the normalized queries: attention picks few tokens, so answers depend on the whole prompt."""
    attention_gain: float = 0.1
    """Scale of what attention adds to a token: small enough that answers repeat themselves now and then, so that a
    drafter that looks back is sometimes right and sometimes wrong."""
    answer_tokens: int = 256
    """How many tokens, all plain words, can ever be an answer."""

    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self._asdict(), sort_keys=True).encode()).hexdigest()

    def config(self) -> dict[str, Any]:
        names = {"s": "sliding_attention", "f": "full_attention"}
        return {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": len(self.layers),
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_size,
            "query_pre_attn_scalar": self.head_size,
            "max_position_embeddings": self.positions,
            "sliding_window": self.window,
            "layer_types": [names[letter] for letter in self.layers],
            "hidden_activation": "gelu_pytorch_tanh",
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
            "rms_norm_eps": 1e-6,
            "attention_bias": False,
            "tie_word_embeddings": False,
            "bos_token_id": BOS,
            "eos_token_id": EOS,
            "pad_token_id": PAD,
            "torch_dtype": "float32",
        }


RECIPES: dict[str, Recipe | deepseek.Recipe] = {recipe.name: recipe for recipe in (Recipe(), deepseek.Recipe())}


def ensure(cache: Path, recipe_name: str, seed: int, progress: Progress) -> Path:
    """The directory of the recipe's model, made first if it is not cached whole. Raises UsageError, PreflightError."""
    recipe = RECIPES.get(recipe_name)
    if recipe is None:
        raise UsageError(
            f"there is no model recipe {recipe_name!r}", remedy=f"use one of {', '.join(RECIPES)}, or give --model DIR"
        )
    folder = cache / "models" / f"{recipe.name}-{seed}-{recipe.digest()[:12]}"
    if folder.exists():
        damage = find_damage(folder)
        if damage is None:
            return folder
        progress(f"{damage}; making the model anew")
    try:
        _make_atomically(recipe, seed, folder)
    except OSError as error:
        raise PreflightError(
            f"the model cannot be written to {folder}: {error.strerror}", remedy="free space or set QUALIFY_CACHE"
        ) from error
    return folder


def find_damage(folder: Path) -> str | None:
    """One line naming the first file that is missing, changed or unknown in a model made here, None if it is whole."""
    try:
        listed = ModelFiles.model_validate_json((folder / LISTING).read_bytes())
    except (OSError, ValidationError):
        return f"model {folder.name}: {LISTING} is missing or unreadable"
    expected = {file.path: file for file in listed.files}
    found = {file.path: file for file in _hash_files(folder)}
    for path in sorted(expected.keys() | found.keys()):
        if path not in found:
            return f"model {folder.name}: {path} is missing"
        if path not in expected:
            return f"model {folder.name}: {path} does not belong there"
        if found[path] != expected[path]:
            return f"model {folder.name}: {path} is damaged"
    return None


def describe(folder: Path) -> ModelFiles:
    """The identity of any model directory: every file with size and sha256.

    Raises UsageError naming the file if it is not a model: no config.json, a broken safetensors header, a missing
    shard.
    """
    check(folder)
    made = folder / LISTING
    if made.is_file():
        if damage := find_damage(folder):
            raise UsageError(damage, remedy="remove the folder; it is made anew")
        return ModelFiles.model_validate_json(made.read_bytes())
    return ModelFiles(name=folder.resolve().name, recipe=None, seed=None, files=_hash_files(folder))


def check(folder: Path) -> None:
    """Raises UsageError naming the first file that the engine could not load. Reads headers only."""
    if not folder.is_dir():
        raise UsageError(f"model directory {folder} does not exist", remedy="give --model a directory with config.json")
    config = _json_object(folder / "config.json", "a model directory needs it")
    if not config.get("architectures"):
        raise UsageError(f"{folder / 'config.json'} names no architectures", remedy="give the model's own config.json")
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = _json_object(index, "").get("weight_map")
        if not isinstance(shards, dict):
            raise UsageError(f"{index} has no weight_map", remedy="download the model again")
        for name in sorted(set(shards.values())):
            if not (folder / str(name)).is_file():
                raise UsageError(f"{folder / str(name)} is missing, but {index.name} lists it", remedy="download it")
    for path in sorted(folder.glob("*.safetensors")):
        _check_safetensors(path)


def _json_object(path: Path, why: str) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{path} is missing: {why}", remedy="give a whole model directory") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is not JSON: {error}", remedy="download the file again") from None
    if not isinstance(value, dict):
        raise UsageError(f"{path} is not a JSON object", remedy="download the file again")
    return value


def _check_safetensors(path: Path) -> None:
    """The format: 8 bytes little-endian header length, a JSON header, then exactly the bytes that the header names."""
    size = path.stat().st_size
    remedy = "download the file again"
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if length > size - 8:
            raise UsageError(f"{path} is cut short within its header ({size} bytes)", remedy=remedy)
        try:
            header = json.loads(file.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
            data = max(ends, default=0)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            raise UsageError(f"{path} has no readable safetensors header", remedy=remedy) from None
    if 8 + length + data != size:
        raise UsageError(f"{path} has {size} bytes, its header names {8 + length + data}", remedy=remedy)


def _hash_files(folder: Path) -> tuple[ModelFile, ...]:
    """Every file but the listing and hidden ones, sorted by path. Links are followed: hubs store models that way."""
    return tuple(
        ModelFile(path=path.relative_to(folder).as_posix(), size=path.stat().st_size, sha256=_sha256(path))
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and path.name != LISTING
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _make_atomically(recipe: Recipe | deepseek.Recipe, seed: int, folder: Path) -> None:
    """Write into a folder beside the target and rename it, so that no reader sees half a model."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        _make(recipe, seed, temporary)
        listing = ModelFiles(name=recipe.name, recipe=recipe.name, seed=seed, files=_hash_files(temporary))
        (temporary / LISTING).write_text(listing.model_dump_json(indent=1) + "\n", encoding="utf-8")
        temporary.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _make(recipe: Recipe | deepseek.Recipe, seed: int, folder: Path) -> None:
    tokenizer = train_tokenizer(recipe.vocabulary, Randomness(seed, "corpus"))
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", tokenizer_config(recipe.positions))
    _write_json(folder / "config.json", recipe.config())
    _write_json(folder / "generation_config.json", generation_config())
    weights = folder / "model.safetensors"
    if isinstance(recipe, deepseek.Recipe):
        deepseek.write(recipe, seed, tokenizer, weights)
    else:
        save_file(_weights(recipe, seed, tokenizer), weights, metadata={"format": "pt"})
    weights.chmod(0o644)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _weights(recipe: Recipe, seed: int, tokenizer: Tokenizer) -> dict[str, Floats]:
    """Every matrix keeps the variance of a normalized input; the norms' stored weight is the offset from one."""
    hidden, inner = recipe.hidden, recipe.intermediate
    queries, keys = recipe.heads * recipe.head_size, recipe.kv_heads * recipe.head_size
    shapes: dict[str, tuple[int, int]] = {}
    norms: dict[str, tuple[int, float]] = {"model.norm.weight": (hidden, 0.0)}
    for layer in range(len(recipe.layers)):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.self_attn.q_proj.weight": (queries, hidden),
            f"{at}.self_attn.k_proj.weight": (keys, hidden),
            f"{at}.self_attn.v_proj.weight": (keys, hidden),
            f"{at}.self_attn.o_proj.weight": (hidden, queries),
            f"{at}.mlp.gate_proj.weight": (inner, hidden),
            f"{at}.mlp.up_proj.weight": (inner, hidden),
            f"{at}.mlp.down_proj.weight": (hidden, inner),
        }
        norms |= {
            f"{at}.self_attn.q_norm.weight": (recipe.head_size, recipe.query_gain - 1.0),
            f"{at}.self_attn.k_norm.weight": (recipe.head_size, 0.0),
        }
        for norm in ("input", "pre_feedforward", "post_feedforward"):
            norms[f"{at}.{norm}_layernorm.weight"] = (hidden, 0.0)
        norms[f"{at}.post_attention_layernorm.weight"] = (hidden, recipe.attention_gain - 1.0)
    tensors = {
        name: Randomness(seed, name).uniform(shape, deviation=shape[1] ** -0.5) for name, shape in shapes.items()
    }
    tensors |= {name: np.full(size, value, dtype=np.float32) for name, (size, value) in norms.items()}
    # The engine multiplies embeddings by sqrt(hidden): this deviation makes them of unit variance there.
    tensors["model.embed_tokens.weight"] = Randomness(seed, "embedding").uniform(
        (recipe.vocabulary, hidden), deviation=hidden**-0.5
    )
    tensors["lm_head.weight"] = np.zeros((recipe.vocabulary, hidden), dtype=np.float32)
    words = answer_words(tokenizer, recipe.answer_tokens)
    tensors["lm_head.weight"][words] = Randomness(seed, "head").uniform((len(words), hidden), deviation=hidden**-0.5)
    return tensors
