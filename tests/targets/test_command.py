# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from qualify import profiles
from qualify.errors import PreflightError
from qualify.observe.graphs import GraphMode
from qualify.profiles import Boot, Graphs, Storage
from qualify.targets import command

PROFILE = profiles.load("cpu-smoke")
PLACES = command.Places(
    python="python",
    model="tiny",
    port=1,
    cache_port=2,
    cache_http_port=3,
    storage="storage",
    extension_path="extension",
    scratch="/tmp/q",
    compiled="/tmp/w/compiled",
    cpus=(4, 6),
)


def boot(cache: Storage = Storage.NONE, speculation: bool = False, plugin: bool = True) -> Boot:
    return Boot(name="b", cache=cache, speculation=speculation, plugin=plugin, probes=())


def option(argv: tuple[str, ...], name: str) -> str:
    return argv[argv.index(name) + 1]


def test_everything_listens_on_loopback_only() -> None:
    """The endpoints that reach into the workers are open, so nothing may listen beyond loopback."""
    engine = command.engine(PROFILE, boot(), PLACES)
    cache = command.cache_server(PROFILE, PLACES)
    assert option(engine.argv, "--host") == option(cache.argv, "--host") == option(cache.argv, "--http-host")
    assert option(engine.argv, "--host") == "127.0.0.1"
    assert engine.environment["VLLM_SERVER_DEV_MODE"] == "1"


def test_the_plain_boot_has_neither_cache_nor_speculation() -> None:
    """The control boot must not load a connector or a drafter."""
    engine = command.engine(PROFILE, boot(), PLACES)
    assert "--kv-transfer-config" not in engine.argv
    assert "--speculative-config" not in engine.argv
    assert "LMCACHE_MP_TRANSFER_MODE" not in engine.environment


def test_engine_and_cache_server_agree() -> None:
    """Engine and cache server get the same port and transfer mode, and a failed load fails the request."""
    engine = command.engine(PROFILE, boot(Storage.EMPTY), PLACES)
    cache = command.cache_server(PROFILE, PLACES)
    transfer = json.loads(option(engine.argv, "--kv-transfer-config"))
    extra = transfer["kv_connector_extra_config"]
    assert str(extra["lmcache.mp.port"]) == option(cache.argv, "--port")
    assert engine.environment["LMCACHE_MP_TRANSFER_MODE"] == option(cache.argv, "--supported-transfer-mode")
    assert transfer["kv_load_failure_policy"] == "fail"
    assert int(option(cache.argv, "--chunk-size")) == PROFILE.cache.chunk_tokens


def test_speculation_is_the_profiles() -> None:
    """The drafter's settings are those of the profile, and no others."""
    engine = command.engine(PROFILE, boot(speculation=True), PLACES)
    config = json.loads(option(engine.argv, "--speculative-config"))
    assert config == {
        "method": PROFILE.speculation.method,
        "num_speculative_tokens": PROFILE.speculation.tokens,
        **PROFILE.speculation.config,
    }


def test_graphs_and_plugin_are_the_profiles() -> None:
    """Mode and sizes are given as promised, and only a boot without the plugin switches it off."""
    graphs = Graphs(mode=GraphMode.FULL_AND_PIECEWISE, sizes=(1, 2, 48))
    profile = PROFILE.model_copy(update={"engine": PROFILE.engine.model_copy(update={"graphs": graphs})})
    engine = command.engine(profile, boot(), PLACES)
    config = json.loads(option(engine.argv, "--compilation-config"))
    assert config == {"cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": [1, 2, 48]}
    assert "VLLM_QOUT" not in engine.environment
    assert command.engine(profile, boot(plugin=False), PLACES).environment["VLLM_QOUT"] == "0"


def test_the_profile_has_the_last_word() -> None:
    """Arguments and variables of the profile come last, so they win over the harness's own."""
    variables = {"PYTHONHASHSEED": "7"}
    engine = PROFILE.engine.model_copy(update={"arguments": ("--dtype", "bfloat16"), "environment": variables})
    started = command.engine(PROFILE.model_copy(update={"engine": engine}), boot(), PLACES)
    assert started.argv[-2:] == ("--dtype", "bfloat16")
    assert started.environment["PYTHONHASHSEED"] == "7"


@given(st.sets(st.integers(0, 500), min_size=1, max_size=16), st.integers(1, 16))
def test_each_rank_gets_a_core_that_the_process_may_use(cpus: set[int], ranks: int) -> None:
    """One usable core a rank, all different; too few is refused before anything starts."""
    if len(cpus) < ranks:
        with pytest.raises(PreflightError):
            command.omp_threads_bind(tuple(cpus), ranks)
        return
    bound = [int(core) for core in command.omp_threads_bind(tuple(cpus), ranks).split("|")]
    assert len(set(bound)) == ranks
    assert set(bound) <= cpus


def test_only_named_variables_are_inherited() -> None:
    """What a user happens to have set cannot change the engine."""
    user = {"PATH": "/bin", "LD_PRELOAD": "x.so", "PYTHONPATH": "y", "VLLM_USE_V1": "0"}
    assert command.inherited(user) == {"PATH": "/bin"}
