#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes the lock files anew: requirements/lock.sh (or `make lock`). Needs uv, found in PATH or named by UV.
# torch-cpu.txt is kept by hand.
set -euo pipefail
cd "$(dirname "$0")/.."

compile() {
  "${UV:-uv}" pip compile --quiet --upgrade --generate-hashes --custom-compile-command requirements/lock.sh "$@"
}

compile pyproject.toml --group setup --universal --python-version 3.11 --output-file requirements/host.txt
compile pyproject.toml --group dev --universal --python-version 3.11 \
  --constraints requirements/host.txt --output-file requirements/dev.txt

# One lock for all supported Python versions: what the oldest needs must be exactly what the others need.
engine() {
  compile requirements/engine-cpu.in --excludes requirements/engine-cpu.excludes --only-binary :all: --no-annotate \
    --python-platform x86_64-manylinux_2_31 --python-version "$@"
}
engine 3.11 --output-file requirements/engine-cpu.txt
for version in 3.12 3.13; do
  if ! engine "$version" --constraints requirements/engine-cpu.txt | diff requirements/engine-cpu.txt -; then
    echo "lock.sh: Python 3.11 and $version need different packages: name those above in requirements/engine-cpu.in" >&2
    exit 1
  fi
done

# For the one Python that GPU hosts without a network have; `qualify bundle` makes the engine from it.
compile requirements/engine-cuda.in --excludes requirements/engine-cuda.excludes --only-binary :all: --no-annotate \
  --python-platform x86_64-manylinux_2_34 --python-version 3.12 --output-file requirements/engine-cuda.txt

compile kernels/requirements/test.in --universal --python-version 3.11 --no-annotate \
  --output-file kernels/requirements/test.txt
