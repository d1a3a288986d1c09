# SPDX-License-Identifier: Apache-2.0
"""What nvidia-smi says of the GPUs: who they are, who uses them, how they are linked, and what slows them down.

Parsing is pure; `ask` alone touches the machine. A field that the driver does not report is None.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from qualify.errors import PreflightError
from qualify.records import Gpu, GpuLink, GpuSample

ASK_SECONDS = 30.0

FACTS = (
    "uuid,name,memory.total,memory.used,driver_version,mig.mode.current,power.limit,clocks.max.sm,clocks.max.mem,"
    "pcie.link.gen.current,pcie.link.width.current"
)
SAMPLE = "uuid,clocks.sm,clocks.mem,power.draw,temperature.gpu,utilization.gpu,clocks_event_reasons.active"

VISIBLE = "CUDA_VISIBLE_DEVICES"

IDLE_MIB = 512
"""Memory in use below which a GPU counts as idle: the driver alone takes some."""

THROTTLES = {
    0x04: "software power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
"""Bits of the clock event reasons that slow a GPU down under load; the others say that it idles or is set so."""


class Seen(NamedTuple):
    """One GPU as this host knows it. The UUID itself stays here: evidence holds its hash."""

    uuid: str
    used_mib: int | None
    record: Gpu


class User(NamedTuple):
    """A process that holds memory of a GPU."""

    uuid: str
    pid: int
    name: str


def uuid_hash(uuid: str) -> str:
    return hashlib.sha256(uuid.encode()).hexdigest()


def ask(*arguments: str) -> str | None:
    """What nvidia-smi prints; None where there is none or it fails."""
    client = shutil.which("nvidia-smi")
    if client is None:
        return None
    try:
        answer = subprocess.run([client, *arguments], capture_output=True, text=True, timeout=ASK_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout if answer.returncode == 0 else None


def observe() -> tuple[Seen, ...]:
    """The GPUs of this host in the driver's order; none where there is no driver."""
    return parse_facts(ask(f"--query-gpu={FACTS}", "--format=csv,noheader,nounits") or "")


def observe_links(count: int) -> tuple[GpuLink, ...] | None:
    """How the first `count` GPUs are linked; None if the driver does not tell."""
    text = ask("topo", "-m")
    return None if text is None else parse_links(text, count)


def users() -> tuple[User, ...] | None:
    """Processes on any GPU that the driver can see; None if it does not tell."""
    text = ask("--query-compute-apps=gpu_uuid,pid,process_name", "--format=csv,noheader")
    return None if text is None else parse_users(text)


def sample(uuids: tuple[str, ...], at: float) -> tuple[GpuSample, ...]:
    """Clocks, power and slow-downs of these GPUs now; `at` is the time to write down."""
    text = ask(f"--id={','.join(uuids)}", f"--query-gpu={SAMPLE}", "--format=csv,noheader,nounits")
    return parse_sample(text or "", at)


def pick_idle(count: int) -> tuple[str, ...]:
    """UUIDs of the first `count` idle GPUs of those that CUDA_VISIBLE_DEVICES allows (all, where it is not set).

    Raises PreflightError that names who uses them.
    """
    seen, found = allowed(observe(), os.environ.get(VISIBLE)), users() or ()
    refuse_unless_idle(seen, found, count, _owner)
    return tuple(gpu.uuid for gpu in seen if is_idle(gpu, found))[:count]


