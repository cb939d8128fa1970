#!/bin/sh
# manual.sh KVTWIN FILE: writes the manual page of the command, from its own help.
set -eu
include=$(mktemp)
trap 'rm -f "$include"' EXIT
echo '[OPTIONS OF SUBCOMMANDS]' >"$include"
for subcommand in $("$1" help | sed -n '/^Subcommands:/,$s/^  \([a-z]\{1,\}\) .*/\1/p'); do
  printf '.SS "kvtwin %s"\n.nf\n' "$subcommand"
  "$1" help "$subcommand" | sed 's/\\/\\e/g; s/^[.'\'']/\\\&&/; s/-/\\-/g'
  printf '.fi\n'
done >>"$include"
help2man --no-info --section 1 --name 'finds bugs in KV caches' \
  --include "$include" --output "$2" "$1"
