#!/usr/bin/env python3
"""Runs everything that is tested on GPUs and prints one table: name, result, seconds.

  tests/device/run_all.py --build build/release --output result.json

DIR is a build folder, or any folder that holds moewave, moewave_schedule_device_test and moewave_forward_device_test.
Rows: the schedule; the forward layer by promise; compute-sanitizer on a tiny layer; the example layer on 1 to 8 ranks.
Every row has a time limit. The file of --output is written anew after each row.

exit code 0: nothing failed (skipped rows are named); 1: a row failed or was not reached; 2: bad input; 77: all rows
were skipped, so nothing was tested
"""
import fnmatch
import json
import re
import shutil
import struct
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
from steps import (Parser, check_output, facts, fail, find_program, first_gpus, heading, number_of,  # noqa: E402
                   run_step, write_json)

NOT_RUN = 77  # exit code of a test program that finds no GPU it can use
SANITIZER_FOUND = 86
LIST_LIMIT_S, SCHEDULE_LIMIT_S, GROUP_LIMIT_S, SANITIZER_LIMIT_S, VERIFY_LIMIT_S = 60, 300, 300, 400, 180
TAIL_CHARACTERS = 4000
FORWARD = "moewave_forward_device_test"

# Tests of the forward layer by promise: patterns of test names without suite and parameter. A test that none of them
# matches runs in the last row.
FORWARD_GROUPS = [
    ("shapes", ["TheOutputIsThatOfTheReference"]),
    ("token counts", ["NoTokens*", "SomeRanks*", "TokenCounts*", "OneToken"]),
    ("expert ids", ["Masked*", "WithAllRoutesMasked*", "AnIdTwice*", "EveryExpert*", "Experts*", "FewerExperts*",
                    "EveryTokenToOneExpert", "IdsOf64Bits*"]),
    ("shared expert, clamps", ["ASharedExpert*", "Clamps*", "GateAndUp*"]),
    ("cuts of the work", ["TheSmallestRing*", "NoCut*", "TheNumberOfRanks*"]),
    ("report, timeline, NaN", ["TheReport*", "TheTimeline*", "Nan*"]),
    ("calls in a row", ["TwoHundred*", "Epochs*"]),
    ("graphs", ["ACapturedCall*"]),
    ("failures", ["ARank*", "AnIdOutOfRange*", "IdsAreTested*", "WhatCannotBe*", "TheBytesThatAreTaken*"]),
    ("memory, processes", ["MemoryThat*", "RanksOfSeveral*"]),
    ("all others", ["*"]),
]
QUICK_RANKS = {"1", "2"}

# Small enough for a tool that slows a kernel down a hundred times: its waits end after 10 s, those at entry after 120.
TINY_LAYER = ["--backend", "cuda", "--hidden", "64", "--intermediate", "32", "--experts", "4", "--topk", "2",
              "--tokens", "16", "--sms", "4", "--comm-sms", "1"]
EXAMPLE_LAYER = "model.layers.3.mlp"


@dataclass
class Outcome:
    result: str  # passed, failed, skipped, not run
    note: str = ""
    output: str = ""
    skipped_tests: list = field(default_factory=list)
    failed_tests: list = field(default_factory=list)


@dataclass
class Row:
    name: str
    limit_s: float
    run: object  # (limit_s) -> Outcome


def tail(text):
    return text[-TAIL_CHARACTERS:]


def outcome_of(step):
    """Of a test program, which ends with 77 without a GPU, or of moewave, which then refuses the backend."""
    if step.returncode == 0:
        return Outcome("passed")
    refused = re.search(r"^moewave: --backend (cuda: .*?)(; allowed.*)?$", step.output, re.MULTILINE)
    if step.returncode == 2 and refused:
        return Outcome("skipped", refused.group(1))
    if step.returncode == NOT_RUN:
        return Outcome("skipped", step.last_line().removeprefix("NOT RUN: ").removesuffix(" NOTHING WAS TESTED."))
    return Outcome("failed", step.reason(), tail(step.output))


# ---- GoogleTest


