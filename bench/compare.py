#!/usr/bin/env python3
"""The forward layer against its baselines on the GPUs of this machine, in one go.

  bench/compare.py --build build/release --output bench/results/NAME.json

For each point (shape, ranks, tokens, routing): moewave bench, NCCL + PyTorch, and on the largest points the two grouped
products alone; one program after another, alternating, with equal routes, iterations, warm-up and pauses (docs/bench.md
says why). A step that fails or runs past its limit is a row. The file of --output is written anew after each step.

Python needs nothing but its own library; the baselines run in the Python of --python, which needs torch.

exit code 0: every step gave a time and no sampled token was wrong; 1: otherwise; 2: bad input
"""
import json
import re
import socket
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "baselines"))
import routes  # noqa: E402
from shapes import SHAPES  # noqa: E402
from steps import (Parser, check_output, facts, fail, find_program, first_gpus, heading, number_of,  # noqa: E402
                   query_gpus, run_step, write_json)

SMALL_TOKENS = (1, 64, 512)
KINDS = {"moewave": "moewave", "nccl_pytorch": "NCCL + PyTorch", "grouped_gemm": "grouped GEMM alone"}
STATE_FIELDS = ("clocks.sm", "temperature.gpu", "power.draw")

# Forward on two H200 at the tokens of the shape, ms. Earlier figures come from other runs on such machines
# (docs/bench.md): they show the order of size and are no part of a ratio.
GOALS_MS = {"A": 8.9, "B": 3.75, "C": 2.1}
EARLIER = {
    "where": "2 x NVIDIA H200, NVLink, uniform routing, other runs and machines than this result",
    "nccl_pytorch_ms": {"A": 16.8, "B": 9.30, "C": 7.83},
    "deepep_deepgemm_ms": {"A": 11.5, "B": 5.91, "C": 4.87},
    "deepgemm_grouped_ms": {"A": 7.94, "B": 3.35, "C": 1.70},
}


@dataclass(frozen=True)
class Point:
    shape: str
    ranks: int
    tokens: int
    routing: str

    def name(self):
        return f"{self.shape} ranks={self.ranks} T={self.tokens} {self.routing}"

    def routes_file(self):
        return f"{self.shape}_{self.ranks}_{self.tokens}_{self.routing.replace(':', '_')}.safetensors"

    def is_full(self):
        return self.tokens == SHAPES[self.shape].tokens

    def goal(self):
        """ms, or None. Small batches have another: not to be slower than NCCL + PyTorch."""
        return GOALS_MS[self.shape] if self.ranks == 2 and self.is_full() and self.routing == "uniform" else None


def make_points(gpus, quick):
    full = lambda ranks, routing: [Point(name, ranks, SHAPES[name].tokens, routing) for name in SHAPES]
    points = full(gpus, "uniform")
    if quick:
        return points
    points += full(gpus, "zipf:1")
    points += [Point(name, gpus, tokens, "uniform") for name in SHAPES for tokens in SMALL_TOKENS]
    if gpus > 1:
        points += full(1, "uniform") + full(1, "zipf:1")
    return points


def kinds_of(point, gpus):
    """The grouped products do not depend on ranks and routing: once for each shape."""
    kinds = ["moewave", "nccl_pytorch"]
    return kinds + ["grouped_gemm"] if point.is_full() and point.ranks == gpus and point.routing == "uniform" else kinds


# ---- One step


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def command_of(kind, point, arguments, moewave, routes_file, result_file):
    shape = SHAPES[point.shape]
    calls = ["--warmup", arguments.warmup, "--iterations", arguments.iterations, "--json", result_file]
    if kind == "moewave":
        return [moewave, "bench", "--shape", point.shape, "--ranks", point.ranks, "--tokens", point.tokens,
                "--experts", shape.experts_per_rank * point.ranks, "--inputs", routes_file, "--routing", "file", *calls]
    script = arguments.baselines / f"{kind}.py"
    if kind == "grouped_gemm":
        return [arguments.python, script, "--shapes", point.shape, *calls]
    return [arguments.python, script, "--shapes", point.shape, "--tokens", point.tokens, "--routes", routes_file,
            "--port", free_port(), *calls]


