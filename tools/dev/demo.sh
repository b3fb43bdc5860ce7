#!/usr/bin/env bash
# ./dev demo [ARGS ...]: the main job; the arguments are tools/demo.py's.
. tools/dev/common.sh

take_sanitizers
case " $* " in
  *" --help "* | *" -h "*) exec python3 tools/demo.py --help ;;
esac
tools/dev/setup.sh --quiet
compile atoll-server atoll-worker
root=$PWD
cd "$CALLER"  # Files among the arguments are the caller's.
exec python3 "$root/tools/demo.py" --bin "$root/$BUILD/bin" "$@"