def list_tests(program):
    """Full names, disabled tests left out; [] if the program does not say."""
    step = run_step([program, "--gtest_list_tests"], LIST_LIMIT_S)
    names, suite = [], ""
    for line in step.output.splitlines() if step.returncode == 0 else []:
        text = line.split("#")[0].rstrip()
        if not line.startswith(" "):
            suite = text
        elif text and "DISABLED_" not in suite + text:
            names.append(suite + text.strip())
    return names


def ranks_of(name):
    """The number of ranks that a test's parameter states, None without one."""
    match = re.search(r"/(?:.*Ranks)?(\d+)$", name)
    return match.group(1) if match else None


def grouped(names):
    """(group, names) in order, every name in the first group that matches it."""
    groups = {group: [] for group, _ in FORWARD_GROUPS}
    for name in names:
        test = name.split(".", 1)[1].split("/")[0] if "." in name else name
        group = next(group for group, patterns in FORWARD_GROUPS if any(fnmatch.fnmatchcase(test, p) for p in patterns))
        groups[group].append(name)
    return [(group, members) for group, members in groups.items() if members]


def run_group(program, names, folder, limit_s):
    report = folder / "gtest.json"
    report.unlink(missing_ok=True)
    step = run_step([program, f"--gtest_filter={':'.join(names)}", f"--gtest_output=json:{report}"], limit_s)
    outcome = outcome_of(step)
    try:
        suites = json.loads(report.read_text())["testsuites"]
    except (OSError, ValueError, KeyError):
        if outcome.result == "passed":
            return Outcome("failed", "the program wrote no report", tail(step.output))
        return outcome
    tests = [(f"{suite['name']}.{test['name']}", test) for suite in suites for test in suite["testsuite"]]
    outcome.failed_tests = [name for name, test in tests if test.get("failures")]
    outcome.skipped_tests = [name for name, test in tests if test.get("result") == "SKIPPED"]
    done = len(tests) - len(outcome.skipped_tests)
    if outcome.failed_tests:
        outcome.note = f"{len(outcome.failed_tests)} of {len(names)} failed: {', '.join(outcome.failed_tests[:3])}"
    elif outcome.result == "passed" and len(tests) != len(names):
        outcome = Outcome("failed", f"{len(tests)} of {len(names)} tests ran", tail(step.output))
    elif outcome.result == "passed":
        outcome.result = "passed" if done else "skipped"
        outcome.note = f"{done} test{'s' * (done != 1)}"
        if outcome.skipped_tests:
            outcome.note += f", {len(outcome.skipped_tests)} skipped: {', '.join(outcome.skipped_tests)}"
    return outcome


def forward_rows(program, folder, quick):
    names = list_tests(program)
    if not names:
        return [Row("forward", LIST_LIMIT_S, lambda limit_s: Outcome("failed", f"{FORWARD} lists no tests"))]
    if quick:
        names = [name for name in names if (ranks_of(name) or "1") in QUICK_RANKS]
    return [Row(f"forward: {group}", GROUP_LIMIT_S,
                lambda limit_s, members=members: run_group(program, members, folder, limit_s))
            for group, members in grouped(names)]


# ---- compute-sanitizer


def find_sanitizer():
    for place in (None, "/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer"):
        found = shutil.which("compute-sanitizer", path=place)
        if found:
            return found
    return None


NEVER_MET = "the tool runs the ranks' kernels one after another, so they never meet"


def run_sanitizer(moewave, tool, ranks, earlier, limit_s):
    """`earlier`: outcomes by number of ranks. Ranks that never meet cost minutes to find out: one tool is enough."""
    sanitizer = find_sanitizer()
    if sanitizer is None:
        return Outcome("skipped", "compute-sanitizer is not installed")
    if any(outcome.note.startswith(NEVER_MET) for outcome in earlier.get(ranks, [])):
        return Outcome("skipped", f"{NEVER_MET}: see above")
    outcome = run_tool(sanitizer, moewave, tool, ranks, limit_s)
    earlier.setdefault(ranks, []).append(outcome)
    return outcome


