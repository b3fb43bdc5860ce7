#!/usr/bin/env bash
# ./dev bench [NAME [ARGS ...]]: bench/NAME_bench.cc, built for release. Without a name, the list.
. tools/dev/common.sh

list() {
  local file
  for file in bench/*_bench.cc; do
    [ -e "$file" ] || { echo "  none yet" && return; }
    printf '  %-12s %s\n' "$(basename "$file" _bench.cc)" "$(sed -n '1s,^// *,,p' "$file")"
  done
}
if [ $# -eq 0 ]; then
  echo "Benchmarks:"
  list
  exit
fi
name=$1
shift
[ -e "bench/${name}_bench.cc" ] || die "there is no benchmark '$name'. There are:" "$(list)"
take_sanitizers
tools/dev/setup.sh --quiet
compile "${name}_bench"
program=$PWD/$BUILD/bin/${name}_bench
cd "$CALLER"  # Files among the arguments are the caller's.
exec "$program" "$@"
