# SPDX-License-Identifier: Apache-2.0
"""What several rooms need: a real registry, and what to do where a tool is missing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

import pytest


@pytest.fixture(scope="session")
def unavailable() -> Callable[[str], NoReturn]:
    """Called with the reason why a test cannot run here: a skip, and a failure where REQUIRE_ALL is set, as in CI."""
    return pytest.fail if os.environ.get("REQUIRE_ALL") else pytest.skip


@pytest.fixture(scope="session")
def distribution(tmp_path_factory: pytest.TempPathFactory, unavailable: Callable[[str], NoReturn]) -> Iterator[str]:
    """HOST:PORT of a real registry (distribution), which has no referrers interface."""
    program = shutil.which("docker-registry")
    if program is None:
        unavailable("docker-registry is not installed (Debian package docker-registry)")
    folder = tmp_path_factory.mktemp("distribution")
    config, log = folder / "config.yml", folder / "log"
    storage = f"storage: {{filesystem: {{rootdirectory: {folder}/data}}}}"
    config.write_text(f"version: 0.1\n{storage}\nhttp: {{addr: '127.0.0.1:0'}}\n")
    with log.open("w") as output:
        process = subprocess.Popen([program, "serve", str(config)], stderr=output)
    try:
        while not (found := re.search(r"listening on (127\.0\.0\.1:\d+)", log.read_text())):
            assert process.poll() is None, log.read_text()
            time.sleep(0.1)
        yield found[1]
    finally:
        process.terminate()
        process.wait(30)
        shutil.rmtree(folder)  # it may hold an image
