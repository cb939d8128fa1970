#!/usr/bin/env bash
# forks_test.sh KVTWIN LIBRARY: the processes that a backend starts end with it,
# and a process that returns from a call is not a second host.
set -u
for fault in forks daemon strays; do
  mark=forks_test_$$_$fault
  KVTWIN_FAULT=$fault KVTWIN_MARK=$mark "$1" fuzz --backend "$2" --ops 300 \
    --level visibility >/dev/null 2>&1
  code=$?
  if [ "$code" -ne 0 ]; then
    echo "forks_test.sh: $fault: exit code $code"
    exit 1
  fi
  # A process of the backend has the mark in its environment.
  left=$(grep -l "KVTWIN_MARK=$mark" /proc/[0-9]*/environ 2>/dev/null)
  if [ -n "$left" ]; then
    echo "forks_test.sh: $fault: left are" $left
    exit 1
  fi
done