def run_tool(sanitizer, moewave, tool, ranks, limit_s):
    step = run_step([sanitizer, "--tool", tool, "--error-exitcode", SANITIZER_FOUND, moewave, "verify", *TINY_LAYER,
                     "--ranks", ranks], limit_s, first_gpus(1))
    found = re.findall(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)", step.output)
    counts = [int(count) for pair in found for count in pair if count]
    if "Device not supported" in step.output:
        return Outcome("skipped", "compute-sanitizer: device not supported here", tail(step.output))
    if step.returncode == 0 and counts and not any(counts):
        return Outcome("passed", "0 errors")
    # Where kernels run one after another, the first rank waits in vain for the ids of one that cannot start.
    alone = ranks > 1 and "waited too long for ids of rank" in step.output
    if alone and counts and not any(counts) and step.returncode != SANITIZER_FOUND:
        return Outcome("skipped", f"{NEVER_MET}; 0 errors until then", tail(step.output))
    without_gpu = outcome_of(step)
    if without_gpu.result == "skipped":
        return without_gpu
    note = f"{max(counts)} errors" if any(counts) else step.reason()
    return Outcome("failed", note, step.output[:TAIL_CHARACTERS] + "\n[...]\n" + tail(step.output)
                   if len(step.output) > 2 * TAIL_CHARACTERS else step.output)


# ---- The example layer


def without_split(source, target):
    """Copies an inputs file without tokens_per_rank, which allows one number of ranks only."""
    raw = source.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    old, data, header, body = json.loads(raw[8:8 + length]), raw[8 + length:], {}, b""
    for name, entry in old.items():
        if name in ("__metadata__", "tokens_per_rank"):
            continue
        begin, end = entry["data_offsets"]
        header[name] = {**entry, "data_offsets": [len(body), len(body) + end - begin]}
        body += data[begin:end]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    target.write_bytes(struct.pack("<Q", len(text)) + text + body)


def run_example(moewave, data, ranks, folder, limit_s):
    inputs, result = folder / "inputs.safetensors", folder / "verify.json"
    result.unlink(missing_ok=True)
    try:
        without_split(data / "inputs.safetensors", inputs)
    except (OSError, ValueError, KeyError, struct.error) as error:
        return Outcome("failed", f"{data / 'inputs.safetensors'}: {error}")
    step = run_step([moewave, "verify", "--backend", "cuda", "--weights", data / "layer.safetensors", "--layer",
                     EXAMPLE_LAYER, "--inputs", inputs, "--ranks", ranks, "--json", result], limit_s)
    outcome = outcome_of(step)
    if step.returncode == 0:
        checks = json.loads(result.read_text())["checks"]
        outcome.note = "; ".join(f"{check['tensor']}: error {check['relative_error']:.2e}, bound {check['bound']:g}"
                                 for check in checks)
    return outcome


# ---- The whole


def make_rows(build, data, folder, quick):
    missing = lambda name: lambda limit_s: Outcome("failed", f"{name} is not in {build}")
    schedule, forward, moewave = (find_program(build, name) for name in
                                  ("moewave_schedule_device_test", FORWARD, "moewave"))
    if not (schedule or forward or moewave):
        fail(f"--build {build} holds none of moewave_schedule_device_test, {FORWARD}, moewave")
    rows = [Row("schedule", SCHEDULE_LIMIT_S,
                (lambda limit_s: outcome_of(run_step([schedule], limit_s))) if schedule else
                missing("moewave_schedule_device_test"))]
    earlier = {}
    rows += forward_rows(forward, folder, quick) if forward else [Row("forward", 0, missing(FORWARD))]
    for ranks in (1, 2) if quick else (1, 2, 4, 8):
        run = lambda limit_s, ranks=ranks: run_example(moewave, data, ranks, folder, limit_s)
        rows.append(Row(f"example, {ranks} rank{'s' * (ranks > 1)}", VERIFY_LIMIT_S,
                        run if moewave else missing("moewave")))
    for tool in ("memcheck",) if quick else ("memcheck", "racecheck", "synccheck"):
        for ranks in (1,) if quick else (1, 2):
            run = lambda limit_s, tool=tool, ranks=ranks: run_sanitizer(moewave, tool, ranks, earlier, limit_s)
            rows.append(Row(f"{tool}, {ranks} rank{'s on one GPU' if ranks > 1 else ''}", SANITIZER_LIMIT_S,
                            run if moewave else missing("moewave")))
    return rows, moewave


