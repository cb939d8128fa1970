#!/usr/bin/env bash
# first_wrong_lines_test.sh KVTWIN RECORDINGS: `kvtwin check --json` names, for
# each recording in RECORDINGS/reject, exactly the line in FIRST_WRONG_LINE.tsv
# beside it, and accepts each recording in RECORDINGS/accept at the identity
# level.
set -u
kvtwin=$1 recordings=$2
wrong=0

# expect FILE REGEX...: the answer for FILE matches each REGEX.
expect() {
  local file=$1 answer regex
  shift
  answer=$("$kvtwin" check --json "$file")
  for regex in "$@"; do
    if ! grep -qE "$regex" <<<"$answer"; then
      echo "$file: expected $regex, got $answer"
      wrong=$((wrong + 1))
    fi
  done
}

rejected=0
while read -r table; do
  folder=${table%/*}
  while read -r name line; do
    rejected=$((rejected + 1))
    expect "$folder/$name" '"verdict": *"reject"' \
      "\"line\": *${line}[,}]"
  done <"$table"
done < <(find "$recordings/reject" -name FIRST_WRONG_LINE.tsv)

accepted=0
while read -r file; do
  accepted=$((accepted + 1))
  expect "$file" '"verdict": *"accept"' '"level": *"identity"'
done < <(find "$recordings/accept" -name '*.jsonl')

listed=$(find "$recordings/reject" -name '*.jsonl' | wc -l)
if [ "$rejected" -ne "$listed" ] || [ "$rejected" -eq 0 ] ||
  [ "$accepted" -eq 0 ]; then
  echo "$listed files to reject, $rejected in tables, $accepted to accept"
  exit 1
fi
echo "$rejected rejected, $accepted accepted, $wrong wrong"
[ "$wrong" -eq 0 ]
