#!/usr/bin/env bash
# completion_test.sh KVTWIN FOLDER: checks the words that bash offers with the
# completions of a folder, and those of zsh and fish, if they are installed.
set -u
kvtwin=$1 folder=$2
export PATH=${kvtwin%/*}:$PATH
wrong=0

# expect EXPECTED SHELL FOUND WORD...
expect() {
  [ "$1" = "$3" ] || {
    echo "$2 after '${*:4}': expected '$1', got '$3'"
    wrong=1
  }
}

compopt() { :; }  # The builtin works only during a completion.
# shellcheck source=docs/install/kvtwin.bash
. "$folder/kvtwin.bash"

# bash_offers EXPECTED WORD...: completes the last word.
bash_offers() {
  local expected=$1
  shift
  COMP_WORDS=("$kvtwin" "$@") COMP_CWORD=$# COMPREPLY=()
  _kvtwin
  expect "$expected" bash "${COMPREPLY[*]}" "$@"
}

# The builtins of zsh that offer words work only during a completion.
zsh_offers() {
  local expected=$1 found
  command -v zsh >/dev/null || return 0
  shift
  # shellcheck disable=SC2016
  found=$(zsh -f -c '
    functions[_kvtwin]=$(<$1)
    compadd() { shift; print -r -- ${(M)@:#${words[CURRENT]}*} }
    _files() { }
    words=(kvtwin "${@:2}") CURRENT=$#words
    _kvtwin' - "$folder/kvtwin.zsh" "$@")
  expect "$expected" zsh "$found" "$@"
}

fish_offers() {
  local expected=$1 found
  command -v fish >/dev/null || return 0
  shift
  # A tab is between a word and its description.
  found=$(cd / && fish --no-config -c "source '$folder/kvtwin.fish'
    complete -C 'kvtwin $*'" | cut -f 1 | tr '\n' ' ')
  expect "$expected" fish "${found% }" "$@"
}

for shell in bash zsh fish; do
  ${shell}_offers "state" st
  ${shell}_offers "fuzz" help f
  ${shell}_offers "help" he
  ${shell}_offers "--seconds --seed" fuzz --se
  ${shell}_offers "--help" fuzz --he
  ${shell}_offers "--call-seconds" fuzz --call
  ${shell}_offers "visibility" laws --backend x.so --level vi
  ${shell}_offers "" check some
  ${shell}_offers "" nonsense --se
done
bash_offers "reference optimized" laws --twin ""
zsh_offers "reference optimized" laws --twin ""
command -v zsh >/dev/null && command -v fish >/dev/null ||
  echo "bash only: zsh or fish is not installed"
exit $wrong
