#!/usr/bin/env bash
# The house rules that a script can check. Each prints the lines that break it.
set -u
shopt -s lastpipe  # `... | rule` counts in this shell.
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 2
export LC_ALL=C
rooms=(include core reference optimized props bench docs python)
# Lines of code of the ledger and the twin, without blank lines and comments: a
# reader can check all of it in one sitting. The rules of other systems
# (reference/cache_ledger.h, dialects.h) and the pools are not counted.
reference_lines=1296
ledger_lines=400     # In reference/ledger.h, comments too.
serve_lines=699      # In the server of docs/examples/serve.
function_lines=40    # In reference/.
function_lines_max=70
wrong=0

# rule TEXT: complains with TEXT about the lines it reads, if there are any.
rule() {
  local found
  found=$(cat)
  [ -n "$found" ] || return 0
  printf '%s:\n%s\n\n' "$1" "$found"
  wrong=$((wrong + 1))
}

# sources ROOM...: prints the C++ files of the rooms.
sources() { find "$@" -name '*.cc' -o -name '*.h' -o -name '*.cu' | sort; }

# includes ROOM... -- ROOM...: prints the lines of the first rooms that include
# the second.
includes() {
  local from=()
  while [ "$1" != -- ]; do from+=("$1") && shift; done
  shift
  sources "${from[@]}" |
    xargs -r grep -nE "#include *[<\"]([^<>\"]*/)?($(IFS='|' && echo "$*"))/"
}

# Prints every function body that is not inside another, as FILE:LINE: COUNT
# lines. A brace opens a body if the text before it, since the last ; { or },
# has a parenthesis, but not at its end, where a table follows, and does not
# begin with namespace, class, struct or enum, or end with extern "C".
functions() {
  # shellcheck disable=SC2016  # These are for awk to expand.
  sources "$@" | xargs -r awk '
    FNR == 1 { depth = 0; inside = 0; head = ""; comment = 0 }
    {
      line = $0
      gsub(/\\./, "", line)
      gsub(/"[^"]*"/, "\"\"", line)
      gsub(/\047[^\047]*\047/, "", line)
      sub(/\/\/.*/, "", line)
      if (line ~ /^#/) next
      for (i = 1; i <= length(line); ++i) {
        c = substr(line, i, 1)
        if (c == "{") {
          ++depth
          sub(/^[ \t]*template *<[^>]*>/, "", head)
          if (!inside && head ~ /\(/ &&
              head !~ /\([ \t]*$|^[ \t]*(namespace|class|struct|enum) |extern "" *$/) {
            inside = depth
          }
          head = ""
        } else if (c == "}") {
          if (inside == depth) {
            print FILENAME ":" start ": " FNR - start + 1 " lines"
            inside = 0
          }
          --depth
          head = ""
        } else if (c == ";") {
          head = ""
        } else {
          if (head ~ /^[ \t]*$/ && c !~ /[ \t]/ && !inside) start = FNR
          head = head c
        }
      }
      head = head " "
    }'
}

# Prints statements that draw twice in one expression, whose parts a compiler may
# evaluate in any order. A call that draws becomes \001, from the inside out.
draws() {
  sources "$@" | xargs -r awk '
    function judge(  text, call, count, twice) {
      text = statement
      while (match(text, /[A-Za-z_0-9.:>-]*\([^()]*\)/)) {
        call = " " substr(text, RSTART, RLENGTH) " "
        count = gsub(/\001/, "\001", call)
        if (count > 1) twice = 1
        count += gsub(/[^A-Za-z_0-9]pick_?[^A-Za-z_0-9]/, "\001", call)
        text = substr(text, 1, RSTART - 1) (count ? "\001" : "x") \
               substr(text, RSTART + RLENGTH)
      }
      # The parts of a list in braces, and the members of a class, have an order.
      if (twice || text ~ /\001[^,]*\001/) {
        print FILENAME ":" start ":" statement
      }
      statement = ""
    }
    FNR == 1 { statement = "" }
    {
      line = $0
      gsub(/"[^"]*"/, "\"\"", line)
      sub(/\/\/.*/, "", line)
      gsub(/::/, "_", line)
      sub(/^ +/, "", line)
      # The ends of a statement, and the operators that order their operands.
      while (match(line, /[;{}?:]|&&|\|\||\) [A-Za-z]/)) {
        if (statement == "") start = FNR
        statement = statement " " substr(line, 1, RSTART)
        line = substr(line, RSTART + RLENGTH - (substr(line, RSTART, 1) == ")"))
        judge()
      }
      if (statement == "") start = FNR
      statement = statement " " line
    }'
}

find "${rooms[@]}" CMakeLists.txt CMakePresets.json README.md dev -type f \
  ! -name '*.png' ! -name '*.safetensors' ! -name '*.pyc' \
  -exec grep -nHP '[^\x00-\x7f]' {} + | cut -c 1-100 | rule "Not ASCII"
find "${rooms[@]}" CMakeLists.txt README.md dev -type f ! -name '*.jsonl' \
  ! -name '*.tsv' ! -name '*.png' ! -name '*.patch' ! -name '*.safetensors' \
  ! -name '*.pyc' \
  -exec grep -nHE '[[:blank:]]$' {} + |
  rule "Blanks at the end of a line"
sources "${rooms[@]}" | xargs awk 'length > 80 { print FILENAME ":" FNR }' |
  rule "More than 80 columns"

includes include -- core reference optimized props bench |
  rule "include/ may include nothing but itself"
