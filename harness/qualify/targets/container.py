# SPDX-License-Identifier: Apache-2.0
"""The container target: the same boots as the local target, each in a container of the image under test.

The container itself does nothing; engine and cache server are run in it, each below the same supervisor as a local
process, so that either may die without the other. Two containers would be two groups for Linux's scheduler: engine
ranks that spin in sched_yield then keep the cache server off the CPU for many seconds (docs/image.md). The container
ends when its standard input does, which is a pipe from the harness: a harness that is killed takes it along, whatever
killed it. docs/image.md gives the reason for every option below.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import psutil
from pydantic import ValidationError

import qualify
from qualify.environment import ENGINE_LOCK, ROOT, TORCH_LOCK, EngineEnv
from qualify.errors import PreflightError, QualifyError, TargetError
from qualify.evidence import EvidenceWriter
from qualify.model import Record
from qualify.profiles import Boot
from qualify.publish import open_repository, read_saved_image
from qualify.receipt.model import IMAGE, Image
from qualify.records import BootRecord, EngineEnvironment
from qualify.registry import NotFound, Reference, RegistryError, Resolved, resolve
from qualify.targets import Launch
from qualify.targets.command import CONTAINER_WORK, Command
from qualify.targets.docker import OWNER_LABEL, DaemonError, Docker, DockerError, explain, owner
from qualify.targets.local import INTROSPECT, LocalRunning, Progress, title
from qualify.targets.process import Supervised

PLUGIN = "vllm-qout"
KIND_LABEL = "dev.vllm-qualify.engine"
LOCKS = {
    "cpu": (TORCH_LOCK, ENGINE_LOCK),
    "cuda": (ROOT / "docker" / "requirements" / "engine-cuda.txt",),
}

ENGINE = EngineEnv(python=Path("/opt/engine/bin/python"), path=Path("/opt/engine"), lock_digest=None)
"""The engine as it lies in every image of ours."""
WORK, SCRATCH, HOME = CONTAINER_WORK, "/tmp", "/home/engine"
SUPERVISOR = f"{WORK}/extension/qualify/targets/supervisor.py"
IMAGE_USER = 2000
"""The image's own user, who runs the engine when the harness is root; else the user of the harness does."""

ONCE_SECONDS = 300.0
"""Bound on a program that looks into the image: hashing every file takes 10 s from memory, minutes from a slow disk."""
CONTAINER_SECONDS = 60.0
PROCESSES = 8192
"""Processes and threads of one container: an engine has some hundreds, a runaway one has more."""
HOST_RESERVE = 1 << 30
"""Bytes of memory kept from the containers, so that one of them fails and not the harness."""


R = TypeVar("R", bound=Record)


@dataclass(frozen=True)
class Identified:
    """The image under test; `local_id` is what this daemon calls it, so that a tag moved later changes nothing."""

    image: Image
    local_id: str
    kind: str


class FileCheck(Record):
    """What `image-manifest verify` reports: the files of the image against the list made when it was built."""

    manifest_digest: str
    files: int
    unreadable: int
    modified: tuple[str, ...]
    missing: tuple[str, ...]
    added: tuple[str, ...]


