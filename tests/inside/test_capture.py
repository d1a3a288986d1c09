# SPDX-License-Identifier: Apache-2.0
"""The capture inside a worker, on a made-up runner. Needs torch, so it runs in the engine's environment."""

from __future__ import annotations

import hashlib
import json
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from qualify.inside import cache  # noqa: E402
from qualify.inside.capture import Capture, Options  # noqa: E402
from qualify.inside.worker import Worker  # noqa: E402

BLOCKS, HEADS, SIZE, CONTENT = 12, 2, 4, 3
"""Blocks of 4 tokens."""


class Runner:
    """Each step writes its number into the named blocks, as a forward pass would."""

    def __init__(self, tensors, split=False):
        self.tensors = tensors
        self.written = []
        self.step = 0
        if split:
            self.sample_tokens = self._sample

    def execute_model(self, scheduled):
        self.step += 1
        for tensor, blocks in self.written.pop(0) if self.written else []:
            for block in blocks:
                tensor[block] = self.step * 100 + block
        return None if hasattr(self, "sample_tokens") else "output"

    def _sample(self, grammar):
        return "sampled"


def tensor_of(seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BLOCKS, HEADS, SIZE, CONTENT, generator=generator).to(dtype)


def kv(tensor, group=0, window=None, layer="layers.0"):
    return cache.KvTensor(group, layer, 0, "Spec", SIZE, window, True, tensor)


def new(identity, prompt, table, computed=0):
    return SimpleNamespace(
        req_id=identity, prompt_token_ids=list(range(prompt)), block_ids=table, num_computed_tokens=computed
    )


def step(counts, news=(), cached=()):
    rows = list(cached)
    return SimpleNamespace(
        num_scheduled_tokens=counts,
        scheduled_new_reqs=list(news),
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[row[0] for row in rows],
            new_block_ids=[row[1] for row in rows],
            num_computed_tokens=[row[2] for row in rows],
            resumed_req_ids=set(),
        ),
    )


def sha(tensor):
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("split", [False, True])
def test_cold_blocks_are_hashed_before_they_are_reused(split):
    """A block given back after its step and used again keeps the digest of the step that filled it."""
    tensor = tensor_of()
    runner = Runner([tensor], split)
    capture = Capture(runner, 0, [kv(tensor)], Options())
    runner.written = [[(tensor, [1, 2])], [(tensor, [3, 1])]]
    runner.execute_model(step({"a": 8}, [new("a", 14, [[1, 2]])]))
    if split:
        runner.sample_tokens(None)
    first, second = sha(tensor[1]), sha(tensor[2])
    runner.execute_model(step({"a": 6}, cached=[("a", [[3, 1]], 8)]))
    if split:
        runner.sample_tokens(None)
    capture.disarm()
    request = capture.report()["requests"][0]
    assert request["cold"] == [(0, 0, 4, first), (0, 1, 4, second), (0, 2, 4, sha(tensor[3]))]
    assert request["steps"] == [(0, 8), (8, 6)]
    assert request["table"] == [[1, 2]]


def test_restored_blocks_are_hashed_before_the_step_reads_them():
    """Null blocks are left out; the block that the restored length cuts is hashed up to it, on its token axis."""
    tensor = tensor_of()
    runner = Runner([tensor])
    capture = Capture(runner, 0, [kv(tensor)], Options())
    whole, cut = sha(tensor[5]), sha(tensor[6][:, :3])
    runner.written = [[(tensor, [5, 6])]]
    runner.execute_model(step({"a": 1}, [new("a", 12, [[0, 5, 6]], computed=11)]))
    capture.disarm()
    assert capture.report()["requests"][0]["restored"] == [(0, 1, 4, whole), (0, 2, 3, cut)]


def test_boundary_is_hashed_cold_too():
    """A cold capture hashes the same part of the block that a restore will be cut at."""
    tensor = tensor_of()
    runner = Runner([tensor])
    capture = Capture(runner, 0, [kv(tensor)], Options(boundary=7))
    runner.execute_model(step({"a": 8}, [new("a", 8, [[1, 2]])]))
    capture.disarm()
    assert (0, 1, 3, sha(tensor[2][:, :3])) in capture.report()["requests"][0]["cold"]


