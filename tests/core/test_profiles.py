# SPDX-License-Identifier: Apache-2.0
"""Profiles: every mistake is refused with its line and key; formatting does not change the digest."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from qualify import profiles
from qualify.errors import UsageError
from qualify.expect import prefill_lengths

SMOKE = (profiles.FOLDER / "cpu-smoke.toml").read_text()


@pytest.mark.parametrize("name", profiles.names())
def test_every_shipped_profile_loads(name: str) -> None:
    """A shipped profile is valid, carries its own file name, and is resolved with every default written out."""
    profile = profiles.load(name)
    assert profile.name == name
    assert profile.resolved() == profile.model_dump_json().encode()


@pytest.mark.parametrize(
    ("old", "new", "line", "key"),
    [
        ("seed = 1234", "sed = 1234", "sed = 1234", "model.sed"),
        ("tensor_parallel = 2", "tensor_parallel = 0", "tensor_parallel = 0", "engine.tensor_parallel"),
        ("tensor_parallel = 2", 'tensor_parallel = "two"', 'tensor_parallel = "two"', "engine.tensor_parallel"),
        ('name = "restart"', 'name = "Re start"', 'name = "Re start"', "boots.2.name"),
        ('cache = "kept"', 'cache = "warm"', 'cache = "warm"', "boots.2.cache"),
        ("max_model_len = 4096", "max_model_len = 1000", "prompt_tokens = [1023", "kv.prompt_tokens"),
        ("concurrency = [1, 4]", "concurrency = [1, 64]", "concurrency = [1, 64]", "throughput.concurrency"),
        ('  "pins",', '  "pinns",', "required = [", "claims.required.0"),
        ("[memory]\n", "[memori]\n", "[memori]", "memory"),
    ],
)
def test_a_mistake_is_named_with_line_and_key(old: str, new: str, line: str, key: str) -> None:
    """The message names the file, the line of the offending key, and the key."""
    assert old in SMOKE
    text = SMOKE.replace(old, new, 1)
    expected = next(number for number, content in enumerate(text.splitlines(), 1) if line in content)
    with pytest.raises(UsageError) as caught:
        profiles.parse(text, "mine.toml")
    assert "mine.toml" in str(caught.value)
    assert key in str(caught.value)
    if key != "memory":
        assert f"line {expected}," in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('name = "cold"', 'name = "control"', "two boots have the same name"),
        ('cache = "kept"', 'cache = "empty"', "kv.restart without kept storage"),
        ('cache = "empty"', 'cache = "none"', "without a cache"),
        ('"service.errors",\n]', '"service.errors"]\noptional = ["pins"]', "required and optional"),
        ('  "pins",', '  "pins", "graphs.capture",', "graphs.capture is asked for"),
        ('  "pins",', '  "pins", "plugin.active",', "never uses the plugin"),
        ('probes = ["serve", ', 'probes = ["prefill", "serve", ', "the CPU engine's memory is not measured"),
        ("[engine.pins]", '[engine.graphs]\nmode = "FULL"\n[engine.pins]', "records no CUDA graphs"),
    ],
)
def test_contradictions_are_refused(old: str, new: str, words: str) -> None:
    """Keys that are valid alone but contradict each other are refused in words."""
    assert old in SMOKE
    with pytest.raises(UsageError, match=re.escape(words)):
        profiles.parse(SMOKE.replace(old, new, 1), "mine.toml")


def short(text: str, tokens: int) -> str:
    """The profile with shorter requests, and a prompt of the KV probes that fits them."""
    return text.replace("max_model_len = 65536", f"max_model_len = {tokens}") + "[kv]\nprompt_tokens = [500]\n"


def test_lengths_of_the_prefill_probe_need_room() -> None:
    """Below 1024 tokens a request two of the 24 lengths could be one; there and above all are different."""
    tight = (profiles.FOLDER / "gpu-tp1-ds4-tight.toml").read_text()
    for tokens in (1024, 4096):
        assert len(set(prefill_lengths(profiles.parse(short(tight, tokens), "mine.toml")))) == 24
    with pytest.raises(UsageError, match=r"engine\.max_model_len is below 1024"):
        profiles.parse(short(tight, 1023), "mine.toml")


def test_text_that_is_not_toml_names_the_line() -> None:
    """A syntax error carries the parser's line."""
    with pytest.raises(UsageError, match="line 2"):
        profiles.parse("a = 1\nb = = 2\n", "mine.toml")


def test_a_missing_profile_lists_the_shipped_ones() -> None:
    """An unknown name is a usage error that helps."""
    with pytest.raises(UsageError, match="cpu-smoke"):
        profiles.load("no-such-profile")


def test_an_unreadable_file_is_a_usage_error(tmp_path: Path) -> None:
    """Bytes that are not UTF-8 are refused in one line."""
    path = tmp_path / "x.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="cannot be read"):
        profiles.load(str(path))


def test_the_digest_is_of_the_content_not_of_the_file() -> None:
    """Comments and blank lines leave the digest alone; any value changes it."""
    commented = "# note\n\n" + SMOKE.replace("\n[kv]\n", "\n\n[kv] # here\n")
    assert profiles.parse(commented, "x").digest() == profiles.parse(SMOKE, "x").digest()
    changed = SMOKE.replace("seed = 1234", "seed = 1235")
    assert profiles.parse(changed, "x").digest() != profiles.parse(SMOKE, "x").digest()


def test_a_profile_may_change_a_shipped_one() -> None:
    """Keys of tables are set one by one, lists are replaced, and the result has the digest of the whole text."""
    own = 'base = "cpu-smoke"\npurpose = "other"\n[model]\nseed = 7\n[claims]\nrequired = ["pins"]\n'
    mine, smoke = profiles.parse(own, "mine.toml"), profiles.load("cpu-smoke")
    assert (mine.purpose, mine.model.seed, mine.model.recipe) == ("other", 7, smoke.model.recipe)
    assert mine.claims.required == ("pins",)
    assert mine.boots == smoke.boots
    for name in profiles.names():  # also one that changes another itself
        assert profiles.parse(f'base = "{name}"\n', "mine.toml").digest() == profiles.load(name).digest()


@pytest.mark.parametrize("base", ['"no-such"', "7", '["cpu-smoke"]', '"../profiles/cpu-smoke"'])
def test_an_unknown_base_is_refused(base: str) -> None:
    """Only a shipped profile can be changed; the line is named."""
    with pytest.raises(UsageError, match=r"mine\.toml, line 2, base: there is no profile"):
        profiles.parse(f"format = 1\nbase = {base}\n", "mine.toml")
