# SPDX-License-Identifier: Apache-2.0
"""What the plugin is doing in this process: bound layers, counters, reservation. Imports nothing of vLLM.

One activation belongs to one vLLM workspace manager, that is to one worker; a later engine in the same
process gets a new one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_qout.reservation import Reservation

COUNTERS = ("profile", "op", "kvOnly", "stock")


@dataclass
class Activation:
    """State of one worker. `counters` count Python calls: replays of a CUDA graph are not among them."""

    workspace: object
    reservation: Reservation
    cache_config: Any
    rank: int
    backend: str
    source_hashes: dict[str, str]
    layers: dict[str, str] = field(default_factory=dict)  # prefix -> class, bound to our method
    stock_layers: dict[str, str] = field(default_factory=dict)  # prefix -> class that has its own method
    context_sites: list[str] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))

    def count(self, name: str) -> None:
        self.counters[name] += 1

    def report(self) -> Mapping[str, object]:
        """JSON-able; `active` means that at least one layer runs our method."""
        return {
            "active": bool(self.layers),
            "rank": self.rank,
            "backend": self.backend,
            "layersBound": sorted(self.layers),
            "layersStock": dict(self.stock_layers),
            "contextSites": list(self.context_sites),
            "sourceHashes": dict(self.source_hashes),
            "counters": dict(self.counters),
            "frozen": self.reservation.frozen,
            "reservedBytes": self.reservation.reserved_bytes(),
            "buffers": self.reservation.report(),
        }


@dataclass
class _Worker:
    activation: Activation | None = None


# The replaced vLLM functions have no place to carry state, so this module holds the worker's.
_worker = _Worker()


def current() -> Activation | None:
    """The activation of this worker; None before a DeepSeek-V4 model is built."""
    return _worker.activation


def activate(workspace: object, create: Callable[[], Activation]) -> Activation:
    """The activation of `workspace`, made by `create` on its first model (target, then draft)."""
    activation = _worker.activation
    if activation is None or activation.workspace is not workspace:
        activation = _worker.activation = create()
    return activation
