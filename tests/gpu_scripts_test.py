#!/usr/bin/env python3
"""What bench/compare.py and tests/device/run_all.py promise, with programs that only pretend: no GPU, no torch.

usage: gpu_scripts_test.py [unittest arguments]
"""
import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WATCHDOG_S = 60

MOEWAVE = """
import json, os, struct, sys, time
if sys.argv[1] == "info":
    print(json.dumps({"version": "9", "build": {"commit": "abc"}, "devices": [{"name": "G", "usable": True}] * 2}))
    sys.exit()
given = dict(zip(sys.argv[2::2], sys.argv[3::2]))
if sys.argv[1] == "verify":
    check = {"tensor": "output", "relative_error": 1e-3, "bound": 5e-3}
    if "--json" in given: json.dump({"checks": [check]}, open(given["--json"], "w"))
    sys.exit(int(given["--ranks"] == "8"))
with open(given["--inputs"], "rb") as file:
    header = json.loads(file.read(*struct.unpack("<Q", file.read(8))))
ranks = int(given["--ranks"])
assert header["topk_ids"]["shape"] == [ranks * int(given["--tokens"]), 8], header
assert len(os.environ["CUDA_VISIBLE_DEVICES"].split(",")) == ranks
if given["--shape"] == "C": time.sleep(100)
wrong = int(given["--shape"] == "B")
json.dump({"isolated": {"median_seconds": 0.004}, "sustained": {"seconds": 0.005}, "ok": not wrong,
           "check": {"tokens": 32, "wrong": wrong}}, open(given["--json"], "w"))
sys.exit(wrong)
"""
BASELINES = """
import json, sys
given = dict(zip(sys.argv[2::2], sys.argv[3::2]))
if given["--shapes"] == "B": sys.exit("no torch today")
times = {"median": 8.0, "sustained": 9.0}
shape = {"ranks": 2, "forward_ms": times, "grouped_isolated_ms": 3.2, "grouped_sustained_ms": 3.3}
json.dump({"shapes": {given["--shapes"]: shape}}, open(given["--json"], "w"))
"""
SCHEDULE = "print('NOT RUN: no GPU. NOTHING WAS TESTED.'); import sys; sys.exit(77)"
FORWARD = """
import json, sys
names = ["NoTokensAtAllAreLegal/1", "NoTokensAtAllAreLegal/4", "AName", "Masked/2"]
if "--gtest_list_tests" in sys.argv:
    print("\\n  ".join(["Suite."] + names + ["DISABLED_Never"])); sys.exit()
given = dict(word.split("=", 1) for word in sys.argv[1:])
chosen = [name.split(".")[1] for name in given["--gtest_filter"].split(":")]
tests = [{"name": name, "result": "SKIPPED" if name == "AName" else "COMPLETED"} for name in chosen]
for test in tests:
    if test["name"] == "Masked/2": test["failures"] = [{}]
json.dump({"testsuites": [{"name": "Suite", "testsuite": tests}]}, open(given["--gtest_output"][5:], "w"))
sys.exit(int(any("failures" in test for test in tests)))
"""
SANITIZER = """
import sys
words = " ".join(sys.argv)
if "racecheck" in words: print("RACECHECK SUMMARY: 2 hazards displayed"); sys.exit(86)
alone = "--ranks 1" in words
if not alone: print("moewave: rank 0, SM 1 (entry) waited too long for ids of rank[1]: wanted 1, saw 0")
print("ERROR SUMMARY: 0 errors"); sys.exit(int(not alone))
"""


