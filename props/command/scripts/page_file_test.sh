#!/usr/bin/env bash
# page_file_test.sh KVTWIN RECORDINGS: after a run with --html, the page exists
# only if this run wrote it; a file that is not a page is left alone.
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
"$kvtwin" check --html "$page" "$right" 2>&1 >/dev/null |
  grep -qx "kvtwin: removed $page, the page of an earlier run" ||
  fail "it does not say what it removed"
[ ! -e "$page" ] || fail "check left the page of an earlier run"
write_page
"$kvtwin" fuzz --ops 100 --html "$page" >/dev/null
[ ! -e "$page" ] || fail "fuzz left the page of an earlier run"
write_page
"$kvtwin" run "kvt1 | put 0*1" --html "$page" >/dev/null
[ ! -e "$page" ] || fail "run left the page of an earlier run"

# refused COMMAND...: checks that the command exits with 2.
refused() {
  local code=0
  "$kvtwin" "$@" >/dev/null 2>"$scratch/said" || code=$?
  [ "$code" -eq 2 ] || fail "'$*' exits with $code, not with 2"
}

# A file that is not a page stays as it is, even if it is the judged recording.
echo "notes" >"$page"
refused fuzz --ops 100 --html "$page"
grep -q "'$page' is not a page of kvtwin" "$scratch/said" ||
  fail "it does not say why"
refused run "kvt1 | put 0*1" --html "$page"
[ "$(cat "$page")" = notes ] || fail "a file of the user is gone"
cp "$wrong" "$scratch/in.jsonl"
refused check --html "$scratch/in.jsonl" "$scratch/in.jsonl"
cmp "$wrong" "$scratch/in.jsonl" || fail "the recording is gone"
refused shrink "$scratch/in.jsonl" --with cat --out "$scratch/in.jsonl"
cmp "$wrong" "$scratch/in.jsonl" || fail "the recording is gone"
refused check --html "" "$wrong"
refused fuzz --ops 100 --html ""

# Without a rejected recording there is no page, and the command says so.
"$kvtwin" check --html "$scratch/none.html" "$right" 2>&1 >/dev/null |
  grep -qx "kvtwin: no page: no recording was rejected" ||
  fail "it does not say that there is no page"

# Each recording gets its own page, in a folder that is made if need be.
mkdir -p "$scratch/many/a"
cp "$wrong" "$scratch/many/a/b.jsonl"
cp "$wrong" "$scratch/many/a-b.jsonl"
"$kvtwin" check --html "$scratch/pages" "$scratch/many" >/dev/null 2>&1 || true
[ "$(find "$scratch/pages" -name '*.html' | wc -l)" -eq 2 ] || fail "a page is lost"
