#!/usr/bin/env bash
# ./dev test [PART] [--all] [--asan] [--ubsan] [--tsan] [--repeat N]
. tools/dev/common.sh

take_sanitizers "$@"
select=() part='' all=false
unset repeat
set -- "${REST[@]}"
while [ $# -gt 0 ]; do
  case $1 in
    --all) all=true ;;
    --repeat) [ $# -ge 2 ] || die "--repeat needs a number."; repeat=$2; shift ;;
    --repeat=*) repeat=${1#*=} ;;
    -*) die "test: unknown option '$1' (./dev test --help lists them)." ;;
    *) [ -z "$part" ] || die "test: one part at a time ('$part' or '$1'?)."; part=$1 ;;
  esac
  shift
done
if [ -n "${repeat+given}" ]; then
  [[ $repeat =~ ^[1-9][0-9]*$ ]] || die "--repeat '$repeat': it should be a whole number, at least 1."
  select+=(--repeat "until-fail:$repeat")
fi

tools/dev/setup.sh --quiet
configure  # From here on the tests are known; what cannot be run is said before the build.
$all || [ "$part" = slow ] || select+=(-LE '^slow$')
if [ -n "$part" ]; then
  # Not pipes: grep would end at its match, and ctest fail of that.
  labels=$(ctest --test-dir "$BUILD" --print-labels | sed -n 's/^  //p')
  tests=$(ctest --test-dir "$BUILD" -N | sed -n 's/^ *Test *#[0-9]*: //p')
  if grep -qxF -- "$part" <<<"$labels"; then
    select+=(-L "^$part\$")
  elif grep -qE -- "$part" <<<"$tests" 2>/dev/null; then
    select+=(-R "$part")
  else
    die_listing "test: no test has '$part' in its name or as its label. Labels are ${labels//$'\n'/, }; tests:" $tests
  fi
fi
selected=$(ctest --test-dir "$BUILD" -N "${select[@]}")
! grep -qx 'Total Tests: 0' <<<"$selected" ||
  die "test: of '${part:-all}' there are only slow tests: ./dev test ${part:+$part }--all runs them."

start=$SECONDS
compile
say test "built in $((SECONDS - start)) s"

# What asks for too much memory gets an error, as without the sanitizer.
export ASAN_OPTIONS=${ASAN_OPTIONS:-allocator_may_return_null=1}
# Libraries that were not compiled with the sanitizer (torch) synchronize in ways it cannot see.
export TSAN_OPTIONS=${TSAN_OPTIONS:-allocator_may_return_null=1 ignore_noninstrumented_modules=1 halt_on_error=1 second_deadlock_stack=1 die_after_fork=0}
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
