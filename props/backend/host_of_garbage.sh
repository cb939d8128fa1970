#!/usr/bin/env bash
# Stands in for kvtwin-host (KVTWIN_HOST). Writes $HOST_SAYS in place of a
# backend's description, then, if set, $HOST_ANSWERS as the answer to a request.
printf '%s\n' "$HOST_SAYS" >&4
read -r -u 3
[ -z "$HOST_ANSWERS" ] || printf '%s\n' "$HOST_ANSWERS" >&4
read -r -u 3
