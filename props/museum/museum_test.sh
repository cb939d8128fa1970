#!/usr/bin/env bash
# museum_test.sh KVTWIN apply|find|cuda: every exhibit of the museum applies,
# and a bad one is noticed; or a sample of the exhibits is found; or a sample is
# found in the twin cuda.
set -u
kvtwin=$1 part=$2
cd "$(dirname "${BASH_SOURCE[0]}")" || exit 2
wrong=0
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# expect CODE REGEX ARG...: `kvtwin museum ARG...` exits with CODE and a line of
# its output matches REGEX.
expect() {
  ../testing/expect.sh "$1" "$2" "$kvtwin" museum "${@:3}" || wrong=$((wrong + 1))
}

# not_as_before SCRIPT: makes a folder with exhibit X02, edited by the sed
# SCRIPT.
not_as_before() { sed "$1" X02.patch >"$folder/X02.patch"; }

if [ "$part" = apply ]; then
  expect 0 "^$(find . -name '*.patch' | wc -l) patches, 0 do not apply" \
    --apply-only
  expect 2 "unknown bug 'X00'" --only X00
  expect 2 'is not a folder where kvtwin was built' --build "$folder"
  not_as_before 's/Backwards/Forwards/'
  expect 1 'X02: does not apply' --apply-only --patches "$folder"
  not_as_before '$a\ \n@@ -1 +1 @@\n-a\n+b'
  expect 1 'X02: of 2 hunks, 1 apply' --apply-only --patches "$folder"
  not_as_before '/^reference/d'
  expect 2 'the header needs' --apply-only --patches "$folder"
  # An exhibit in code of only one twin has to name this twin.
  if ! diff <(grep -l '^+++ b/optimized/cuda/' ./*.patch) \
    <(grep -l '^twin: cuda$' ./*.patch); then
    echo "patches of optimized/cuda/ and those that say so differ"
    wrong=$((wrong + 1))
  fi
elif [ "$part" = cuda ]; then
  expect 0 '2 of 2 found by all' --twin cuda --seeds 1 --only X14 G01
  expect 2 'only the twin optimized has such code:.* A21 ' --twin cuda --only A21
  sed 's/^+  filled_ = before;/+  (void)before;/' G01.patch >"$folder/G01.patch"
  expect 1 'not found.* by 1 of 1 seeds' --twin cuda --seeds 1 --seconds 0.5 \
    --patches "$folder"
else
  expect 2 'only the twin cuda has such code: G01 ' --seeds 1 --only G01
  expect 0 '1 of 1 found by all' --backend --seeds 2 --only X84
  expect 2 'the twin cuda has no states:.* X62' --twin cuda --only X62
  expect 0 '4 of 4 found by all' --seeds 2 --only X01 A10 F04 X62
  # Only histories with drafts show it.
  sed '/^speculate/d' X84.patch >"$folder/X84.patch"
  expect 1 'not found.* by 1 of 1 seeds' --seeds 1 --seconds 0.1 \
    --patches "$folder"
  rm "$folder/X84.patch"
  expect 0 '"found": true' --seeds 1 --only H18 --json
  # With fast paths off, a bug of a fast path does not show.
  (
    export KVTWIN_FAST_PATHS=off
    expect 2 'fast paths are off: X46 ' --seeds 1 --only X46
    [ "$wrong" -eq 0 ]
  ) || wrong=$((wrong + 1))
  not_as_before 's/^+   .*/+    \/\/ A comment is no bug./'
  expect 1 'not found.* by 1 of 1 seeds' --seeds 1 --seconds 0.1 \
    --patches "$folder"
  # A crash in a history counts as finding the bug, for a cache and for a pool.
  # A crash elsewhere does not.
  not_as_before 's/^+   .*/+    __builtin_trap();/'
  expect 0 'crashed with signal 4 \(ILL\).* `kvt1 .*put' --seeds 1 \
    --patches "$folder"
  sed '/^+/s/(prompt.size()/((__builtin_trap(), prompt.size())/; s/A03p/X02/' A03p.patch \
    >"$folder/X02.patch"
  expect 0 'crashed with signal 4 \(ILL\).* `kvp1 block=' --seeds 1 \
    --patches "$folder"
  not_as_before 's/^+   .*/+    static int n; if (++n > 900) __builtin_trap();/'
  expect 0 'crashed with signal 4 \(ILL\), and not in this history alone' \
    --seeds 1 --patches "$folder"
  { sed '/^--- /,$d' X02.patch && cat <<'END'; } >"$folder/X02.patch"
--- a/props/base/program.cc
+++ b/props/base/program.cc
@@ -10,5 +10,5 @@
 }  // namespace

-void SetProgram(std::string_view name) { program = name; }
+void SetProgram(std::string_view) { __builtin_trap(); }

 const std::string& Program() { return program; }
END
  expect 1 'not found.* seed 1: crashed with signal 4 \(ILL\), in no history' \
    --seeds 2 --patches "$folder"
  not_as_before 's/^+   .*/+    no_such_name = 1;/'
  expect 1 'does not compile' --patches "$folder"
fi
[ "$wrong" -eq 0 ]
