#!/usr/bin/env bash
# help_test.sh KVTWIN: every subcommand, and every option of each, has a description.
set -uo pipefail
kvtwin=$1
wrong=0

# described TEXT: prints the options, or subcommands, of this help that have no
# description. A description follows the name after blanks, or is on a line of
# its own.
described() {
  awk '
    function done() { if (name != "" && !text) print name }
    /^  [-a-z]/ {
      done()
      name = $1
      text = match($0, /[^ ]  +[^ ]/) > 0
      next
    }
    /^          +[^ ]/ { text = 1; next }
    { done(); name = "" }
    END { done() }' <<<"$1"
}

commands=$("$kvtwin" help | sed -n '/^Subcommands:/,$ s/^  \([a-z][a-z]*\).*/\1/p')
[ "$(wc -w <<<"$commands")" -gt 8 ] || { echo "no subcommands: $commands"; exit 1; }
for command in "" $commands; do
  # shellcheck disable=SC2086  # No command is no word.
  help=$("$kvtwin" help $command) || wrong=1
  without=$(described "$help")
  [ -z "$without" ] && continue
  echo "kvtwin $command: no description of" $without
  wrong=1
done
exit $wrong
