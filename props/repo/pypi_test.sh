#!/usr/bin/env bash
# usage: pypi_test.sh INSTALLED GIB COMMAND...: runs the command. Unless
# INSTALLED exists, the command needs PyPI and this much disk; if either is
# missing, it is skipped (77), with the reason.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
installed=$1 gib=$2
shift 2

skip() {
  echo "skipped: $*"
  exit 77
}

if [ ! -e "$installed" ]; then
  place=$(mktemp -d)
  trap 'rm -rf "$place"' EXIT
  python3 -m venv "$place/venv" || skip "python3 has no venv"
  "$place/venv/bin/pip" download -q --retries 1 --no-deps -d "$place" \
    packaging==26.3 || skip "PyPI cannot be reached"
  [ "$(df -Pk . | awk 'END { print int($4 / 1048576) }')" -ge "$gib" ] ||
    skip "less than $gib GiB of disk are free"
fi
"$@"
