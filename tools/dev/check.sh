#!/usr/bin/env bash
# ./dev check [--fix] [--tidy BASE]: what a commit must pass besides the tests.
. tools/dev/common.sh

fix=false base=
while [ $# -gt 0 ]; do
  case $1 in
    --fix) fix=true ;;
    --tidy) [ $# -ge 2 ] || die "--tidy needs a commit to compare with."; base=$2; shift ;;
    --tidy=*) base=${1#*=} ;;
    *) die "check: unknown option '$1' (./dev check --help lists them)." ;;
  esac
  shift
done

git ls-files --error-unmatch dev >/dev/null ||
  die "git cannot list the files of this tree (above it says why), and the checks are over those." \
    "They need a clone, not an archive, that belongs to who runs them (or: git config --global --add safe.directory $PWD)."
[ -z "$base" ] || git rev-parse --quiet --verify "$base^{commit}" >/dev/null || die "--tidy: '$base' is no commit of this tree."
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
  local count
  count=$(sources '*.h' '*.cc' '*.cu' | wc -l)
  [ "$count" -gt 0 ] || { echo "no sources found"; return 1; }
  echo "$count files"
  if $fix; then sources '*.h' '*.cc' '*.cu' | xargs -P "$JOBS" -n 16 clang-format -i; return; fi
  sources '*.h' '*.cc' '*.cu' | xargs -P "$JOBS" -n 16 clang-format --dry-run -Werror 2>&1 | grep -E 'error:' | sort -u -t: -k1,1
  [ "${PIPESTATUS[1]}" -eq 0 ] || { echo "./dev check --fix formats"; return 1; }
}
# The sources to tidy for what changed since $base, new files too: of a header the source beside it, else the first
# that includes it (its findings in the header are shown).
changed_sources() {
  local file source
  { git diff --name-only --diff-filter=d "$base" -- '*.cc' '*.h'; git ls-files --others --exclude-standard -- '*.cc' '*.h'; } |
    sort -u | while read -r file; do
      source=${file%.h}
      case $file in
        *.cc) source=$file ;;
        *) [ -e "$source.cc" ] && source=$source.cc || source=$(sources '*.cc' | xargs grep -lF "\"atoll/$file\"" | head -n 1) || true ;;
      esac
      [ -z "$source" ] || ! grep -qF "\"$PWD/$source\"" "$BUILD/compile_commands.json" || echo "$source"
    done | sort -u
}
tidy() {
  local changed
  changed=$(changed_sources)
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
