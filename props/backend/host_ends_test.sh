#!/usr/bin/env bash
# host_ends_test.sh KVTWIN LIBRARY: a host whose backend hangs ends with the
# command, even if the command is killed and cannot end the host itself.
set -u
is_there() { # PID: the process runs, and is not a zombie
  grep -q '^State:[[:space:]]*[^ZX]' "/proc/$1/status" 2>/dev/null
}
KVTWIN_FAULT=spins "$1" fuzz --backend "$2" --ops 1500 --level visibility \
  --call-seconds 600 >/dev/null 2>&1 &
kvtwin=$!
trap 'kill -9 $kvtwin ${host:-} 2>/dev/null' EXIT
host=
for ((i = 0; i < 300; ++i)); do
  host=$(cat "/proc/$kvtwin/task/$kvtwin/children" 2>/dev/null)
  host=${host// /}
  # CPU time shows that the host runs the call that does not return.
  [ -n "$host" ] && [ "$(cut -d' ' -f14 "/proc/$host/stat")" -gt 50 ] && break
  sleep 0.1
done
if ! is_there "${host:-none}"; then
  echo "host_ends_test.sh: nothing hangs"
  exit 1
fi
kill -9 "$kvtwin"
for ((i = 0; i < 100; ++i)); do
  is_there "$host" || exit 0
  sleep 0.1
done
echo "host_ends_test.sh: process $host runs on without kvtwin"
exit 1
