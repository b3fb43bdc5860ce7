#!/usr/bin/env bash
# ./dev build [TARGET ...] [--torch DIR] [--asan] [--ubsan] [--tsan]
. tools/dev/common.sh

take_sanitizers "$@"
targets=()
set -- "${REST[@]}"
while [ $# -gt 0 ]; do
  case $1 in
    --torch) [ $# -ge 2 ] || die "--torch needs the folder of an installed torch."; remember_torch "$2"; shift ;;
    --torch=*) remember_torch "${1#*=}" ;;
    -*) die "build: unknown option '$1' (./dev lists them)." ;;
    *) targets+=("$1") ;;
  esac
  shift
done
tools/dev/setup.sh
compile "${targets[@]}"
say build "done: $BUILD"
