#!/usr/bin/env bash
# c_api_test.sh CMAKE CXX BUILD FLAGS: checks that libkvtwin.so exports exactly
# what its header declares, that the header is C99 and C++, and that the programs
# in docs/examples/c build and run with kvtwin as installed from BUILD.
set -euo pipefail
cmake=$1 cxx=$2 build=$3 flags=$4
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
prefix=$scratch/prefix
strict=(-pedantic -Wall -Wextra -Werror)

"$cmake" --install "$build" --prefix "$prefix" >"$scratch/log" ||
  { cat "$scratch/log"; exit 1; }
library=$(find "$prefix" -name libkvtwin.so)
export PKG_CONFIG_PATH
PKG_CONFIG_PATH=$(dirname "$library")/pkgconfig
export LD_LIBRARY_PATH
LD_LIBRARY_PATH=$(dirname "$library")

# The name of a declaration stands before its first bracket. Comments and the
# tables of backends are left out.
"$cxx" -E -P -x c -std=c99 -I "$prefix/include" "$prefix/include/kvtwin/kvtwin.h" |
  tr '\n' ' ' | tr ';' '\n' | grep -v typedef |
  grep -o '\bkvtwin_[a-z_0-9]*(' | tr -d '(' | sort -u >"$scratch/declared"
nm -D --defined-only "$library" | sed 's/^[0-9a-f]* //' |
  grep -v '^A KVTWIN_0.1$' | sort >"$scratch/shown"
sed 's/.*/T &@@KVTWIN_0.1/' "$scratch/declared" | sort >"$scratch/expected"
diff "$scratch/expected" "$scratch/shown" ||
  { echo "declared (<) and shown (>) differ"; exit 1; }
[ "$(wc -l <"$scratch/declared")" -gt 60 ] ||
  { echo "few functions are declared"; exit 1; }
readelf -d "$library" | grep -q 'SONAME.*\[libkvtwin.so.0\]' ||
  { echo "the SONAME is not libkvtwin.so.0"; exit 1; }

printf '#include <kvtwin/%s.h>\n' pool_backend kvtwin >"$scratch/header.c"
for language in "c -std=c99 -Wstrict-prototypes" "c -std=c11" "c++ -std=c++11" "c++ -std=c++20"; do
  # shellcheck disable=SC2086
  "$cxx" -x $language "${strict[@]}" -I "$prefix/include" -fsyntax-only \
    "$scratch/header.c"
done

for program in main attention; do
  # shellcheck disable=SC2086,SC2046
  "$cxx" -x c -std=c99 "${strict[@]}" $flags \
    "$root/docs/examples/c/$program.c" -x none -o "$scratch/$program" \
    $(pkg-config --cflags --libs kvtwin)
done
"$scratch/main" "$scratch/pass.jsonl" >"$scratch/out"
cat "$scratch/out"
grep -q '^kvtwin [0-9.]*: 2 tokens, K is \[1, 2, 2\]$' "$scratch/out"
grep -q 'pass.jsonl: accepted$' "$scratch/out"
diff - <("$scratch/attention") <<END
token 0: [1.0000 2.0000] [1.0000 2.0000]
token 1: [1.6605 2.6605] [2.3395 3.3395]
token 2: [3.0000 4.0000] [3.4067 4.4067]
END

# A project without C++ finds only the shared library.
mkdir "$scratch/project"
cat >"$scratch/project/CMakeLists.txt" <<END
cmake_minimum_required(VERSION 3.22)
project(c_only LANGUAGES C)
find_package(kvtwin REQUIRED)
add_executable(pass $root/docs/examples/c/main.c)
target_link_libraries(pass PRIVATE kvtwin::shared)
if(TARGET kvtwin::kvtwin)
  message(FATAL_ERROR "a C project has the C++ library")
endif()
END
"$cmake" -S "$scratch/project" -B "$scratch/project/build" \
  -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_C_FLAGS="$flags"
"$cmake" --build "$scratch/project/build"
"$scratch/project/build/pass" "$scratch/again.jsonl" >/dev/null
[ -s "$prefix"/share/doc/kvtwin/LICENSE ] || { echo "there is no LICENSE"; exit 1; }
[ "$(wc -l <"$scratch/pass.jsonl")" -eq 4 ]
