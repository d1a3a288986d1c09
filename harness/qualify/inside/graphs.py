# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of one worker: which sizes are captured, where steps are sent, and which graphs are replayed.

The engine keeps no such counts, so its managers and wrappers are watched from the moment the extension is loaded, which
is before a model runner exists. A note is taken after each call; what goes wrong with a note is kept as text and never
reaches the engine. Names are those of vLLM 0.32.0; one that is missing leaves null and its reason.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from qualify.inside import plugin
from qualify.inside.describe import process
from qualify.inside.facts import gather

Dispatch = tuple[Any, ...]
"""(requests, tokens, tokens of every request if uniform, mode, size of the graph): requests None where not told."""

Note = Callable[..., None]

PIECEWISE, FULL, NONE = "PIECEWISE", "FULL", "NONE"

DRAFTERS = {
    "query_cudagraph_manager": "drafter",
    "prefill_cudagraph_manager": "drafterPrefill",
    "decode_cudagraph_manager": "drafterDecode",
}
"""Attributes of the speculator; any other manager keeps the name of its attribute."""


@dataclass
class Ledger:
    """What was noted in this process. Counts are kept per manager or wrapper and go with it."""

    dispatches: WeakKeyDictionary[Any, Counter[Dispatch]] = field(default_factory=WeakKeyDictionary)
    replays: WeakKeyDictionary[Any, Counter[tuple[str, int]]] = field(default_factory=WeakKeyDictionary)
    passes: list[dict[str, Any]] = field(default_factory=list)
    moments: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The plugin's buffers before the profiling capture, `profiled`, and after the real one, `captured`."""
    problems: list[str] = field(default_factory=list)
    watched: list[str] = field(default_factory=list)
    profiling: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def problem(self, where: str, error: Exception) -> None:
        """Once per text: a note that fails at every step must not fill the memory."""
        text = f"{where}: {type(error).__name__}: {error}"[:300]
        with self._lock:
            if text not in self.problems and len(self.problems) < 20:
                self.problems.append(text)

    def dispatched(self, manager: Any, requests: Any, tokens: int, uniform: Any, mode: Any, size: int) -> None:
        key = (_whole(requests), int(tokens), _whole(uniform), mode.name, int(size))
        with self._lock:
            self.dispatches.setdefault(manager, Counter())[key] += 1

    def replayed(self, owner: Any, mode: str, size: int) -> None:
        with self._lock:
            self.replays.setdefault(owner, Counter())[mode, int(size)] += 1

    def counts(self, table: WeakKeyDictionary[Any, Counter[Any]], owner: Any) -> Counter[Any]:
        with self._lock:
            return Counter(table.get(owner, {}))


def _whole(value: Any) -> int | None:
    return None if value is None else int(value)


_ledger = Ledger()


def ledger() -> Ledger:
    return _ledger


def watch() -> None:
    """Watch the engine's graphs in this process, once. Outside a CUDA worker it does nothing. Never raises."""
    if _ledger.watched or _ledger.problems or "vllm" not in sys.modules:
        return
    try:
        from vllm.platforms import current_platform

        if current_platform.is_cuda_alike():
            install()
    except Exception as error:
        _ledger.problem("platform", error)


def install() -> None:
    """Wrap what decides, captures and replays. A part that this engine lacks is told and left out."""
    for part in (_watch_managers, _watch_dispatcher, _watch_breakable, _watch_wrappers):
        name = part.__name__.removeprefix("_watch_")
        try:
            part()
            _ledger.watched.append(name)
        except Exception as error:
            _ledger.problem(name, error)


def _after(owner: Any, name: str, note: Note) -> None:
    """Call `note(result, instance, ...)` after each call of a method that did not fail."""
    original = vars(owner)[name]

    @functools.wraps(original)
    def watched(instance: Any, *arguments: Any, **options: Any) -> Any:
        result = original(instance, *arguments, **options)
        _guarded(name, lambda: note(result, instance, *arguments, **options))
        return result

    setattr(owner, name, watched)


def _guarded(where: str, action: Callable[[], None]) -> None:
    try:
        action()
    except Exception as error:
        _ledger.problem(where, error)