class Scripts(unittest.TestCase):

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        for name, source in (("moewave", MOEWAVE), ("python", BASELINES), ("moewave_schedule_device_test", SCHEDULE),
                             ("moewave_forward_device_test", FORWARD), ("compute-sanitizer", SANITIZER)):
            (self.folder / name).write_text(f"#!{sys.executable}\n{source}")
            (self.folder / name).chmod(0o755)

    def run_script(self, script, *arguments):
        environment = {**os.environ, "PATH": f"{self.folder}:{os.environ['PATH']}"}
        environment.pop("CUDA_VISIBLE_DEVICES", None)
        done = subprocess.run([sys.executable, ROOT / script, "--build", self.folder, *map(str, arguments)],
                              capture_output=True, text=True, timeout=WATCHDOG_S, env=environment)
        self.assertNotIn("Traceback", done.stderr)
        return done

    def compare(self, *arguments):
        output = self.folder / "result.json"
        done = self.run_script("bench/compare.py", "--python", self.folder / "python", "--pause", 0, "--step-limit", 2,
                               "--output", output, *arguments)
        return done, json.loads(output.read_text())

    def rows(self, *arguments):
        output = self.folder / "result.json"
        done = self.run_script("tests/device/run_all.py", "--output", output, *arguments)
        result = json.loads(output.read_text())
        return done, {row["name"]: row for row in result["rows"]}

    def test_a_comparison_has_a_row_for_everything_that_goes_wrong(self):
        done, result = self.compare("--quick")
        self.assertEqual(done.returncode, 1)
        a, b, c = result["points"]
        self.assertEqual((result["commit"], result["gpus"], a["ranks"], a["goal_ms"]), ("abc", ["G", "G"], 2, 8.9))
        self.assertAlmostEqual(a["speedup_to_nccl_pytorch"], 2.0)
        self.assertAlmostEqual(a["ratio_to_grouped_gemm"], 1.25)
        self.assertTrue(a["goal_reached"])
        self.assertIn("wrong: 1 of 32", b["moewave"]["problem"])
        self.assertIn("no torch today", b["nccl_pytorch"]["problem"])
        self.assertIn("ran past 2 s", c["moewave"]["problem"])
        self.assertIsNone(c["goal_reached"])
        for text in ("WRONG", "FAILED", "no torch today", "1 of 32 sampled tokens are wrong"):
            self.assertIn(text, done.stdout)

    def test_rounds_alternate_and_small_batches_have_their_own_goal(self):
        done, result = self.compare("--only", "^A ranks=2 T=(64|8192) uniform")
        self.assertEqual(done.returncode, 0, done.stdout)
        kinds = [step["kind"] for step in result["steps"] if step["tokens"] == 8192]
        self.assertEqual(kinds, ["moewave", "nccl_pytorch", "grouped_gemm", "grouped_gemm", "nccl_pytorch", "moewave"])
        small = next(point for point in result["points"] if point["tokens"] == 64)
        self.assertTrue(small["goal_reached"])
        self.assertIsNone(small["goal_ms"])

    def test_a_comparison_ends_in_time(self):
        done, result = self.compare("--quick", "--time-limit", 1)
        self.assertEqual(done.returncode, 1)
        self.assertEqual(result["steps"][-1]["status"], "not run")
        self.assertEqual(len(result["steps"]), 9)

    def test_the_device_script_names_what_failed_and_what_was_skipped(self):
        done, rows = self.rows()
        self.assertEqual(done.returncode, 1)
        self.assertEqual(rows["schedule"]["result"], "skipped")
        self.assertEqual(rows["forward: token counts"]["note"], "2 tests")
        self.assertEqual(rows["forward: expert ids"]["failed_tests"], ["Suite.Masked/2"])
        self.assertEqual(rows["forward: all others"]["skipped_tests"], ["Suite.AName"])
        self.assertEqual(rows["example, 4 ranks"]["result"], "passed")
        self.assertEqual(rows["example, 8 ranks"]["result"], "failed")
        self.assertEqual(rows["memcheck, 1 rank"]["result"], "passed")
        self.assertEqual(rows["memcheck, 2 ranks on one GPU"]["result"], "skipped")
        self.assertEqual(rows["racecheck, 1 rank"]["note"], "2 errors")
        self.assertIn("see above", rows["synccheck, 2 ranks on one GPU"]["note"])
        self.assertIn("FAILED", done.stdout)

    def test_the_device_script_tells_nothing_tested_from_success(self):
        self.assertEqual(self.rows("--only", "schedule")[0].returncode, 77)
        self.assertEqual(self.rows("--only", "memcheck, 1")[0].returncode, 0)
        (self.folder / "moewave_forward_device_test").unlink()
        done, rows = self.rows("--only", "forward")
        self.assertEqual((done.returncode, rows["forward"]["result"]), (1, "failed"))

    def test_quick_leaves_out_more_than_two_ranks(self):
        self.assertEqual(self.rows("--quick", "--only", "token counts")[1]["forward: token counts"]["note"], "1 test")

    def test_wrong_options_are_one_line(self):
        for script in ("bench/compare.py", "tests/device/run_all.py"):
            for wrong in (["--build", "/none"], ["--only", "("], ["--only", "zzz"], ["--what"], ["--time-limit", "0"],
                          ["--output", "/none/x.json"]):
                done = self.run_script(script, *wrong)
                self.assertEqual(done.returncode, 2, (script, wrong))
                self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
                self.assertEqual(done.stdout, "")


if __name__ == "__main__":
    unittest.main()
