#!/usr/bin/env bash
# Stands in for kvtwin-host (KVTWIN_HOST). Writes $HOST_SAYS in place of a
# backend's description, then, if set, $HOST_ANSWERS as the answer to a request,
# and $HOST_REPEATS without end. DEEP in the first two stands for 100000 nested
# arrays.
deep=$(printf '%*s' 100000 '')
deep=$(tr ' ' '[' <<<"$deep")$(tr ' ' ']' <<<"$deep")
printf '%s\n' "${HOST_SAYS/DEEP/"$deep"}" >&4
read -r -u 3
[ -z "$HOST_ANSWERS" ] || printf '%s\n' "${HOST_ANSWERS/DEEP/"$deep"}" >&4
[ -z "$HOST_REPEATS" ] || yes "$HOST_REPEATS" >&4
read -r -u 3