def times_of(kind, point, result):
    """{isolated_ms, sustained_ms} of a program's JSON; KeyError if it is not what was asked for."""
    if kind == "moewave":
        return {"isolated_ms": result["isolated"]["median_seconds"] * 1e3,
                "sustained_ms": result["sustained"]["seconds"] * 1e3}
    shape = result["shapes"][point.shape]
    if kind == "grouped_gemm":
        return {"isolated_ms": shape["grouped_isolated_ms"], "sustained_ms": shape["grouped_sustained_ms"]}
    if shape["ranks"] != point.ranks:
        raise KeyError(f"{shape['ranks']} ranks instead of {point.ranks}")
    return {"isolated_ms": shape["forward_ms"]["median"], "sustained_ms": shape["forward_ms"]["sustained"]}


def measure(kind, point, arguments, moewave, folder, limit_s):
    """An entry of `steps`: what ran, how it ended, its times and its own JSON."""
    result_file = folder / "step.json"
    result_file.unlink(missing_ok=True)
    entry = {"gpus_before": [dict(zip(STATE_FIELDS, values)) for values in query_gpus(*STATE_FIELDS)]}
    if kind == "moewave" and moewave is None:
        return entry | {"status": "failed", "message": f"moewave is not in {arguments.build}"}
    command = command_of(kind, point, arguments, moewave, folder / point.routes_file(), result_file)
    step = run_step(command, limit_s, first_gpus(point.ranks))
    entry["seconds"] = round(step.seconds, 1)
    try:
        result = json.loads(result_file.read_text())
        entry |= times_of(kind, point, result) | {"status": "ok", "result": result}
    except (OSError, ValueError, KeyError, TypeError) as error:
        message = step.reason() if step.returncode != 0 else f"no result: {error}"
        return entry | {"status": "failed", "message": message, "output": step.output[-2000:]}
    if kind == "moewave" and not result.get("ok"):
        check = result.get("check", {})
        message = f"{check.get('wrong')} of {check.get('tokens')} sampled tokens are wrong"
        entry |= {"status": "wrong", "message": message}
    elif step.returncode != 0:
        entry |= {"status": "failed", "message": step.reason(), "output": step.output[-2000:]}
    return entry


# ---- All of them


def write_routes(points, seed, folder):
    """A file for each point, before the first program runs: later it would be a longer pause for some than for others.
    Returns the rows of the busiest rank, relative to the mean."""
    busiest = {}
    for point in points:
        ids = routes.draw(SHAPES[point.shape], point.ranks, point.tokens, point.routing, seed)
        routes.write(folder / point.routes_file(), ids)
        busiest[point] = routes.busiest(SHAPES[point.shape], point.ranks, ids)
    return busiest


def run_points(points, arguments, moewave, gpus, comparison):
    end = time.monotonic() + arguments.time_limit if arguments.time_limit else float("inf")
    with tempfile.TemporaryDirectory(prefix="moewave_compare_") as name:
        folder = Path(name)
        busiest = write_routes(points, arguments.seed, folder)
        for turn in range(arguments.rounds):
            for point in points:
                kinds = kinds_of(point, gpus)
                for kind in kinds if turn % 2 == 0 else reversed(kinds):
                    left = end - time.monotonic()
                    label = {"shape": point.shape, "ranks": point.ranks, "tokens": point.tokens,
                             "routing": point.routing, "kind": kind, "round": turn}
                    if left < arguments.pause + 1:
                        entry = {"status": "not run", "message": f"--time-limit of {arguments.time_limit:g} s was over"}
                    else:
                        print(f"round {turn + 1}: {point.name()}: {KINDS[kind]} ...", file=sys.stderr, flush=True)
                        time.sleep(arguments.pause)
                        limit_s = min(arguments.step_limit, left - arguments.pause)
                        entry = measure(kind, point, arguments, moewave, folder, limit_s)
                    comparison["steps"].append(label | {"busiest_rank_to_mean": round(busiest[point], 4)} | entry)
                    comparison["points"] = [summary(point, comparison["steps"]) for point in points]
                    comparison["ok"] = all(step["status"] == "ok" for step in comparison["steps"])
                    write_json(arguments.output, comparison)


