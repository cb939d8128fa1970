#!/usr/bin/env bash
# shrink_test.sh KVTWIN TOY: `shrink` shortens a recording of a program with a
# bug, and exits with 2 if the program cannot be used. Exit code 77 (skipped):
# Python is missing.
set -uo pipefail
kvtwin=$1 toy=$2
if ! command -v python3 >/dev/null; then
  echo "skipped: there is no python3 here to run $toy"
  exit 77
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
fail() {
  printf 'shrink_test.sh: %s\n' "$1"
  exit 1
}

# A rejected recording: a row should see the token that the copy loses.
history='kvt1 seqs=2 cap=16 batch=8 shift=tag_add | put 0*3 | ask 0@2'
history+=' | put 0*2 1*1 | drop 1:0- | copy 0>1:3 | put 1*2 | get | drop 0:2-'
"$kvtwin" gen "$history | put 0*1" |
  python3 "$toy" --bug >"$folder/bug.jsonl"
"$kvtwin" check "$folder/bug.jsonl" >/dev/null
[ $? -eq 1 ] || fail "the recording of a bug is not rejected"

# shrinks CODE REGEX ARGS...: checks that `shrink ARGS` exits with CODE and that
# a line of its output matches REGEX. With from=/dev/stdin, a pipe has the
# recording.
shrinks() {
  local want=$1 regex=$2 output code
  shift 2
  output=$(cat "$folder/bug.jsonl" |
    "$kvtwin" shrink "${from:-$folder/bug.jsonl}" "$@" 2>&1)
  code=$?
  printf '%s\n' "$output"
  [ "$code" -eq "$want" ] || fail "exit code $code, expected $want"
  grep -qE -- "$regex" <<<"$output" || fail "no line matches '$regex'"
}

shrinks 1 "^[1-9] calls of [0-9]+, after [0-9]+ runs$" \
  --with "python3 -S '$toy' --bug"
"$kvtwin" check "$folder/bug.short.jsonl"
[ $? -eq 1 ] || fail "the short one is not rejected"
[ "$(wc -l <"$folder/bug.short.jsonl")" -le 10 ] || fail "it is not short"
# The bug loses the last token of a copy: the next token shows it. Batches
# continue their sequences, as those of the recording do.
positions=$(grep -oE '"positions": *\[[^]]*\]' "$folder/bug.short.jsonl")
[ "$positions" = $'"positions": [0, 1, 2]\n"positions": [3]' ] ||
  fail "the passes are not those that the bug needs: $positions"
shrinks 1 "written .*again.jsonl" --with "python3 -S '$toy' --bug" \
  --out "$folder/again.jsonl"
cmp "$folder/bug.short.jsonl" "$folder/again.jsonl" || fail "it is another one"
from=/dev/stdin shrinks 1 "written .*piped.jsonl" \
  --with "python3 -S '$toy' --bug" --out "$folder/piped.jsonl"
cmp "$folder/bug.short.jsonl" "$folder/piped.jsonl" || fail "a pipe differs"
from=/dev/stdin shrinks 2 "--out is required: /dev/stdin is not a regular file" \
  --with "touch '$folder/ran'"
from=/dev/zero shrinks 2 "'/dev/zero' is too large for --output-mib 1: more" \
  --with "touch '$folder/ran'" --output-mib 1
shrinks 2 "what the command prints is accepted" --with "python3 -S '$toy'"
shrinks 2 "it ends with exit code 3, having printed: no" \
  --with "echo no >&2; exit 3"
shrinks 2 "it ends with SIG34" --with "kill -34 \$\$"
shrinks 2 "takes longer than 0.3 seconds" --with "sleep 60" --seconds 0.3
shrinks 2 "prints more than 1 MiB" --with yes --output-mib 1
shrinks 2 "prints more than 1 MiB" --with "yes >&2" --output-mib 1
shrinks 2 "prints more than 1 MiB" --with "exec >&-; yes >&2" --output-mib 1
shrinks 2 "is not a recording: line 2" --with cat
# The command is not run if its result could not be written.
shrinks 2 "--out: '$folder/no/such/folder' .* No such file" \
  --with "touch '$folder/ran'" --out "$folder/no/such/folder"
shrinks 2 "--out: '$folder' cannot be written: Is a directory" \
  --with "touch '$folder/ran'" --out "$folder"
[ ! -e "$folder/ran" ] || fail "the command is run before --out is refused"
shrinks 2 "/dev/full cannot be written: No space left on device" \
  --with "python3 -S '$toy' --bug" --runs 1 --out /dev/full