def _watch_managers() -> None:
    """The V2 runner: one manager for the target, others for the drafter, all of one base class."""
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    def dispatched(
        result: Any, manager: Any, num_reqs: int, num_tokens: int, uniform_token_count: int | None, *_: Any, **__: Any
    ) -> None:
        _ledger.dispatched(manager, num_reqs, num_tokens, uniform_token_count, result.cg_mode, result.num_tokens)

    def replayed(_: Any, manager: Any, desc: Any) -> None:
        _ledger.replayed(manager, FULL, desc.num_tokens)

    capture = vars(CudaGraphManager)["capture"]

    @functools.wraps(capture)
    def watched(manager: Any, create_forward_fn: Any, progress_bar_desc: str = "Capturing CUDA graphs") -> Any:
        _guarded("capture", lambda: _capture_begins(manager, progress_bar_desc))
        result = capture(manager, create_forward_fn, progress_bar_desc)
        _guarded("capture", lambda: _capture_ends(manager, progress_bar_desc))
        return result

    _after(CudaGraphManager, "dispatch", dispatched)
    _after(CudaGraphManager, "run_fullgraph", replayed)
    CudaGraphManager.capture = watched


def _capture_begins(manager: Any, label: str) -> None:
    """The target captures first in either pass; only while memory is profiled is its number of FULL graphs limited."""
    if label == "Capturing CUDA graphs":
        _ledger.profiling = manager._max_full_descs_to_capture is not None
        if _ledger.profiling:
            _ledger.moments.setdefault("profiled", plugin.buffers())


def _capture_ends(manager: Any, label: str) -> None:
    _ledger.passes.append(
        {
            "label": label,
            "profiling": _ledger.profiling,
            **gather({"piecewise": lambda: _piecewise(manager), "full": lambda: _full(manager)}),
        }
    )
    if not _ledger.profiling:
        _ledger.moments["captured"] = plugin.buffers()


def _watch_dispatcher() -> None:
    """The V1 runner decides in a dispatcher of its own."""
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

    def dispatched(
        result: Any, dispatcher: Any, num_tokens: int, uniform_decode: bool = False, *_: Any, **__: Any
    ) -> None:
        mode, descriptor = result
        uniform = dispatcher.uniform_decode_query_len if uniform_decode else None
        _ledger.dispatched(dispatcher, None, num_tokens, uniform, mode, descriptor.num_tokens)

    _after(CudagraphDispatcher, "dispatch", dispatched)


def _watch_breakable() -> None:
    """PIECEWISE graphs of models that are not compiled, DeepSeek-V4 among them."""
    from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper

    def replayed(_: Any, wrapper: Any, entry: Any, *__: Any, **___: Any) -> None:
        _ledger.replayed(wrapper, PIECEWISE, entry.batch_descriptor.num_tokens)

    _after(BreakableCUDAGraphWrapper, "_replay", replayed)


def _watch_wrappers() -> None:
    """Graphs of compiled models, one wrapper a piece, and FULL graphs of the V1 runner. The call that captures counts
    as well, so that only differences after the start are replays.
    """
    from vllm.compilation.cuda_graph import CUDAGraphWrapper
    from vllm.forward_context import get_forward_context, is_forward_context_available

    def called(_: Any, wrapper: Any, *__: Any, **___: Any) -> None:
        if not is_forward_context_available():
            return
        context = get_forward_context()
        if context.cudagraph_runtime_mode == wrapper.runtime_mode and context.batch_descriptor is not None:
            _ledger.replayed(wrapper, wrapper.runtime_mode.name, context.batch_descriptor.num_tokens)

    _after(CUDAGraphWrapper, "__call__", called)


def _wrappers(mode: str) -> list[Any]:
    """The wrappers of compiled models and of the V1 runner's FULL graphs."""
    from vllm.compilation.cuda_graph import CUDAGraphWrapper

    return [one for one in list(CUDAGraphWrapper._all_instances) if one.runtime_mode.name == mode]


def _in_all(sizes: Iterable[set[int]]) -> list[int]:
    """A size is captured if every piece has it."""
    found = list(sizes)
    return sorted(set.intersection(*found)) if found else []


def _pieces(mode: str) -> list[int]:
    return _in_all(
        {key.num_tokens for key, entry in one.concrete_cudagraph_entries.items() if entry.cudagraph is not None}
        for one in _wrappers(mode)
    )


def _piece_replays(mode: str) -> Counter[tuple[str, int]]:
    """A step replays every piece once, so the least count over the pieces is that of the steps."""
    tables = [_ledger.counts(_ledger.replays, one) for one in _wrappers(mode)]
    if not tables:
        return Counter()
    return Counter({key: min(table[key] for table in tables) for key in set().union(*tables)})


def _breakable_sizes(wrapper: Any) -> list[int]:
    return sorted({key.num_tokens for key, entry in wrapper.entries.items() if entry.capture is not None})


