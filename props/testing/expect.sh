#!/usr/bin/env bash
# expect.sh CODE REGEX COMMAND...: passes if COMMAND exits with CODE and a line
# of its output matches the extended regular expression REGEX.
set -u
want=$1 regex=$2
shift 2
output=$("$@" 2>&1)
code=$?
printf '%s\n' "$output" | head -n 100
if [ "$code" -ne "$want" ]; then
  echo "expect.sh: exit code $code, expected $want"
  exit 1
fi
if ! grep -qE -- "$regex" <<<"$output"; then
  echo "expect.sh: no line matches '$regex'"
  exit 1
fi
