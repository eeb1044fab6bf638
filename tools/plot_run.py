#!/usr/bin/python3
"""Draws a run of the emulator: timeline.png (which SM did what, when) and traffic.png (bytes between ranks, expert load).

usage: plot_run.py RESULT.json TIMELINE.json OUTDIR

RESULT.json and TIMELINE.json come from `moewave run` or `verify` with --json and --timeline.
"""
import json
import sys
from pathlib import Path

# Roles in the order of the legend; names with "shared " in front are the shared expert's and drawn in a lighter tone.
ROLE_COLOURS = {
    "entry": "#8d6e63",
    "schedule": "#5e35b1",
    "pull": "#1e88e5",
    "gate-up": "#fb8c00",
    "down": "#e53935",
    "recompute": "#fdd835",
    "dh": "#00897b",
    "dx": "#43a047",
    "wgrad": "#9ccc65",
    "merge": "#d81b60",
    "exit": "#546e7a",
    "wait": "#eceff1",
}
OTHER_COLOUR = "#212121"
RANK_COLOURS = ["#1e88e5", "#fb8c00", "#43a047", "#d81b60", "#5e35b1", "#00897b", "#fdd835", "#8d6e63"]
INK, FAINT = "#263238", "#90a4ae"


def fail(message):
    sys.exit(f"plot_run.py: {message}")


try:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import LinearSegmentedColormap, to_rgb
    from matplotlib.patches import Patch
except ImportError:
    fail("matplotlib is missing; install it for this Python, on Debian and Ubuntu: apt-get install python3-matplotlib")


def load(path, key):
    try:
        content = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        fail(f"{path}: {error}")
    if not isinstance(content, dict) or not content.get(key):
        fail(f"{path} has no {key}; it must come from moewave with --backend emulator")
    return content


def human_bytes(count):
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 999.5 or unit == "GiB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1024


def colour_of(name):
    colour = to_rgb(ROLE_COLOURS.get(name.removeprefix("shared "), OTHER_COLOUR))
    return tuple(0.5 + 0.5 * c for c in colour) if name.startswith("shared ") else colour


def describe(result):
    shape = result["shape"]
    text = f"H {shape['hidden']}, I {shape['intermediate']}, {shape['experts']} experts, top-{shape['topk']}"
    if shape["shared_intermediate"]:
        text += f", shared expert {shape['shared_intermediate']}"
    return f"{result['ranks']} ranks, {result['tokens']:,} tokens, {text}"


# ---- Timeline ----------------------------------------------------------------------------------------------------------


def lanes_of(events):
    """(rank, sm) -> y of its lane, from the top, with a gap between ranks."""
    lanes, y, previous = {}, 0.0, None
    for rank, sm in sorted({(event["pid"], event["tid"]) for event in events}):
        if previous is not None and rank != previous:
            y += 0.9
        lanes[rank, sm] = y
        y, previous = y + 1, rank
    return lanes


def legend_order(names):
    known = list(ROLE_COLOURS)
    plain = [name.removeprefix("shared ") for name in names]
    return sorted(names, key=lambda n: (known.index(p) if (p := n.removeprefix("shared ")) in plain and p in known else 99, n))


def share_not_waiting(events):
    begin = min(event["ts"] for event in events)
    end = max(event["ts"] + event["dur"] for event in events)
    waited = sum(event["dur"] for event in events if event["name"] == "wait")
    sms = len({event["tid"] for event in events})
    return 1 - waited / (sms * (end - begin)) if end > begin else 1


def draw_calls(axes, events, start, height):
    """A line above the lanes for each call, from its first event on any rank to its last; calls may overlap."""
    calls = sorted({event["args"]["call"] for event in events})
    for call in calls:
        own = [event for event in events if event["args"]["call"] == call]
        begin = (min(event["ts"] for event in own) - start) / 1e3
        end = (max(event["ts"] + event["dur"] for event in own) - start) / 1e3
        y = height - 0.4 * (call % 2)
        axes.annotate("", (begin, y), (end, y), annotation_clip=False,
                      arrowprops={"arrowstyle": "|-|,widthA=0.25,widthB=0.25", "color": INK, "lw": 1, "shrinkA": 0, "shrinkB": 0})
        axes.text((begin + end) / 2, y - 0.2, f"{own[0]['cat']}, {end - begin:.1f} ms", ha="center", va="bottom",
                  color=INK, fontsize=10)