def test_chunks_are_rebuilt_across_steps():
    """[layers][tokens][heads x content] of the object's groups; of a window only the chunk's last tokens."""
    full, slide = tensor_of(1), tensor_of(2)
    tensors = [kv(full, 0), kv(slide, 1, window=6, layer="layers.1")]
    runner = Runner([full, slide])
    capture = Capture(runner, 0, tensors, Options(chunk_tokens=8, objects=((0,), (0, 1))))
    runner.execute_model(step({"a": 4}, [new("a", 8, [[1], [7]])]))
    runner.execute_model(step({"a": 4}, cached=[("a", [[2], [8]], 4)]))
    capture.disarm()

    def tokens(tensor, blocks):
        return torch.cat([tensor[block].permute(1, 0, 2) for block in blocks])

    alone = tokens(full, [1, 2])
    both = torch.cat([alone.reshape(-1), tokens(slide, [7, 8])[2:].reshape(-1)])
    assert capture.report()["requests"][0]["chunks"] == [(0, 0, sha(alone)), (1, 0, sha(both))]
    assert capture.errors == []


def test_a_step_may_end_within_a_block_and_a_chunk():
    """A drafter takes slots of each step, so steps end anywhere: a chunk then has blocks as each was when it became
    full, also where the window has given one of them back and the next step has used it again.
    """
    full, slide = tensor_of(1), tensor_of(2)
    tensors = [kv(full, 0), kv(slide, 1, window=6, layer="layers.1")]
    runner = Runner([full, slide])
    runner.written = [[(full, [1, 2]), (slide, [7, 8])], [(full, [2, 3, 4]), (slide, [8, 9, 7])]]
    capture = Capture(runner, 0, tensors, Options(chunk_tokens=8, objects=((0, 1),)))
    runner.execute_model(step({"a": 6}, [new("a", 16, [[1, 2], [7, 8]])]))
    kept = {index: tensor[block].clone() for index, (tensor, block) in enumerate([(full, 1), (slide, 7)])}
    runner.execute_model(step({"a": 10}, cached=[("a", [[3, 4], [9, 7]], 6)]))
    capture.disarm()

    def rows(*blocks):
        return torch.cat([block.permute(1, 0, 2) for block in blocks])

    chunks = [
        torch.cat([rows(kept[0], full[2]), rows(kept[1], slide[8])[2:]]),
        torch.cat([rows(full[3], full[4]), rows(slide[9], slide[7])[2:]]),
    ]
    assert capture.report()["requests"][0]["chunks"] == [(0, n, sha(chunk)) for n, chunk in enumerate(chunks)]
    assert capture.errors == []


def latent(rows, content, dtype=torch.uint8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 256, (BLOCKS, rows, content), generator=generator)
    return numbers.to(torch.uint8) if dtype == torch.uint8 else numbers.to(dtype)


def test_chunks_of_compressed_attention_are_rebuilt():
    """Kinds of layers of one group follow each other; a block with fewer rows than tokens is taken whole; a row of the
    sparse indexer stands with its scale, which its block keeps behind the values of all rows.
    """
    rows = 2
    index, keys, other = latent(rows, 132, seed=1), latent(rows, 8, seed=2), latent(rows, 132, seed=3)
    tensors = [kv(index, layer="layers.1.indexer"), kv(keys, layer="layers.1"), kv(other, layer="layers.3.indexer")]
    runner = Runner([])
    capture = Capture(runner, 0, tensors, Options(chunk_tokens=8, objects=((0,),)))
    runner.execute_model(step({"a": 8}, [new("a", 8, [[4, 9]])]))
    capture.disarm()
    wanted = b""
    for tensor in (index, other):
        for block in (4, 9):
            octets = tensor[block].reshape(-1).numpy().tobytes()
            for row in range(rows):
                scale = rows * 128 + row * 4
                wanted += octets[row * 128 : (row + 1) * 128] + octets[scale : scale + 4]
    wanted += keys[[4, 9]].numpy().tobytes()
    assert capture.report()["requests"][0]["chunks"] == [(0, 0, hashlib.sha256(wanted).hexdigest())]
    assert capture.errors == []


def test_a_compressed_block_is_never_cut():
    """Where rows are not tokens, the last part of a window cannot be told: an error, not a guess."""
    narrow = latent(2, 8)
    runner = Runner([])
    capture = Capture(runner, 0, [kv(narrow, window=6)], Options(chunk_tokens=8, objects=((0,),)))
    runner.execute_model(step({"a": 8}, [new("a", 8, [[4, 9]])]))
    capture.disarm()
    assert "no axis counts tokens" in capture.errors[0]


def test_a_flip_changes_one_bit_and_says_where():
    """The fault hits the last restored block of its group on its rank, in the first layer only."""
    tensor, other = tensor_of(1), tensor_of(2)
    before = tensor.clone()
    runner = Runner([tensor, other])
    fault = {"kind": "flip", "rank": 1, "group": 0, "bit": 13}
    capture = Capture(runner, 1, [kv(tensor), kv(other, layer="layers.1")], Options(fault=fault))
    runner.execute_model(step({"a": 1}, [new("a", 9, [[3, 4, 5]], computed=8)]))
    capture.disarm()
    changed = tensor.view(torch.uint8) ^ before.view(torch.uint8)
    assert changed.sum() == 1 << 13 % 8
    assert changed[4].sum() == changed.sum()
    assert capture.report()["faults"] == [(0, 1, 4, "flip")]


