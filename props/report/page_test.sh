#!/usr/bin/env bash
# page_test.sh KVTWIN RECORDINGS: the page of a failure in a real browser. It
# loads without an error, marks the wrong row, and shows the step that its
# address asks for. Exits with 77 if there is no Chromium.
set -u
kvtwin=$1 bug=$2/reject/ollama-0.12.9-defrag/contiguous-0016.jsonl
browser=$(command -v chromium || command -v chromium-browser ||
  command -v google-chrome) || {
  echo "skipped: there is no Chromium here"
  exit 77
}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
wrong=0

complain() {
  echo "page_test.sh: $*"
  wrong=$((wrong + 1))
}

# dom ADDRESS: prints the page after its script ran; the browser's complaints
# about it go to $folder/log.
dom() {
  HOME=$folder timeout 60 "$browser" --headless --no-sandbox --disable-gpu \
    --user-data-dir="$folder/profile" --enable-logging=stderr --dump-dom \
    "$1" 2>"$folder/log"
  if grep -E 'CONSOLE|Uncaught' "$folder/log"; then
    complain "the browser complains about $1"
  fi
}

# has DOM REGEX...: each REGEX matches a line.
has() {
  local regex
  for regex in "${@:2}"; do
    grep -qE -- "$regex" <<<"$1" || complain "no line matches $regex"
  done
}

# The page of a recording whose path contains markup.
path="$folder/x<"
mkdir -p "$path"
path+='/script><script>console.error(1)<'
mkdir -p "$path"
path+='/script>.jsonl'
cp "$bug" "$path"
"$kvtwin" check --html "$folder/page.html" "$path" >"$folder/out"
[ $? -eq 1 ] || complain "check exits with another code than 1"

page=$(dom "file://$folder/page.html")
has "$page" 'data-step="12"' \
  '<h1>The token at position 6 of sequence 0 reads the wrong token.</h1>' \
  'aria-current="step"><span class="n">12</span>'
marked=$(grep -o '<tr class="mask line">.*' <<<"$page" | sed 's|</tr>.*||')
has "$marked" '>6<small> seq 0</small>' 'sight see bad here"[^>]*>3 not 4<'
[ "$(grep -o '<tr class="mask line">' <<<"$page" | wc -l)" -eq 1 ] ||
  complain "not exactly one row is marked"

page=$(dom "file://$folder/page.html#step=4")
has "$page" 'data-step="4"' 'Line 4: start_forward 0@0 0@1 0@2: ok'
if grep -q 'mask line' <<<"$page"; then complain "step 4 marks a row"; fi

# Where no cell is known, there is no row of their numbers.
sed '1s/contiguous/other/' "$bug" >"$folder/other.jsonl"
"$kvtwin" check --html "$folder/other.html" "$folder/other.jsonl" >"$folder/out"
page=$(dom "file://$folder/other.html#step=4")
has "$page" 'data-step="4"' '<th>must hold</th>'
if grep -q '<th>cell</th>' <<<"$page"; then complain "step 4 has cells"; fi

# Several recordings go into a folder, with one page each.
mkdir "$folder/pages"
"$kvtwin" check --html "$folder/pages" "${bug%/*}" >"$folder/out"
pages=("$folder"/pages/*.html)
[ "${#pages[@]}" -eq "$(find "${bug%/*}" -name '*.jsonl' | wc -l)" ] ||
  complain "${#pages[@]} pages of the folder"

[ "$wrong" -eq 0 ]
