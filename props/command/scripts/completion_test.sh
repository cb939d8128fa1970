#!/usr/bin/env bash
# completion_test.sh KVTWIN BASH_COMPLETION: checks the words that bash offers.
set -u
kvtwin=$1
compopt() { :; }  # The builtin works only during a completion.
# shellcheck source=docs/install/kvtwin.bash
. "$2"
wrong=0

# offers EXPECTED WORD...: completes the last word.
offers() {
  local expected=$1
  shift
  COMP_WORDS=("$kvtwin" "$@") COMP_CWORD=$# COMPREPLY=()
  _kvtwin
  [ "${COMPREPLY[*]}" = "$expected" ] || {
    echo "after '$*': expected '$expected', got '${COMPREPLY[*]}'"
    wrong=1
  }
}
offers "state" st
offers "fuzz" help f
offers "help" he
offers "--seconds --seed" fuzz --se
offers "--help" fuzz --he
offers "--call-seconds" fuzz --call
offers "reference optimized" laws --twin ""
offers "visibility" laws --backend x.so --level vi
offers "" check some
offers "" nonsense --se
exit $wrong
