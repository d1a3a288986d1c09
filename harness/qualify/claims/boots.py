# SPDX-License-Identifier: Apache-2.0
"""Which boots a claim has to find evidence of, and where."""

from __future__ import annotations

import re
from collections.abc import Iterable

from qualify.evidence import Evidence, MissingEvidence
from qualify.probes.workers import WORKERS, ProcessIdentity, WorkerReport
from qualify.profiles import Boot, Probe, Profile
from qualify.records import RUN, Run

ENOUGH_BOOTS = 3
"""Equal boots from which on there is an interval between boots."""


def is_outside(evidence: Evidence) -> bool:
    """Whether the server was started by somebody else, so that nothing inside it could be seen."""
    return evidence.record(RUN, Run).target.startswith("url:")


def folder_of(evidence: Evidence, boot: Boot) -> str | None:
    """The folder of a boot by its name; None if it left no file."""
    paths = evidence.paths(rf"^boots/\d+-{re.escape(boot.name)}/")
    return "/".join(paths[0].split("/")[:2]) if paths else None


def visited(evidence: Evidence, profile: Profile, probe: Probe | None = None) -> list[tuple[Boot, str]]:
    """The boots with this probe (or all) and their folders, in the profile's order.

    A server started by somebody else is visited once, so its other boots may be absent. Raises MissingEvidence for any
    other boot that left nothing, and when there is none at all.
    """
    wanted = [boot for boot in profile.boots if probe is None or probe in boot.probes]
    pairs = [(boot, folder_of(evidence, boot)) for boot in wanted]
    found = [(boot, folder) for boot, folder in pairs if folder is not None]
    missing = [boot.name for boot, folder in pairs if folder is None]
    if not found or (missing and not is_outside(evidence)):
        raise MissingEvidence(f"boots/NN-{missing[0] if missing else '*'}")
    return found


def equal_boots(boots: Iterable[Boot]) -> list[list[Boot]]:
    """Boots that differ in nothing but name and probes, together."""
    alike: dict[tuple[object, ...], list[Boot]] = {}
    for boot in boots:
        alike.setdefault((boot.cache, boot.speculation, boot.plugin), []).append(boot)
    return list(alike.values())


def require_boot(path: str, named: Iterable[str], boot: Boot) -> None:
    """Evidence that names its boot. Raises MissingEvidence where another one is named."""
    others = sorted({name for name in named if name != boot.name})
    if others:
        raise MissingEvidence(f"{path} of boot {boot.name} (it is of {others[0]})")


def worker_reports(evidence: Evidence, folders: Iterable[str]) -> dict[str, tuple[WorkerReport, ...]]:
    """The reports of each boot's workers, in rank order.

    Raises MissingEvidence where a process reports in two boots: one of the reports is then of another boot.
    """
    found = {folder: evidence.record(f"{folder}/{WORKERS}", tuple[WorkerReport, ...]) for folder in folders}
    owner: dict[ProcessIdentity, str] = {}
    for folder, reports in found.items():
        for process in (report.process for report in reports if report.process is not None):
            if owner.setdefault(process, folder) != folder:
                raise MissingEvidence(f"{folder}/{WORKERS} of its own (process {process.pid} is of {owner[process]})")
    return found
