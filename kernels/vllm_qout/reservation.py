# SPDX-License-Identifier: Apache-2.0
"""The memory that the padded queries are written to: sized once, allocated while vLLM profiles, never again.

A slot is one buffer `[rows, padded heads, 512]` per (lane, microbatch, padded heads, dtype).
Lane 1 belongs to the DSpark draft, everything else runs on lane 0; microbatches exist with
dual-batch overlap only.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

HEAD_DIM = 512
TARGET_LANE = 0
DRAFT_LANE = 1

PHASES = ("profile", "capture", "live")

# (key, shape, dtype) -> a tensor that stays allocated for the life of the worker
Allocate = Callable[[tuple[object, ...], tuple[int, int, int], torch.dtype], torch.Tensor]


class ReservationError(RuntimeError):
    """A query does not fit what was reserved, or nothing was reserved for it."""


def microbatch_rows(tokens: int, microbatches: int) -> tuple[int, ...]:
    """Rows that each microbatch can need when any T <= `tokens` is split into `microbatches`.

    vLLM cuts at multiples of T // n and gives the rest to the last part; microbatch 0 also runs
    unsplit batches. The last part is not always longest at T = tokens: with tokens = Q*n + R, T = Q*n - 1
    leaves it Q + n - 2.
    """
    if tokens < 1 or microbatches < 1:
        raise ValueError(f"got {tokens} tokens in {microbatches} microbatches, needs at least 1 of each")
    if microbatches == 1:
        return (tokens,)
    share, rest = divmod(tokens, microbatches)
    last = min(tokens, share + max(rest, microbatches - 2))
    return (tokens, *[share] * (microbatches - 2), last)


@dataclass(frozen=True)
class Capacity:
    """How many query rows a worker can be asked for; `draft_rows` is None without a DSpark draft."""

    tokens: int
    microbatches: int = 1
    draft_rows: int | None = None

    def rows(self, lane: int) -> tuple[int, ...]:
        """Rows of each microbatch slot of a lane."""
        if lane == TARGET_LANE:
            return microbatch_rows(self.tokens, self.microbatches)
        if lane == DRAFT_LANE and self.draft_rows is not None:
            return (self.draft_rows,)
        raise ReservationError(
            f"vllm_qout: got workspace lane {lane}, needs lane 0, or lane 1 with a DSpark draft; "
            "set VLLM_QOUT=0 to serve without the plugin"
        )


def capacity_of(vllm_config: Any) -> Capacity:
    """The capacity that a vLLM configuration implies.

    Both runners split a batch only with data parallelism. A DSpark draft runs `num_speculative_tokens`
    query rows a request, one more if it does not sample from its anchor.
    """
    scheduler = vllm_config.scheduler_config
    parallel = vllm_config.parallel_config
    tokens = int(scheduler.max_num_batched_tokens)
    split = parallel.use_ubatching and parallel.data_parallel_size > 1
    speculative = vllm_config.speculative_config
    draft_rows = None
    if speculative is not None and speculative.use_dspark():
        from_anchor = getattr(speculative.draft_model_config.hf_config, "sample_from_anchor", True)
        query_rows = speculative.num_speculative_tokens + (0 if from_anchor else 1)
        draft_rows = min(tokens, scheduler.max_num_seqs * query_rows)
    return Capacity(tokens, int(parallel.num_ubatches) if split else 1, draft_rows)


@dataclass(frozen=True)
class SlotKey:
    device: str
    lane: int
    microbatch: int
    heads: int
    dtype: torch.dtype


@dataclass
class Slot:
    """One reserved buffer and the addresses that calls were given in it, by phase."""

    buffer: torch.Tensor
    addresses: dict[str, set[int]] = field(default_factory=lambda: {phase: set() for phase in PHASES})

    def view(self, rows: int, phase: str) -> torch.Tensor:
        view = self.buffer[:rows]
        if rows:  # an empty view has no address
            self.addresses[phase].add(view.data_ptr())
        return view


class Reservation:
    """All slots of one worker. Slots appear in the profile only; the first real forward freezes the set.

    The flag is our own, because vLLM's workspace lock is skipped without CUDA graphs and undone by
    elastic expert parallelism.
    """

    def __init__(self, capacity: Capacity, allocate: Allocate) -> None:
        self.capacity = capacity
        self.frozen = False
        self.slots: dict[SlotKey, Slot] = {}
        self._allocate = allocate

    def reserved_bytes(self) -> int:
        return sum(slot.buffer.nbytes for slot in self.slots.values())

    def reserve(self, key: SlotKey, rows: int) -> torch.Tensor:
        """The first `rows` rows of the slot, contents unspecified, for a forward without metadata.

        The first call for a lane allocates every microbatch of it at full capacity, whatever `rows` is.
        """
        if key not in self.slots:
            self._allocate_lane(key)
        return self._view(key, rows, "profile")

    def take(self, key: SlotKey, rows: int, capturing: bool) -> torch.Tensor:
        """The first `rows` rows of the slot for a forward with metadata; never allocates."""
        self.frozen = True
        return self._view(key, rows, "capture" if capturing else "live")

    def _allocate_lane(self, key: SlotKey) -> None:
        if self.frozen:
            raise ReservationError(self._missing(key, "after the first real forward"))
        for microbatch, rows in enumerate(self.capacity.rows(key.lane)):
            slot_key = SlotKey(key.device, key.lane, microbatch, key.heads, key.dtype)
            # A plain tensor, so that it can be written inside and outside inference mode.
            with torch.inference_mode(False):
                buffer = self._allocate(
                    ("vllm_qout.q_out", microbatch, key.heads, key.dtype), (rows, key.heads, HEAD_DIM), key.dtype
                )
            if str(buffer.device) != key.device:
                raise ReservationError(
                    f"vllm_qout: got a workspace on {buffer.device}, needs {key.device}, where the query is"
                )
            self.slots[slot_key] = Slot(buffer)

    def _view(self, key: SlotKey, rows: int, phase: str) -> torch.Tensor:
        slot = self.slots.get(key)
        if slot is None:
            raise ReservationError(self._missing(key, "for a real forward"))
        capacity = slot.buffer.shape[0]
        if rows > capacity:
            raise ReservationError(
                f"vllm_qout: got {rows} query rows, the buffer of lane {key.lane} microbatch {key.microbatch} "
                f"holds {capacity}; needs a reservation for every batch that the scheduler can form "
                "(raise max_num_batched_tokens, or set VLLM_QOUT=0 to serve without the plugin)"
            )
        return slot.view(rows, phase)

    def _missing(self, key: SlotKey, when: str) -> str:
        return (
            f"vllm_qout: got no reserved query buffer {when} (device {key.device}, lane {key.lane}, "
            f"microbatch {key.microbatch}, {key.heads} heads); needs vLLM's memory profile to run first, "
            "which reserves it. Set VLLM_QOUT=0 to serve without the plugin"
        )

    def report(self) -> list[dict[str, object]]:
        """JSON-able rows, one per slot: identity, size in bytes, base address, addresses by phase."""
        return [
            {
                "device": key.device,
                "lane": key.lane,
                "ubatch": key.microbatch,
                "heads": key.heads,
                "dtype": str(key.dtype).removeprefix("torch."),
                "rows": slot.buffer.shape[0],
                "bytes": slot.buffer.nbytes,
                "address": slot.buffer.data_ptr(),
                "addresses": {phase: sorted(seen) for phase, seen in slot.addresses.items()},
            }
            for key, slot in self.slots.items()
        ]
