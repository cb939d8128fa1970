#!/usr/bin/env bash
# interrupt_test.sh KVTWIN [LIBRARY]: on SIGINT and SIGTERM, long runs stop,
# report their progress, leave no files and exit as a shell expects; a
# second signal ends them at once. With a library, they run that third-party
# cache.
set -u
kvtwin=$1 wrong=0
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"; kill -9 ${pid:-} 2>/dev/null' EXIT
export TMPDIR=$scratch/tmp
mkdir "$TMPDIR"

complain() {
  printf 'interrupt_test.sh: %s\n' "$*"
  sed 's/^/    /' "$scratch/out" "$scratch/said"
  wrong=$((wrong + 1))
}

# interrupted SIGNAL CODE REGEX ARGS...: runs kvtwin ARGS, sends SIGNAL when it
# runs (if $ready is set: when that command succeeds), and checks the exit code
# and the output.
interrupted() {
  local signal=$1 want=$2 regex=$3 code=0
  shift 3
  # Shells ignore SIGINT in commands that they start in the background.
  python3 -c 'import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])' "$kvtwin" "$@" \
    >"$scratch/out" 2>"$scratch/said" &
  pid=$!
  for ((i = 0; i < 300; ++i)); do
    ${ready:-false} && break
    # Waits until the process is kvtwin, not still the shell, and catches
    # signals.
    [ -z "${ready:-}" ] && [ "/proc/$pid/exe" -ef "$kvtwin" ] &&
      grep -q "^SigCgt:.*[4-7c-f]...$" "/proc/$pid/status" 2>/dev/null && break
    sleep 0.05
  done
  sleep 0.2
  kill "-$signal" "$pid"
  wait "$pid" || code=$?
  [ "$code" -eq "$want" ] || complain "'$*' ends with $code, not $want"
  grep -Eq "$regex" "$scratch/out" || complain "'$*' does not print '$regex'"
  grep -q "^kvtwin: interrupted" "$scratch/said" || complain "'$*' is silent"
}
command -v python3 >/dev/null || exit 77

if [ $# -eq 2 ]; then
  interrupted INT 130 '^0 broken, [1-9] hold, 0 not judged, seed 5' \
    laws --runs 1000000 --seed 5 --backend "$2"
  interrupted TERM 143 '"broken":0,"seed":5,"laws":.*"holds":true' \
    laws --runs 1000000 --seed 5 --json --backend "$2"
  interrupted INT 130 '^all .*, 0 differences, not finished' \
    explore --cells 5 --threads 2 --backend "$2"
  interrupted INT 130 '^paged: [1-9][0-9]* histories, not all of 8' \
    explore --kind paged --depth 8 --backend "$2"
  exit "$wrong"
fi

interrupted INT 130 '^[1-9][0-9]* operations in .*, 0 differences.* seed 5' \
  fuzz --seconds 60 --seed 5 --threads 2
interrupted TERM 143 '"operations":[1-9].*"differences":0.*"seed":5' \
  fuzz --seconds 60 --seed 5 --json
interrupted INT 130 '^[1-9][0-9]* operations in .* 0 differences, seed 5' \
  fuzz --kind paged --seconds 60 --seed 5
interrupted INT 130 '^all .*, 0 differences, not finished' \
  explore --cells 5 --threads 2
interrupted INT 130 '^paged: [1-9][0-9]* histories, not all of 8' \
  explore --kind paged --depth 8
interrupted TERM 143 '^0 broken, seed 5' laws --runs 1000000 --seed 5
interrupted INT 130 '"broken":0,"seed":5,"laws":.*"holds":true' \
  laws --runs 1000000 --seed 5 --json

copied() { compgen -G "$TMPDIR/kvtwin-museum-*/sources/props" >/dev/null; }
ready=copied
interrupted INT 130 '^0 of 0 found' museum --seeds 1 --only X01
[ -z "$(ls "$TMPDIR")" ] || complain "the museum leaves $(ls "$TMPDIR")"
[ "$wrong" -eq 0 ]
