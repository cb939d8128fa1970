#!/usr/bin/env bash
# rerun_test.sh KVTWIN CACHE POOL: the rerun line of a failure shows the failure
# again in the folder where kvtwin was called, with a path of any kind. CACHE
# and POOL have bugs.
set -u
fail() {
  printf 'rerun_test.sh: %s\n' "$1"
  exit 1
}
cd "$(dirname "$1")/.." || fail "no folder of $1"
kvtwin=$(basename "$(dirname "$1")")/$(basename "$1")
reruns() { # WHAT ARGS...: kvtwin fuzz ARGS..., and then its line, print WHAT
  local what=$1
  shift
  local line
  line=$("$kvtwin" fuzz --ops 5000 "$@" | sed -n 's/^  rerun   //p' | head -n 1)
  printf '%s\n' "$line"
  [[ $line == "$kvtwin run "* ]] || fail "another program than $kvtwin"
  eval "$line" | grep -q "^$what" || fail "no $what"
}
reruns "FAIL subject: rows" --backend "$2"
# The rerun line keeps the limits of the backend.
reruns "FAIL subject: rows" --backend "$2" --call-seconds 3 --memory-mib 99 |
  grep -q -- "--backend .* --call-seconds 3 --memory-mib 99 --level" ||
  fail "no --call-seconds or --memory-mib"
reruns "DIFFERENCE" --kind paged --backend "$3"
