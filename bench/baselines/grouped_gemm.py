#!/usr/bin/env python3
"""The two expert products alone, on one GPU: what no MoE layer built on them can beat.

Per shape, with T * k rows spread evenly over the rank's experts: torch._grouped_mm for gate-up (N = 2I, K = H) and down
(N = H, K = I), and one dense product of the same size through cuBLAS (all rows, one expert's weights). Random normal data:
zeros would run faster, since power limits the clock.

Prints a table, and JSON with --json FILE. The two products of the table are timed one by one, medians of --iterations
back-to-back runs after a warm-up. grouped_isolated_ms and grouped_sustained_ms are of both in a row, timed as `moewave
bench` times the layer: L2 flushed and GPU idle before each call (median), and all calls without a pause.
"""
import argparse
import json
import statistics

import torch

from shapes import SHAPES
from timing import Timer


def median_ms(function, warmup, iterations):
    for _ in range(warmup):
        function()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(iterations + 1)]
    events[0].record()
    for event in events[1:]:
        function()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in zip(events, events[1:]))


def measure(shape, warmup, iterations):
    rows, experts = shape.tokens * shape.topk, shape.experts_per_rank
    hidden, intermediate = shape.hidden, shape.intermediate
    make = lambda *size: torch.randn(*size, device="cuda", dtype=torch.bfloat16)
    x, h = make(rows, hidden), make(rows, intermediate)
    w_gate_up = make(experts, hidden, 2 * intermediate) * hidden**-0.5
    w_down = make(experts, intermediate, hidden) * intermediate**-0.5
    # K-major weights, as the layer keeps them.
    w_gate_up = w_gate_up.transpose(1, 2).contiguous().transpose(1, 2)
    w_down = w_down.transpose(1, 2).contiguous().transpose(1, 2)
    ends = torch.arange(1, experts + 1, device="cuda", dtype=torch.int32) * (rows // experts)
    ends[-1] = rows
    gate_up = lambda: torch._grouped_mm(x, w_gate_up, offs=ends)
    down = lambda: torch._grouped_mm(h, w_down, offs=ends)
    timer = Timer(warmup, iterations)
    both = lambda: (gate_up(), down())
    result = {
        "grouped_isolated_ms": statistics.median(timer.isolated_ms(both)),
        "grouped_sustained_ms": timer.sustained_ms(both),
        "grouped_gate_up_ms": median_ms(gate_up, warmup, iterations),
        "grouped_down_ms": median_ms(down, warmup, iterations),
        "cublas_gate_up_ms": median_ms(lambda: x @ w_gate_up[0], warmup, iterations),
        "cublas_down_ms": median_ms(lambda: h @ w_down[0], warmup, iterations),
    }
    flops = 6.0 * rows * hidden * intermediate
    for kind in ("grouped", "cublas"):
        result[f"{kind}_ms"] = result[f"{kind}_gate_up_ms"] + result[f"{kind}_down_ms"]
        result[f"{kind}_tflops"] = flops / result[f"{kind}_ms"] * 1e-9
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="ABC", help="of A, B, C (default ABC)")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("grouped_gemm.py needs a CUDA GPU; none is visible")
    results = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "shapes": {}}
    print("shape   torch._grouped_mm           cuBLAS, one expert")
    for name in arguments.shapes:
        result = results["shapes"][name] = measure(SHAPES[name], arguments.warmup, arguments.iterations)
        print(f"{name:5} {result['grouped_ms']:9.3f} ms {result['grouped_tflops']:5.0f} TFLOP/s"
              f" {result['cublas_ms']:9.3f} ms {result['cublas_tflops']:5.0f} TFLOP/s", flush=True)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(results, file, indent=2)


if __name__ == "__main__":
    main()
