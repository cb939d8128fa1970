#!/usr/bin/env bash
# identical_test.sh [--quick] KVTWIN...: do all these builds of the command print the
# same, byte for byte, on one and two threads, on every SIMD target and with all
# fast paths forced on and off? Text that must differ is removed first: times,
# rates, and the target's own name. Attention differs between targets by
# rounding: its results must be the same on each target, from every build.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
history="kvt1 kind=swa window=2 cap=4 shift=rope dtype=f16 | put 0*2"
history+=" | copy 0>1:2 | put 1*3 | drop 1:0-1 | reload | put 0*free"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
wrong=0
operations=40000 forced=(on off)
if [ "$1" = --quick ]; then
  operations=1000 forced=(off)
  shift
fi

# report KVTWIN THREADS: prints the output of the command in many uses, and its
# exit codes.
report() {
  local kind
  run() { "$kvtwin" "$@" || printf 'exit code %s\n' $?; }
  local kvtwin=$1 threads=$2
  for kind in causal swa swa_mem chunked encoder wrapper; do
    run fuzz --ops "$operations" --seed 7 --kind $kind --threads "$threads" \
      --json
  done
  run explore --cells 3 --positions 3 --threads "$threads" --json
  run check --json recordings/accept
  run check --json recordings/reject
  run show recordings/reject/ollama-0.12.9-defrag/contiguous-0016.jsonl
  run run "$history"
}

# same LABEL KVTWIN THREADS: its report is the same as in the first call.
same() {
  local file="$work/$1"
  report "$2" "$3" | tee "$file.raw" |
    sed -E 's/"(operations_per_second|seconds|target)":[^,}]*//g' >"$file"
  [ -e "$work/first" ] || cp "$file" "$work/first"
  if ! cmp -s "$work/first" "$file"; then
    printf 'differs: %s\n' "$1"
    diff "$work/first" "$file" | cut -c 1-200 | head -n 6
    wrong=1
  fi
}

# attention KVTWIN TARGET: on one and two threads, the results of attention are
# those of the first build on this target.
attention() {
  local digest first="$work/attention-$2" run threads
  digest=$(dirname "$1")/kvtwin-attention-digest
  for run in "${forced[@]/%/ 1}" "${forced[0]} 2"; do
    threads=${run#* }
    # With fast paths forced on, threads share all work.
    KVTWIN_TARGET=$2 KVTWIN_FAST_PATHS=${run% *} OMP_NUM_THREADS=$threads \
      "$digest" >"$work/digest" || wrong=1
    [ -e "$first" ] || cp "$work/digest" "$first"
    if ! cmp -s "$first" "$work/digest"; then
      printf 'attention differs: %s on %s, fast paths %s, %s threads\n' \
        "$(basename "$(dirname "$1")")" "$2" "${run% *}" "$threads"
      diff "$first" "$work/digest" | head -n 6
      wrong=1
    fi
  done
  if ! grep -qx "target $2" "$first"; then
    printf 'not active: %s of %s\n' "$2" "$digest"
    wrong=1
  fi
}

for kvtwin in "$@"; do
  name=$(basename "$(dirname "$kvtwin")")
  same "$name-1" "$kvtwin" 1
  same "$name-2" "$kvtwin" 2
  # "... this machine has AVX3, AVX2"
  targets=$(KVTWIN_TARGET=none "$kvtwin" fuzz --ops 1 2>&1 | sed 's/.* has //') ||
    true
  for target in ${targets//,/}; do
    KVTWIN_TARGET=$target same "$name-$target" "$kvtwin" 1
    if [ "$(grep -c "\"target\":\"$target\"" "$work/$name-$target.raw")" -ne 6 ]
    then
      printf 'not active: %s of %s\n' "$target" "$kvtwin"
      wrong=1
    fi
    attention "$kvtwin" "$target"
  done
  for use in "${forced[@]}"; do
    KVTWIN_FAST_PATHS=$use same "$name-fast-paths-$use" "$kvtwin" 1
  done
  printf '%s: %s, 1 and 2 threads, fast paths forced %s\n' "$name" "$targets" \
    "${forced[*]}"
done
[ "$wrong" -eq 0 ] &&
  printf 'identical: %s lines from each, %s of attention from each target\n' \
    "$(wc -l <"$work/first")" "$(wc -l <"$work/attention-$target")"
exit "$wrong"
