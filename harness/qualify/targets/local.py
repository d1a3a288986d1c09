# SPDX-License-Identifier: Apache-2.0
"""The local target: vLLM and, where the boot asks for it, `lmcache server` as processes of our own."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

import httpx
from pydantic import ValidationError

import qualify
from qualify.environment import EngineEnv
from qualify.errors import TargetError, UsageError
from qualify.profiles import Boot, Profile, Storage
from qualify.records import BootOutcome, BootRecord, EngineEnvironment, Process
from qualify.targets import Launch
from qualify.targets.command import (
    LOOPBACK,
    QUIET,
    Command,
    Places,
    cache_server,
    code_variables,
    engine,
    inherited,
    visible,
)
from qualify.targets.process import Ended, Supervised, count_lines, free_ports, last_lines, last_words

INTROSPECT = Path(qualify.__file__).parent / "inside" / "introspect.py"

INTROSPECT_SECONDS = 120.0
"""Bound on hashing the engine's files: about 10 s from memory, more from a cold disk."""

CONTRACT_SECONDS = 180.0
"""Bound on the contract suite: about 10 s of one core when measured."""

CACHE_START_SECONDS = 90.0
"""Bound on the cache server alone; measured: 10 to 20 s, most of it imports."""

DYING_SECONDS = 5.0
"""Bound on the time between an engine's last closed port and its end: it tears down its workers in between."""

POLL_SECONDS = 0.25

Progress = Callable[[str], None]


class LocalTarget:
    """Starts every boot with the Python of one engine environment."""

    label = "local"

    def __init__(
        self, profile: Profile, env: EngineEnv, progress: Progress, visible_gpus: tuple[str, ...] = ()
    ) -> None:
        """`visible_gpus` are the UUIDs of the GPUs to use, one a rank; none for an engine without GPUs."""
        self._profile = profile
        self._env = env
        self._progress = progress
        self._gpus = visible_gpus

    def supports(self, boot: Boot) -> bool:
        return True

    def environment(self) -> EngineEnvironment:
        """What is installed in the engine, found by its own Python. Raises TargetError."""
        program = ["-I", str(INTROSPECT)]
        for lock in self._env.locks:
            program += ["--lock", str(lock)]
        if self._env.pruned is not None:
            program += ["--pruned", str(self._env.pruned)]
        report = self._report(program, "look into the engine", INTROSPECT_SECONDS)
        try:
            seen = EngineEnvironment.model_validate_json(report, strict=False)
        except ValidationError as error:
            raise TargetError(
                f"what {self._env.path} says of itself is of another form: {error.errors()[0]['msg']}",
                phase="look into the engine",
                remedy="file a bug with this line",
            ) from None
        return seen.model_copy(update={"variables": code_variables(self._profile)})

    def contract(self) -> bytes:
        """The report of the operator's contract suite, run by the engine's own Python. Raises TargetError."""
        device = "cuda" if self._profile.engine.kind == "cuda" else "cpu"
        return self._report(["-m", "vllm_qout.contract", "--device", device], "operator contract", CONTRACT_SECONDS)

    def _report(self, program: list[str], phase: str, seconds: float) -> bytes:
        """What a program writes to the file named by its option --json, run by the engine's Python."""
        with tempfile.TemporaryDirectory(prefix="qualify-") as name:
            folder = Path(name)
            argv = [str(self._env.python), *program, "--json", str(folder / "report.json")]
            environment = inherited(os.environ) | self._env.variables | QUIET | visible(self._gpus)
            with Supervised(argv, log=folder / "log", environment=environment, cwd=folder) as process:
                status = process.wait(seconds)
            with contextlib.suppress(OSError):
                return (folder / "report.json").read_bytes()
            end = f"did not end within {seconds:.0f} s" if status is None else f"{_how(status)} and left no report"
            raise TargetError(
                f"the program for the phase {phase!r} {end}",
                phase=phase,
                remedy=f"see its last lines; if the engine is damaged, remove {self._env.path}: it is made anew",
                tail=last_words(folder / "log"),
            )

    def boot(self, launch: Launch) -> LocalRunning:
        """Start and wait until a request was served. Raises TargetError; then nothing is left, but boot.json."""
        running = LocalRunning(launch, self._env, self._progress, self._gpus)
        try:
            running.start()
        except BaseException:
            launch.evidence.record("boot.json", running.stop())
            raise
        return running


