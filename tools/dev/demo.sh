#!/usr/bin/env bash
# ./dev demo [ARGS ...]: the main job; the arguments are tools/demo.py's.
. tools/dev/common.sh

take_sanitizers
case " $* " in
  *" --help "* | *" -h "*) exec python3 tools/demo.py --help ;;
esac
root=$PWD
# What is wrong with the arguments is said now, not after a build. (Python itself may be the set-up's to install.)
! command -v python3 >/dev/null || (cd "$CALLER" && python3 "$root/tools/demo.py" --check-arguments "$@")
tools/dev/setup.sh --quiet
compile atoll-server atoll-worker
cd "$CALLER"  # Files among the arguments are the caller's.
exec python3 "$root/tools/demo.py" --bin "$root/$BUILD/bin" "$@"
