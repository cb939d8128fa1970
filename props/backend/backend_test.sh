#!/usr/bin/env bash
# backend_test.sh KVTWIN LIBRARY FAULT CHECK: the fault that
# KVTWIN_FAULT=FAULT gives the library is reported as CHECK, with the shortest
# history, and the run continues. The words of CHECK after a comma must be in
# the report, too.
set -u
kvtwin=$1 library=$2 fault=$3 check=${4%%,*} words=${4#*,}
fail() {
  printf 'backend_test.sh: %s\n' "$1"
  exit 1
}
output=$(KVTWIN_FAULT=$fault "$kvtwin" fuzz --backend "$library" --ops 1500 \
  --level visibility --call-seconds 1 --memory-mib 64 2>&1)
code=$?
printf '%s\n' "$output" | head -n 60
if [ "$check" = none ]; then
  [ "$code" -eq 0 ] || fail "exit code $code, expected 0"
  exit 0
fi
if [ "$check" = refused ]; then
  [ "$code" -eq 2 ] || fail "exit code $code, expected 2"
else
  [ "$code" -eq 1 ] || fail "exit code $code, expected 1"
  grep -q "^FAIL $check " <<<"$output" || fail "no '$check'"
  grep -Eq "^  rerun   [^ ]*kvtwin run 'kvt1 [^|]*\| (put 0\*[34]( \| get)?|put 0\*1( \| put 0\*1){2}|put 0\*[12] \| put 0\*[12])' --backend" \
    <<<"$output" || fail "it is not shrunk"
  ran=$(sed -n 's/^\([0-9]*\) operations in .*/\1/p' <<<"$output")
  # A finding that breaks the level ends the run earlier.
  [[ $check == subject* ]] || [ "${ran:-0}" -ge 1500 ] ||
    fail "it stopped after ${ran:-0} operations"
fi
[ "$words" = "$4" ] || grep -q -- "$words" <<<"$output" || fail "no '$words'"
