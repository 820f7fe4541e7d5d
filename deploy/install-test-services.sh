#!/bin/sh
# Install what the tests of the redis and mooncake backends need from the system: redis-server, and the
# shared libraries of Mooncake's wheel. For Debian and Ubuntu, as root; does nothing where nothing is missing.
# Where packages cannot be installed it says so and still succeeds: those tests are then skipped, with the reason.
set -eu

has_library() {
    { ldconfig -p 2>/dev/null || /sbin/ldconfig -p; } | grep -q "$1"
}

missing=""
command -v redis-server >/dev/null 2>&1 || missing="$missing redis-server"
has_library 'libibverbs\.so\.1 ' || missing="$missing libibverbs1"
has_library 'libnl-3\.so\.200 ' || missing="$missing libnl-3-200"
has_library 'libnl-route-3\.so\.200 ' || missing="$missing libnl-route-3-200"
has_library 'libnuma\.so\.1 ' || missing="$missing libnuma1"
has_library 'libcurl\.so\.4 ' || missing="$missing libcurl4"

if [ -z "$missing" ]; then
    echo "test services: nothing is missing"
    exit 0
fi

skip() {
    echo "test services: $1; the tests that need$missing will be skipped" >&2
    exit 0
}

command -v apt-get >/dev/null 2>&1 || skip "there is no apt-get here"
[ "$(id -u)" -eq 0 ] || skip "not root (try: sudo $0)"

export DEBIAN_FRONTEND=noninteractive
apt-get update -qq || skip "apt-get update failed"
# shellcheck disable=SC2086  # a list of package names
apt-get install -y -qq --no-install-recommends $missing || skip "apt-get install failed"
echo "test services: installed$missing"