class ContainerTarget:
    """Runs every boot in containers of one image. `cache` keeps compile caches of GPU engines between runs."""

    def __init__(self, reference: str, cache: Path, progress: Progress, docker: Docker | None = None) -> None:
        self._reference = Reference.parse(reference)
        self._cache = cache
        self._progress = progress
        self._docker = docker or Docker()
        self._identified: Identified | None = None
        self.label = f"image:{reference}"

    def supports(self, boot: Boot) -> bool:
        return True

    def environment(self) -> EngineEnvironment:
        """What is installed in the image, and whether each of its files is the one that was built.

        Raises PreflightError for a daemon, an image or a tag that cannot be used, TargetError for a broken image.
        """
        docker = self._docker
        docker.check()
        for removed in docker.reap():
            self._progress(f"removed the {removed} of a run that was killed")
        found = self._identify()
        self._progress("looking into the image")
        engine = self._introspect(found)
        if PLUGIN not in {distribution.name for distribution in engine.distributions}:
            raise PreflightError(
                f"the image {self._reference} has no {PLUGIN}",
                remedy="build one with docker/build.sh, or install the wheel in its engine",
            )
        checked = self._check_files(found)
        return engine.model_copy(
            update={
                "files_checked": engine.files_checked + checked.files,
                "files_modified": (
                    *engine.files_modified,
                    *(f"{path} (image)" for path in checked.modified),
                    *(f"{path} (image, missing)" for path in checked.missing),
                    *(f"{path} (image, added)" for path in checked.added),
                ),
            }
        )

    def contract(self) -> bytes:
        """The report of the operator's contract suite, run by the engine of the image. Raises TargetError."""
        found = self._identify()
        with tempfile.TemporaryDirectory(prefix="qualify-") as scratch:
            own(Path(scratch))
            argv = [str(ENGINE.python), "-m", "vllm_qout.contract", "--json", "/out/contract.json"]
            argv += ["--device", found.kind]
            mounts = [mount(Path(scratch), "/out", writable=True)]
            with contextlib.suppress(DockerError):  # failed cases end with a status, and are evidence
                self._once(found, [*mounts, *gpu_options(idle_gpus(1) if found.kind == "cuda" else ())], argv)
            try:
                return (Path(scratch) / "contract.json").read_bytes()
            except OSError:
                raise TargetError(
                    "the operator's contract suite left no report",
                    phase="operator contract",
                    remedy=f"run it: docker run --rm {self._reference} python -m vllm_qout.contract",
                ) from None

    def boot(self, launch: Launch) -> ContainerRunning:
        """Start and wait until a request was served. Raises TargetError; then nothing is left, but boot.json."""
        found = self._identify()
        wanted = launch.profile.engine.kind
        if found.kind != wanted:
            raise PreflightError(
                f"the image holds the {found.kind} engine, profile {launch.profile.name} is for {wanted}",
                remedy="choose the image or the profile that fits",
            )
        EvidenceWriter(launch.evidence.root).record(IMAGE, found.image)
        running = ContainerRunning(launch, found, self._docker, self._cache, self._progress)
        try:
            running.start()
        except BaseException:
            launch.evidence.record("boot.json", running.stop())
            raise
        return running

    def _identify(self) -> Identified:
        if self._identified is None:
            self._identified = identify(self._docker, self._reference, self._progress)
        return self._identified

    def _introspect(self, found: Identified) -> EngineEnvironment:
        mounts = [mount(INTROSPECT, "/introspect.py")]
        argv = [str(ENGINE.python), "-I", "/introspect.py"]
        for lock in LOCKS[found.kind]:
            mounts.append(mount(lock, f"/locks/{lock.name}"))
            argv += ["--lock", f"/locks/{lock.name}"]
        return self._describe(found, mounts, argv, EngineEnvironment, "its engine cannot be looked into")

    def _check_files(self, found: Identified) -> FileCheck:
        return self._describe(found, [], ["image-manifest", "verify"], FileCheck, "its files cannot be checked")

    def _describe(self, found: Identified, mounts: list[str], argv: list[str], kind: type[R], failure: str) -> R:
        """What a program of the image prints, as a record."""
        try:
            return kind.model_validate_json(self._once(found, mounts, argv), strict=False)
        except (DockerError, ValidationError) as error:
            why = error.what if isinstance(error, DockerError) else "it gave no description of itself"
            raise TargetError(
                f"image {self._reference}: {failure}: {why}",
                phase="introspect",
                remedy="build it with docker/build.sh",
            ) from None

    def _once(self, found: Identified, options: list[str], argv: list[str]) -> str:
        """The output of one program in a container of its own, without a network. Raises DockerError."""
        name = f"vllm-qualify-{os.getpid()}-once"
        fixed = ["--rm", "--name", name, "--label", f"{OWNER_LABEL}={owner()}", "--network", "none", *confinement()]
        try:
            return self._docker.call(
                "run", *fixed, *writable_in_memory(), *options, found.local_id, *argv, timeout=ONCE_SECONDS
            )
        except BaseException:
            self._docker.remove(name)  # the client may have been interrupted, and the container not
            raise


# Which image it is


