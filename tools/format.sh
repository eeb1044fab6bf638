#!/usr/bin/env bash
# Formats all C++ and CUDA sources as .clang-format says; --check changes nothing and fails where something would change.
set -euo pipefail
cd "$(dirname "$0")/.."

case ${1:-} in
  '') mode=(-i) ;;
  --check) mode=(--dry-run -Werror) ;;
  *)
    echo "format: unknown option '$1'; allowed: --check" >&2
    exit 2
    ;;
esac

find include src tools tests bench examples -type d -name build -prune -o \
  -type f \( -name '*.h' -o -name '*.cpp' -o -name '*.cuh' -o -name '*.cu' \) -print0 |
  xargs -0 clang-format-14 --style=file "${mode[@]}"
