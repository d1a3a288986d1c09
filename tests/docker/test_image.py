# SPDX-License-Identifier: Apache-2.0
"""The CPU engine image itself. Skipped until docker/build.sh cpu has made it (or IMAGE names another tag)."""

import json
import os

import pytest
from qualify.targets.container import PLUGIN, FileCheck, confinement, writable_in_memory

pytestmark = pytest.mark.docker

IMAGE = os.environ.get("IMAGE", "vllm-qualify-engine:cpu")
MAX_BYTES = 4_500_000_000


@pytest.fixture(scope="module")
def image(docker):
    found = docker.inspect("image", IMAGE)
    if found is None:
        pytest.skip(f"{IMAGE} is not built: docker/build.sh cpu")
    return found


@pytest.fixture
def run(docker, image):
    """The output of a program of the image, confined as the harness does it: run(*argv, options=(...))."""

    def run(*argv, options=()):
        confined = ["--rm", "--network", "none", *confinement(), *writable_in_memory()]
        return docker.call("run", *confined, *options, image["Id"], *argv, timeout=300)

    return run


def test_size_budget(image):
    """The CPU image stays within its budget."""
    assert image["Size"] <= MAX_BYTES


def test_labels_name_sources_and_no_result(image):
    """Sources, versions and lock are named; a test result would be a statement of the image about itself."""
    labels = image["Config"]["Labels"]
    for name in ("org.opencontainers.image.revision", "org.opencontainers.image.base.digest"):
        assert labels[name] not in ("", "unknown")
    assert len(labels["dev.vllm-qualify.lock.sha256"]) == 64
    assert not [name for name in labels if "result" in name or "passed" in name or "receipt" in name]


def test_image_runs_without_root(image):
    """The default user is not root, and the image answers for its health."""
    assert image["Config"]["User"] == "2000:0"
    assert image["Config"]["Healthcheck"]["Test"] == ["CMD", "healthcheck"]


def test_every_file_is_as_built(run):
    """Nothing differs from the list made at build time."""
    check = FileCheck.model_validate_json(run("image-manifest", "verify"), strict=False)
    assert (check.modified, check.missing, check.added) == ((), (), ())
    assert check.files > 10_000
    assert check.unreadable < 20, "only what the system keeps from users"


def test_a_file_mounted_over_the_engine_is_seen(run, tmp_path):
    """A mount that replaces a file of the image makes that file missing."""
    other = tmp_path / "settle"
    other.write_text("other")
    options = ["--mount", f"type=bind,source={other},target=/usr/local/sbin/settle,readonly"]
    check = FileCheck.model_validate_json(run("image-manifest", "verify", options=options), strict=False)
    assert check.missing == ("/usr/local/sbin/settle",)


def test_any_user_can_run_the_engine(run):
    """A user that no file knows, with a read-only root: the engine and the plugin are importable, home is writable."""
    program = (
        "import vllm, vllm_qout, getpass, pathlib; pathlib.Path.home().joinpath('x').touch(); print(getpass.getuser())"
    )
    home = ["--tmpfs", "/home/engine:rw,exec,mode=0770,uid=54321,gid=0"]
    assert run("python", "-c", program, options=["--user", "54321:0", *home]).splitlines()[-1] == "engine"


def test_development_endpoints_need_consent(run):
    """The variable alone, which may have come along by accident, does not open them."""
    program = "import os; print(os.environ.get('VLLM_SERVER_DEV_MODE'))"
    asked = ["--env", "VLLM_SERVER_DEV_MODE=1"]
    assert run("python", "-c", program, options=asked) == "None\n"
    assert run("python", "-c", program, options=[*asked, "--env", "QUALIFY_PRIVATE_NETWORK=1"]) == "1\n"


def test_plugin_and_lock(run):
    """The plugin is installed with its compiled library, beside exactly one torch, the CPU build."""
    program = (
        "import json, pathlib; from importlib import metadata as m; d = m.distribution('vllm-qout');"
        "print(json.dumps([d.name, m.version('torch'), sorted(str(f) for f in d.files if str(f).endswith('.so'))]))"
    )
    name, torch, libraries = json.loads(run("python", "-c", program))
    assert (name, torch, libraries) == (PLUGIN, "2.13.0+cpu", ["vllm_qout/libvllm_qout.so"])


def test_nothing_of_the_build_is_left(run):
    """No package lists, no caches, no pip, no wheels, no compiler but the one that compiles at run time."""
    program = (
        "import os, shutil;"
        "print([p for p in ('/var/lib/apt/lists', '/var/cache/apt', '/root/.cache', '/wheels', '/kernels')"
        " if os.path.isdir(p) and os.access(p, os.R_OK) and os.listdir(p)],"
        " [n for n in ('pip', 'pip3', 'cmake', 'make', 'nvcc', 'git', 'clang') if shutil.which(n)])"
    )
    assert run("python", "-c", program) == "[] []\n"
