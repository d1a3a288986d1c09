#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Fills build/wheels/SET with the wheels of that set's lock files: docker/wheels.sh cpu|cuda|toolkit
#
# pip runs on the host, with the host's own configuration (index, proxy, certificates, folders of wheels), so that none
# of it has to reach the image build. The images have Python 3.11; this host's Python may be another one.
# TORCH_INDEX names the index that has the CPU build of torch, where the host's configuration does not.
set -eu
cd "$(dirname "$0")/.."

case "${1:-}" in
  cpu) locks="requirements/torch-cpu.txt requirements/engine-cpu.txt" ;;
  cuda) locks="docker/requirements/engine-cuda.txt" ;;
  toolkit) locks="kernels/requirements/cuda-build.txt" ;;
  *) echo "usage: docker/wheels.sh cpu|cuda|toolkit" >&2; exit 2 ;;
esac

folder=build/wheels/$1
stamp=$folder/.complete
# shellcheck disable=SC2086 # a list of files
wanted=$(cat $locks | sha256sum)
[ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ] || exit 0

platforms=""
for minor in $(seq 36 -1 5); do
  platforms="$platforms --platform manylinux_2_${minor}_x86_64"
done
platforms="$platforms --platform manylinux2014_x86_64 --platform manylinux2010_x86_64 --platform manylinux1_x86_64"

mkdir -p "$folder"
for lock in $locks; do
  # shellcheck disable=SC2086
  ${PYTHON:-python3} -m pip download --quiet --disable-pip-version-check --no-deps --require-hashes \
    --only-binary :all: --python-version 3.11 --implementation cp --abi cp311 --abi abi3 --abi none \
    $platforms --platform linux_x86_64 ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} \
    --dest "$folder" --requirement "$lock" || {
    echo "wheels: $lock cannot be downloaded: see pip's messages above" >&2
    exit 1
  }
done
echo "$wanted" >"$stamp"
