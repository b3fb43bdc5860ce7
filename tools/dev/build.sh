#!/usr/bin/env bash
# ./dev build [TARGET ...] [--torch DIR] [--asan] [--ubsan] [--tsan]
. tools/dev/common.sh

# target_names: the programs, tests and libraries, but not ninja's own.
target_names() {
  ninja -C "$BUILD" -t targets all 2>/dev/null |
    sed -n 's/^\([a-z][a-z0-9_-]*\): phony$/\1/p' |
    grep -vxE 'cmake_.*|test|all|help|edit_cache|rebuild_cache|list_install_components|install'
}

take_sanitizers "$@"
targets=()
set -- "${REST[@]}"
while [ $# -gt 0 ]; do
  case $1 in
    --torch) [ $# -ge 2 ] || die "--torch needs the folder of an installed torch."; remember_torch "$2"; shift ;;
    --torch=*) remember_torch "${1#*=}" ;;
    -*) die "build: unknown option '$1' (./dev build --help lists them)." ;;
    *) targets+=("$1") ;;
  esac
  shift
done
tools/dev/setup.sh
configure
for target in "${targets[@]}"; do
  ninja -C "$BUILD" -t query "$target" >/dev/null 2>&1 ||
    die_listing "build: there is no target '$target'. There are:" $(target_names)
done
compile "${targets[@]}"
say build "done: $BUILD"