def identify(docker: Docker, reference: Reference, progress: Progress) -> Identified:
    """Find or pull the image, and find out the digests that name it. Raises PreflightError.

    An image that came from a registry has the digests that it has there; one that never left this machine has the
    manifest that `publish` will push.
    """
    found = _inspect(docker, reference)
    if found is None:
        progress(f"pulling {reference}")
        try:
            docker.call("pull", "--quiet", str(reference), timeout=None)
        except DockerError as error:
            raise PreflightError(
                f"image {reference} is not here and cannot be pulled: {error.what}",
                remedy="build it with docker/build.sh, or check name and login",
            ) from None
        found = _inspect(docker, reference)
    if found is None:
        raise PreflightError(f"image {reference} is not here after it was pulled", remedy="see the daemon's log")
    labels = found.get("Config", {}).get("Labels") or {}
    kind = labels.get(KIND_LABEL)
    if kind not in LOCKS:
        raise PreflightError(
            f"the image {reference} is not one of this project's engines: it has no label {KIND_LABEL}",
            remedy="build one with docker/build.sh",
        )
    _refuse_moved_tag(docker, reference, found)
    digests = [
        entry.digest for entry in map(Reference.parse, found.get("RepoDigests") or ()) if entry.name == reference.name
    ]
    if digests and digests[0]:
        resolved = _ask_registry(replace(reference, digest=reference.digest or digests[0]))
        manifest, index = resolved.manifest, resolved.index
        if found["Id"] not in (manifest.config.digest, manifest.digest, index.digest if index else None):
            raise PreflightError(
                f"{reference} is {manifest.config.digest} in its registry and {found['Id']} here",
                remedy="pull it again",
            )
    else:
        progress("measuring the image, which is in no registry yet")
        with docker.save(found["Id"]) as stream:
            manifest, index = read_saved_image(stream).manifest, None
    image = Image(
        repository=reference.name,
        tag=reference.tag,
        manifest_digest=manifest.digest,
        index_digest=index.digest if index else None,
        config_digest=manifest.config.digest,
        platform=f"{found['Os']}/{found['Architecture']}",
    )
    return Identified(image, found["Id"], kind)


def _inspect(docker: Docker, reference: Reference) -> dict[str, Any] | None:
    return docker.inspect("image", str(reference.at(reference.digest) if reference.digest else reference))


def _refuse_moved_tag(docker: Docker, reference: Reference, found: Mapping[str, Any]) -> None:
    if reference.tag and reference.digest:
        tagged = docker.inspect("image", f"{reference.name}:{reference.tag}")
        if tagged is not None and tagged["Id"] != found["Id"]:
            raise PreflightError(
                f"tag {reference.tag} is {tagged['Id']} here, not the image of {reference.digest}",
                remedy="the tag was moved: name the image that you mean",
            )


def _ask_registry(reference: Reference) -> Resolved:
    """Manifest and index by tag and digest, which must agree; by digest alone where the registry has no such tag."""
    repository = open_repository(reference)
    try:
        try:
            return resolve(repository, reference)
        except NotFound:
            return resolve(repository, replace(reference, tag=None))
    except RegistryError as error:
        raise PreflightError(f"image {reference}: {error.what}", remedy=error.remedy) from None
    finally:
        repository.close()


# How its containers are confined


def user() -> str:
    """UID:GID of the containers. Group 0 owns what the image lets be written, whatever the UID."""
    return f"{os.getuid() or IMAGE_USER}:0"


def confinement() -> list[str]:
    """What every container gets: no root, no capabilities, no way to either, and nothing to write in the image."""
    return [
        *("--user", user(), "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--read-only"),
        *("--pids-limit", str(PROCESSES), "--no-healthcheck", "--log-driver", "none"),
    ]


def writable_in_memory() -> list[str]:
    """The two folders that programs write. Both allow execution: compiled kernels are loaded from there."""
    return [
        *("--tmpfs", f"{SCRATCH}:rw,exec,mode=1777"),
        *("--tmpfs", f"{HOME}:rw,exec,mode=0770,uid={user().split(':')[0]},gid=0"),
    ]


@dataclass(frozen=True)
class Card:
    """A GPU; `capability` names what compiled kernels are for, e.g. 9.0."""

    uuid: str
    capability: str


def gpu_options(cards: Sequence[Card]) -> list[str]:
    return ["--gpus", f'"device={",".join(card.uuid for card in cards)}"'] if cards else []


def mount(source: Path, target: str, *, writable: bool = False) -> str:
    """One --mount option. Raises PreflightError for a path that the option cannot carry."""
    if "," in str(source) or '"' in str(source):
        raise PreflightError(f"{source} cannot be mounted: its name has a comma or quote", remedy="rename it")
    return f"--mount=type=bind,source={source},target={target}{'' if writable else ',readonly'}"


