# SPDX-License-Identifier: Apache-2.0
"""Digests of KV blocks at the moments that decide a restore, taken between the steps of the model runner.

Cold: each full prompt block, right after the step that filled it. A sliding window gives blocks back while the prompt
is still being prefilled, and the worker is not told, so the end of the request is too late.
Restored: each block below the computed count with which a request arrives, before its first forward reads it. This
suits connectors that load between steps; one that loads inside the step would show poison here and fail.

The runner's `execute_model` and `sample_tokens` are wrapped in this process only, and only while armed. A failure of
the capture is recorded and never disturbs the step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from qualify.inside.cache import KvTensor, digest, fill, raw, read_blocks, synchronize

INDEXER_ROW = (128, 4)
"""Bytes of values and of scale in one row of a sparse indexer's FP8 cache."""

Digest = tuple[int, int, int, str]
"""(tensor, block, tokens, sha256): the index of the tensor, the position in the table, how many tokens were hashed."""


@dataclass
class Request:
    """One request as this rank saw it. `table` is its block table on arrival, one row per group."""

    prompt: int
    computed: int
    table: list[list[int]]
    arrival: list[list[int]]
    steps: list[tuple[int, int]] = field(default_factory=list)
    cold: list[Digest] = field(default_factory=list)
    restored: list[Digest] = field(default_factory=list)
    chunks: list[tuple[int, int, str]] = field(default_factory=list)

    def report(self, identity: str) -> dict[str, Any]:
        return {
            "id": identity,
            "prompt_tokens": self.prompt,
            "computed_tokens": self.computed,
            "table": self.arrival,
            "steps": self.steps,
            "cold": self.cold,
            "restored": self.restored,
            "chunks": self.chunks,
        }


@dataclass(frozen=True)
class Options:
    """`boundary`: a token count; the part of a block below it is hashed as well. `chunk_tokens` and `objects`: also
    hash each whole cache chunk as the cache server stores it, one per object, an object being a list of groups.
    `fault`: damage done to restored blocks just before they are hashed, so that the proof can be seen to fail.
    """

    boundary: int = 0
    chunk_tokens: int = 0
    objects: tuple[tuple[int, ...], ...] = ()
    fault: dict[str, Any] | None = None


