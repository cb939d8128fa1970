#!/usr/bin/env bash
# out_of_memory_test.sh KVTWIN SUBCOMMAND: a recording that needs more memory
# than is available ends with exit code 2 and a message.
set -uo pipefail
kvtwin=$1 subcommand=$2
file=$(mktemp)
trap 'rm -f "$file"' EXIT
cat >"$file" <<'EOF'
{"kvtrace":1,"producer":"","placement":"lowest","cache":{"type":"paged"},"pool":{"block_size":1,"blocks":1,"max_seq_len":1,"layers":1,"kv_heads":1,"k_head_dim":60000000,"v_head_dim":1,"dtype":"f32"}}
EOF

"$kvtwin" "$subcommand" "$file" >/dev/null || exit 1
output=$(ulimit -v 200000 && "$kvtwin" "$subcommand" "$file" 2>&1)
code=$?
echo "$output"
if [ "$code" -ne 2 ] || ! [[ $output =~ "not enough memory" ]]; then
  echo "out_of_memory_test.sh: exit code $code, expected 2 and a message"
  exit 1
fi
