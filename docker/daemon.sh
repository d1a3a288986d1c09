#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# A Docker daemon of its own, for tests and for machines without an init system; another daemon is left alone.
#
#   docker/daemon.sh start DIR      prints the DOCKER_HOST to use; needs root and the package docker.io
#   docker/daemon.sh stop DIR       stops it and removes its state, unless KEEP=1
set -eu

fail() {
  echo "daemon: $1" >&2
  exit 1
}

[ $# -eq 2 ] || fail "usage: docker/daemon.sh start|stop DIR"
mkdir -p "$2"
dir=$(cd "$2" && pwd)
socket=$dir/docker.sock

running() {
  [ -f "$dir/pid" ] && [ "$(cat "/proc/$(cat "$dir/pid")/comm" 2>/dev/null)" = dockerd ]
}

case "$1" in
  start)
    [ "$(id -u)" -eq 0 ] || fail "needs root: run it with sudo"
    program=$(PATH="$PATH:/usr/sbin:/sbin" command -v dockerd) || fail "dockerd is missing: install the package docker.io"
    # A socket's address may have 107 bytes, and containerd's below it is longer than ours.
    [ "${#dir}" -le 60 ] || fail "$dir is too long a path for a socket: choose a shorter one"
    if ! running; then
      setsid "$program" --data-root "$dir/data" --exec-root "$dir/exec" --pidfile "$dir/pid" \
        --host "unix://$socket" >"$dir/log" 2>&1 </dev/null &
    fi
    tries=0
    until curl -sf --unix-socket "$socket" http://docker/_ping >/dev/null; do
      tries=$((tries + 1))
      [ "$tries" -lt 60 ] || { tail -5 "$dir/log" >&2; fail "it does not answer: see $dir/log"; }
      sleep 0.5
    done
    echo "unix://$socket"
    ;;
  stop)
    if running; then
      pid=$(cat "$dir/pid")
      kill "$pid"
      tries=0
      while [ -d "/proc/$pid" ]; do
        tries=$((tries + 1))
        [ "$tries" -lt 60 ] || fail "process $pid does not end"
        sleep 0.5
      done
    fi
    [ "${KEEP:-0}" = 1 ] || rm -rf "$dir"
    ;;
  *) fail "usage: docker/daemon.sh start|stop DIR" ;;
esac