def test_another_rank_is_spared_and_stale_hits_a_whole_group():
    """`rank` limits a fault; `stale` overwrites every restored block of the group."""
    for rank, spoiled in ((0, False), (1, True)):
        tensor = tensor_of()
        before = tensor.clone()
        runner = Runner([tensor])
        capture = Capture(runner, rank, [kv(tensor)], Options(fault={"kind": "stale", "rank": 1, "group": 0}))
        runner.execute_model(step({"a": 1}, [new("a", 9, [[3, 4, 5]], computed=8)]))
        capture.disarm()
        assert [block for block in range(BLOCKS) if not torch.equal(tensor[block], before[block])] == (
            [3, 4] if spoiled else []
        )


def test_a_capture_that_fails_leaves_the_step_alone():
    """A block table that names an impossible block is recorded as an error; the request is served all the same."""
    tensor = tensor_of()
    runner = Runner([tensor])
    capture = Capture(runner, 0, [kv(tensor)], Options())
    assert runner.execute_model(step({"a": 4}, [new("a", 4, [[BLOCKS + 5]])])) == "output"
    capture.disarm()
    assert "IndexError" in capture.report()["errors"][0]


def test_disarming_puts_methods_back():
    """Also where somebody else had put a method on the runner before."""
    runner = Runner([], split=True)
    theirs = runner.sample_tokens
    Capture(runner, 0, [], Options()).disarm()
    assert runner.sample_tokens is theirs
    assert "execute_model" not in vars(runner)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_poison_is_finite_and_verified(dtype):
    """Every byte is overwritten once for shared memory, in any cache type, without NaN."""
    tensor = tensor_of(dtype=dtype)
    result = cache.poison([kv(tensor), kv(tensor, group=1)])
    assert (result["tensors"], result["views"], result["verified"]) == (2, 1, True)
    assert result["bytes"] == tensor.numel() * tensor.element_size()
    assert torch.isfinite(tensor.float()).all()


def test_poison_leaves_padding_alone():
    """A page's padding between two views is not part of the cache."""
    page = torch.zeros(BLOCKS, 2 * CONTENT * SIZE)
    view = page[:, : CONTENT * SIZE].view(BLOCKS, 1, SIZE, CONTENT)
    assert cache.poison([kv(view)])["verified"]
    assert page[:, CONTENT * SIZE :].abs().sum() == 0


def test_poison_that_did_not_take_is_noticed(monkeypatch):
    """The read-back finds a block that still holds data."""
    monkeypatch.setattr(cache, "fill", lambda view: None)
    assert not cache.poison([kv(tensor_of())])["verified"]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((6, 2, 4, 3), (6, 2, 4, 3)), ((2, 6, 4, 3), (6, 2, 4, 3)), ((12, 2, 4, 3), (6, 2, 2, 4, 3))],
)
def test_blocks_are_counted_on_the_first_axis(shape, expected):
    """Whatever axis the engine counts blocks on, and when kernels split a block into several rows."""
    assert cache._by_block(torch.zeros(shape), 6).shape == expected


class FakeWorker(Worker):
    rank = 1

    def __init__(self):
        tensor = tensor_of()
        layers = {"layers.0": SimpleNamespace(kv_cache=[tensor])}
        group = SimpleNamespace(layer_names=["layers.0"], kv_cache_spec=SimpleNamespace(block_size=SIZE))
        self.model_runner = Runner([tensor])
        self.model_runner.kv_cache_config = SimpleNamespace(num_blocks=BLOCKS, kv_cache_groups=[group])
        self.vllm_config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))


def test_worker_answers_are_plain_json():
    """The whole round trip by RPC: arm, serve, collect; a second collect is refused in words."""
    worker = FakeWorker()
    assert worker.qualify_arm(json.dumps({"boundary": 3})) == {"rank": 1}
    worker.model_runner.execute_model(step({"a": 4}, [new("a", 4, [[2]])]))
    answer = worker.qualify_collect("{}")
    assert answer == json.loads(json.dumps(answer))
    assert [entry[:3] for entry in answer["requests"][0]["cold"]] == [[0, 0, 4], [0, 0, 3]]
    assert "not armed" in worker.qualify_collect("{}")["error"]


def test_unknown_facts_are_null_with_a_reason():
    """A worker without the private names of the engine answers null and why, and does not raise."""
    answer = FakeWorker().qualify_describe("{}")
    assert answer["model_class"] is None
    assert "AttributeError" in answer["unknown"]["model_class"]
    assert answer["process"]["started"] > 0
