#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds an engine image: docker/build.sh cpu|cuda|kernels [TAG]      default TAG: vllm-qualify-engine:cpu, ...
#
# kernels: only vllm-qout, compiled as for the CUDA image; needs neither the wheels of the CUDA engine nor a GPU.
# With buildx: through docker-bake.hcl, which adds provenance and an SBOM where the builder can store them.
# Without it: the daemon's own BuildKit, which clients older than 23 can use. BASE=IMAGE takes another base than the
# offline one. DOCKER names the client.
set -eu
cd "$(dirname "$0")/.."

what=${1:-}
tag=${2:-vllm-qualify-engine:$what}
toolkit=kernels/requirements/cuda-build.txt
case "$what" in
  cpu) target=engine-cpu sets="cpu" locks="requirements/torch-cpu.txt requirements/engine-cpu.txt" ;;
  cuda) target=engine-cuda sets="cpu cuda toolkit" locks="docker/requirements/engine-cuda.txt $toolkit" ;;
  kernels) target=kernels-cuda sets="cpu toolkit" locks="$toolkit" ;;
  *) echo "usage: docker/build.sh cpu|cuda|kernels [TAG]" >&2; exit 2 ;;
esac

fail() {
  echo "build: $1" >&2
  exit 1
}

can_build() {
  "$1" buildx version >/dev/null 2>&1 || "$1" --version 2>/dev/null | grep -Eq ' version (1[89]|2[0-2])\.'
}

# The client that is first in PATH may be another one than that of the daemon's package, and without buildx.
docker=${DOCKER:-}
for client in docker /usr/bin/docker; do
  [ -n "$docker" ] || ! can_build "$client" || docker=$client
done
[ -n "$docker" ] || fail "no docker client here can build: install buildx, or the package docker.io"
export DOCKER="$docker"
"$docker" version >/dev/null 2>&1 ||
  fail "no Docker daemon answers: start one (docker/daemon.sh start DIR) or set DOCKER_HOST"

if [ -z "${BASE:-}" ]; then
  BASE=vllm-qualify-base:bookworm
  "$docker" image inspect "$BASE" >/dev/null 2>&1 || docker/offline-base.sh "$BASE"
fi
for set in $sets; do
  docker/wheels.sh "$set"
done
mkdir -p build/wheels/cpu build/wheels/cuda build/wheels/toolkit

# shellcheck disable=SC2086 # a list of files
LOCK_SHA256=$(cat $locks | sha256sum | cut -d' ' -f1)
# An address that anybody can use: not a path of this machine, and without a login in it.
SOURCE=${SOURCE:-$(git remote get-url origin 2>/dev/null | grep -E '^https://[^@]+$' || echo unknown)}
REVISION=$(git rev-parse HEAD 2>/dev/null || echo unknown)
[ -z "$(git status --porcelain 2>/dev/null)" ] || REVISION="$REVISION-dirty"
BASE_DIGEST=$("$docker" image inspect --format '{{.Id}}' "$BASE" 2>/dev/null || echo "${BASE#*@}")
export BASE LOCK_SHA256 SOURCE REVISION BASE_DIGEST TAG="$tag"

if "$docker" buildx version >/dev/null 2>&1; then
  # Attestations are manifests beside the image's, which only the containerd store of images can hold.
  set --
  "$docker" info --format '{{.DriverStatus}}' | grep -q containerd || set -- --provenance=false --sbom=false
  exec "$docker" buildx bake --file docker/docker-bake.hcl --load "$@" "$target"
fi
# The network of the host, because the offline base knows only the mirror that this host can reach.
DOCKER_BUILDKIT=1 exec "$docker" build --network host --progress plain --file docker/Dockerfile \
  --target "$target" --tag "$tag" \
  --build-arg BASE="$BASE" --build-arg BASE_NAME="$BASE" --build-arg BASE_DIGEST="$BASE_DIGEST" \
  --build-arg SOURCE="$SOURCE" --build-arg REVISION="$REVISION" --build-arg LOCK_SHA256="$LOCK_SHA256" .
