#!/usr/bin/env bash
# page_file_test.sh KVTWIN RECORDINGS: a page is there after a run with --html only
# if this run wrote it, and a file that is no page is left alone.
set -eu
kvtwin=$1 recordings=$2
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
page=$scratch/page.html
wrong=$recordings/reject/ollama-0.12.9-defrag/contiguous-0016.jsonl
right=$recordings/accept/ollama-0.15.4-wrapper/wrapper-scatter-0011.jsonl
fail() {
  echo "$1"
  exit 1
}

write_page() {
  "$kvtwin" check --html "$page" "$wrong" 2>&1 >/dev/null |
    grep -qx "kvtwin: wrote $page" || fail "it does not say what it wrote"
  [ -s "$page" ] || fail "there is no page"
}

write_page
"$kvtwin" check --html "$page" "$right" >/dev/null
[ ! -e "$page" ] || fail "check left the page of an earlier run"
write_page
"$kvtwin" fuzz --ops 100 --html "$page" >/dev/null
[ ! -e "$page" ] || fail "fuzz left the page of an earlier run"
write_page
"$kvtwin" run "kvt1 | put 0*1" --html "$page" >/dev/null
[ ! -e "$page" ] || fail "run left the page of an earlier run"

echo "notes" >"$page"
"$kvtwin" fuzz --ops 100 --html "$page" >/dev/null
[ "$(cat "$page")" = notes ] || fail "a file of the user is gone"
