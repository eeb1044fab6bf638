#!/usr/bin/env bash
# Builds the libFuzzer programs with clang and runs each for a while. The corpus grows in build/fuzz/corpus/.
#
#   tools/fuzz.sh [seconds for each program]
set -euo pipefail
cd "$(dirname "$0")/.."
readonly seconds=${1:-60}

if ! command -v clang++ >/dev/null; then
  echo 'fuzz: libFuzzer needs clang++ (Debian/Ubuntu: apt-get install clang); the seeded mutation test runs without it' >&2
  exit 1
fi
cmake --preset fuzz
cmake --build --preset fuzz
for program in build/fuzz/fuzzers/*; do
  corpus=build/fuzz/corpus/$(basename "$program")
  mkdir -p "$corpus"
  echo "== $(basename "$program"), $seconds s"
  "$program" -max_total_time="$seconds" -rss_limit_mb=2048 -timeout=10 -print_final_stats=1 "$corpus"
done
