#!/usr/bin/env bash
# link_test.sh CMAKE CXX BUILD FLAGS OPENMP: the project in docs/examples/link
# builds without warnings and runs against kvtwin as installed from BUILD,
# prints the output that README.md shows, and configures with kvtwin as a
# subdirectory. README.md shows its source.
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
awk '/^```cpp$/ { shown = 1; next } /^```$/ { shown = 0 } shown' \
  "$root/README.md" | diff - "$root/docs/examples/link/main.cc"

configure -B "$scratch/installed" -DCMAKE_PREFIX_PATH="$scratch/prefix"
"$cmake" --build "$scratch/installed"
"$scratch/installed/hello" >"$scratch/printed"
sed -n '/^sequence [0-9] attends/p' "$root/README.md" | diff - "$scratch/printed"

if command -v pkg-config >/dev/null; then
  PKG_CONFIG_PATH=$(dirname "$(find "$scratch/prefix" -name kvtwin-cxx.pc)")
  export PKG_CONFIG_PATH
  # shellcheck disable=SC2046,SC2086
  "$cxx" -std=c++20 $flags "$root/docs/examples/link/main.cc" -o "$scratch/hello" \
    $(pkg-config --cflags --libs kvtwin-cxx)
  "$scratch/hello" | diff - "$scratch/printed"
fi

configure -B "$scratch/folder" -DKVTWIN_FOLDER="$root"
# Nothing is built there yet: cmake says so, and copies nothing.
"$cmake" --install "$scratch/folder" --prefix "$scratch/empty" 2>"$scratch/log" &&
  { echo "installed what is not built"; exit 1; }
grep -q 'is not built yet' "$scratch/log"
[ ! -e "$scratch/empty" ] || { echo "copied a part of it"; exit 1; }

# CMake finds all that it needs in what the recipe for Conan exports.
mapfile -t exported < <(sed -n '/for what in/,/:$/p' \
  "$root/docs/install/conanfile.py" | grep -o '"[^"]*"' | tr -d '"')
mkdir "$scratch/exported"
tar -c -C "$root" "${exported[@]%/\*}" | tar -x -C "$scratch/exported"
"$cmake" -S "$scratch/exported" -B "$scratch/recipe" \
  -DCMAKE_CXX_COMPILER="$cxx" -DKVTWIN_COMMAND=OFF -DKVTWIN_OPENMP="$openmp"
