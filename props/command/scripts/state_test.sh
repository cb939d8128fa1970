#!/usr/bin/env bash
# state_test.sh KVTWIN STATE: `kvtwin state` accepts the file STATE, and refuses
# the damaged files made from it here: within seconds, with exit code 2 and a
# message.
set -uo pipefail
kvtwin=$1 state=$2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

fail() {
  echo "state_test.sh: $*"
  exit 1
}

# refused WHY FILE: checks that FILE is refused with a message that names it and
# matches WHY.
refused() {
  local output code
  output=$(timeout 20 "$kvtwin" state "$2" 2>&1)
  code=$?
  echo "$output"
  [ "$code" -eq 2 ] || fail "exit code $code, expected 2"
  [[ $output == "kvtwin state: '$2'"* ]] || fail "the file is not named"
  [[ $output =~ $1 ]] || fail "expected '$1'"
}

# changed NAME SED-SCRIPT: writes the state, changed by sed, to the file NAME.
changed() {
  LC_ALL=C sed "$2" "$state" >"$folder/$1"
  cmp -s "$state" "$folder/$1" && fail "'$2' changes nothing"
}

# headed NAME HEADER: writes a file that has only this header, of less than 128
# bytes.
headed() {
  # shellcheck disable=SC2059  # The length is an escape.
  printf "\\x$(printf '%02x' ${#2})\\0\\0\\0\\0\\0\\0\\0" >"$folder/$1"
  printf '%s' "$2" >>"$folder/$1"
}

bytes=$(wc -c <"$state")
"$kvtwin" state "$state" || fail "the state itself is refused"

refused "No such file" "$folder/none"
refused "is not a regular file, but a folder" "$folder"
refused "is not a regular file, but a device" /dev/zero
mkfifo "$folder/pipe"
refused "is not a regular file, but a pipe" "$folder/pipe"  # Has no writer.
: >"$folder/empty"
refused "it is too short" "$folder/empty"
refused "its header is of .* bytes, all of it of" "$0"  # A text file.
for size in 7 8 200 $((bytes - 1)); do
  head -c "$size" "$state" >"$folder/cut"
  refused "this is not a state of a cache" "$folder/cut"
done
cat "$state" "$0" >"$folder/longer"
refused "it has other bytes as well" "$folder/longer"

headed other '{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'
refused "its metadata has no 'kvtwin_state'" "$folder/other"
headed metadata '{"__metadata__":[{"__metadata__":7}]}'
refused "its metadata has no 'kvtwin_state'" "$folder/metadata"
headed deep "$(printf '%0100d' 0 | tr 0 '[')"
refused "this is not a state of a cache" "$folder/deep"
changed version 's/"kvtwin_state":"2"/"kvtwin_state":"3"/'
refused "its version is '3', not '2'" "$folder/version"
changed model 's/"a model"/"A model"/'
refused "its checksum does not hold" "$folder/model"
changed checksum 's/"xxh3":"./"xxh3":"g/'
refused "its checksum does not hold" "$folder/checksum"
changed shape 's/"shape":\[1,5,2,4\]/"shape":[1,5,4,2]/'
refused "its checksum does not hold" "$folder/shape"
cp "$state" "$folder/bit"
printf '\1' | dd of="$folder/bit" bs=1 seek=$((bytes - 1)) conv=notrunc 2>&-
refused "its checksum does not hold" "$folder/bit"

# A sparse file larger than any memory, if the file system supports it.
if truncate -s 4T "$folder/bit" 2>&-; then
  refused "this machine has memory for" "$folder/bit"
fi