class LocalRunning:
    """One boot: its processes from start to stop."""

    extension = True

    def __init__(self, launch: Launch, env: EngineEnv, progress: Progress, visible_gpus: tuple[str, ...] = ()) -> None:
        self._launch = launch
        self._variables = env.variables
        self.gpus = visible_gpus
        self._progress = progress
        self._began = time.monotonic()
        self._started_at = datetime.now(UTC).isoformat(timespec="seconds")
        self._ready: float | None = None
        self._record: BootRecord | None = None
        self._processes: list[tuple[Command, Supervised]] = []
        self._ports = free_ports(3)
        self._cached = launch.boot.cache is not Storage.NONE
        self._scratch = Path(tempfile.mkdtemp(prefix="qualify-"))
        self._places = replace(_places(launch, env, self._ports, self._scratch), gpus=visible_gpus)
        self.model = self._places.model
        self.engine_url = f"http://{LOOPBACK}:{self._places.port}"
        self.cache_url = f"http://{LOOPBACK}:{self._places.cache_http_port}" if self._cached else None
        self.storage = launch.work / self._places.storage if self._cached else None

    def start(self) -> None:
        launch, seconds = self._launch, self._launch.profile.timeouts.start_seconds
        self._prepare()
        if self.cache_url is not None:
            cache = self._spawn(cache_server(launch.profile, self._places), "cache.log")
            deadline = time.monotonic() + min(seconds, CACHE_START_SECONDS)
            self._await("start of the cache server", cache, f"{self.cache_url}/healthcheck", deadline)
        deadline = time.monotonic() + seconds
        server = self._spawn(engine(launch.profile, launch.boot, self._places), "engine.log")
        self._await("start of the engine", server, f"{self.engine_url}/health", deadline)
        self._first_request(server, deadline)
        self._ready = self._elapsed()

    def died(self) -> str | None:
        """One line about the first process that ended by itself. An engine that accepts no connection any more is
        waited for: it closes its port a moment before it ends."""
        if self._processes and not _accepts(self.engine_url):
            self._processes[-1][1].wait(DYING_SECONDS)
        for command, process in self._processes:
            status = process.wait(0.0)
            if status is not None:
                return f"the {title(command)} {_how(status)}"
        return None

    def pid_of(self, role: str) -> int:
        """The process id of `engine` or `cache`. Raises KeyError if the boot has no such process."""
        return {command.role: process.pid or 0 for command, process in self._processes}[role]

    def stop(self) -> BootRecord:
        """The engine first, then the cache server, which may still hold memory that the engine shares with it."""
        if self._record is None:
            asked = self._elapsed()
            patience = self._launch.profile.timeouts.stop_seconds if self._ready is not None else 0.0
            ended = [process.stop(patience) for _, process in reversed(self._processes)][::-1]
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._record = self._boot_record(asked, ended)
        return self._record

    def _boot_record(self, asked: float, ended: list[Ended]) -> BootRecord:
        outcomes = [end.outcome for end in ended]
        outcome = next((o for o in (BootOutcome.DIED, BootOutcome.KILLED) if o in outcomes), BootOutcome.STOPPED)
        hide = {str(self._scratch): "{scratch}", str(self._launch.work): "{work}", self._places.python: "{python}"}
        hide |= {uuid: f"{{gpu {rank}}}" for rank, uuid in enumerate(self._places.gpus)}
        return BootRecord(
            index=self._launch.index,
            name=self._launch.boot.name,
            started_at=self._started_at,
            ready_seconds=self._ready,
            stop_requested_seconds=asked if self._ready is not None else None,
            stopped_seconds=self._elapsed(),
            outcome=outcome if self._ready is not None else BootOutcome.NOT_READY,
            processes=tuple(
                Process(
                    role=command.role,
                    argv=tuple(_hidden(word, hide) for word in command.argv),
                    environment={name: _hidden(value, hide) for name, value in command.environment.items()},
                    pid=process.pid or 0,
                    exit_status=end.exit_status,
                    outcome=end.outcome,
                    log_lines=count_lines(process.log),
                )
                for (command, process), end in zip(self._processes, ended, strict=True)
            ),
            leftovers=tuple(item for end in ended for item in end.leftovers),
        )

    def _prepare(self) -> None:
        _prepare(self._launch, self._places)

    def _spawn(self, command: Command, log_name: str) -> Supervised:
        self._progress(f"starting the {title(command)}")
        process = Supervised(
            command.argv,
            log=self._launch.evidence.path(log_name),
            environment=inherited(os.environ) | self._variables | command.environment,
            cwd=self._launch.work,
            scratch=self._scratch if command.role == "engine" else None,
        )
        self._processes.append((command, process))
        return process

    def _await(self, phase: str, process: Supervised, url: str, deadline: float) -> None:
        """Until `url` answers 200. Raises TargetError when the process ends or the deadline passes first."""
        shown = ""
        while time.monotonic() < deadline:
            self._check_alive(phase)
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(url, timeout=5.0, trust_env=False).status_code == 200:
                    return
            if (line := _progress_line(process.log)) and line != shown:
                shown = line
                self._progress(line)
            time.sleep(POLL_SECONDS)
        raise self._late(phase, process)

    def _check_alive(self, phase: str) -> None:
        for command, process in self._processes:
            status = process.wait(0.0)
            if status is not None:
                error = process.stop(0.0).error
                raise TargetError(
                    f"the {title(command)} could not be started: {error}"
                    if error
                    else f"the {title(command)} {_how(status)} during: {phase}",
                    phase=phase,
                    remedy=_remedy(process.log),
                    tail=last_words(process.log),
                )

    def _first_request(self, process: Supervised, deadline: float) -> None:
        """A health check proves no decoding: ready means that one token was generated."""
        phase = "first request"
        self._progress("waiting for the first token")
        body = {"model": self.model, "prompt": "ready?", "max_tokens": 1, "temperature": 0}
        answers: queue.Queue[httpx.Response | httpx.HTTPError] = queue.Queue()

        def ask() -> None:
            try:
                left = max(0.1, deadline - time.monotonic())
                answers.put(httpx.post(f"{self.engine_url}/v1/completions", json=body, timeout=left, trust_env=False))
            except httpx.HTTPError as error:
                answers.put(error)

        # In a thread, so that the end of the engine is noticed while the request hangs.
        threading.Thread(target=ask, name="first request", daemon=True).start()
        while time.monotonic() < deadline:
            self._check_alive(phase)
            with contextlib.suppress(queue.Empty):
                return self._judge_first(answers.get(timeout=POLL_SECONDS), process, phase)
        raise self._late(phase, process)

    def _judge_first(self, answer: httpx.Response | httpx.HTTPError, process: Supervised, phase: str) -> None:
        if isinstance(answer, httpx.Response) and answer.status_code == 200 and _choices(answer):
            return
        # A connection that broke is the symptom; the end of the process is the cause, and may be seen a moment later.
        process.wait(2.0)
        self._check_alive(phase)
        if isinstance(answer, httpx.TimeoutException):
            raise self._late(phase, process)
        said = f"{answer.status_code}: {answer.text[:200]}" if isinstance(answer, httpx.Response) else repr(answer)
        raise TargetError(
            f"the engine answered its first request with {said}",
            phase=phase,
            remedy="see the engine's last lines",
            tail=last_words(process.log),
        )

    def _late(self, phase: str, process: Supervised) -> TargetError:
        return TargetError(
            f"not ready in time, during: {phase}",
            phase=phase,
            remedy="see the last lines; raise timeouts.start_seconds if it was still working",
            tail=last_lines(process.log, 6),
        )

    def _elapsed(self) -> float:
        return round(time.monotonic() - self._began, 3)


