#!/usr/bin/env bash
# ./dev demo [ARGS ...]: the main job; the arguments are tools/demo.py's.
. tools/dev/common.sh

take_sanitizers
case " $* " in
  *" --help "* | *" -h "*) exec python3 tools/demo.py --help ;;
esac
tools/dev/setup.sh --quiet
compile atoll-server atoll-worker
exec python3 tools/demo.py --bin "$BUILD/bin" "$@"