def summary(point, steps):
    """A row of the table: medians over the rounds of the isolated medians, and of the sustained times."""
    row = {"shape": point.shape, "ranks": point.ranks, "tokens": point.tokens, "routing": point.routing,
           "goal_ms": point.goal()}
    own = [step for step in steps if all(step[key] == row[key] for key in ("shape", "ranks", "tokens", "routing"))]
    # The grouped products have even rows, whatever the number of ranks.
    even = point.is_full() and point.routing == "uniform"
    alone = [step for step in steps if even and step["shape"] == point.shape]
    for kind in KINDS:
        found = [step for step in (alone if kind == "grouped_gemm" else own) if step["kind"] == kind]
        good = [step for step in found if step["status"] == "ok"]
        row[kind] = {name: statistics.median(step[name] for step in good) if good else None
                     for name in ("isolated_ms", "sustained_ms")}
        row[kind]["steps_ok"] = len(good)
        bad = [step for step in found if step["status"] != "ok"]
        if bad:
            row[kind]["problem"] = f"{bad[0]['status']}: {bad[0]['message']}"
    ours, nccl, gemm = (row[kind]["isolated_ms"] for kind in KINDS)
    row["speedup_to_nccl_pytorch"] = nccl / ours if ours and nccl else None
    row["ratio_to_grouped_gemm"] = ours / gemm if ours and gemm else None
    goal = row["goal_ms"] or (nccl if not point.is_full() else None)
    row["goal_reached"] = ours <= goal if ours and goal else None
    return row


def table(comparison):
    number = lambda value, digits=3: "-" if value is None else f"{value:.{digits}f}"
    lines = [f"# {heading(comparison)}",
             f"# forward, BF16, ms: isolated calls, medians of {comparison['iterations']} calls of the slowest rank, "
             f"{comparison['rounds']} round{'s' * (comparison['rounds'] > 1)}; in brackets sustained",
             f"{'shape':5} {'ranks':>5} {'T':>6} {'routing':8} {'moewave':>17} {'NCCL + PyTorch':>17} "
             f"{'grouped GEMM':>17} {'NCCL/ours':>9} {'ours/GEMM':>9} {'goal':>6}  reached"]
    for row in comparison["points"]:
        cells = []
        for kind in KINDS:
            isolated, sustained = row[kind]["isolated_ms"], row[kind]["sustained_ms"]
            state = row[kind].get("problem", "").split(":")[0]
            cells.append(f"{number(isolated)} ({number(sustained)})" if isolated is not None else state.upper() or "-")
        goal = number(row["goal_ms"], 2) if row["goal_ms"] else "NCCL" if row["tokens"] in SMALL_TOKENS else "-"
        reached = {True: "yes", False: "no", None: "-"}[row["goal_reached"]]
        lines.append(f"{row['shape']:5} {row['ranks']:5} {row['tokens']:6} {row['routing']:8} {cells[0]:>17} "
                     f"{cells[1]:>17} {cells[2]:>17} {number(row['speedup_to_nccl_pytorch'], 2):>9} "
                     f"{number(row['ratio_to_grouped_gemm'], 2):>9} {goal:>6}  {reached}")
    problems = [step for step in comparison["steps"] if step["status"] != "ok"]
    lines += [f"{step['status']}: {step['shape']} ranks={step['ranks']} T={step['tokens']} {step['routing']}, round "
              f"{step['round'] + 1}, {KINDS[step['kind']]}: {step['message']}" for step in problems]
    return "\n".join(lines)