def _places(launch: Launch, env: EngineEnv, ports: tuple[int, ...], scratch: Path) -> Places:
    return Places(
        python=str(env.python),
        model=_link_name(_model(launch)),
        port=ports[0],
        cache_port=ports[1],
        cache_http_port=ports[2],
        storage="storage",
        extension_path=str(launch.work / "extension"),
        scratch=str(scratch),
        compiled=str(launch.work / "compiled"),
        cpus=tuple(sorted(os.sched_getaffinity(0))),
    )


def _model(launch: Launch) -> Path:
    if launch.model is None:
        raise UsageError("this target serves no model of its own", remedy="give --model DIR")
    return launch.model.resolve()


def _link_name(model: Path) -> str:
    """The name of the model's link in the working directory and of the served model: the folder's own, unless it
    could be taken for an option or for another entry there."""
    plain = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", model.name)
    return model.name if plain and model.name not in ("storage", "extension") else "model"


def _prepare(launch: Launch, places: Places) -> None:
    """The working directory: links to the model and to this package, and the storage that the boot asks for."""
    work = launch.work
    links = {work / places.model: _model(launch), work / "extension" / "qualify": Path(qualify.__file__).parent}
    for link, target in links.items():
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(target)
    storage = work / places.storage
    if launch.boot.cache is Storage.EMPTY:
        shutil.rmtree(storage, ignore_errors=True)
    if launch.boot.cache is not Storage.NONE:
        storage.mkdir(exist_ok=True)