def _piecewise(manager: Any) -> list[int]:
    if not manager.cudagraph_mode.has_piecewise_cudagraphs():
        return []
    if not manager.use_breakable_cg:
        return _pieces(PIECEWISE)
    return [] if manager.breakable_cg_runner is None else _breakable_sizes(manager.breakable_cg_runner)


def _full(manager: Any) -> list[int]:
    return sorted({descriptor.num_tokens for descriptor in manager.graphs})


def describe(worker: Any) -> dict[str, Any]:
    """Every fact of `qualify.probes.graph_records.GraphReport`."""

    def compilation() -> Any:
        return worker.vllm_config.compilation_config

    def scheduler() -> Any:
        return worker.vllm_config.scheduler_config

    return gather(
        {
            "process": process,
            "runner": lambda: "V2" if ".worker.gpu." in type(worker.model_runner).__module__ else "V1",
            "sizes": lambda: sorted(int(size) for size in compilation().cudagraph_capture_sizes or ()),
            "max_size": lambda: int(compilation().max_cudagraph_capture_size or 0),
            "max_num_seqs": lambda: int(scheduler().max_num_seqs),
            "max_num_batched_tokens": lambda: int(scheduler().max_num_batched_tokens),
            "managers": lambda: [_manager(name, one) for name, one in _managers(worker.model_runner)],
            "passes": lambda: list(_ledger.passes),
            "watched": lambda: list(_ledger.watched),
            "problems": lambda: list(_ledger.problems),
        }
    )


def _managers(runner: Any) -> list[tuple[str, Any]]:
    """(name, manager) of this runner; of V1 its dispatcher, whose drafters share the target's wrappers."""
    if ".worker.gpu." not in type(runner).__module__:
        return [("target", runner.cudagraph_dispatcher)]
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    found = [("target", runner.cudagraph_manager)]
    if (speculator := getattr(runner, "speculator", None)) is not None:
        found += [(DRAFTERS.get(name, name), one) for name, one in vars(speculator).items()]
    return [(name, one) for name, one in found if isinstance(one, CudaGraphManager)]


def _manager(name: str, manager: Any) -> dict[str, Any]:
    second = hasattr(manager, "graphs")
    readers: dict[str, Callable[[], Any]] = {
        "mode": lambda: manager.cudagraph_mode.name,
        "query_len": lambda: int(manager.decode_query_len if second else manager.uniform_decode_query_len),
        "piecewise": lambda: _piecewise(manager) if second else _v1_piecewise(manager),
        "full": lambda: _full(manager) if second else _pieces(FULL),
        "planned_piecewise": lambda: _planned(manager, PIECEWISE),
        "planned_full": lambda: _planned(manager, FULL),
        "dispatches": lambda: _rows(_ledger.counts(_ledger.dispatches, manager)),
        "replays": lambda: _rows(_replays(manager) if second else _v1_replays()),
    }
    return {"name": name, **gather(readers)}


def _planned(manager: Any, mode: str) -> list[int]:
    plan = getattr(manager, "_capture_descs", None)
    if plan is None:
        plan = manager.cudagraph_keys
    return sorted({one.num_tokens for key, descriptors in plan.items() if key.name == mode for one in descriptors})


def _rows(counts: Counter[Any]) -> list[list[Any]]:
    return [[*key, count] for key, count in sorted(counts.items(), key=lambda row: str(row[0]))]


def _replays(manager: Any) -> Counter[tuple[str, int]]:
    found = _ledger.counts(_ledger.replays, manager)
    if not manager.use_breakable_cg:
        pieces = _piece_replays(PIECEWISE) if manager.cudagraph_mode.has_piecewise_cudagraphs() else Counter()
        return found + pieces
    if manager.breakable_cg_runner is not None:
        found += _ledger.counts(_ledger.replays, manager.breakable_cg_runner)
    return found


def _v1_breakable() -> list[Any]:
    from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper

    return list(BreakableCUDAGraphWrapper._all_instances)


def _v1_piecewise(dispatcher: Any) -> list[int]:
    if not dispatcher.cudagraph_mode.has_piecewise_cudagraphs():
        return []
    breakable = _v1_breakable()
    return _in_all(set(_breakable_sizes(one)) for one in breakable) if breakable else _pieces(PIECEWISE)


def _v1_replays() -> Counter[tuple[str, int]]:
    found = _piece_replays(FULL) + _piece_replays(PIECEWISE)
    for one in _v1_breakable():
        found |= _ledger.counts(_ledger.replays, one)
    return found
