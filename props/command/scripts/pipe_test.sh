#!/usr/bin/env bash
# pipe_test.sh KVTWIN TOY: `check -` of what cannot be read; then `gen | program |
# check -`, with the correct program, then with its bug. Exit code 77 (skipped): Python
# is missing.
set -uo pipefail
kvtwin=$1 toy=$2
# What cannot be read is not called empty.
for input in '<&-' '</'; do
  output=$(eval "'$kvtwin' check - $input")
  code=$?
  if [ "$code" -ne 2 ] || ! grep -q ' -:1: cannot be read$' <<<"$output" ||
    ! grep -q ' 1 bad input$' <<<"$output"; then
    echo "pipe_test.sh: exit code $code with $input: $output"
    exit 1
  fi
done
# A reader that has seen enough causes no message, also where SIGPIPE is ignored.
said=$(trap '' PIPE; "$kvtwin" gen --histories 100 2>&1 >/dev/full | head -n 1)
[[ $said == *"No space left on device" ]] || { echo "pipe_test.sh: $said"; exit 1; }
said=$( { trap '' PIPE; "$kvtwin" gen --histories 100 | :; } 2>&1)
[ -z "$said" ] || { echo "pipe_test.sh: a closed pipe: $said"; exit 1; }
if ! command -v python3 >/dev/null; then
  echo "skipped: there is no python3 here to run $toy"
  exit 77
fi

# piped CODE LINE [ARG...]: runs the toy with ARG..., and checks that `check`
# exits with CODE and its last line matches LINE.
piped() {
  local want=$1 regex=$2 output code
  shift 2
  output=$("$kvtwin" gen --seed 3 --histories 600 |
    python3 "$toy" "$@" | "$kvtwin" check -)
  code=$?
  output=$(tail -n 1 <<<"$output")
  echo "$output"
  if [ "$code" -ne "$want" ] || ! [[ $output =~ $regex ]]; then
    echo "pipe_test.sh: exit code $code, expected $want and '$regex'"
    exit 1
  fi
}

piped 0 '^[1-9][0-9]* accepted, 0 rejected, 0 bad input$'
piped 1 '^[1-9][0-9]* accepted, [1-9][0-9]* rejected, 0 bad input$' --bug
