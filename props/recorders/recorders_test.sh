#!/usr/bin/env bash
# recorders_test.sh KVTWIN CXX LANGUAGE: the recorder of docs/recorders in c, go
# or rust. KVTWIN judges its output, which is byte for byte the output of the C
# recorder, built by the C++ compiler CXX. Exits with 77 if there is no compiler
# of LANGUAGE.
set -uo pipefail
kvtwin=$1 cxx=$2 language=$3
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
docs=$root/docs/recorders tests=$root/props/recorders
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
strict=(-Wall -Wextra -Werror -pedantic "-I$docs")
wrong=0

complain() {
  echo "recorders_test.sh: $*"
  wrong=$((wrong + 1))
}

# build_LANGUAGE SOURCE PROGRAM: builds without warnings. SOURCE has no suffix.
build_cxx() { "$cxx" -std=c++11 "${strict[@]}" -x c++ "$1.c" -o "$2"; }
build_c() { "$cc" -std=c99 "${strict[@]}" "$1.c" -o "$2"; }
build_go() {
  mkdir -p "$folder/src/kvtwinrecorder"
  cp "$docs/kvtwin_recorder.go" "$folder/src/kvtwinrecorder"
  go vet kvtwinrecorder && go vet "$1.go" && go build -o "$2" "$1.go"
}
build_rust() {
  mkdir -p "$folder/rust"
  cp "$docs/kvtwin_recorder.rs" "$1.rs" "$folder/rust"
  rustc --edition 2021 -D warnings "$folder/rust/${1##*/}.rs" -o "$2"
}

case $language in
  c) compiler=$(command -v gcc || command -v clang || command -v cc) ;;
  go) compiler=$(command -v go) && go version ;;
  rust) compiler=$(command -v rustc) && rustc --version ;;
esac || {
  echo "skipped: there is no compiler of $language here"
  exit 77
}
cc=$compiler
# Only local files: no module, no network, no settings of the user.
export GOPATH=$folder GOCACHE=$folder/cache GO111MODULE=off GOFLAGS="" \
  GOPROXY=off GOENV=off

# runs CODE COMMAND...: the command exits with CODE. Its output is in
# $folder/log.
runs() {
  local want=$1 code=0
  shift
  "$@" >"$folder/log" 2>&1 || code=$?
  [ "$code" -eq "$want" ] && return
  complain "exit code $code, expected $want: $*"
  cat "$folder/log"
}

# prints REGEX: a line of the output of the last `runs` matches.
prints() {
  grep -qiE -- "$1" "$folder/log" && return
  complain "no line matches $1"
  cat "$folder/log"
}

for build in cxx "$language"; do
  mkdir "$folder/$build"
  for source in "$docs/example" "$tests/all_calls"; do
    "build_$build" "$source" "$folder/$build/${source##*/}" || {
      complain "$source does not build as $build"
      exit 1
    }
  done
  cd "$folder/$build" || exit 2
  runs 0 ./example right.jsonl
  runs 0 ./example wrong.jsonl --bug
  mkdir calls
  runs 0 ./all_calls calls

  runs 0 "$kvtwin" check right.jsonl
  runs 1 "$kvtwin" check wrong.jsonl
  prints 'misses the token .sequence 0.1, position 1.'
  runs 0 "$kvtwin" check - <calls/all_calls.jsonl
  prints '^7 accepted, 0 rejected, 0 bad input$'
  runs 1 "$kvtwin" check calls/wrong_attention.jsonl
  prints 'row 2 .sequence 0, position 2.*as if position 0 were seen'
  diff calls/refused.txt - <<'END' || complain "other refusals"
put: key: element 1 is not finite, which no recording can hold
put: value: element 3 is not finite, which no recording can hold
get: key: element 3 is not finite, which no recording can hold
get: value: element 1 is not finite, which no recording can hold
put: key: extent 1 is 0, it must be 1 or more
put: value: more than 67108864 numbers
get: mask has 0 columns and 2 rows
get: mask: element 1 is neither 0 nor -inf
get: mask: element 0 is neither 0 nor -inf
get: mask: element 1 is neither 0 nor -inf
attend: query: element 1 is not finite, which no recording can hold
attend: out: element 3 is not finite, which no recording can hold
header: kv_heads is 0, it must be 1 or more
header: rope_base or rope_scale is not finite
header: a number for attend is not finite
END

  runs 1 ./example /no/such/folder/file
  prints '/no/such/folder/file.*no such file'
  if [ -c /dev/full ]; then
    runs 1 ./example /dev/full
    prints 'no space left'
  fi
  cd "$folder" || exit 2
done

for written in right.jsonl wrong.jsonl calls/all_calls.jsonl \
  calls/wrong_attention.jsonl; do
  cmp "cxx/$written" "$language/$written" || complain "other bytes: $written"
done

# again NAME COMMAND...: another run of all_calls, in C, writes the same bytes.
again() {
  mkdir "$1"
  runs 0 "${@:2}"
  cmp c/calls/all_calls.jsonl "$1/all_calls.jsonl" ||
    complain "other bytes: $1"
  cmp c/calls/refused.txt "$1/refused.txt" || complain "other refusals: $1"
  echo "with $1 as well"
}

if [ "$language" = c ]; then
  # With a compiler option by which neither NaN nor denormal numbers exist.
  "$cc" -std=c99 -O3 -ffast-math "-I$docs" "$tests/all_calls.c" -o fast ||
    complain "does not build with -ffast-math"
  again fast-math ./fast fast-math
  # With a locale that has a decimal comma, if it can be made: numbers still
  # have points.
  if localedef -i de_DE -f UTF-8 "$folder/de_DE.UTF-8" >log 2>&1; then
    again comma env "LOCPATH=$folder" LC_ALL=de_DE.UTF-8 \
      c/all_calls comma --comma
  fi
fi
[ "$wrong" -eq 0 ] && echo "$language: as $("$cxx" --version | head -n 1)"
[ "$wrong" -eq 0 ]