def title(command: Command) -> str:
    """What a command is called in messages."""
    return {"engine": "engine (vLLM)", "cache": "cache server (LMCache)"}[command.role]


def _how(status: int) -> str:
    return f"was ended by signal {-status}" if status < 0 else f"ended by itself with status {status}"


def _remedy(log: Path) -> str:
    text = "\n".join(last_lines(log, 200))
    if "ddress already in use" in text:
        return "another program took the port meanwhile; run again"
    if "No space left" in text:
        return "free disk space or /dev/shm"
    if "No module named" in text:
        return "the engine's environment is incomplete: remove it, it is made anew"
    return "see its last lines"


MILESTONE = re.compile(
    r"Initializing a V1 LLM engine \(v[\w.]+\)|(Starting to load|Loading) (model|safetensors|weights)[^%]*"
    r"|KV cache size: [\d,]+ tokens|Capturing CUDA graphs[^%]*|Building JIT module \w+|TileLang begins to compile"
    r"|LMCache MP worker adapter created|Application startup complete"
)


def _progress_line(log: Path) -> str:
    """The last milestone that the engine itself reported, empty before the first."""
    found = (MILESTONE.search(line) for line in reversed(last_lines(log, 200)))
    return next((match[0].strip()[:80] for match in found if match), "")


def _accepts(url: str) -> bool:
    parts = urlsplit(url)
    try:
        socket.create_connection((parts.hostname or LOOPBACK, parts.port or 80), timeout=2.0).close()
    except TimeoutError:
        return True  # busy, not closed
    except OSError:
        return False
    return True


def _choices(answer: httpx.Response) -> bool:
    try:
        value = answer.json()
    except json.JSONDecodeError:
        return False
    return isinstance(value, dict) and bool(value.get("choices"))


def _hidden(text: str, names: dict[str, str]) -> str:
    """Paths of this machine are no evidence: they are replaced by what they mean."""
    for path, name in names.items():
        text = text.replace(path, name)
    return text
