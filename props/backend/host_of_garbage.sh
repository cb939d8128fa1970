#!/usr/bin/env bash
# Stands in for kvtwin-host (KVTWIN_HOST), and says $HOST_SAYS instead of what a
# backend says of itself, and $HOST_ANSWERS, if there is one, of a history.
printf '%s\n' "$HOST_SAYS" >&4
read -r -u 3
[ -z "$HOST_ANSWERS" ] || printf '%s\n' "$HOST_ANSWERS" >&4
read -r -u 3
