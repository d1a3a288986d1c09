# SPDX-License-Identifier: Apache-2.0
"""The CPU engine image itself, as docker/build.sh makes it."""

import json
import re

import pytest
from qualify.targets.container import PLUGIN, FileCheck, confinement, writable_in_memory

pytestmark = pytest.mark.docker

MAX_BYTES = 4_500_000_000


@pytest.fixture
def built(docker, image):
    """What the daemon knows about the image."""
    return docker.inspect("image", image)


@pytest.fixture
def run(docker, built):
    """The output of a program of the image, confined as the harness does it: run(*argv, options=(...))."""

    def run(*argv, options=()):
        confined = ["--rm", "--network", "none", *confinement(), *writable_in_memory()]
        return docker.call("run", *confined, *options, built["Id"], *argv, timeout=300)

    return run


def test_rebuild_gives_the_same_image(docker, image, built, build):
    """Without changes every layer is the same again, and comes from the build cache."""
    output = build("cpu")
    assert docker.inspect("image", image)["RootFS"] == built["RootFS"]
    assert is_cached(output, "tree-cpu") and is_cached(output, "engine-cpu")


def is_cached(output, stage):
    """Whether the last step of a build stage came from the cache."""
    step = re.findall(rf"^#(\d+) \[{stage} ", output, re.MULTILINE)[-1]
    return f"#{step} CACHED" in output.splitlines()


def test_kernels_of_the_cuda_image_compile(build):
    """nvcc from the locked wheels compiles the operator as for the CUDA image; the build itself checks that the library
    has machine code for every card that is claimed, and no PTX."""
    assert re.search(r"\[plugin-cuda .*check-sass \S+ sm_90a sm_100a sm_120a$", build("kernels"), re.MULTILINE)


def test_size_budget(built):
    """The CPU image stays within its budget."""
    assert built["Size"] <= MAX_BYTES


def test_labels_name_sources_and_no_result(built):
    """Sources, versions and lock are named; a test result would be a statement of the image about itself."""
    labels = built["Config"]["Labels"]
    for name in ("org.opencontainers.image.revision", "org.opencontainers.image.base.digest"):
        assert labels[name] not in ("", "unknown")
    assert len(labels["dev.vllm-qualify.lock.sha256"]) == 64
    assert not [name for name in labels if "result" in name or "passed" in name or "receipt" in name]


def test_image_runs_without_root(built):
    """The default user is not root, and the image answers for its health."""
    assert built["Config"]["User"] == "2000:0"
    assert built["Config"]["Healthcheck"]["Test"] == ["CMD", "healthcheck"]


def test_every_file_is_as_built(run):
    """Nothing differs from the list made at build time."""
    check = FileCheck.model_validate_json(run("image-manifest", "verify"), strict=False)
    assert (check.modified, check.missing, check.added) == ((), (), ())
    assert check.files > 10_000
    assert check.unreadable < 20, "only what the system keeps from users"


def test_a_file_mounted_over_the_engine_is_seen(run, tmp_path):
    """A mount that replaces a file of the image makes that file missing."""
    other = tmp_path / "healthcheck"
    other.write_text("other")
    options = ["--mount", f"type=bind,source={other},target=/usr/local/bin/healthcheck,readonly"]
    check = FileCheck.model_validate_json(run("image-manifest", "verify", options=options), strict=False)
    assert check.missing == ("/usr/local/bin/healthcheck",)


def test_any_user_can_run_the_engine(run):
    """A user that no file knows, with a read-only root: the engine and the plugin are importable, home is writable."""
    program = (
        "import vllm, vllm_qout, getpass, pathlib; pathlib.Path.home().joinpath('x').touch(); print(getpass.getuser())"
    )
    home = ["--tmpfs", "/home/engine:rw,exec,mode=0770,uid=54321,gid=0"]
    assert run("python", "-c", program, options=["--user", "54321:0", *home]).splitlines()[-1] == "engine"


def test_development_endpoints_stay_closed(run):
    """A variable that came along by accident does not open them."""
    program = "import os; print(os.environ.get('VLLM_SERVER_DEV_MODE'))"
    assert run("python", "-c", program, options=["--env", "VLLM_SERVER_DEV_MODE=1"]) == "None\n"


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
