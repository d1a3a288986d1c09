# SPDX-License-Identifier: Apache-2.0
"""The worker extension: `--worker-extension-cls qualify.inside.worker.Worker`.

The engine mixes this class into its worker and calls it once per rank through `/collective_rpc`, which passes strings
only: every method takes one JSON object and returns a dict, {"error": ...} when it could not do what was asked.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

from qualify.inside import cache, describe, graphs, memory, plugin
from qualify.inside.capture import Capture, Options

Method = Callable[..., dict[str, Any]]

# The engine loads this module in each worker before it builds the model runner: the last moment to see every graph.
graphs.watch()


def answers(method: Method) -> Method:
    """Options in, plain JSON values out. The engine's transport stops for good at a value it cannot encode, and an
    exception here would end the worker.
    """

    @functools.wraps(method)
    def call(self: Worker, options: str = "{}") -> dict[str, Any]:
        try:
            result = {"rank": int(self.rank), **method(self, **json.loads(options))}
            plain: dict[str, Any] = json.loads(json.dumps(result))
            return plain
        except Exception as error:
            return {"rank": int(self.rank), "error": f"{type(error).__name__}: {error}"[:300]}

    return call


class Worker:
    """Mixed into the engine's worker; every name contains `qualify`, because both share one namespace."""

    rank: int
    model_runner: Any

    @answers
    def qualify_describe(self) -> dict[str, Any]:
        return describe.describe(self)

    @answers
    def qualify_memory(self) -> dict[str, Any]:
        return memory.describe(self)

    @answers
    def qualify_graphs(self) -> dict[str, Any]:
        return graphs.describe(self)

    @answers
    def qualify_plugin(self) -> dict[str, Any]:
        return plugin.describe(self, graphs.ledger().moments)

    @answers
    def qualify_poison(self) -> dict[str, Any]:
        """Overwrite every KV byte of this rank. Only between requests, with nothing cached that is still wanted."""
        return cache.poison(cache.tensors_of(self))

    @answers
    def qualify_arm(self, **options: Any) -> dict[str, Any]:
        """Record KV digests of the requests that follow; see `Options`. Arming again starts afresh."""
        self._qualify_disarm()
        options["objects"] = tuple(tuple(groups) for groups in options.get("objects", ()))
        tensors = cache.tensors_of(self)
        self._qualify_capture = Capture(self.model_runner, int(self.rank), tensors, Options(**options))
        return {}

    @answers
    def qualify_collect(self) -> dict[str, Any]:
        """Stop recording and return what was recorded."""
        capture = self._qualify_disarm()
        if capture is None:
            raise RuntimeError("the capture was not armed")
        return {
            "process": describe.process(),
            "tensors": [item.describe() for item in capture.tensors],
            **capture.report(),
        }

    def _qualify_disarm(self) -> Capture | None:
        capture: Capture | None = getattr(self, "_qualify_capture", None)
        if capture is not None:
            capture.disarm()
            self._qualify_capture = None
        return capture