def parse_arguments():
    parser = Parser(__doc__)
    parser.add_argument("--build", type=Path, default=HERE.parent / "build/release", metavar="DIR",
                        help="folder with moewave (default: the release build)")
    parser.add_argument("--python", default=sys.executable, metavar="PROGRAM", help="has torch (default: this one)")
    parser.add_argument("--baselines", type=Path, default=HERE / "baselines", metavar="DIR",
                        help="folder with nccl_pytorch.py and grouped_gemm.py (default: bench/baselines)")
    parser.add_argument("--quick", action="store_true", help="A, B, C with a rank on each GPU, uniform; 1 round")
    parser.add_argument("--only", metavar="PATTERN",
                        help="points whose name (see --list) this regular expression finds")
    parser.add_argument("--list", action="store_true", help="print the names of the points and run nothing")
    parser.add_argument("--ranks", type=number_of(int, 1), metavar="N",
                        help="instead of the number of GPUs that moewave sees")
    parser.add_argument("--rounds", type=number_of(int, 1), help="(default 2; 1 with --quick)")
    parser.add_argument("--warmup", type=number_of(int, 0), default=5, help="calls of each program (default 5)")
    parser.add_argument("--iterations", type=number_of(int, 1), default=20,
                        help="timed calls of each kind (default 20)")
    parser.add_argument("--pause", type=number_of(float, 0), default=3.0, metavar="SECONDS",
                        help="before each program, GPUs idle (default 3)")
    parser.add_argument("--seed", type=number_of(int, 0), default=1, help="of the routes (default 1)")
    parser.add_argument("--step-limit", type=number_of(float, 1), default=180.0, metavar="SECONDS",
                        help="of each program (default 180)")
    parser.add_argument("--time-limit", type=number_of(float, 1), metavar="SECONDS",
                        help="of the whole run; what is not reached is a row (default: none)")
    parser.add_argument("--commit", help="for the result file (default: the one that moewave was built from)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON (docs/bench.md)")
    arguments = parser.parse_args()
    arguments.rounds = arguments.rounds or (1 if arguments.quick else 2)
    for name in ("build", "baselines"):
        if not getattr(arguments, name).is_dir():
            fail(f"--{name} {getattr(arguments, name)} is not a folder")
    check_output(arguments.output)
    try:
        arguments.pattern = re.compile(arguments.only or "")
    except re.error as error:
        fail(f"--only '{arguments.only}' is no regular expression: {error}")
    return arguments


def main():
    arguments = parse_arguments()
    moewave = find_program(arguments.build.resolve(), "moewave")
    if moewave is None:
        print(f"compare.py: moewave is not in {arguments.build}; only the baselines run", file=sys.stderr)
    known = facts(moewave, arguments.commit)
    gpus = arguments.ranks or len(known["gpus"]) or len(query_gpus("name"))
    if gpus == 0:
        fail("no GPU is visible; --ranks N says how many to ask for all the same")
    points = [point for point in make_points(gpus, arguments.quick) if arguments.pattern.search(point.name())]
    if not points:
        fail(f"--only '{arguments.only}' finds no point; --list names them all")
    if arguments.list:
        print("\n".join(point.name() for point in points))
        return 0
    used = {name: getattr(arguments, name) for name in ("rounds", "warmup", "iterations", "pause", "seed", "quick")}
    shapes = {name: asdict(shape) for name, shape in SHAPES.items()}
    comparison = {"format": "moewave-comparison", "format_version": 1, **known, "direction": "forward", "dtype": "bf16",
                  **used, "shapes": shapes, "earlier": EARLIER, "ok": True, "points": [], "steps": []}
    run_points(points, arguments, moewave, gpus, comparison)
    print(table(comparison))
    return 0 if comparison["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
