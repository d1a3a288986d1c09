# SPDX-License-Identifier: Apache-2.0
"""What the workers hold before and after the load of a boot: memory, and on CUDA q_out and the graphs."""

from __future__ import annotations

from qualify.probes import workers
from qualify.probes.graph_records import GraphReport, graphs_file
from qualify.probes.plugin_records import PluginReport, plugin_file
from qualify.session import Session

READY, LOADED = "ready", "loaded"


def collect(session: Session, label: str) -> None:
    """Write one file a kind: `ready` before any load, `loaded` after it. The graphs come last, with nothing running."""
    workers.memory(session, label)
    if session.profile.engine.kind == "cuda":
        session.evidence.records(plugin_file(label), workers.ask(session, "qualify_plugin", PluginReport))
        session.evidence.records(graphs_file(label), workers.ask(session, "qualify_graphs", GraphReport))
