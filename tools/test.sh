#!/usr/bin/env bash
# All tests: the release build first, then those marked for it (SANITIZE) once more under a sanitizer.
#
#   tools/test.sh [compile jobs]
set -euo pipefail
cd "$(dirname "$0")/.."
readonly jobs=${1:-$(nproc)}
readonly test_jobs=2  # an emulated layer is dozens of threads already

# ThreadSanitizer of older compilers stops at start-up where the kernel randomises addresses widely.
without_address_randomisation() {
  if setarch -R true 2>/dev/null; then
    setarch -R "$@"
  else
    "$@"
  fi
}

echo '== release: all tests'
cmake --preset release -DMOEWAVE_BUILD_TESTS=ON -DMOEWAVE_BUILD_BENCH=ON
cmake --build --preset release --target all all_verify_interface_header_sets -j "$jobs"
ctest --preset release -j "$test_jobs"

echo '== tsan: tests marked for ThreadSanitizer'
cmake --preset tsan
cmake --build --preset tsan -j "$jobs"
without_address_randomisation ctest --preset tsan -j "$test_jobs"

echo '== asan: tests marked for AddressSanitizer and UndefinedBehaviorSanitizer'
cmake --preset asan
cmake --build --preset asan -j "$jobs"
ctest --preset asan -j "$test_jobs"

echo '== all tests passed: release, tsan, asan'
