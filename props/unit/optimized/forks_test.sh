#!/usr/bin/env bash
# forks_test.sh KVTWIN LIBRARY: processes that a backend starts end with it, and
# a forked process that returns from a call does not become a second host.
set -u
for illness in forks daemon strays; do
  mark=forks_test_$$_$illness
  KVTWIN_SICK=$illness KVTWIN_MARK=$mark "$1" fuzz --backend "$2" --ops 300 \
    --level visibility >/dev/null 2>&1
  code=$?
  if [ "$code" -ne 0 ]; then
    echo "forks_test.sh: $illness: exit code $code"
    exit 1
  fi
  # A process of the backend has the mark in its initial environment.
  left=$(grep -l "KVTWIN_MARK=$mark" /proc/[0-9]*/environ 2>/dev/null)
  if [ -n "$left" ]; then
    echo "forks_test.sh: $illness: left are" $left
    exit 1
  fi
done
