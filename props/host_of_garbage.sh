#!/usr/bin/env bash
# Stands in for kvtwin-host (KVTWIN_HOST), and says $HOST_SAYS instead of what a
# backend says of itself.
printf '%s\n' "$HOST_SAYS" >&4
read -r -u 3
