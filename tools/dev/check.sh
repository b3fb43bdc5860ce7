#!/usr/bin/env bash
# ./dev check [--fix] [--tidy BASE]: what a commit must pass besides the tests.
. tools/dev/common.sh

fix=false base=
while [ $# -gt 0 ]; do
  case $1 in
    --fix) fix=true ;;
    --tidy) [ $# -ge 2 ] || die "--tidy needs a commit to compare with."; base=$2; shift ;;
    *) die "check: unknown option '$1' (./dev lists them)." ;;
  esac
  shift
done

tools/dev/setup.sh --quiet --check
take_sanitizers
configure
logged configure-release ninja -C "$BUILD" build.ninja || exit 1  # The list of sources is today's.

# Files of the tree, committed or not, but not ignored ones.
sources() { git ls-files --cached --others --exclude-standard -- "$@" | while read -r f; do [ -e "$f" ] && echo "$f"; done; }
failed=()
phase() {  # NAME COMMAND...: all phases run, so that one run shows everything.
  local name=$1 start=$SECONDS
  shift
  if "$@"; then say check "$name: ok ($((SECONDS - start)) s)"; else say check "$name: FAILED"; failed+=("$name"); fi
}

format() {
  if $fix; then sources '*.h' '*.cc' '*.cu' | xargs -P "$JOBS" -n 16 clang-format -i; return; fi
  sources '*.h' '*.cc' '*.cu' | xargs -P "$JOBS" -n 16 clang-format --dry-run -Werror 2>&1 | grep -E 'error:' | sort -u -t: -k1,1
  [ "${PIPESTATUS[1]}" -eq 0 ] || { echo "./dev check --fix formats"; return 1; }
}
tidy() {
  local changed
  changed=$(git diff --name-only --diff-filter=d "$base" -- '*.cc') || return 1
  [ -n "$changed" ] || { echo "no source changed since $base"; return 0; }
  echo "$changed" | xargs -P "$JOBS" -n 1 clang-tidy -p "$BUILD" --quiet --warnings-as-errors='*'
}

phase format format
phase layers python3 tools/check_layers.py . tools/layers.txt
phase documents python3 tools/check_docs.py .
phase sizes python3 tools/check_sizes.py .
phase "lock annotations" python3 tools/check_threads.py "$BUILD" "$JOBS"
[ -z "$base" ] || phase "clang-tidy since $base" tidy
[ ${#failed[@]} -eq 0 ] || die "check failed: $(IFS=,; echo "${failed[*]}")"
