#!/usr/bin/env bash
# ./dev test [PART] [--all] [--asan] [--ubsan] [--tsan] [--repeat N]
. tools/dev/common.sh

take_sanitizers "$@"
select=() part='' all=false
set -- "${REST[@]}"
while [ $# -gt 0 ]; do
  case $1 in
    --all) all=true ;;
    --repeat) [ $# -ge 2 ] || die "--repeat needs a number."; select+=(--repeat "until-fail:$2"); shift ;;
    --repeat=*) select+=(--repeat "until-fail:${1#*=}") ;;
    -*) die "test: unknown option '$1' (./dev lists them)." ;;
    *) [ -z "$part" ] || die "test: one part at a time ('$part' or '$1'?)."; part=$1 ;;
  esac
  shift
done

tools/dev/setup.sh --quiet
start=$SECONDS
compile
say test "built in $((SECONDS - start)) s"

$all || [ "$part" = slow ] || select+=(-LE '^slow$')
if [ -n "$part" ]; then
  # Not a pipe: grep would end at its match, and ctest fail of that.
  labels=$(ctest --test-dir "$BUILD" --print-labels)
  if grep -qx " *$part" <<<"$labels"; then
    select+=(-L "^$part\$")
  else
    select+=(-R "$part")
  fi
fi

# What asks for too much memory gets an error, as without the sanitizer.
export ASAN_OPTIONS=${ASAN_OPTIONS:-allocator_may_return_null=1}
# Libraries that were not compiled with the sanitizer (torch) synchronize in ways it cannot see.
export TSAN_OPTIONS=${TSAN_OPTIONS:-ignore_noninstrumented_modules=1 halt_on_error=1 second_deadlock_stack=1 die_after_fork=0}
export UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1}
start=$SECONDS
status=0
ctest --test-dir "$BUILD" -j "$(nproc)" --output-on-failure --no-tests=error "${select[@]}" || status=$?
say test "ran in $((SECONDS - start)) s"
# What was not tested here is said, also where the rest of its binary passed.
sed -n 's/.*ATOLL_TEST_SKIPPED: */[test] skipped: /p' "$BUILD/Testing/Temporary/LastTest.log" 2>/dev/null | sort | uniq -c |
  sed 's/^ *\([0-9]*\) \(.*\)/\2 (\1)/' || true
[ $status -eq 0 ] || die "tests failed in $BUILD; their output is above, and in $BUILD/Testing/Temporary/LastTest.log" \
  "One alone: ./dev test PART; one case: $BUILD/tests/NAME_test --gtest_filter=..."
