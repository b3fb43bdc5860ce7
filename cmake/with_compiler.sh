#!/bin/sh
# with_compiler.sh FROM TO COMMAND...: runs COMMAND with the compiler TO in the place of FROM. For targets that
# another compiler builds than the rest.
from=$1 to=$2
shift 2
count=$#
while [ "$count" -gt 0 ]; do
  word=$1
  shift
  [ "$word" = "$from" ] && word=$to
  set -- "$@" "$word"
  count=$((count - 1))
done
exec "$@"
