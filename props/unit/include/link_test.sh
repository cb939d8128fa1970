#!/usr/bin/env bash
# link_test.sh CMAKE CXX BUILD FLAGS OPENMP: the project in docs/examples/link builds
# and runs against kvtwin as installed from BUILD, and configures with kvtwin as
# a folder of its own.
set -eu
cmake=$1 cxx=$2 build=$3 flags=$4 openmp=$5
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

"$cmake" --install "$build" --prefix "$scratch/prefix" >"$scratch/log" ||
  { cat "$scratch/log"; exit 1; }

configure() {
  "$cmake" -S "$root/docs/examples/link" -DCMAKE_CXX_COMPILER="$cxx" \
    -DCMAKE_CXX_FLAGS="$flags" -DKVTWIN_OPENMP="$openmp" "$@"
}
configure -B "$scratch/installed" -DCMAKE_PREFIX_PATH="$scratch/prefix"
"$cmake" --build "$scratch/installed"
"$scratch/installed/hello"

configure -B "$scratch/folder" -DKVTWIN_FOLDER="$root"
