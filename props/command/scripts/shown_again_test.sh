#!/usr/bin/env bash
# shown_again_test.sh KVTWIN REGEX ARGS...: `kvtwin ARGS...` exits with 1, a line of
# what it prints matches REGEX, and the command after `rerun` exits with 1, too.
set -u
kvtwin=$1 regex=$2
shift 2
fail() {
  printf 'shown_again_test.sh: %s\n' "$1"
  exit 1
}
output=$("$kvtwin" "$@" 2>&1)
code=$?
printf '%s\n' "$output" | head -n 40
[ "$code" -eq 1 ] || fail "exit code $code, expected 1"
grep -Eq -- "$regex" <<<"$output" || fail "no '$regex'"
rerun=$(sed -n 's/^  rerun   //p' <<<"$output" | head -n 1)
[ -n "$rerun" ] || fail "no rerun"
[ "${#rerun}" -lt 1000 ] || fail "it is not shrunk"
bash -c "$rerun" >/dev/null
code=$?
[ "$code" -eq 1 ] || fail "exit code $code of the rerun, expected 1"
