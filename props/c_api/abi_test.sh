#!/usr/bin/env bash
# abi_test.sh LIBRARY [--write]: programs that were linked with the release that
# kvtwin.abi describes run with this library (docs/c_interface.md, "Versions"). With
# --write, kvtwin.abi describes this library from now on. Exits with 77 without
# abidiff.
set -euo pipefail
library=$(realpath "$1")
cd "$(dirname "${BASH_SOURCE[0]}")"
command -v abidiff >/dev/null || {
  echo "skipped: the Debian package abigail-tools is not installed"
  exit 77
}
now=$(mktemp)
trap 'rm -f "$now"' EXIT
abidw --exported-interfaces-only --headers-dir ../../include/kvtwin \
  --drop-private-types --no-corpus-path --no-comp-dir-path --no-show-locs \
  --no-architecture --no-elf-needed --type-id-style hash "$library" >"$now"
if [ "${2:-}" = --write ]; then
  cp "$now" kvtwin.abi
  exit
fi
# New functions and new enumerators break no program.
if ! abidiff --no-added-syms --suppressions abi_changes.ini kvtwin.abi "$now"; then
  echo "the changes above break programs that were linked with kvtwin.abi"
  exit 1
fi
functions=$(grep -c '<function-decl' kvtwin.abi)
[ "$functions" -gt 100 ] || { echo "few functions are compared"; exit 1; }
echo "$functions functions are as in kvtwin.abi"