def idle_gpus(count: int) -> tuple[Card, ...]:
    """GPUs that no process uses, in the driver's order. Raises PreflightError if there are too few."""
    query = ["nvidia-smi", "--query-gpu=uuid,compute_cap,memory.used", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        raise PreflightError(
            "nvidia-smi does not answer", remedy="install the NVIDIA driver, or use a CPU image"
        ) from None
    rows = [line.split(", ") for line in answer.splitlines() if line.startswith("GPU-")]
    idle = tuple(Card(uuid, capability) for uuid, capability, used in rows if int(used) < IDLE_MIB)
    if len(idle) < count:
        raise PreflightError(f"{count} idle GPUs are needed, {len(idle)} of {len(rows)} are", remedy="free them")
    return idle[:count]


IDLE_MIB = 512
"""Memory of a GPU in use below which it counts as idle: the driver alone takes some."""


class BootContainer:
    """The container of one boot, with an internal network of its own."""

    def __init__(self, docker: Docker, image: str, name: str) -> None:
        self._docker = docker
        self._image = image
        self.name = name
        self.address = ""
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, options: Sequence[str]) -> None:
        """Raises TargetError with the daemon's reason."""
        label = f"{OWNER_LABEL}={owner()}"
        self._docker.call("network", "create", "--internal", "--label", label, self.name)
        self._process = subprocess.Popen(
            [
                *(self._docker.program, "run", "--interactive", "--rm", "--name", self.name, "--label", label),
                *("--network", self.name, *confinement(), *options),
                *("--entrypoint", "/usr/bin/tini", self._image, "-s", "--", "cat"),
            ],
            env=self._docker.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            process_group=0,  # Ctrl-C is for the harness, which stops the engine first
        )
        deadline = time.monotonic() + CONTAINER_SECONDS
        while not self.address:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise TargetError(self._complaint(), phase="start of the container", remedy="see the daemon's log")
            time.sleep(0.1)
            found = self._docker.inspect("container", self.name) or {}
            if found.get("State", {}).get("Running"):
                self.address = found["NetworkSettings"]["Networks"][self.name]["IPAddress"]

    def runs(self) -> bool:
        return bool((self._docker.inspect("container", self.name) or {}).get("State", {}).get("Running"))

    def close(self) -> None:
        """Remove container and network. Raises DaemonError if the daemon is gone."""
        if self._process is not None:
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        self._docker.remove(self.name)
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        with contextlib.suppress(DockerError):
            self._docker.call("network", "rm", self.name)

    def _complaint(self) -> str:
        assert self._process is not None and self._process.stderr is not None
        if self._process.poll() is None:
            self._process.kill()
            return f"the container did not start within {CONTAINER_SECONDS:.0f} s"
        return explain("run", self._process.stderr.read().decode(errors="replace")).what


