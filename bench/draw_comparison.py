#!/usr/bin/env python3
"""Draws a result of compare.py: forward of the whole layer on all GPUs, at the full number of tokens, uniform routing.

usage: draw_comparison.py RESULT.json PICTURE.png
"""
import json
import sys
from pathlib import Path

INK, FAINT = "#263238", "#90a4ae"
OURS, NCCL, EARLIER, GEMM = "#1e88e5", "#90a4ae", "#cfd8dc", "#d81b60"
EARLIER_RANKS, EARLIER_GPU = 2, "H200"  # what the earlier figures of the result were measured on
WIDTH = 0.27


def fail(message):
    sys.exit(f"draw_comparison.py: {message}")


try:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
except ImportError:
    fail("matplotlib is missing; install it for this Python, on Debian and Ubuntu: apt-get install python3-matplotlib")


def load(path):
    try:
        result = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        fail(f"{path}: {error}")
    if not isinstance(result, dict) or result.get("format") != "moewave-comparison":
        fail(f"{path} is no result of bench/compare.py")
    return result


def points_to_draw(result, path):
    """Of each shape the point with most ranks and most tokens."""
    best = {}
    for point in result["points"]:
        if point["routing"] != "uniform":
            continue
        size = lambda p: (p["ranks"], p["tokens"])
        if point["shape"] not in best or size(point) > size(best[point["shape"]]):
            best[point["shape"]] = point
    points = [best[shape] for shape in sorted(best)]
    if not any(point[kind]["isolated_ms"] for point in points for kind in ("moewave", "nccl_pytorch")):
        fail(f"{path} has no times with uniform routing")
    if len({point["ranks"] for point in points}) > 1:
        fail(f"{path} has different numbers of ranks for {', '.join(sorted(best))}")
    return points


def draw_bar(axes, x, measured, colour, hatch=None, bold=False):
    value = measured["isolated_ms"]
    if value is None:
        problem = measured.get("problem", "missing").split(":")[0]
        axes.text(x, 0.1, problem, rotation=90, ha="center", va="bottom", fontsize=9, color=INK)
        return
    axes.bar(x, value, WIDTH * 0.92, color=colour, hatch=hatch, edgecolor="white" if hatch is None else FAINT, lw=0.6)
    axes.annotate(f"{value:.2f}" if value < 10 else f"{value:.1f}", (x, value), (0, 3), textcoords="offset points",
                  ha="center", va="bottom", fontsize=10.5, color=INK, fontweight="bold" if bold else "normal")


def describe(point, shape):
    return (f"{point['shape']}: H {shape['hidden']}, I {shape['intermediate']}, top-{shape['topk']}\n"
            f"{point['tokens']:,} tokens, {shape['experts_per_rank']} experts a rank")


def draw(result, points, picture):
    ranks = points[0]["ranks"]
    gpus = result["gpus"]
    name = gpus[0] if gpus else "unknown GPU"
    earlier = result["earlier"]["deepep_deepgemm_ms"] if ranks == EARLIER_RANKS and EARLIER_GPU in name else {}
    figure, axes = plt.subplots(figsize=(9.2, 4.9))
    for i, point in enumerate(points):
        side = WIDTH if earlier else WIDTH / 2
        nccl, ours = i - side, i + side
        draw_bar(axes, nccl, point["nccl_pytorch"], NCCL)
        if earlier:
            draw_bar(axes, i, {"isolated_ms": earlier[point["shape"]]}, EARLIER, hatch="////")
        draw_bar(axes, ours, point["moewave"], OURS, bold=True)
        floor = point["grouped_gemm"]["isolated_ms"]
        if floor is not None:
            axes.plot([nccl - WIDTH / 2, ours + WIDTH / 2], [floor, floor], color=GEMM, lw=1.8, zorder=5)
            axes.annotate(f"{floor:.2f}", (ours + WIDTH / 2, floor), (4, 0), textcoords="offset points", ha="left",
                          va="center", fontsize=9.5, color=GEMM)
    axes.set_xticks(range(len(points)), [describe(point, result["shapes"][point["shape"]]) for point in points])
    axes.set_xlim(-0.6, len(points) - 0.35)
    axes.set_ylim(0, axes.get_ylim()[1] * 1.06)
    axes.set_ylabel("ms, lower is better")
    axes.tick_params(axis="x", length=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    handles = [Patch(color=NCCL, label="NCCL + PyTorch")]
    if earlier:
        handles.append(Patch(facecolor=EARLIER, edgecolor=FAINT, hatch="////",
                             label="DeepEP + DeepGEMM, unfused\n(measured earlier, another machine)"))
    handles.append(Patch(color=OURS, label="moewave"))
    if any(point["grouped_gemm"]["isolated_ms"] for point in points):
        handles.append(Line2D([], [], color=GEMM, lw=1.8, label="the two grouped GEMMs alone\n(torch._grouped_mm)"))
    axes.legend(handles=handles, frameon=False, fontsize=9.5, loc="upper right", labelspacing=0.8)
    title = f"Forward of a whole MoE layer, BF16, {ranks} rank{'s' * (ranks > 1)} on {min(ranks, len(gpus))} x {name}"
    figure.suptitle(title, x=0.06, y=0.97, ha="left", fontsize=12.5, color=INK)
    source = (f"Isolated calls, medians of the slowest rank; uniform routing. moewave {result['version']}, "
              f"commit {result['commit']}, driver {result['driver'] or 'unknown'}, {result['date'][:10]}.")
    figure.text(0.06, 0.015, source, fontsize=8.5, color=INK)
    figure.subplots_adjust(left=0.075, right=0.985, top=0.9, bottom=0.17)
    try:
        figure.savefig(picture, dpi=150)
    except (OSError, ValueError) as error:
        fail(f"{picture}: {error}")


def main(arguments):
    if len(arguments) != 2:
        sys.exit(__doc__.strip())
    result = load(arguments[0])
    plt.rcParams.update({"font.family": "DejaVu Sans", "axes.edgecolor": FAINT, "xtick.color": INK, "ytick.color": INK,
                         "axes.labelcolor": INK, "hatch.linewidth": 0.5, "hatch.color": FAINT})
    draw(result, points_to_draw(result, arguments[0]), arguments[1])


if __name__ == "__main__":
    main(sys.argv[1:])
