#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Makes docker/requirements/engine-cuda.txt anew. Needs uv, found in PATH or named by UV.
set -eu
cd "$(dirname "$0")/../.."

"${UV:-uv}" pip compile docker/requirements/engine-cuda.in --output-file docker/requirements/engine-cuda.txt \
  --quiet --upgrade --generate-hashes --only-binary :all: --no-annotate \
  --python-platform x86_64-manylinux_2_31 --python-version 3.11 \
  --custom-compile-command docker/requirements/lock.sh
