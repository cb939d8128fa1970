#!/usr/bin/env bash
# serve_test.sh CMAKE CXX BUILD FLAGS LAUNCHER: the server in docs/examples/serve
# builds without warnings against kvtwin as installed from BUILD, and passes its
# tests with a tiny random model. Skipped if a library that it needs is missing.
set -eu
cmake=$1 cxx=$2 build=$3 flags=$4 launcher=$5
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
skip() { echo "skipped: $1 is missing" && exit 77; }
command -v python3 >/dev/null || skip python3
command -v pkg-config >/dev/null || skip pkg-config
for library in libpcre2-8 cpp-httplib; do
  pkg-config --exists "$library" || skip "$library"
done
for header in dnnl.hpp openssl/ssl.h eigen3/Eigen/Dense; do
  echo "#include <$header>" | "$cxx" -E -x c++ - >/dev/null 2>&1 || skip "$header"
done
# The folder stays, so that the next run compiles only what has changed.
scratch=$build/serve_example
mkdir -p "$scratch"

"$cmake" --install "$build" --prefix "$scratch/prefix" >"$scratch/log" ||
  { cat "$scratch/log"; exit 1; }
# Headers are compiled once for all sources, without optimization: the model is
# tiny.
"$cmake" -S "$root/docs/examples/serve" -B "$scratch/serve" \
  -DCMAKE_CXX_COMPILER="$cxx" -DCMAKE_CXX_FLAGS="$flags" \
  -DCMAKE_CXX_COMPILER_LAUNCHER="$launcher" -DCMAKE_BUILD_TYPE=Debug \
  -DCMAKE_CXX_FLAGS_DEBUG= -DCMAKE_UNITY_BUILD=ON \
  -DCMAKE_PREFIX_PATH="$scratch/prefix"
"$cmake" --build "$scratch/serve"
python3 "$root/docs/examples/serve/test_serve.py" "$scratch/serve"
