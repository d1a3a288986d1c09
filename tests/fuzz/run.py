# SPDX-License-Identifier: Apache-2.0
"""Fuzzes all readers for a while, without a network or an installation.

    python3.12 tests/fuzz/run.py --wheels FOLDER --out FOLDER [--processes 16] [--seconds 150]

FOLDER of `--wheels` holds what the harnesses import, for the Python that runs this:
`pip download atheris click httpx jsonschema psutil pydantic pytest rfc8785 rich`. Readers take turns among the
processes. A process that finds a crash is started again, so the time is always spent. Prints for each reader its
executions, crashes and CPU seconds; below `--out` lie the crashing inputs and the corpus, minimized. The exit status
is 1 if anything crashed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MAX_LENGTH = {"log": 4096, "metrics": 4096, "profile": 6144, "receipt": 8192}
"""Bytes of an input, by reader. A whole statement of the small receipt has 5 KiB."""
EXECUTED = re.compile(rb"stat::number_of_executed_units: (\d+)")


@dataclass
class Tally:
    executions: int = 0
    crashes: int = 0
    cpu_seconds: float = 0.0


def unpack(wheels: Path, site: Path) -> None:
    """An installation by hand: these wheels need no installer."""
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)


def seed(site: Path, reader: str, folder: Path) -> Path:
    """The committed corpus, and what the reader reads when nothing is wrong."""
    folder.mkdir(parents=True)
    committed = HERE / "corpus" / reader
    inputs = [path.read_bytes() for path in committed.iterdir()] if committed.is_dir() else []
    if reader == "profile":
        inputs += [path.read_bytes() for path in (ROOT / "harness" / "qualify" / "profiles").glob("*.toml")]
    for number, content in enumerate(inputs):
        (folder / f"seed-{number}").write_bytes(content)
    if reader == "receipt":
        program = (
            "import sys, pathlib, fuzz_receipt\n"
            "for number, content in enumerate(fuzz_receipt.seeds()):\n"
            "    pathlib.Path(sys.argv[1], f'made-{number}').write_bytes(content)"
        )
        argv = [sys.executable, "-c", program, str(folder)]
        subprocess.run(argv, env=variables(site), check=True, stderr=subprocess.DEVNULL)
    return folder


def variables(site: Path) -> dict[str, str]:
    paths = os.pathsep.join(map(str, (site, ROOT / "harness", HERE)))
    # The fuzzer ends without clean-up, so what the harnesses make temporarily lies below the output.
    return {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(site)}


def fuzz(site: Path, reader: str, seeds: Path, out: Path, number: int, until: float) -> Tally:
    """One process after the other until the time is up; each new one goes on with the corpus of the last."""
    tally = Tally()
    corpus, crashes = out / "work" / f"{reader}-{number}", out / "crashes" / reader
    corpus.mkdir(parents=True)
    crashes.mkdir(parents=True, exist_ok=True)
    while (left := int(until - time.monotonic())) > 0:
        argv = [sys.executable, str(HERE / f"fuzz_{reader}.py"), f"-max_total_time={left}", "-print_final_stats=1"]
        argv += [f"-max_len={MAX_LENGTH[reader]}", "-timeout=25", "-rss_limit_mb=2500"]
        argv += [f"-artifact_prefix={crashes}/{number}-", str(corpus), str(seeds)]
        log = out / "work" / f"{reader}-{number}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(argv, env=variables(site), stdout=file, stderr=file)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        executed = EXECUTED.findall(log.read_bytes())
        tally.executions += int(executed[-1]) if executed else 0
        tally.cpu_seconds += usage.ru_utime + usage.ru_stime
        if process.returncode != 0:
            tally.crashes += 1
            with (out / "crashes.log").open("ab") as file:
                file.write(b"".join(log.read_bytes().splitlines(keepends=True)[-40:]))
    return tally


def minimize(site: Path, reader: str, out: Path) -> None:
    """All corpora of a reader merged into the inputs that reach something."""
    merged = out / "corpus" / reader
    merged.mkdir(parents=True)
    found = [str(path) for path in (out / "work").glob(f"{reader}-*") if path.is_dir()]
    # The merger starts itself again through a shell, by the name that it was called.
    program = f"import sys, atheris, fuzz_{reader} as it; atheris.Setup(sys.argv[1:], it.check)"
    called = f"{sys.executable} {HERE / f'fuzz_{reader}.py'}"
    argv = [sys.executable, "-c", f"{program}; atheris.Fuzz()", called, "-merge=1", str(merged), *found]
    subprocess.run(argv, env=variables(site), capture_output=True, timeout=600, check=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--wheels", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=int, default=150)
    options = parser.parse_args()
    if options.out.exists():
        parser.error(f"{options.out} exists")
    if options.processes < len(MAX_LENGTH):
        parser.error(f"--processes must be at least {len(MAX_LENGTH)}, one for each reader")
    options.out.mkdir(parents=True)
    out = options.out.resolve()
    site = out / "site"
    unpack(options.wheels, site)
    readers = list(MAX_LENGTH)
    seeds = {reader: seed(site, reader, out / "seeds" / reader) for reader in readers}
    turns = [(readers[number % len(readers)], number) for number in range(options.processes)]
    until = time.monotonic() + options.seconds
    with ThreadPoolExecutor(len(turns)) as pool:
        jobs = [
            (reader, pool.submit(fuzz, site, reader, seeds[reader], out, number, until)) for reader, number in turns
        ]
        tallies = [(reader, job.result()) for reader, job in jobs]
    with ThreadPoolExecutor(len(readers)) as pool:
        list(pool.map(lambda reader: minimize(site, reader, out), readers))
    for name in ("site", "work", "seeds"):
        shutil.rmtree(out / name)
    for reader in readers:
        mine = [tally for name, tally in tallies if name == reader]
        executions, crashes = sum(tally.executions for tally in mine), sum(tally.crashes for tally in mine)
        seconds = sum(tally.cpu_seconds for tally in mine)
        print(f"{reader}: {executions} executions, {crashes} crashes, {seconds:.0f} CPU seconds")
    print(f"all: {sum(tally.cpu_seconds for _, tally in tallies) / 60:.1f} CPU minutes")
    return 1 if any(tally.crashes for _, tally in tallies) else 0


if __name__ == "__main__":
    sys.exit(main())