class Capture:
    """Armed on creation, until `disarm`."""

    def __init__(self, runner: Any, rank: int, tensors: Sequence[KvTensor], options: Options) -> None:
        self.runner = runner
        self.rank = rank
        self.tensors = tensors
        self.options = options
        self.requests: dict[str, Request] = {}
        self.errors: list[str] = []
        self.faults: list[Digest] = []
        self._pending: list[tuple[str, int, int]] = []
        self._found = {name: runner.__dict__.get(name) for name in ("execute_model", "sample_tokens")}
        self._chunks = Chunks(tensors, options.chunk_tokens, options.objects)
        self._wrap()

    def disarm(self) -> None:
        """Put the runner's methods back as they were found."""
        for name, found in self._found.items():
            if found is None:
                self.runner.__dict__.pop(name, None)
            else:
                setattr(self.runner, name, found)
        self._guard(self._drain)

    def report(self) -> dict[str, Any]:
        return {
            "requests": [request.report(identity) for identity, request in self.requests.items()],
            "faults": self.faults,
            "errors": self.errors,
        }

    def _wrap(self) -> None:
        runner = self.runner
        execute, sample = runner.execute_model, getattr(runner, "sample_tokens", None)

        def execute_model(scheduled: Any, *arguments: Any, **options: Any) -> Any:
            self._guard(self._drain)
            self._guard(lambda: self._arrive(scheduled))
            output = execute(scheduled, *arguments, **options)
            if sample is None or output is not None:
                self._guard(self._drain)
            return output

        def sample_tokens(*arguments: Any, **options: Any) -> Any:
            output = sample(*arguments, **options)
            # A draft model writes its own cache here, so the step is over only now.
            self._guard(self._drain)
            return output

        runner.execute_model = execute_model
        if sample is not None:
            runner.sample_tokens = sample_tokens

    def _guard(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self.errors.append(f"{type(error).__name__}: {error}"[:300])

    def _arrive(self, scheduled: Any) -> None:
        """Read what the scheduler decided for this step."""
        counts = scheduled.num_scheduled_tokens
        for new in scheduled.scheduled_new_reqs:
            table = [list(row) for row in new.block_ids]
            request = Request(
                prompt=len(new.prompt_token_ids or ()),
                computed=new.num_computed_tokens,
                table=table,
                arrival=[list(row) for row in table],
            )
            self.requests[new.req_id] = request
            if request.computed:
                synchronize()
                self._break(request)
                request.restored += self._digests(request, 0, request.computed, request.computed)
            self._pending.append((new.req_id, request.computed, counts.get(new.req_id, 0)))
        cached = scheduled.scheduled_cached_reqs
        rows = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        for identity, added, computed in rows:
            request = self.requests.get(identity)
            if request is None:
                continue
            if added is not None and identity in cached.resumed_req_ids:
                request.table = [list(row) for row in added]
            elif added is not None:
                for row, more in zip(request.table, added, strict=True):
                    row.extend(more)
            self._pending.append((identity, computed, counts.get(identity, 0)))

    def _drain(self) -> None:
        """Hash what the last step completed."""
        if not self._pending:
            return
        synchronize()
        pending, self._pending = self._pending, []
        for identity, start, count in pending:
            request = self.requests[identity]
            request.steps.append((start, count))
            end = min(start + count, request.prompt)
            request.cold += self._digests(request, start, end, self.options.boundary)
            self._chunks.add(request, start, end)

    def _digests(self, request: Request, start: int, end: int, boundary: int) -> list[Digest]:
        """Blocks that became full within tokens [start, end), and the block that `boundary` cuts."""
        found: list[Digest] = []
        for index, item in enumerate(self.tensors):
            row = request.table[item.group]
            size = item.tokens_per_block
            blocks = [b for b in range(start // size, end // size) if b < len(row) and row[b]]
            physical = [row[b] for b in blocks]
            for block, content in zip(blocks, read_blocks(item.tensor, physical), strict=True):
                found.append((index, block, size, digest(content)))
            cut, rest = divmod(boundary, size)
            if rest and start < boundary <= end and cut < len(row) and row[cut] and item.token_axis is not None:
                content = next(read_blocks(item.tensor, [row[cut]]))
                found.append((index, cut, rest, digest(content.narrow(item.token_axis, 0, rest))))
        return found

    def _break(self, request: Request) -> None:
        """Apply the fault: `flip` one bit of the last restored block of a group, or leave the group `stale`."""
        fault = self.options.fault
        if fault is None or fault.get("rank", self.rank) != self.rank:
            return
        for index, item in enumerate(self.tensors):
            if item.group != fault["group"]:
                continue
            size = item.tokens_per_block
            row = request.table[item.group][: request.computed // size]
            blocks = [b for b, physical in enumerate(row) if physical]
            if fault["kind"] == "stale":
                for block in blocks:
                    fill(item.tensor[row[block]])
                    self.faults.append((index, block, size, "stale"))
            elif blocks:
                self._flip(item.tensor[row[blocks[-1]]], int(fault["bit"]))
                self.faults.append((index, blocks[-1], size, "flip"))
                return

    @staticmethod
    def _flip(view: torch.Tensor, bit: int) -> None:
        content = view.contiguous()
        octets = content.reshape(-1).view(torch.uint8)
        octets[bit // 8 % octets.numel()] ^= 1 << bit % 8
        view.copy_(content)


class Chunks:
    """Rebuilds cache chunks as the cache server stores them and hashes them: for each group of the object
    [layers][rows][content], of a sliding window only the chunk's last window. Layers of one group whose rows differ in
    shape or type follow each other kind by kind. No code of the server is used.
    """

    def __init__(self, tensors: Sequence[KvTensor], tokens: int, objects: Sequence[Sequence[int]]) -> None:
        self.tensors = tensors
        self.tokens = tokens
        self.objects = [[i for group in groups for i in _by_kind(tensors, group)] for groups in objects]
        self._blocks: dict[tuple[int, int], torch.Tensor] = {}

    def add(self, request: Request, start: int, end: int) -> None:
        """Keep the blocks that the step completed until their chunk is whole, then hash and forget them."""
        if not self.tokens:
            return
        for index, item in enumerate(self.tensors):
            row, size = request.table[item.group], item.tokens_per_block
            blocks = [b for b in range(start // size, end // size) if b < len(row) and row[b]]
            contents = read_blocks(item.tensor, [row[b] for b in blocks])
            for block, content in zip(blocks, contents, strict=True):
                self._blocks[index, block] = content
        for chunk in range(start // self.tokens, end // self.tokens):
            for number, members in enumerate(self.objects):
                request.chunks.append((number, chunk, self._digest(members, chunk)))
        kept = end // self.tokens * self.tokens
        self._blocks = {
            (index, block): content
            for (index, block), content in self._blocks.items()
            if block * self.tensors[index].tokens_per_block >= kept
        }

    def _digest(self, members: Sequence[int], chunk: int) -> str:
        total = hashlib.sha256()
        for index in members:
            item = self.tensors[index]
            size = item.tokens_per_block
            first, last = chunk * self.tokens, (chunk + 1) * self.tokens
            if item.window is not None:
                first = max(first, last - item.window)
            for block in range(first // size, last // size):
                rows = _stored_rows(item, self._blocks[index, block])
                skip = max(0, first - block * size)
                if skip and item.token_axis is None:
                    raise RuntimeError(f"{item.layer}: no axis counts tokens, so no block of it can be cut")
                total.update(raw(rows[skip:]))
        return total.hexdigest()


def _by_kind(tensors: Sequence[KvTensor], group: int) -> list[int]:
    """The tensors of a group, those of one shape and type together, in the order in which the kinds first appear."""
    kinds: dict[tuple[torch.Size, torch.dtype], list[int]] = {}
    for index, item in enumerate(tensors):
        if item.group == group:
            kinds.setdefault((item.tensor.shape[1:], item.tensor.dtype), []).append(index)
    return [index for members in kinds.values() for index in members]


def _stored_rows(item: KvTensor, block: torch.Tensor) -> torch.Tensor:
    """One block as the server stores it: row after row, over all heads.

    A block of the sparse indexer holds the values of all its rows first and their scales behind them; the server
    stores each row with its own scale (LMCache 0.5.6 knows such a block by type and row size, and so do we).
    """
    if item.row_axis is None:
        raise RuntimeError(f"{item.layer}: blocks of {tuple(block.shape)} have no known rows")
    if block.dtype != torch.uint8 or block.shape[-1] != sum(INDEXER_ROW):
        return block.movedim(item.row_axis, 0)
    rows = block.numel() // sum(INDEXER_ROW)
    values, scales = block.reshape(-1).split([rows * width for width in INDEXER_ROW])
    return torch.cat([values.view(rows, -1), scales.view(rows, -1)], dim=1)
