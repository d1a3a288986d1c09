#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# A Debian base image for machines that can reach a package mirror but no image registry.
#
#   docker/offline-base.sh [TAG]        default TAG: vllm-qualify-base:bookworm
#
# Needs root (debootstrap makes device nodes and changes root). MIRROR overrides debootstrap's own default.
# The layer is deterministic for one state of the mirror: sorted, fixed times, no caches, no logs, no host identity.
set -eu

tag=${1:-vllm-qualify-base:bookworm}
suite=bookworm
epoch=${SOURCE_DATE_EPOCH:-0}
docker=${DOCKER:-docker}

fail() {
  echo "offline-base: $1" >&2
  exit 1
}

[ "$(id -u)" -eq 0 ] || fail "needs root: run it with sudo"
command -v debootstrap >/dev/null || fail "debootstrap is missing: install the package debootstrap"
"$docker" version >/dev/null 2>&1 || fail "no Docker daemon answers: start one (docker/daemon.sh start DIR) or set DOCKER_HOST"

root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT INT TERM

debootstrap --variant=minbase --include=ca-certificates "$suite" "$root" ${MIRROR:+"$MIRROR"} >"$root.log" 2>&1 || {
  tail -5 "$root.log" >&2
  rm -f "$root.log"
  fail "debootstrap failed"
}
rm -f "$root.log"

# What differs between two runs, or names the machine that ran them.
rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/var/log/* "$root"/var/cache/ldconfig/*
# A container engine mounts over these; were they missing, it would make and remove them, and so date /etc.
for file in machine-id hostname hosts resolv.conf; do
  : >"$root/etc/$file"
done

tar --sort=name --mtime="@$epoch" --numeric-owner -C "$root" -c . |
  "$docker" import --change 'CMD ["/bin/bash"]' - "$tag" >/dev/null
echo "$tag $("$docker" image inspect --format '{{index .RootFS.Layers 0}}' "$tag")"