def draw_timeline(result, trace, path):
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    lanes = lanes_of(events)
    bottom = max(lanes.values()) + 1
    figure, axes = plt.subplots(figsize=(15, min(2.2 + 0.19 * bottom, 30)))

    start = min(event["ts"] for event in events)
    end = (max(event["ts"] + event["dur"] for event in events) - start) / 1e3
    narrowest = end / 2000  # thinner ones would not be seen

    # Waits lie inside the events of their roles, so they are drawn last.
    boxes, colours = [], []
    for event in sorted(events, key=lambda e: e["name"] == "wait"):
        left = (event["ts"] - start) / 1e3
        right = left + event["dur"] / 1e3
        if event["name"] != "wait":
            right = max(right, left + narrowest)
        y = lanes[event["pid"], event["tid"]]
        boxes.append([(left, y + 0.06), (right, y + 0.06), (right, y + 0.94), (left, y + 0.94)])
        colours.append(colour_of(event["name"]))
    axes.add_collection(PolyCollection(boxes, facecolors=colours, edgecolors="none", rasterized=True))

    axes.set_xlim(0, end)
    axes.set_ylim(bottom + 0.2, -0.4)
    axes.set_xlabel("logical time, ms: as if every SM had a processor of its own")
    comm_sms = result["tuning"]["comm_sms"]
    axes.set_yticks([y + 0.5 for y in lanes.values()],
                    [f"{'comm ' if sm < comm_sms else ''}SM {sm}" for _, sm in lanes], fontsize=6.5, color=INK)
    axes.tick_params(axis="y", length=0)
    for rank in sorted({rank for rank, _ in lanes}):
        own = [y for (owner, _), y in lanes.items() if owner == rank]
        middle = (min(own) + max(own) + 1) / 2
        axes.text(-0.062, middle, f"rank {rank}", transform=axes.get_yaxis_transform(), rotation=90, ha="center",
                  va="center", fontsize=11, fontweight="bold", color=INK)
        share = share_not_waiting([event for event in events if event["pid"] == rank])
        axes.text(1.006, middle, f"{share:.0%}\nnot waiting", transform=axes.get_yaxis_transform(), va="center",
                  fontsize=8, color=INK)
    draw_calls(axes, events, start, -0.75)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)

    names = legend_order({event["name"] for event in events})
    axes.legend(handles=[Patch(facecolor=colour_of(n), edgecolor="#b0bec5", lw=0.5, label=n) for n in names],
                loc="upper center", bbox_to_anchor=(0.5, -0.75 / figure.get_figheight()), ncol=-(-len(names) // -(-len(names) // 12)),
                frameon=False, fontsize=9, handlelength=1.2, columnspacing=1.4)
    axes.set_title(f"What every SM did: {describe(result)}", loc="left", pad=30, fontsize=13, color=INK)
    figure.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(figure)


# ---- Traffic -----------------------------------------------------------------------------------------------------------


def draw_matrix(axes, matrix, title, row_label, column_label):
    ranks = len(matrix)
    largest = max((max(row) for row in matrix), default=0)
    colours = LinearSegmentedColormap.from_list("bytes", ["#f5f9fd", "#64b5f6", "#0d47a1"])
    shown = [[matrix[r][c] if r != c else float("nan") for c in range(ranks)] for r in range(ranks)]
    colours.set_bad("#eceff1")
    axes.imshow(shown, cmap=colours, vmin=0, vmax=largest or 1)
    if ranks <= 10:
        for r in range(ranks):
            for c in range(ranks):
                dark = r != c and matrix[r][c] > 0.55 * largest
                axes.text(c, r, "own" if r == c else human_bytes(matrix[r][c]), ha="center", va="center",
                          color="white" if dark else FAINT if r == c else INK, fontsize=9 if ranks <= 6 else 6.5)
    axes.set_xticks(range(ranks))
    axes.set_yticks(range(ranks))
    axes.set_xlabel(column_label)
    axes.set_ylabel(row_label)
    axes.tick_params(length=0)
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    for spine in axes.spines.values():
        spine.set_visible(False)


def draw_saving(axes, calls):
    """Bytes that each rank would read with a pull for every route, and does read with one pull a token."""
    ranks = len(calls[0]["ranks"])
    width = 0.38
    per_route = [sum(call["ranks"][r]["per_route_bytes"] for call in calls) / 2**20 for r in range(ranks)]
    pulled = [sum(call["ranks"][r]["pulled_bytes"] for call in calls) / 2**20 for r in range(ranks)]
    axes.bar([r - width / 2 for r in range(ranks)], per_route, width, color="#cfd8dc", label="a pull for every route")
    axes.bar([r + width / 2 for r in range(ranks)], pulled, width, color="#1e88e5", label="each token once (what was read)")
    for r in range(ranks):
        if per_route[r] > 0 and ranks <= 16:
            axes.text(r + width / 2, pulled[r], f"{pulled[r] / per_route[r]:.0%}", ha="center", va="bottom", fontsize=9,
                      color=INK)
    axes.set_xticks(range(ranks))
    axes.set_xlabel("reading rank")
    axes.set_ylabel("MiB over the link")
    axes.set_ylim(0, 1.32 * max(per_route + [1e-9]))
    axes.legend(frameon=False, fontsize=9, loc="upper right")
    directions = " and ".join(call["direction"] for call in calls)
    axes.set_title(f"Pulling once: {directions}", loc="left", fontsize=11, color=INK)


def draw_experts(axes, result):
    rows, owners = result["expert_rows"], result["expert_owner"]
    axes.bar(range(len(rows)), rows, color=[RANK_COLOURS[owner % len(RANK_COLOURS)] for owner in owners], width=0.82)
    mean = sum(rows) / len(rows)
    axes.axhline(mean, color=INK, lw=1, ls=(0, (4, 3)))
    axes.text(1.004, mean, f"mean {mean:.0f}", transform=axes.get_yaxis_transform(), va="center", fontsize=9, color=INK)
    axes.set_xlim(-0.7, len(rows) - 0.3)
    axes.set_xlabel("expert")
    axes.set_ylabel("rows (tokens routed to it)")
    if len(rows) <= 40:
        axes.set_xticks(range(len(rows)))
        axes.tick_params(axis="x", length=0, labelsize=8)
    if result["ranks"] <= 16:
        handles = []
        for rank in range(result["ranks"]):
            total = sum(count for count, owner in zip(rows, owners) if owner == rank)
            handles.append(Patch(color=RANK_COLOURS[rank % len(RANK_COLOURS)], label=f"on rank {rank}: {total:,} rows"))
        axes.legend(handles=handles, frameon=False, fontsize=9, ncol=min(8, len(handles)), loc="lower right",
                    bbox_to_anchor=(1, 1), borderaxespad=0.2)
    axes.set_title("Expert load", loc="left", fontsize=11, color=INK)


def draw_traffic(result, path):
    calls = result["calls"]
    forward = calls[0]
    figure = plt.figure(figsize=(15, 9.2))
    grid = figure.add_gridspec(2, 3, height_ratios=[1.15, 1], hspace=0.36, wspace=0.24, top=0.89)
    draw_matrix(figure.add_subplot(grid[0, 0]), forward["pulled_bytes"], "Dispatch: tokens pulled, each once (forward)",
                "reading rank", "from rank")
    draw_matrix(figure.add_subplot(grid[0, 1]), forward["pushed_bytes"], "Combine: rows pushed back (forward)",
                "writing rank", "to rank")
    saving = figure.add_subplot(grid[0, 2])
    draw_saving(saving, calls)
    experts = figure.add_subplot(grid[1, :])
    draw_experts(experts, result)
    for axes in (saving, experts):
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.suptitle(f"What crossed the links: {describe(result)}", x=0.125, y=0.965, ha="left", fontsize=13, color=INK)
    figure.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(figure)


def main(arguments):
    if len(arguments) != 3:
        sys.exit(__doc__.strip())
    result, trace = load(arguments[0], "calls"), load(arguments[1], "traceEvents")
    folder = Path(arguments[2])
    plt.rcParams.update({"font.family": "DejaVu Sans", "axes.edgecolor": FAINT, "xtick.color": INK, "ytick.color": INK,
                         "axes.labelcolor": INK})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        draw_timeline(result, trace, folder / "timeline.png")
        draw_traffic(result, folder / "traffic.png")
    except OSError as error:
        fail(error)


if __name__ == "__main__":
    main(sys.argv[1:])
