#!/usr/bin/env bash
# Takes the place of kvtwin-host (KVTWIN_HOST). It prints $HOST_SAYS instead of
# the description of a backend, and $HOST_ANSWERS, if set, as the result of a
# history.
printf '%s\n' "$HOST_SAYS" >&4
read -r -u 3
[ -z "$HOST_ANSWERS" ] || printf '%s\n' "$HOST_ANSWERS" >&4
read -r -u 3