includes core -- reference optimized props bench |
  rule "core/ may include include/ only"
includes core/*.* -- core/trace core/save core/dialects |
  rule "The files of core/ itself may not include its folders"
includes core/save -- core/trace core/dialects |
  rule "core/save/ may include, of core/, core/ itself only"
includes core/dialects -- core/trace core/save |
  rule "core/dialects/ may include, of core/, core/ itself only"
includes core/trace -- core/save |
  rule "core/trace/ may include, of core/, core/ itself and core/dialects/ only"
find core -mindepth 1 -type d | grep -vxE 'core/(trace|save|dialects)' |
  rule "A folder of core/ that this script does not know"
sources core | grep -vxE 'core/(factory\.cc|twin\.h)' |
  xargs grep -nE '\b(reference|optimized)::|\bnamespace (reference|optimized)\b' |
  rule "Only core/factory.cc calls the twins, which core/twin.h declares"
includes reference -- optimized props bench |
  rule "reference/ may include include/ and core/ only"
includes reference -- core/trace core/save |
  rule "reference/ may include, of core/, core/ itself and core/dialects/ only"
includes optimized -- reference props bench |
  rule "optimized/ may include include/ and core/ only"
includes optimized -- core/trace core/save core/dialects |
  rule "optimized/ may include, of core/, core/ itself only"
includes props -- bench | rule "props/ may not include bench/"

# room NAME ROOM...: the code of a room of props/ includes, from props/, only
# its own files and files of the named rooms. Each room is above the rooms that
# it may include, so that no cycle is possible. Tests may include all rooms.
rooms_of_props=()
room() {
  local name=$1 below
  shift
  for below in "$@"; do
    [[ " ${rooms_of_props[*]} " == *" $below "* ]] ||
      echo "$name includes $below, which does not stand below it"
  done | rule "The rooms of props/ have an order"
  rooms_of_props+=("$name")
  sources "props/$name" | grep -vE '_(test|props)\.cc$' |
    xargs -r grep -nE '#include "props/' |
    grep -vE "\"props/($(IFS='|' && echo "$name $*" | tr ' ' '|'))/" |
    rule "props/$name/ may include of props/ only: ${*:-nothing}"
}
room base
room history base
room attention base
room compare base history attention
room oracle base attention compare
room shrink base history compare
room report base compare oracle
room page_judge base compare oracle report
room paged base history attention compare shrink report
room laws base history compare shrink paged
room sessions base compare shrink report
room search base history compare oracle shrink report page_judge paged sessions
room backend base history compare oracle report paged laws search
room c_api compare oracle backend
room certify base history compare report laws search backend
room command base history compare oracle shrink report page_judge paged laws search backend certify sessions
room fuzzers history oracle shrink paged search
room cuda
room testing base history compare oracle paged search
room unit base history attention compare testing
room repo
room museum
room recorders
room recordings
find props -mindepth 1 -maxdepth 1 ! -type d |
  rule "props/ has rooms and no files of its own"
find props -mindepth 1 -maxdepth 1 -type d -printf '%f\n' |
  grep -vxF "$(printf '%s\n' "${rooms_of_props[@]}")" |
  rule "A room of props/ that this script does not know"
find props -type f ! -path 'props/museum/*' ! -path 'props/recordings/*' \
  ! -path 'props/fuzzers/corpus/*' -printf '%h\n' | sort | uniq -c |
  awk '$1 > 25' | rule "A room of props/ has at most 25 files"

cat reference/{ledger,ledger_token,recurrent_ledger,wrapper_ledger}.h \
  reference/{causal,encoder,make}.* | grep -cvE '^ *(//.*)?$' |
  awk -v most="$reference_lines" '$1 > most { print $1 " lines" }' |
  rule "Ledger and twin have more than $reference_lines lines of code"
cat docs/examples/serve/{model.h,tokenizer.h,serve.cc} |
  grep -cvE '^ *(//.*)?$' |
  awk -v most="$serve_lines" '$1 > most { print $1 " lines" }' |
  rule "The server in docs/examples/serve has more than $serve_lines lines of code"
awk -v most="$ledger_lines" 'END { if (NR > most) print NR " lines" }' \
  reference/ledger.h | rule "reference/ledger.h has more than $ledger_lines lines"
functions reference | awk -v most="$function_lines" '$2 > most' |
  rule "A function of reference/ has more than $function_lines lines"
functions "${rooms[@]}" | awk -v most="$function_lines_max" '$2 > most' |
  rule "A function has more than $function_lines_max lines"

sources "${rooms[@]}" | xargs grep -nE '\b(TODO|FIXME|XXX|HACK)\b' |
  rule "Unfinished: do it, or file an issue"
sources "${rooms[@]}" | grep -v '/scratch_folder\.h$' |
  xargs grep -nE 'temp_directory_path|TempDir\(|"/tmp' |
  rule "A file in the temp folder has a name of its own (ScratchFolder)"
sources include core reference optimized | xargs -r grep -nE \
  'std::c(out|err)|\bprintf\(' | rule "The library prints nothing"

draws props bench | rule "Two draws in one expression: name them, to order them"

if command -v python3 >/dev/null; then
  python3 props/repo/mutants.py --arguments 2>&1 >/dev/null | rule "Stale arguments"
fi

[ "$wrong" -eq 0 ] && echo "tidy: $(sources "${rooms[@]}" | wc -l) files"
[ "$wrong" -eq 0 ]
