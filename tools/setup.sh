#!/usr/bin/env bash
# Finds what a task needs and installs what is missing. Does nothing, quickly, when all is there.
#
#   tools/setup.sh run|test|format|lint
#
# Debian and Ubuntu: apt-get, as root or through sudo; where neither is possible the command to run is printed and the exit
# status is 1. Elsewhere the missing things are listed and the exit status is 1.
set -euo pipefail

readonly cmake_minimum=3.25

die() {
  printf 'setup: %s\n' "$*" >&2
  exit 1
}

# One requirement a line: kind, what to look for, Debian/Ubuntu package. Kinds: "program" is searched in PATH, so a newer one
# from elsewhere counts; "header" is a C++ header; "python" a module of /usr/bin/python3. clang-format and clang-tidy are
# held at one version because their results differ between versions.
requirements() {
  case $1 in
    run)
      cat <<'LIST'
program g++ g++
program make make
program cmake cmake
program ninja ninja-build
header CLI/CLI.hpp libcli11-dev
header nlohmann/json.hpp nlohmann-json3-dev
header fmt/core.h libfmt-dev
header eigen3/Eigen/Core libeigen3-dev
program /usr/bin/python3 python3
python matplotlib python3-matplotlib
LIST
      ;;
    test)
      requirements run
      cat <<'LIST'
header gtest/gtest.h libgtest-dev
header rapidcheck.h librapidcheck-dev
header benchmark/benchmark.h libbenchmark-dev
LIST
      ;;
    format) echo 'program clang-format-14 clang-format-14' ;;
    lint)
      requirements test
      echo 'program clang-tidy-14 clang-tidy-14'
      ;;
    *) die "unknown task '$1'; allowed: run, test, format, lint" ;;
  esac
}

has_package() {
  [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ]
}

has() {
  local kind=$1 name=$2 package=$3
  if [ "$kind" = program ]; then
    command -v "$name" >/dev/null
    return
  fi
  if [ "$apt" = yes ] && has_package "$package"; then
    return 0
  fi
  case $kind in
    header) printf '#include <%s>\n' "$name" | "${CXX:-g++}" -std=c++20 -E -x c++ - >/dev/null 2>&1 ;;
    python) /usr/bin/python3 -c "import $name" 2>/dev/null ;;
  esac
}

check_cmake_version() {
  local version
  version=$(cmake --version | sed -n '1s/.*version \([0-9.]*\).*/\1/p')
  if [ "$(printf '%s\n%s\n' "$cmake_minimum" "$version" | sort -V | head -n 1)" != "$cmake_minimum" ]; then
    die "CMake $cmake_minimum or later is needed, found $version ($(command -v cmake));" \
      "a newer one: 'pip install cmake' in a virtual environment, or cmake.org/download"
  fi
}

install_packages() {
  local -a as_root=()
  local install="apt-get install -y --no-install-recommends $*"
  if [ "$(id -u)" != 0 ]; then
    if command -v sudo >/dev/null && { sudo -n true 2>/dev/null || [ -t 0 ]; }; then
      as_root=(sudo)
    else
      die "missing: $*; no root rights to install them, please run as root: apt-get update && $install"
    fi
  fi
  echo "setup: installing with apt-get: $*"
  "${as_root[@]}" apt-get -q -o DPkg::Lock::Timeout=120 update ||
    echo 'setup: apt-get update failed, trying with the package lists that are here' >&2
  # shellcheck disable=SC2086
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive $install -q -o DPkg::Lock::Timeout=120 ||
    die "apt-get could not install: $*"
}

[ $# = 1 ] || die 'usage: tools/setup.sh run|test|format|lint'
apt=no
if command -v apt-get >/dev/null && command -v dpkg-query >/dev/null; then
  apt=yes
fi

list=$(requirements "$1")
missing=()
while read -r kind name package; do
  has "$kind" "$name" "$package" || missing+=("$package")
done <<<"$list"

if [ ${#missing[@]} -gt 0 ]; then
  [ "$apt" = yes ] || die "missing (names of the Debian packages): ${missing[*]}; this system has no apt-get, please" \
    'install what provides them'
  install_packages "${missing[@]}"
fi
if [ "$1" != format ]; then
  check_cmake_version
fi
