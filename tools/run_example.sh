#!/usr/bin/env bash
# The example layer forward and backward on 4 emulated ranks, checked against the FP64 reference, with its pictures.
#
#   tools/run_example.sh [PROGRAM]      default: build/release/moewave
set -euo pipefail
cd "$(dirname "$0")/.."
readonly program=${1:-build/release/moewave}

if [ ! -x "$program" ]; then
  echo "run_example: $program is missing; 'make run' builds it first" >&2
  exit 1
fi
mkdir -p out
"$program" verify \
  --weights examples/data/layer.safetensors --layer model.layers.3.mlp \
  --inputs examples/data/inputs.safetensors \
  --backward --ranks 4 \
  --json out/example.json --timeline out/example-trace.json --output out/example.safetensors
/usr/bin/python3 tools/plot_run.py out/example.json out/example-trace.json out

cat <<'TEXT'

Look at
  out/timeline.png         what every SM of every rank did, and when
  out/traffic.png          bytes between the ranks, what pulling once saves, expert load
  out/example-trace.json   the timeline in full, for https://ui.perfetto.dev
  out/example.json         all numbers above, for programs (docs/json.md)
  out/example.safetensors  output and gradients (docs/files.md)
TEXT