def allowed(seen: tuple[Seen, ...], visible: str | None) -> tuple[Seen, ...]:
    """The GPUs that the variable names by the driver's numbers or by UUIDs, in its order; all if it is not set.

    Raises PreflightError for a name that no GPU has.
    """
    if visible is None:
        return seen
    known = {str(number): gpu for number, gpu in enumerate(seen)} | {gpu.uuid: gpu for gpu in seen}
    names = [name.strip() for name in visible.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise PreflightError(f"{VISIBLE} names {name}, which no GPU here has", remedy="see nvidia-smi -L")
    # A GPU that is named twice is one GPU, and must not serve two ranks.
    return tuple({known[name].uuid: known[name] for name in names}.values())


def is_idle(gpu: Seen, found: tuple[User, ...]) -> bool:
    return gpu.used_mib is not None and gpu.used_mib < IDLE_MIB and not any(user.uuid == gpu.uuid for user in found)


def refuse_unless_idle(
    seen: tuple[Seen, ...], found: tuple[User, ...], count: int, owner: Callable[[int], str | None]
) -> None:
    """Raises PreflightError unless `count` GPUs are idle; `owner` names a process that the driver does not name."""
    idle = [gpu for gpu in seen if is_idle(gpu, found)]
    if len(idle) >= count:
        return
    busy = [f"{owner(user.pid) or user.name} (pid {user.pid})" for user in found]
    used = [f"{gpu.used_mib} MiB in use" for gpu in seen if gpu not in idle and gpu.used_mib is not None]
    why = f": {', '.join(busy or used)}" if busy or used else ""
    raise PreflightError(f"{count} idle GPUs are needed, {len(idle)} of {len(seen)} are{why}", remedy="free them")


def _owner(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() or None
    except OSError:
        return None


def parse_facts(text: str) -> tuple[Seen, ...]:
    found = []
    for row in _rows(text, FACTS):
        memory = _number(row["memory.total"])
        used = _number(row["memory.used"])
        record = Gpu(
            uuid_hash=uuid_hash(row["uuid"]),
            name=row["name"],
            memory_bytes=int(memory or 0) << 20,
            driver=row["driver_version"],
            mig=_text(row["mig.mode.current"]),
            power_limit_watts=_number(row["power.limit"]),
            max_sm_mhz=_number(row["clocks.max.sm"]),
            max_memory_mhz=_number(row["clocks.max.mem"]),
            pcie=_pcie(row["pcie.link.gen.current"], row["pcie.link.width.current"]),
        )
        found.append(Seen(row["uuid"], None if used is None else int(used), record))
    return tuple(found)


def parse_sample(text: str, at: float) -> tuple[GpuSample, ...]:
    return tuple(
        GpuSample(
            at=at,
            uuid_hash=uuid_hash(row["uuid"]),
            sm_mhz=_number(row["clocks.sm"]),
            memory_mhz=_number(row["clocks.mem"]),
            power_watts=_number(row["power.draw"]),
            celsius=_number(row["temperature.gpu"]),
            busy_percent=_number(row["utilization.gpu"]),
            throttles=_throttles(row["clocks_event_reasons.active"]),
        )
        for row in _rows(text, SAMPLE)
    )


def parse_users(text: str) -> tuple[User, ...]:
    rows = (line.split(", ", 2) for line in text.splitlines())
    return tuple(User(row[0], int(row[1]), row[2]) for row in rows if len(row) == 3 and row[1].isdigit())


def parse_links(text: str, count: int) -> tuple[GpuLink, ...]:
    """The matrix of `nvidia-smi topo -m`: NV18 is 18 NVLinks, PIX to SYS are ways over PCIe and between sockets."""
    rows = [line.split() for line in text.splitlines()]
    cells = {row[0]: row[1:] for row in rows if row and row[0].startswith("GPU") and "X" in row[1:]}
    return tuple(
        GpuLink(one=one, other=other, link=cells[f"GPU{one}"][other])
        for one in range(count)
        for other in range(one + 1, count)
        if len(cells.get(f"GPU{one}", ())) > other
    )


def _rows(text: str, fields: str) -> list[dict[str, str]]:
    names = fields.split(",")
    rows = ([cell.strip() for cell in line.split(",")] for line in text.splitlines())
    return [dict(zip(names, row, strict=True)) for row in rows if len(row) == len(names) and row[0].startswith("GPU-")]


def _text(cell: str) -> str | None:
    return None if not cell or cell.startswith("[") else cell


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def _pcie(generation: str, width: str) -> str | None:
    known = generation.isdigit() and width.isdigit()
    return f"gen {generation} x{width}" if known else None


def _throttles(cell: str) -> tuple[str, ...] | None:
    """The names of the slow-downs in a bit mask such as 0x0000000000000004."""
    try:
        mask = int(cell, 16)
    except ValueError:
        return None
    return tuple(name for bit, name in THROTTLES.items() if mask & bit)
