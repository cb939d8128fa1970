#!/usr/bin/env bash
# Everything that docs/seeds.md names exists: properties and tests in the
# sources, rules in docs/semantics.md, methods in the public headers.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 2
table=$(grep '^| `' docs/seeds.md)
names=$(grep -oE '`[^`]*`' <<<"$table" | tr -d '`' | sort -u)
wrong=0
missing() {
  printf 'docs/seeds.md names %s, which is not there\n' "$1"
  wrong=$((wrong + 1))
}
while read -r name; do
  case "$name" in
    StatusCode::* | Kind::*)
      grep -q "^  ${name##*:}," include/kvtwin/*.h || missing "$name" ;;
    *::*)
      grep -qE "\b${name##*:}\(" include/kvtwin/*.h || missing "$name" ;;
    [A-Z]*.[A-Z]*)
      grep -qrE "(TEST|TEST_P|RC_GTEST_PROP)\(${name%.*}, ${name#*.}\b" \
        --include='*.cc' props || missing "$name" ;;
    [a-z]*)
      grep -q "{\"$name\"" props/laws/*.cc || missing "$name" ;;
  esac
done <<<"$names"
for rule in $(grep -oE '\b[SP][0-9]+\b' <<<"$table" | sort -u); do
  grep -q "^- \*\*$rule\*\*" docs/semantics.md || missing "$rule"
done
[ "$wrong" -eq 0 ]
