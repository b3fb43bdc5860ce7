# What the commands of ./dev share. Sourced, in the root of the tree.
set -euo pipefail

TORCH_VERSION=2.11.0
LOGS=build/logs
CALLER=${ATOLL_DEV_CALLER:-$PWD}

# say PHASE TEXT: a line of progress.
say() { printf '[%s] %s\n' "$1" "$2"; }

# die TEXT...: what is wrong, and what to do about it.
die() {
  printf 'dev: %s\n' "$1" >&2
  shift
  for line in "$@"; do printf '     %s\n' "$line" >&2; done
  exit 1
}

# die_listing TEXT NAME...: what is wrong, and the names that would have been right.
die_listing() {
  local text=$1 lines
  shift
  mapfile -t lines < <(echo "$*" | fold -s -w 110)
  die "$text" "${lines[@]}"
}

# from_caller PATH: PATH as whoever called ./dev means it.
from_caller() {
  case $1 in
    /*) echo "$1" ;;
    *) echo "$CALLER/$1" ;;
  esac
}

CUDA_HOME=${ATOLL_CUDA_HOME:-/usr/local/cuda}
[ "$CUDA_HOME" = none ] || CUDA_HOME=$(from_caller "$CUDA_HOME")
have_toolkit() { [ -x "$CUDA_HOME/bin/nvcc" ]; }

# The installed torch named by an earlier --torch, or nothing.
remembered_torch() { cat build/torch-dir 2>/dev/null || true; }

# remember_torch DIR: DIR is a torch package, or a site-packages or virtual environment that holds one.
remember_torch() {
  local dir given
  given=$(from_caller "$1")
  for dir in "$given" "$given"/torch "$given"/lib/python3*/site-packages/torch; do
    [ -e "$dir/lib/libtorch_cpu.so" ] || continue
    dir=$(readlink -f "$dir")
    grep -q "__version__ = '$TORCH_VERSION" "$dir/version.py" ||
      die "torch in $dir is $(sed -n "s/^__version__ = '\(.*\)'/\1/p" "$dir/version.py"); needed is $TORCH_VERSION."
    mkdir -p build
    echo "$dir" >build/torch-dir
    say setup "torch from $dir (remembered in build/torch-dir; remove that file to go back to .venv)"
    return
  done
  die "no torch in $given: looked for lib/libtorch_cpu.so there, in torch/ and in lib/python3*/site-packages/torch/."
}

# Compilations at one time: a file that includes torch/torch.h needs 1.3 GB.
jobs_default() {
  local cores memory
  cores=$(nproc)
  memory=$(awk '/MemAvailable/ { print int($2 / 1500000) }' /proc/meminfo)
  [ "$memory" -ge 1 ] || memory=1
  echo $((cores < memory ? cores : memory))
}
JOBS=${ATOLL_JOBS:-$(jobs_default)}

# logged NAME COMMAND...: runs it with its output in a log; on failure shows the end and names the log.
logged() {
  local log=$LOGS/$1.log
  shift
  mkdir -p "$LOGS"
  if ! "$@" >"$log" 2>&1; then
    tail -n 15 "$log" >&2
    echo "dev: failed: $*" >&2
    echo "     the whole output is in $log" >&2
    return 1
  fi
}

# take_sanitizers ARGS...: sets BUILD (the build folder) and SANITIZER; the other arguments are in REST.
take_sanitizers() {
  local names=() kinds=() arg
  REST=()
  for arg in "$@"; do
    case $arg in
      --asan) names+=(asan) kinds+=(address) ;;
      --ubsan) names+=(ubsan) kinds+=(undefined) ;;
      --tsan) names+=(tsan) kinds+=(thread) ;;
      *) REST+=("$arg") ;;
    esac
  done
  if [ ${#names[@]} -eq 0 ]; then
    BUILD=build/release SANITIZER=
    return
  fi
  BUILD=build/$(IFS=-; echo "${names[*]}")
  SANITIZER=$(IFS=,; echo "${kinds[*]}")
  case $SANITIZER in
    *thread*,* | *,thread*) die "--tsan goes with no other sanitizer." ;;
  esac
}

# configure: CMake in $BUILD, only when the options differ from the last time (ninja sees to the rest).
configure() {
  local options=("-DATOLL_SANITIZER=$SANITIZER" "-DATOLL_CUDA_HOME=$CUDA_HOME" "-DATOLL_TORCH_DIR=$(remembered_torch)")
  local remembered toolkit=none
  # A toolkit that was installed, removed or replaced in its place is another configuration too.
  ! have_toolkit || toolkit=$(readlink -f "$CUDA_HOME/bin/nvcc")
  remembered=$(printf '%q ' "${options[@]}" "$toolkit")
  [ -e "$BUILD/build.ninja" ] && [ "$(cat "$BUILD/dev-options" 2>/dev/null)" = "$remembered" ] && return
  say build "configuring $BUILD"
  mkdir -p "$BUILD"
  # Values looked up with another torch or toolkit are forgotten.
  rm -f "$BUILD/CMakeCache.txt" "$BUILD/dev-options"
  logged "configure-$(basename "$BUILD")" cmake -S . -B "$BUILD" -G Ninja "${options[@]}" || exit 1
  grep -h 'No CUDA toolkit' "$LOGS/configure-$(basename "$BUILD").log" | sed 's/^-- /[build] /' || true
  echo "$remembered" >"$BUILD/dev-options"
}

# compile [TARGET ...]: brings them (default: all) up to date. A terminal sees ninja's own line; a log file
# gets one line for each tenth of the work.
compile() {
  configure
  if [ -t 1 ]; then
    NINJA_STATUS="[build %f/%t %es] " ninja -j "$JOBS" -C "$BUILD" "$@" || die "the build in $BUILD failed."
    return
  fi
  local log
  log=$LOGS/build-$(basename "$BUILD").log
  mkdir -p "$LOGS"
  if ! NINJA_STATUS="[build %f/%t %es] " ninja -j "$JOBS" -C "$BUILD" "$@" 2>&1 | tee "$log" | tenths; then
    grep -A 40 -m 1 '^FAILED' "$log" >&2 || tail -n 40 "$log" >&2
    die "the build in $BUILD failed; the whole output is in $log"
  fi
}

# tenths: of ninja's lines, one for each tenth of the work. (Not awk: Debian's reads ahead.)
tenths() {
  local line tenth last=0
  while IFS= read -r line; do
    [[ $line =~ ^\[build\ ([0-9]+)/([0-9]+)\ [0-9.]+s\] ]] || continue
    tenth=$((10 * BASH_REMATCH[1] / BASH_REMATCH[2]))
    [ "$tenth" -gt "$last" ] && [ "${BASH_REMATCH[2]}" -ge 10 ] || continue
    echo "${BASH_REMATCH[0]}"
    last=$tenth
  done
}
