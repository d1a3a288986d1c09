# SPDX-License-Identifier: Apache-2.0
"""Which function collects for which probe of a profile."""

from __future__ import annotations

from qualify.probes import kv, prefill, serve, throughput
from qualify.profiles import Probe
from qualify.session import ProbeFunction

PROBES: dict[Probe, ProbeFunction] = {
    Probe.SERVE: serve.collect,
    Probe.PREFILL: prefill.collect,
    Probe.KV_CONTROL: kv.control,
    Probe.KV_COLD: kv.cold,
    Probe.KV_RESTORE: kv.restore,
    Probe.KV_RESTART: kv.restart,
    Probe.KV_CONTROLS: kv.negative_controls,
    Probe.THROUGHPUT: throughput.collect,
}
