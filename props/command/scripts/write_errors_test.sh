#!/usr/bin/env bash
# write_errors_test.sh KVTWIN RECORDINGS: if a subcommand cannot print or write
# a file, it reports the system's error message and exits with 2: on a full
# device, and with a size limit at any point of a file.
set -u
kvtwin=$1 recordings=$2 wrong=0
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
reject=$recordings/reject/ollama-0.12.9-defrag/contiguous-0016.jsonl
state=$recordings/state.safetensors
history='kvt1 | put 0*1'

complain() {
  printf 'write_errors_test.sh: %s\n' "$*"
  wrong=$((wrong + 1))
}

# full ARGS...: checks the subcommand with its output to /dev/full.
full() {
  local code=0
  "$kvtwin" "$@" >/dev/full 2>"$scratch/said" || code=$?
  [ "$code" -eq 2 ] || complain "'$*' ends with $code"
  grep -q 'No space left on device' "$scratch/said" ||
    complain "'$*' says $(cat "$scratch/said")"
}
for arguments in "check $reject" "check --json $reject" "show $reject" \
  "show --json $reject" "fuzz --ops 500" "fuzz --ops 500 --json" \
  "fuzz --ops 500 --marks" "fuzz --ops 100 --kind paged" \
  "gen --histories 1" "gen --histories 300" "gen --kind paged" \
  "explore --cells 2 --positions 2 --kind chunked" \
  "explore --kind paged --depth 1" "laws --runs 1 --law frame" \
  "state $state" "profile --list" "profile --list --json" "--help" \
  "fuzz --help" "--version"; do
  # shellcheck disable=SC2086  # Split into words.
  full $arguments
done
full run "$history"
full run --json "$history"
full gen "$history"
full gen 'kvp1 | open 0 2 0'

# cut_at CODE FILE ARGS...: runs the subcommand with growing limits of file
# size, until it exits with CODE; before that it must exit with 2.
cut_at() {
  local want=$1 file=$2 size code cuts=0
  shift 2
  for size in 0 1 2 4 8 16 32 64 128 256 512 1024; do
    rm -f "$file"
    (
      trap '' XFSZ
      ulimit -f "$size"
      exec "$kvtwin" "$@" 2>&1 >"$scratch/out"
    ) | cat >"$scratch/said"
    code=${PIPESTATUS[0]}
    [ "$code" -ne "$want" ] || break
    cuts=$((cuts + 1))
    if [ "$code" -ne 2 ] || ! grep -q 'File too large' "$scratch/said"; then
      complain "'$*' with $size KiB ends with $code: $(cat "$scratch/said")"
    fi
  done
  [ "$code" -eq "$want" ] || complain "'$*' ends with $code at last"
  [ "$cuts" -gt 0 ] || complain "'$*' writes nothing"
}
cut_at 1 "$scratch/page.html" check --html "$scratch/page.html" "$reject"
# The earlier page stays until the new one is complete, and no other file
# remains.
mkdir "$scratch/pages"
echo before >"$scratch/pages/page.html"
for size in 0 4; do
  (
    trap '' XFSZ
    ulimit -f "$size"
    exec "$kvtwin" check --html "$scratch/pages/page.html" "$reject" 2>&1
  ) | cat >"$scratch/said"
  [ "${PIPESTATUS[0]}" -eq 2 ] || complain "a page of $size KiB is written"
  [ "$(cat "$scratch/pages/page.html")" = before ] ||
    complain "a page that cannot be written replaces another one"
done
[ "$(ls -A "$scratch/pages")" = page.html ] ||
  complain "there is more than a page: $(ls -A "$scratch/pages")"
cut_at 0 "$scratch/sequence" state --sequence 0 --out "$scratch/sequence" \
  "$state"
mkdir "$scratch/explored"
cut_at 0 "$scratch/explored/chunked-chunk=2" explore --cells 2 --positions 2 \
  --kind chunked --state "$scratch/explored"
# The museum's message names its working folder.
said=$(trap '' XFSZ && ulimit -f 8 && "$kvtwin" museum --only X01 2>&1)
grep -q "kvtwin-museum-.* cannot be written: File too large" <<<"$said" ||
  complain "the museum says $said"
# Standard output to a file.
cut_at 0 "$scratch/out" gen --histories 20
cut_at 1 "$scratch/out" show --all "$reject"
[ "$wrong" -eq 0 ]
