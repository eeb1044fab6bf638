#!/usr/bin/env bash
# clang-tidy over every source of the debug build, with the checks of .clang-tidy.
#
#   tools/lint.sh [jobs]
set -euo pipefail
cd "$(dirname "$0")/.."
readonly jobs=${1:-$(nproc)}

# Without CUDA: clang-tidy would need its own view of the toolkit. Without ccache's launcher the commands are plain.
cmake --preset debug -B build/lint -DMOEWAVE_CUDA=OFF -DMOEWAVE_BUILD_BENCH=ON -DCMAKE_CXX_COMPILER_LAUNCHER=
cmake --build build/lint --target moewave_write_build_info
sed -n 's/^ *"file": "\(.*\)",\{0,1\}$/\1/p' build/lint/compile_commands.json | grep -v '^.*/build/' | sort -u |
  xargs -n 1 -P "$jobs" clang-tidy-14 -p build/lint --quiet --warnings-as-errors='*'
