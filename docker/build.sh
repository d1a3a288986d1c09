#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds an engine image: docker/build.sh cpu|cuda [TAG]          default TAG: vllm-qualify-engine:cpu or :cuda
#
# With buildx: through docker-bake.hcl, which adds provenance and an SBOM where the builder can store them.
# Without it: the daemon's own BuildKit. BASE=IMAGE takes another base than the offline one. DOCKER names the client.
set -eu
cd "$(dirname "$0")/.."

engine=${1:-}
tag=${2:-vllm-qualify-engine:$engine}
docker=${DOCKER:-docker}
case "$engine" in
  cpu) sets="cpu" locks="requirements/torch-cpu.txt requirements/engine-cpu.txt" ;;
  cuda) sets="cpu cuda toolkit" locks="docker/requirements/engine-cuda.txt kernels/requirements/cuda-build.txt" ;;
  *) echo "usage: docker/build.sh cpu|cuda [TAG]" >&2; exit 2 ;;
esac

"$docker" version >/dev/null 2>&1 || {
  echo "build: no Docker daemon answers: start one (docker/daemon.sh start DIR) or set DOCKER_HOST" >&2
  exit 1
}

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
REVISION=$(git rev-parse HEAD 2>/dev/null || echo unknown)
[ -z "$(git status --porcelain 2>/dev/null)" ] || REVISION="$REVISION-dirty"
BASE_DIGEST=$("$docker" image inspect --format '{{.Id}}' "$BASE" 2>/dev/null || echo "${BASE#*@}")
export BASE LOCK_SHA256 REVISION BASE_DIGEST TAG="$tag"

if "$docker" buildx version >/dev/null 2>&1; then
  # Attestations are manifests beside the image's, which only the containerd store of images can hold.
  set --
  "$docker" info --format '{{.DriverStatus}}' | grep -q containerd || set -- --provenance=false --sbom=false
  exec "$docker" buildx bake --file docker/docker-bake.hcl --load "$@" "engine-$engine"
fi
# The network of the host, because the offline base knows only the mirror that this host can reach.
DOCKER_BUILDKIT=1 exec "$docker" build --network host --progress plain --file docker/Dockerfile \
  --target "engine-$engine" --tag "$tag" \
  --build-arg BASE="$BASE" --build-arg BASE_NAME="$BASE" --build-arg BASE_DIGEST="$BASE_DIGEST" \
  --build-arg REVISION="$REVISION" --build-arg LOCK_SHA256="$LOCK_SHA256" .