class Executed(Supervised):
    """A command in a container that runs already. Its supervisor runs there too, with standard input and output of the
    client for pipes; the command's output is what the client prints as errors."""

    def __init__(self, docker: Docker, container: str, command: Command, log: Path) -> None:
        options = [f"--env={key}={value}" for key, value in sorted(command.environment.items())]
        self._client = [
            docker.program,
            "exec",
            "--interactive",
            *options,
            container,
            "/usr/bin/python3",
            "-I",
            SUPERVISOR,
        ]
        super().__init__(command.argv, log=log, environment=docker.environment, cwd=Path(WORK))

    def _start(
        self, control: int, status: int, config: dict[str, object], environment: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        argv = [*self._client, "0", "1", json.dumps(config | {"log": None})]
        with self.log.open("ab") as log:
            return subprocess.Popen(argv, env=environment, stdin=control, stdout=status, stderr=log, process_group=0)

    def _lost(self) -> None:
        """The client is gone. What it ran ends with the container; its process number means nothing out here."""
        self._done = self._done or {"error": "its container or the daemon ended"}


class ContainerRunning(LocalRunning):
    """One boot: what LocalRunning does, in a container."""

    def __init__(self, launch: Launch, found: Identified, docker: Docker, cache: Path, progress: Progress) -> None:
        super().__init__(launch, ENGINE, progress)
        self._docker = docker
        name = f"vllm-qualify-{os.getpid()}-{launch.index:02d}-{launch.boot.name}"
        self._container = BootContainer(docker, found.local_id, name)
        self._gpus = idle_gpus(launch.profile.engine.tensor_parallel) if found.kind == "cuda" else ()
        self.gpus = tuple(card.uuid for card in self._gpus)
        self._home = compile_caches(cache, found.image, self._gpus) if self._gpus else None
        self._memory = psutil.virtual_memory().total - HOST_RESERVE
        self._places = replace(
            self._places, extension_path=f"{WORK}/extension", scratch=SCRATCH, compiled=f"{SCRATCH}/compiled"
        )

    def died(self) -> str | None:
        died = super().died()
        return died and (self._trouble() or died)

    def stop(self) -> BootRecord:
        if self._record is None:
            record = super().stop()
            left: tuple[str, ...] = ()
            try:
                self._container.close()
            except QualifyError as error:
                left = (f"container {self._container.name} ({error.what})",)
            self._record = record.model_copy(
                update={"leftovers": (*record.leftovers, *left), "facts": {"container": self._facts()}}
            )
        return self._record

    def _prepare(self) -> None:
        super()._prepare()
        self._progress("starting the container")
        self._container.start([*self._limits(), *self._mounts()])
        self.engine_url = f"http://{self._container.address}:{self._places.port}"
        if self.cache_url is not None:
            self.cache_url = f"http://{self._container.address}:{self._places.cache_http_port}"

    def _check_alive(self, phase: str) -> None:
        ended = any(process.wait(0.0) is not None for _, process in self._processes)
        if ended and (trouble := self._trouble()):
            raise TargetError(f"{trouble} during: {phase}", phase=phase, remedy="see the daemon's log, and run again")
        super()._check_alive(phase)

    def _trouble(self) -> str | None:
        """What ended a process from outside, if it was not the process itself."""
        try:
            return None if self._container.runs() else "the container was killed or removed"
        except DaemonError as error:
            return f"the Docker daemon went away ({error.what})"

    def _spawn(self, command: Command, log_name: str) -> Supervised:
        self._progress(f"starting the {title(command)}")
        command = self._reachable(command)
        process = Executed(self._docker, self._container.name, command, self._launch.evidence.path(log_name))
        self._processes.append((command, process))
        return process

    def _reachable(self, command: Command) -> Command:
        """The same command, reachable at the container's address instead of on its loopback."""
        argv = list(command.argv)
        option = "--http-host" if "--http-host" in argv else "--host"
        argv[argv.index(option) + 1] = self._container.address
        return replace(command, argv=tuple(argv))

    def _limits(self) -> list[str]:
        limits = ["--shm-size", str(self._memory // 2)]
        limits += ["--memory", str(self._memory), "--memory-swap", str(self._memory)]
        limits += ["--cpuset-cpus", ",".join(map(str, self._places.cpus))]
        limits += ["--ulimit", "core=0"]
        return [*limits, *gpu_options(self._gpus)]

    def _mounts(self) -> list[str]:
        package = Path(qualify.__file__).parent
        mounts = writable_in_memory()
        if self._home is not None:
            own(self._home)
            mounts = [*mounts[:2], mount(self._home, HOME, writable=True)]
        mounts.append(mount(package, f"{WORK}/extension/{package.name}"))
        if self._launch.model is not None:
            mounts.append(mount(self._launch.model.resolve(), f"{WORK}/{self._places.model}"))
        if self.storage is not None:
            own(self.storage)
            mounts.append(mount(self.storage.resolve(), f"{WORK}/{self._places.storage}", writable=True))
        return mounts

    def _facts(self) -> dict[str, Any]:
        return {
            "user": user(),
            "network": "internal bridge",
            "shmBytes": self._memory // 2,
            "memoryBytes": self._memory,
            "capabilities": [],
            "noNewPrivileges": True,
            "readOnlyRoot": True,
            "gpus": len(self._gpus),
            "writable": [SCRATCH, HOME, *([f"{WORK}/{self._places.storage}"] if self.storage else [])],
        }


def compile_caches(cache: Path, image: Image, cards: Sequence[Card]) -> Path:
    """The home folder of the engine, kept between runs, for one image on one kind of card."""
    kinds = "-".join(sorted({card.capability for card in cards}))
    return cache / "image-home" / f"{image.manifest_digest[7:19]}-{kinds}"


def own(folder: Path) -> None:
    """Make a folder that the containers may write, also where the harness is root and they are not."""
    folder.mkdir(parents=True, exist_ok=True)
    if os.getuid() == 0:
        shutil.chown(folder, IMAGE_USER, 0)