def run_rows(rows, time_limit_s, result, output):
    end = time.monotonic() + time_limit_s if time_limit_s else float("inf")
    for row in rows:
        begin = time.monotonic()
        left = end - begin
        if left < 1:
            outcome = Outcome("not run", f"--time-limit of {time_limit_s:g} s was over")
        else:
            print(f"{row.name} ...", file=sys.stderr, flush=True)
            outcome = row.run(min(row.limit_s, left))
        entry = {"name": row.name, "result": outcome.result, "seconds": round(time.monotonic() - begin, 1),
                 "note": outcome.note}
        for key in ("failed_tests", "skipped_tests", "output"):
            if getattr(outcome, key):
                entry[key] = getattr(outcome, key)
        result["rows"].append(entry)
        result["ok"] = all(r["result"] in ("passed", "skipped") for r in result["rows"])
        write_json(output, result)


def print_table(result):
    rows = result["rows"]
    for row in rows:
        if row["result"] == "failed" and "output" in row:
            print(f"---- {row['name']}\n{row['output'].rstrip()}\n")
    width = max(len(row["name"]) for row in rows)
    print(f"# {heading(result)}{', quick' if result['quick'] else ''}")
    print(f"{'name':{width}}  {'result':8} {'seconds':>8}")
    for row in rows:
        shown = row["result"].upper() if row["result"] in ("failed", "not run") else row["result"]
        print(f"{row['name']:{width}}  {shown:8} {row['seconds']:8.1f}  {row['note']}".rstrip())
    counts = {kind: sum(row["result"] == kind for row in rows) for kind in ("passed", "failed", "skipped", "not run")}
    print(", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
          + ("" if counts["passed"] or counts["failed"] else ". NOTHING WAS TESTED."))


def main():
    parser = Parser(__doc__)
    parser.add_argument("--build", type=Path, default=ROOT / "build/release", metavar="DIR",
                        help="folder with the programs (default: the release build)")
    parser.add_argument("--data", type=Path, default=ROOT / "examples/data", metavar="DIR",
                        help="folder with layer.safetensors and inputs.safetensors (default: the example's)")
    parser.add_argument("--quick", action="store_true", help="1 and 2 ranks; of compute-sanitizer memcheck on 1 rank")
    parser.add_argument("--only", metavar="PATTERN", help="rows whose name this regular expression finds")
    parser.add_argument("--list", action="store_true", help="print the names of the rows and run nothing")
    parser.add_argument("--time-limit", type=number_of(float, 1), metavar="SECONDS",
                        help="of the whole run; rows that are not reached count as failed (default: none)")
    parser.add_argument("--commit", help="for the result file (default: the one that moewave was built from)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON (HACKING.md)")
    arguments = parser.parse_args()
    if not arguments.build.is_dir():
        fail(f"--build {arguments.build} is not a folder")
    if not arguments.data.is_dir():
        fail(f"--data {arguments.data} is not a folder")
    check_output(arguments.output)
    try:
        pattern = re.compile(arguments.only or "")
    except re.error as error:
        fail(f"--only '{arguments.only}' is no regular expression: {error}")
    with tempfile.TemporaryDirectory(prefix="moewave_device_") as folder:
        rows, moewave = make_rows(arguments.build.resolve(), arguments.data.resolve(), Path(folder), arguments.quick)
        chosen = [row for row in rows if pattern.search(row.name)]
        if not chosen:
            fail(f"--only '{arguments.only}' finds no row; there are: {'; '.join(row.name for row in rows)}")
        if arguments.list:
            print("\n".join(row.name for row in chosen))
            return 0
        result = {"format": "moewave-device-tests", "format_version": 1, **facts(moewave, arguments.commit),
                  "quick": arguments.quick, "only": arguments.only, "ok": True, "rows": []}
        run_rows(chosen, arguments.time_limit, result, arguments.output)
    print_table(result)
    if not result["ok"]:
        return 1
    return 0 if any(row["result"] == "passed" for row in result["rows"]) else NOT_RUN


if __name__ == "__main__":
    sys.exit(main())
