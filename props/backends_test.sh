#!/usr/bin/env bash
# usage: backends_test.sh NAME KVTWIN: ./dev backends NAME, unless what it needs
# cannot be had here.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

skip() {
  echo "skipped: $*"
  exit 77
}

home=build/backends/$1
if ! cmp -s "docs/backends/requirements-$1.txt" "$home/installed.txt"; then
  place=$(mktemp -d)
  trap 'rm -rf "$place"' EXIT
  python3 -m venv "$place/venv" || skip "python3 has no venv"
  "$place/venv/bin/pip" download -q --retries 1 --no-deps -d "$place" \
    packaging==26.3 || skip "PyPI cannot be reached"
  [ "$(df -Pk . | awk 'END { print int($4 / 1048576) }')" -ge 10 ] ||
    skip "less than 10 GiB of disk are free"
fi
KVTWIN=$2 ./dev backends "$1"
