#!/usr/bin/env bash
# How OSS-Fuzz and ClusterFuzzLite build the fuzzers: CXX, CXXFLAGS,
# LIB_FUZZING_ENGINE, SRC, WORK and OUT are theirs.
set -euo pipefail

# The packages that are linked have been built with the other library.
flags=${CXXFLAGS//-stdlib=libc++/}
cmake -S "$SRC/kvtwin" -B "$WORK/kvtwin" -G Ninja \
  -DCMAKE_BUILD_TYPE=None -DCMAKE_CXX_COMPILER="$CXX" -DCMAKE_CXX_FLAGS="$flags" \
  -DCMAKE_BUILD_RPATH="\$ORIGIN/lib" -DKVTWIN_OPENMP=OFF -DKVTWIN_WERROR=OFF \
  -DKVTWIN_FUZZING_ENGINE="$LIB_FUZZING_ENGINE"
cmake --build "$WORK/kvtwin"

mkdir -p "$OUT/lib"
for corpus in "$SRC"/kvtwin/props/fuzzers/corpus/*.corpus; do
  name=$(basename "$corpus" .corpus)
  fuzzer=fuzz_$name
  inputs=$(mktemp -d)
  "$WORK/kvtwin/kvtwin_replay" unpack "$corpus" "$inputs"
  if [ "$name" = recording ]; then
    find "$SRC/kvtwin/props/recordings" -name '*.jsonl' -exec cp {} "$inputs" \;
  fi
  zip -qjr "$OUT/${fuzzer}_seed_corpus.zip" "$inputs"
  cp "$WORK/kvtwin/$fuzzer" "$OUT"
  cp "$SRC/kvtwin/props/fuzzers/fuzzers.options" "$OUT/$fuzzer.options"
  dictionary=$SRC/kvtwin/props/fuzzers/$name.dict
  [ ! -f "$dictionary" ] || cp "$dictionary" "$OUT/$fuzzer.dict"
  # The machine that runs it has no packages.
  ldd "$OUT/$fuzzer" | awk '$3 ~ /lib(fmt|hwy|xxhash)/ { print $3 }' |
    xargs -r cp -t "$OUT/lib"
done
