#!/usr/bin/env bash
# ./dev setup [--quiet] [--check]: what the build, the tests and the demo need; with --check, what
# ./dev check needs besides. Looks first, and installs only what is missing.
. tools/dev/common.sh

OS_RELEASE=${ATOLL_OS_RELEASE:-/etc/os-release}  # Tests name another.
quiet=false check=false
packages=(g++ cmake ninja-build ccache mold python3 libabsl-dev libgtest-dev libgmock-dev
  libtensorpipe-dev libnop-dev libssl-dev zlib1g-dev dataset-fashion-mnist)
check_packages=(clang clang-format clang-tidy libclang-rt-14-dev)
for arg in "$@"; do
  case $arg in
    --quiet) quiet=true ;;
    --check) check=true packages+=("${check_packages[@]}") ;;
    *) die "setup: unknown option '$arg' (it has --check alone: what ./dev check needs besides)." ;;
  esac
done
[ -n "$(remembered_torch)" ] || packages+=(python3-venv)

mkdir -p build
exec 9>build/setup.lock
flock 9  # Two commands at one time: the second finds the first one's work done.
changed=false

need_disk() {  # GIGABYTES FOLDER WHAT
  local free
  free=$(df -Pk "$2" | awk 'NR == 2 { print int($4 / 1000000) }')
  [ "$free" -ge "$1" ] || die "too little disk: $3 needs about $1 GB in $(readlink -f "$2"), and $free GB are free." \
    "Free some, or clone the tree on a larger disk."
}

install_packages() {
  local missing=() package
  for package in "${packages[@]}"; do
    case $(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true) in
      installed) ;;
      *) missing+=("$package") ;;
    esac
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  [ "$(. "$OS_RELEASE" 2>/dev/null && echo "${ID-} ${VERSION_ID-}")" = "debian 12" ] ||
    die "this is $(. "$OS_RELEASE" 2>/dev/null && echo "${PRETTY_NAME-}" || uname -sr), not Debian 12, whose packages Atoll is built with." \
      "Missing here, by their names there: ${missing[*]}" \
      "Either use a Debian 12 machine or container, or install their equivalents (Abseil 20220623 or later," \
      "TensorPipe's and libnop's headers of 2022, OpenSSL 3) and run again with ATOLL_SKIP_PACKAGES=1."
  [ "$(id -u)" -eq 0 ] ||
    die "Debian packages are missing, and installing them needs root. Run this, then the same command again:" \
      "sudo apt-get update && sudo apt-get install --no-install-recommends ${missing[*]}"
  need_disk 2 / "installing ${#missing[@]} Debian packages"
  say setup "installing ${#missing[@]} Debian packages: ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  logged apt-update apt-get update ||
    die "apt-get cannot fetch its lists: no network, or a wrong proxy or mirror in /etc/apt?" \
      "Mend that and run again, or install by other means: ${missing[*]}"
  logged apt-install apt-get -o DPkg::Lock::Timeout=300 install -y --no-install-recommends "${missing[@]}" ||
    die "apt-get could not install: ${missing[*]}" "Its last lines are above: mend what they say, and run again."
  changed=true
}

# Where packages are somebody else's to install: what is missing, by what is looked for and by Debian's names.
check_tools() {
  local missing=() command package header probes='' includes=() folder
  while read -r command package; do
    command -v "$command" >/dev/null || missing+=("$command ($package)")
  done <<'TEXT'
cmake cmake
ninja ninja-build
python3 python3
TEXT
  if $check; then
    for command in clang clang-format clang-tidy; do command -v "$command" >/dev/null || missing+=("$command ($command)"); done
  fi
  while IFS= read -r -d : folder; do
    [ -z "$folder" ] || includes+=("-I$folder/include")
  done <<<"${CMAKE_PREFIX_PATH-}:"
  while read -r header package; do
    printf -v probes '%s#if !__has_include(<%s>)\nmissing %s (%s)\n#endif\n' "$probes" "$header" "$header" "$package"
  done <<'TEXT'
absl/strings/string_view.h libabsl-dev
gtest/gtest.h libgtest-dev
gmock/gmock.h libgmock-dev
nop/serializer.h libnop-dev
openssl/evp.h libssl-dev
tensorpipe/transport/connection.h libtensorpipe-dev
zlib.h zlib1g-dev
TEXT
  while IFS= read -r header; do missing+=("$header"); done < <(
    g++ -E -P -x c++ "${includes[@]}" - <<<"$probes" | sed -n 's/^missing //p')
  [ ${#missing[@]} -eq 0 ] ||
    die "missing, with the name of Debian's package:" "${missing[@]}" \
      "Install them, or run without ATOLL_SKIP_PACKAGES on Debian 12. CMAKE_PREFIX_PATH names other places."
}

install_torch() {
  local wanted=(tools/dev/requirements.txt) stamp=.venv/atoll-requirements
  if have_toolkit; then wanted+=(tools/dev/requirements-cuda.txt); else wanted+=(tools/dev/requirements-cpu.txt); fi
  cat "${wanted[@]}" | cmp -s - $stamp && [ -e .venv/bin/python ] && return 0
  rm -f $stamp  # Until all of it is there again.
  compgen -G ".venv/lib/python3*/site-packages/torch/lib/libtorch_cpu.so" >/dev/null ||
    need_disk 4 . "torch and a build"
  say setup "installing torch $TORCH_VERSION into .venv (850 MB to fetch at most)"
  # One that was interrupted has a python, but no pip.
  .venv/bin/python -m pip --version >/dev/null 2>&1 || logged venv /usr/bin/python3 -m venv --clear .venv ||
    die "no virtual environment could be made: is Debian's python3-venv whole?"
  # No dependencies: torch's own list would bring 3 GB of NVIDIA packages that linking does not need.
  logged pip .venv/bin/python -m pip install --disable-pip-version-check --no-deps --progress-bar off \
    $(printf -- '-r %s ' "${wanted[@]}") ||
    die "pip could not install torch $TORCH_VERSION: no network, or a wrong proxy or index?" \
      "Mend that and run again, or use a torch $TORCH_VERSION that is installed somewhere:" \
      "./dev build --torch DIR"
  cat "${wanted[@]}" >$stamp
  changed=true
}

[ "$(uname -sm)" = "Linux x86_64" ] || die "Atoll runs on Linux on x86_64; this is $(uname -sm)."
if [ -z "${ATOLL_SKIP_PACKAGES-}" ]; then install_packages; fi
command -v g++ >/dev/null || die "no compiler: g++ 11 or later is needed (Debian: apt-get install g++)."
if [ -n "${ATOLL_SKIP_PACKAGES-}" ]; then check_tools; fi
[ -n "$(remembered_torch)" ] || install_torch
need_disk 1 . "a build"

if $changed || ! $quiet; then
  have_toolkit || say setup "no CUDA toolkit in $CUDA_HOME: the CPU half is built (ATOLL_CUDA_HOME names another place)"
fi
$changed || $quiet || say setup "nothing to do"
