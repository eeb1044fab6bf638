#!/usr/bin/env python3
"""What the program promises to its user: exit codes, one-line errors, no partial files, agreement of sizes.

usage: cli_test.py PROGRAM [unittest arguments]
"""
import json
import math
import os
import random
import re
import struct
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

PROGRAM = None
WATCHDOG_S = 120
SMALL = ["--hidden", "64", "--intermediate", "32", "--experts", "4", "--topk", "2", "--tokens", "5,0,3"]


def write_safetensors(path, tensors):
    """tensors: name -> (dtype, shape, bytes)."""
    header, data = {}, b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    Path(path).write_bytes(struct.pack("<Q", len(text)) + text + data)


def read_safetensors(path):
    raw = Path(path).read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8:8 + length])
    header.pop("__metadata__", None)
    return {name: (t["dtype"], t["shape"], raw[8 + length:][slice(*t["data_offsets"])]) for name, t in header.items()}


def f32(shape, rng):
    return ("F32", shape, struct.pack(f"<{math.prod(shape)}f", *(rng.gauss(0, 0.3) for _ in range(math.prod(shape)))))


def inputs_tensors(tokens=8, hidden=16, topk=2, experts=4, tokens_per_rank=None, grad=True):
    rng = random.Random(7)
    ids = [e for _ in range(tokens) for e in rng.sample(range(experts), topk)]
    tensors = {
        "hidden_states": f32([tokens, hidden], rng),
        "topk_ids": ("I32", [tokens, topk], struct.pack(f"<{len(ids)}i", *ids)),
        "topk_weights": f32([tokens, topk], rng),
    }
    if grad:
        tensors["grad_output"] = f32([tokens, hidden], rng)
    if tokens_per_rank is not None:
        raw = struct.pack(f"<{len(tokens_per_rank)}q", *tokens_per_rank)
        tensors["tokens_per_rank"] = ("I64", [len(tokens_per_rank)], raw)
    return tensors


def weights_tensors(hidden=16, intermediate=8, experts=4, shared=0, prefix=""):
    rng = random.Random(11)
    tensors = {
        prefix + "experts.gate_up_proj": f32([experts, 2 * intermediate, hidden], rng),
        prefix + "experts.down_proj": f32([experts, hidden, intermediate], rng),
    }
    if shared:
        tensors[prefix + "shared_expert.gate_proj.weight"] = f32([shared, hidden], rng)
        tensors[prefix + "shared_expert.up_proj.weight"] = f32([shared, hidden], rng)
        tensors[prefix + "shared_expert.down_proj.weight"] = f32([hidden, shared], rng)
    return tensors


class CliTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.weights = str(self.folder / "weights.safetensors")
        self.inputs = str(self.folder / "inputs.safetensors")
        write_safetensors(self.weights, weights_tensors())
        write_safetensors(self.inputs, inputs_tensors())

    def run_program(self, *arguments, **options):
        return subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, timeout=WATCHDOG_S, **options)

    def succeed(self, *arguments):
        result = self.run_program(*arguments)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(result.stderr, b"")
        return result.stdout.decode()

    def succeed_json(self, *arguments):
        return json.loads(self.succeed(*arguments, "--json", "-"))

    def refuse(self, code, *arguments, says=()):
        """Exit code, nothing on stdout, one line on stderr that holds every text of `says`."""
        result = self.run_program(*arguments)
        message = result.stderr.decode()
        self.assertEqual(result.returncode, code, message)
        self.assertEqual(result.stdout, b"")
        self.assertRegex(message, r"\Amoewave: [^\n]+\n\Z")
        self.assertNotIn("Usage", message)
        for text in says:
            self.assertIn(text, message)

    def has_gpu(self):
        return "cuda" in self.succeed_json("info")["backends"]

    def names(self):
        return sorted(path.name for path in self.folder.iterdir())


class HelpAndInfo(CliTest):
    def test_help_lists_the_commands_and_goes_to_stdout(self):
        text = self.succeed("--help")
        for command in ("run", "verify", "bench", "info"):
            self.assertRegex(text, rf"(?m)^  {command} ")

    def test_help_of_a_command_lists_its_options(self):
        for command in ("run", "verify"):
            text = self.succeed(command, "--help")
            for option in ("--backend", "--ranks", "--tokens", "--hidden", "--intermediate", "--experts", "--topk",
                           "--shared-intermediate", "--clamp", "--shared-clamp", "--dtype", "--routing", "--seed",
                           "--weights", "--layer", "--inputs", "--output", "--backward", "--minibatch", "--ring", "--sms",
                           "--comm-sms", "--json", "--timeline"):
                self.assertIn(option + " ", text)

    def test_help_of_bench_lists_its_options(self):
        text = self.succeed("bench", "--help")
        for option in ("--shape", "--ranks", "--tokens", "--hidden", "--intermediate", "--experts", "--topk", "--inputs",
                       "--routing", "--seed", "--json", "--minibatch", "--ring", "--sms", "--comm-sms", "--warmup",
                       "--iterations"):
            self.assertIn(option + " ", text)

    def test_version(self):
        self.assertRegex(self.succeed("--version"), r"\Amoewave \d+\.\d+\.\d+\n\Z")

    def test_no_command_unknown_command_and_two_commands_are_bad_input(self):
        self.refuse(2, says=["run", "verify", "bench", "info"])
        self.refuse(2, "dance", says=["'dance'", "run, verify, bench, info"])
        self.refuse(2, "dance", "--fast", says=["'dance'", "run, verify, bench, info"])
        self.refuse(2, "run", "verify")
        self.refuse(2, "run", "run")
        self.refuse(2, "run", "stray")

    def test_info_names_version_backends_and_limits(self):
        text = self.succeed("info")
        for word in ("moewave", "build", "backends", "reference", "emulator", "devices", "4096"):
            self.assertIn(word, text)
        info = self.succeed_json("info")
        self.assertEqual(info["format"], "moewave-info")
        self.assertIn("emulator", info["backends"])
        self.assertEqual("cuda" in info["backends"], info["cuda_obstacle"] == "")
        self.assertEqual(info["default_backend"], "cuda" if "cuda" in info["backends"] else "emulator")


class BadValues(CliTest):
    def test_numbers_are_whole_decimal_and_in_range(self):
        for option in ("--ranks", "--tokens", "--hidden", "--intermediate", "--experts", "--topk", "--shared-intermediate",
                       "--seed", "--minibatch", "--ring", "--sms", "--comm-sms", "--jitter-us", "--saved-rows"):
            for value in ("-1", "1e3", "12abc", "abc", "", " 8", "8 ", "+8", "0x10", "1.5", "nan",
                          "99999999999999999999999"):
                with self.subTest(option=option, value=value):
                    self.refuse(2, "run", option, value, says=[option, value, "allowed"])

    def test_token_lists_have_no_holes(self):
        for value in ("1,", ",1", "1,,2", "1;2", "1,-2", "1,x"):
            with self.subTest(value=value):
                self.refuse(2, "run", "--tokens", value, says=["--tokens", value, "allowed"])

    def test_clamps_are_finite_and_positive(self):
        for option in ("--clamp", "--shared-clamp"):
            for value in ("0", "-1", "nan", "inf", "1e99", "1e-99", "x", ""):
                with self.subTest(option=option, value=value):
                    self.refuse(2, "run", option, value, says=[option, value, "allowed"])
        self.refuse(2, "run", "--shared-clamp", "3", says=["--shared-clamp", "shared expert"])

    def test_names_outside_the_allowed_set(self):
        if not self.has_gpu():
            self.refuse(2, "run", "--backend", "cuda", says=["cuda", "reference", "emulator"])
        self.refuse(2, "run", "--backend", "cuda", "--backward", says=["--backward", "cuda", "reference", "emulator"])
        self.refuse(2, "run", "--backend", "tpu", says=["tpu", "reference", "emulator"])
        self.refuse(2, "run", "--dtype", "fp8_block", says=["fp8_block", "bf16"])
        for routing in ("fair", "zipf", "zipf:", "zipf:x", "zipf:1x", "single:", "single:99", "single:-1", "single:1.5",
                        "uniform:3"):
            with self.subTest(routing=routing):
                self.refuse(2, "run", *SMALL, "--routing", routing, says=[routing])
        self.refuse(2, "run", "--routing", "", says=["--routing", "uniform"])
        self.refuse(2, "run", "--routing", "file", says=["--inputs"])

    def test_unknown_options_and_missing_values(self):
        self.refuse(2, "run", "--speed", "9", says=["--speed"])
        self.refuse(2, "--ranks", "2", "run", says=["--ranks"])
        self.refuse(2, "run", "--ranks", says=["--ranks"])
        self.refuse(2, "run", "--ranks", "--tokens", "5", says=["--ranks"])
        self.refuse(2, "run", "--output", "--backward", says=["--output"])
        self.refuse(2, "run", "--unknown", "3", says=["'--unknown 3'", "moewave run --help"])
        self.refuse(2, "--unknown", "3", says=["'--unknown 3'", "moewave --help"])

    def test_flags_take_true_and_false_and_nothing_else(self):
        for flag in ("--backward", "--poison"):
            for value in ("banana", "no", "1", "on", "TRUE"):
                with self.subTest(flag=flag, value=value):
                    self.refuse(2, "run", f"{flag}={value}", says=[flag, f"'{value}'", f"{flag}=true", f"{flag}=false"])
        self.assertTrue(self.succeed_json("run", *SMALL, "--backward=true")["backward"])
        self.assertFalse(self.succeed_json("run", *SMALL, "--backward", "--backward=false")["backward"])

    def test_jitter_has_an_upper_bound(self):
        self.refuse(2, "run", *SMALL, "--jitter-us", "1000001", says=["--jitter-us", "1000001", "from 0 to 1000000"])
        self.refuse(2, "run", *SMALL, "--backend", "reference", "--jitter-us", "1000001", says=["from 0 to 1000000"])
        self.assertRegex(self.succeed("run", "--help"), r"--jitter-us N .* 1000000")

    def test_a_message_stays_one_line_whatever_a_name_holds(self):
        self.refuse(2, "run", "--weights", "two\nlines")
        self.refuse(2, "run", "--routing", "two\nlines\x1b[31m")
        self.refuse(2, "run", "--two\nlines")

    def test_control_characters_are_shown_in_one_way_everywhere(self):
        name = "a\n\tb\x1b"
        shown = r"a\x0a\x09b\x1b"
        self.refuse(2, "run", "--weights", name, says=[shown])
        self.refuse(2, "run", "--routing", name, says=[shown])
        self.refuse(2, "run", "--output", name, "--json", name, says=[shown])
        self.refuse(2, "run", "--" + name, says=[shown])
        inputs = self.folder / name
        inputs.write_bytes(Path(self.inputs).read_bytes())
        self.assertIn(shown, self.succeed("run", "--inputs", inputs))

    def test_one_of_a_thing_is_not_many(self):
        write_safetensors(self.inputs, inputs_tensors(tokens=0, tokens_per_rank=[1]))
        self.refuse(2, "run", "--inputs", self.inputs, says=["gives rank 0 1 token;"])
        write_safetensors(self.inputs, inputs_tensors(tokens=1, tokens_per_rank=[0]))
        self.refuse(2, "run", "--inputs", self.inputs, says=["sums to 0, hidden_states has 1 row\n"])
        short = self.folder / "short"
        short.write_bytes(b"x")
        self.refuse(2, "run", "--inputs", short, says=["has 1 byte;"])
        self.refuse(2, "run", *SMALL, "--tokens", "5", "--backend", "emulator", "--sms", "100000", says=["1 rank of 100000 SMs"])

    def test_shapes_outside_the_limits(self):
        self.refuse(2, "run", "--hidden", "12", says=["12", "8"])
        self.refuse(2, "run", "--intermediate", "20", says=["20", "8"])
        self.refuse(2, "run", "--shared-intermediate", "3", says=["3", "8"])
        self.refuse(2, "run", "--experts", "4097", says=["4097", "4096"])
        self.refuse(2, "run", "--experts", "4", "--topk", "5", says=["5", "4"])
        self.refuse(2, "run", "--experts", "100", "--topk", "65", says=["65", "64"])
        self.refuse(2, "run", "--ranks", "1025", says=["1025", "1024"])
        self.refuse(2, "run", *SMALL, "--sms", "1")
        self.refuse(2, "run", *SMALL, "--sms", "4", "--comm-sms", "4", says=["4"])

    def test_what_cannot_fit_into_memory_fails_before_it_is_tried(self):
        self.refuse(1, "run", "--tokens", "9000000000000", says=["memory"])
        self.refuse(1, "run", "--hidden", "8000000000", says=["memory"])
        self.refuse(2, "run", "--tokens", "9000000000000000000,9000000000000000000", says=["tokens"])


class Options(CliTest):
    def test_the_last_of_an_option_given_twice_counts(self):
        result = self.succeed_json("run", "--hidden", "12abc", *SMALL, "--seed", "7", "--seed", "9", "--hidden", "8")
        self.assertEqual(result["seed"], 9)
        self.assertEqual(result["shape"]["hidden"], 8)

    def test_experts_follow_topk_where_nothing_says_how_many(self):
        shape = self.succeed_json("run", "--hidden", "8", "--intermediate", "8", "--tokens", "2", "--topk", "9")["shape"]
        self.assertEqual((shape["experts"], shape["topk"]), (9, 9))
        self.assertRegex(self.succeed("run", "--help"), r"--experts E .*--topk")

    def test_the_largest_ring_holds_every_token_of_the_other_ranks(self):
        for tokens, most in (("64", 0), ("64,64", 64), ("50,3,7", 128)):  # 2 * 50, rounded up to 32
            with self.subTest(tokens=tokens):
                result = self.succeed_json("run", "--hidden", "8", "--intermediate", "8", "--tokens", tokens, "--ring",
                                           "100000", "--backend", "emulator")
                self.assertEqual(result["tuning"]["ring_tokens"], most)

    def test_zero_is_the_same_as_absent(self):
        result = self.succeed_json("run", *SMALL, "--minibatch", "0", "--ring", "0", "--sms", "0", "--comm-sms", "0",
                                   "--ranks", "0", "--hidden", "0")
        self.assertEqual(result["ranks"], 3)
        self.assertEqual(result["shape"]["hidden"], 256)
        self.assertGreater(result["tuning"]["minibatch_rows"], 0)
        self.assertGreater(result["tuning"]["comm_sms"], 0)
        self.assertEqual(result["tuning_asked"]["minibatch_rows"], 0)

    def test_any_minibatch_and_ring_are_legal_and_rounded_up(self):
        first = None
        for minibatch, ring in ((1, 1), (3, 7), (1000, 5), (5, 100000)):
            output = self.folder / "output.safetensors"
            result = self.succeed_json("run", *SMALL, "--minibatch", minibatch, "--ring", ring, "--output", output)
            tuning = result["tuning"]
            self.assertGreater(tuning["minibatch_rows"], 0)
            if max(minibatch, ring) < 32:  # larger ones are cut to what the layer can fill
                self.assertGreaterEqual(tuning["minibatch_rows"], minibatch)
                self.assertGreaterEqual(tuning["ring_tokens"], ring)
            first = first or output.read_bytes()
            self.assertEqual(first, output.read_bytes())

    def test_the_same_seed_gives_the_same_file_and_another_seed_another(self):
        files = []
        for seed in (3, 3, 4):
            output = self.folder / f"output{len(files)}.safetensors"
            self.succeed("run", *SMALL, "--seed", seed, "--backward", "--output", output)
            files.append(output.read_bytes())
        self.assertEqual(files[0], files[1])
        self.assertNotEqual(files[0], files[2])

    def test_options_of_the_emulator_are_refused_elsewhere(self):
        for option in (["--timeline", self.folder / "t.json"], ["--poison"], ["--jitter-us", "5"], ["--saved-rows", "0"]):
            self.refuse(2, "run", *SMALL, "--backend", "reference", *option, says=[option[0], "emulator"])
        self.assertNotIn("t.json", self.names())

    def test_layer_needs_weights(self):
        self.refuse(2, "run", "--layer", "model.layers.3.mlp", says=["--layer", "--weights"])


class Bench(CliTest):
    def test_what_cannot_be_is_refused_whatever_the_machine(self):
        self.refuse(2, "bench", "--shape", "D", says=["--shape", "D", "A, B, C"])
        self.refuse(2, "bench", "--iterations", "0", says=["--iterations", "0"])
        self.refuse(2, "bench", "--warmup", "-1", says=["--warmup", "-1"])
        self.refuse(2, "bench", "--routing", "file", says=["--inputs"])
        self.refuse(2, "bench", "--inputs", self.inputs, "--routing", "uniform", says=["--inputs", "--routing"])
        self.refuse(2, "bench", "--backward")

    def test_without_a_gpu_it_says_so(self):
        if self.has_gpu():
            self.skipTest("there is a GPU")
        self.refuse(2, "bench", says=["cuda"])
        self.refuse(2, "bench", "--shape", "A", says=["cuda"])


class OnGpus(CliTest):
    def setUp(self):
        super().setUp()
        if not self.has_gpu():
            self.skipTest("no GPU")

    def test_cuda_is_the_default_for_forward_and_agrees_with_the_reference(self):
        result = self.succeed_json("verify", *SMALL, "--poison", "--jitter-us", "20")
        self.assertEqual((result["backend"], result["ok"]), ("cuda", True))
        self.assertEqual(self.succeed_json("run", *SMALL, "--backward")["backend"], "emulator")

    def test_ranks_are_the_gpus_unless_something_says_otherwise(self):
        gpus = sum(device["usable"] for device in self.succeed_json("info")["devices"])
        self.assertEqual(self.succeed_json("run")["ranks"], gpus)
        self.assertEqual(self.succeed_json("verify", "--ranks", "5")["ranks"], 5)

    def test_no_cut_of_the_work_changes_a_bit(self):
        files = set()
        for extra in ([], ["--minibatch", "1", "--ring", "1"], ["--sms", "4", "--comm-sms", "3"], ["--poison"]):
            output = self.folder / "output.safetensors"
            self.succeed("verify", *SMALL, "--backend", "cuda", "--output", output, *extra)
            files.add(output.read_bytes())
        self.assertEqual(len(files), 1)

    def test_traffic_is_that_of_the_emulator(self):
        options = [*SMALL, "--minibatch", "128"]
        gpu = self.succeed_json("run", *options, "--backend", "cuda")["calls"][0]
        emulated = self.succeed_json("run", *options, "--backend", "emulator")["calls"][0]
        for field in ("pulled_bytes", "pushed_bytes"):
            self.assertEqual(gpu[field], emulated[field])

    def test_the_timeline_has_every_sm_and_a_track_for_its_producer(self):
        path = self.folder / "trace.json"
        self.succeed("run", *SMALL, "--sms", "3", "--timeline", path)
        slices = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
        self.assertLessEqual({(r, s) for r in range(3) for s in range(3)}, {(e["pid"], e["tid"]) for e in slices})
        self.assertTrue(all(e["ts"] >= 0 and e["dur"] >= 0 for e in slices))

    def test_more_sms_than_the_gpu_has_are_refused(self):
        self.refuse(2, "run", "--backend", "cuda", "--sms", "100000", says=["sms", "100000"])

    def test_bench_times_and_checks(self):
        result = self.succeed_json("bench", "--ranks", "2", "--tokens", "100,40", "--hidden", "256", "--intermediate",
                                   "128", "--iterations", "3", "--shared-intermediate", "64")
        self.assertTrue(result["ok"])
        self.assertEqual(len(result["isolated"]["seconds"]), 3)
        self.assertGreater(result["sustained"]["seconds"], 0)
        self.assertIn("isolated", self.succeed("bench", "--inputs", self.inputs, "--experts", "4", "--tokens", "50"))


class RanksAndTokens(CliTest):
    def tokens(self, *arguments):
        result = self.succeed_json("run", "--backend", "reference", *arguments)
        self.assertEqual(result["ranks"], len(result["tokens_per_rank"]))
        self.assertEqual(result["tokens"], sum(result["tokens_per_rank"]))
        return result["tokens_per_rank"]

    def split(self, tokens_per_rank):
        write_safetensors(self.inputs, inputs_tensors(tokens_per_rank=tokens_per_rank))

    def test_without_a_file(self):
        self.assertEqual(self.tokens(), [64])
        self.assertEqual(self.tokens("--ranks", "3"), [64, 64, 64])
        self.assertEqual(self.tokens("--tokens", "5"), [5])
        self.assertEqual(self.tokens("--tokens", "5", "--ranks", "2"), [5, 5])
        self.assertEqual(self.tokens("--tokens", "5,0,7"), [5, 0, 7])
        self.assertEqual(self.tokens("--tokens", "5,0,7", "--ranks", "3"), [5, 0, 7])
        self.assertEqual(self.tokens("--tokens", "0"), [0])

    def test_a_list_of_another_length_than_the_ranks_is_refused(self):
        self.refuse(2, "run", "--tokens", "1,2", "--ranks", "3", says=["--tokens", "2", "--ranks", "3"])

    def test_a_file_without_a_split_is_split_evenly(self):
        self.assertEqual(self.tokens("--inputs", self.inputs), [8])
        self.assertEqual(self.tokens("--inputs", self.inputs, "--ranks", "3"), [3, 3, 2])
        self.assertEqual(self.tokens("--inputs", self.inputs, "--tokens", "1,7"), [1, 7])
        self.assertEqual(self.tokens("--inputs", self.inputs, "--tokens", "4", "--ranks", "2"), [4, 4])
        self.assertEqual(self.tokens("--inputs", self.inputs, "--ranks", "10"), [1] * 8 + [0, 0])

    def test_a_file_with_a_split_names_the_ranks(self):
        self.split([6, 0, 2])
        self.assertEqual(self.tokens("--inputs", self.inputs), [6, 0, 2])
        self.assertEqual(self.tokens("--inputs", self.inputs, "--ranks", "3", "--tokens", "6,0,2"), [6, 0, 2])

    def test_disagreements_are_refused_naming_both_sides(self):
        self.refuse(2, "run", "--inputs", self.inputs, "--tokens", "4,5", says=["9", "8"])
        self.refuse(2, "run", "--inputs", self.inputs, "--tokens", "5", says=["5", "8"])
        self.split([6, 0, 2])
        self.refuse(2, "run", "--inputs", self.inputs, "--ranks", "2", says=["--ranks", "2", "tokens_per_rank", "3"])
        self.refuse(2, "run", "--inputs", self.inputs, "--tokens", "2,0,6", says=["2,0,6", "6,0,2"])
        self.refuse(2, "run", "--inputs", self.inputs, "--tokens", "4,4", says=["--tokens", "tokens_per_rank"])
        self.split([6, 3])
        self.refuse(2, "run", "--inputs", self.inputs, says=["tokens_per_rank", "8"])
        self.split([-1, 9])
        self.refuse(2, "run", "--inputs", self.inputs, says=["tokens_per_rank", "-1"])


class Files(CliTest):
    def test_sizes_come_from_the_files(self):
        write_safetensors(self.weights, weights_tensors(shared=24, prefix="model.layers.3.mlp."))
        for layer in ("model.layers.3.mlp", "model.layers.3.mlp."):
            result = self.succeed_json("run", "--weights", self.weights, "--layer", layer, "--inputs", self.inputs)
            self.assertEqual(result["shape"], {"hidden": 16, "intermediate": 8, "experts": 4, "topk": 2,
                                               "shared_intermediate": 24, "clamp": None, "shared_clamp": None})
            self.assertEqual(result["routing"], "file")

    def test_inputs_alone_get_random_weights_for_every_id_they_hold(self):
        write_safetensors(self.inputs, inputs_tensors(experts=40, tokens=64))
        result = self.succeed_json("run", "--inputs", self.inputs)
        self.assertEqual(result["shape"]["hidden"], 16)
        self.assertGreater(result["shape"]["experts"], 8)

    def test_sizes_of_options_and_files_must_agree(self):
        for option, value, held in (("--hidden", 24, 16), ("--intermediate", 16, 8), ("--experts", 5, 4),
                                    ("--shared-intermediate", 8, 0)):
            self.refuse(2, "run", "--weights", self.weights, option, value, says=[option, str(value), str(held), self.weights])
        self.refuse(2, "run", "--inputs", self.inputs, "--topk", "1", says=["--topk", "1", "2", self.inputs])
        self.refuse(2, "run", "--inputs", self.inputs, "--hidden", "8", says=["--hidden", "8", "16", self.inputs])
        self.succeed("run", "--weights", self.weights, "--inputs", self.inputs, "--hidden", "16", "--topk", "2")

    def test_weights_and_inputs_must_agree(self):
        write_safetensors(self.inputs, inputs_tensors(hidden=24))
        self.refuse(2, "run", "--weights", self.weights, "--inputs", self.inputs,
                    says=["hidden", "16", "24", self.weights, self.inputs])
        write_safetensors(self.inputs, inputs_tensors(experts=40, tokens=64))
        self.refuse(2, "run", "--weights", self.weights, "--inputs", self.inputs, says=["id"])

    def test_another_routing_replaces_that_of_the_file(self):
        result = self.succeed_json("run", "--weights", self.weights, "--inputs", self.inputs, "--routing", "single:3",
                                   "--topk", "1")
        self.assertEqual(result["expert_rows"], [0, 0, 0, 8])
        self.assertTrue(any("--routing" in note for note in result["notes"]))

    def test_backward_of_a_file_needs_its_output_gradient(self):
        write_safetensors(self.inputs, inputs_tensors(grad=False))
        self.refuse(2, "run", "--inputs", self.inputs, "--backward", says=["grad_output", self.inputs])
        self.succeed("run", "--inputs", self.inputs)

    def test_missing_truncated_and_foreign_files_are_bad_input(self):
        foreign = self.folder / "foreign.safetensors"
        foreign.write_bytes(b"PK\x03\x04 not a tensor file")
        cut = self.folder / "cut.safetensors"
        cut.write_bytes(Path(self.inputs).read_bytes()[:-3])
        for option in ("--weights", "--inputs"):
            for path in (self.folder / "missing.safetensors", self.folder, foreign, cut):
                self.refuse(2, "run", option, path, says=[path.name])
        self.refuse(2, "run", "--weights", self.weights, "--layer", "no.such.layer", says=["no.such.layer"])

    def test_results_have_the_documented_names_types_and_shapes(self):
        write_safetensors(self.weights, weights_tensors(shared=24))
        output = self.folder / "output.safetensors"
        for backend in ("emulator", "reference"):
            self.succeed("run", "--backend", backend, "--weights", self.weights, "--inputs", self.inputs, "--ranks", "2",
                         "--backward", "--output", output)
            shapes = {name: (dtype, shape) for name, (dtype, shape, _) in read_safetensors(output).items()}
            self.assertEqual(shapes, {
                "output": ("BF16", [8, 16]),
                "grad_hidden_states": ("BF16", [8, 16]),
                "grad_topk_weights": ("F32", [8, 2]),
                "grad_gate_up_proj": ("F32", [4, 16, 16]),
                "grad_down_proj": ("F32", [4, 16, 8]),
                "grad_shared_gate_proj": ("F32", [24, 16]),
                "grad_shared_up_proj": ("F32", [24, 16]),
                "grad_shared_down_proj": ("F32", [16, 24]),
            })
        self.succeed("run", *SMALL, "--output", output)
        self.assertEqual(list(read_safetensors(output)), ["output"])

    def test_zero_tokens_are_legal(self):
        output = self.folder / "output.safetensors"
        result = self.succeed_json("verify", *SMALL, "--tokens", "0,0", "--backward", "--output", output)
        self.assertTrue(result["ok"])
        tensors = read_safetensors(output)
        self.assertEqual(tensors["output"][1], [0, 64])
        self.assertEqual(set(tensors["grad_down_proj"][2]), {0})


class Destinations(CliTest):
    def test_a_destination_that_cannot_be_written_is_refused_before_any_work(self):
        before = self.names()
        for option in ("--output", "--json", "--timeline"):
            for path in (self.folder / "nowhere" / "file", self.folder, self.folder / "weights.safetensors" / "file", "",
                         "/dev/null"):
                # A shape that could never run shows that the destination is looked at first.
                self.refuse(2, "run", "--hidden", "12", option, path, says=[str(path)])
        self.assertEqual(self.names(), before)

    @unittest.skipIf(os.geteuid() == 0, "the superuser can write everywhere")
    def test_a_folder_without_permission_is_refused(self):
        locked = self.folder / "locked"
        locked.mkdir(mode=0o500)
        self.refuse(2, "run", *SMALL, "--output", locked / "file", says=["file"])

    def test_nothing_is_left_behind_when_a_run_is_refused(self):
        before = self.names()
        destinations = ["--output", self.folder / "o", "--json", self.folder / "j", "--timeline", self.folder / "t"]
        self.refuse(2, "run", "--hidden", "12", *destinations)
        self.refuse(2, "run", "--weights", self.folder / "missing", *destinations)
        self.refuse(1, "run", "--tokens", "9000000000000", *destinations)
        self.assertEqual(self.names(), before)

    def test_an_older_file_survives_a_refused_run(self):
        old = self.folder / "output.safetensors"
        old.write_text("old")
        self.refuse(2, "run", "--hidden", "12", "--output", old)
        self.assertEqual(old.read_text(), "old")

    def test_inputs_are_never_overwritten_and_results_never_share_a_file(self):
        self.refuse(2, "run", "--weights", self.weights, "--output", self.weights, says=["--output", "--weights"])
        os.symlink(self.inputs, self.folder / "link")
        self.refuse(2, "run", "--inputs", self.inputs, "--json", self.folder / "link", says=["--json", "--inputs"])
        self.refuse(2, "run", "--output", self.folder / "o", "--json", self.folder / "." / "o", says=["--output", "--json"])

    def test_two_names_of_one_new_file_are_noticed(self):
        (self.folder / "sub").mkdir()
        os.symlink("sub", self.folder / "link")
        before = self.names()
        for first, second in (("z1", "./z1"), ("z1", "sub/../z1"), ("z1", self.folder / "z1"), ("sub/z1", "link/z1"),
                              ("link/../z1", "z1"), (".//z1", "z1")):
            for options in (("--output", "--json"), ("--timeline", "--output"), ("--json", "--timeline")):
                with self.subTest(first=first, second=second, options=options):
                    result = self.run_program("run", *SMALL, options[0], first, options[1], second, cwd=self.folder)
                    self.assertEqual(result.returncode, 2, result.stderr)
                    self.assertRegex(result.stderr.decode(), rf"\Amoewave: .*{options[0]}.*\n\Z")
                    self.assertRegex(result.stderr.decode(), rf"\Amoewave: .*{options[1]}.*\n\Z")
        self.assertEqual(self.names(), before)

    def test_links_are_followed_to_files_that_are_there_or_not(self):
        (self.folder / "sub").mkdir()
        (self.folder / "old").write_text("old")
        links = {"to-old": "old", "to-new": "sub/new", "to-absolute": self.folder / "absolute", "first": "second",
                 "second": "sub/third", "sub/third": "../end"}
        for name, target in links.items():
            os.symlink(target, self.folder / name)
        for name, end in (("to-old", "old"), ("to-new", "sub/new"), ("to-absolute", "absolute"), ("first", "end")):
            with self.subTest(name=name):
                self.succeed("run", *SMALL, "--json", self.folder / name)
                self.assertTrue((self.folder / name).is_symlink())
                self.assertEqual(json.loads((self.folder / end).read_text())["format"], "moewave-result")
        for name, target in links.items():
            self.assertEqual(os.readlink(self.folder / name), str(target))

    def test_links_that_lead_nowhere_are_refused(self):
        os.symlink("nowhere/file", self.folder / "to-nowhere")
        os.symlink("circle", self.folder / "circle")
        os.symlink("b", self.folder / "a")
        os.symlink("a", self.folder / "b")
        before = self.names()
        for name in ("to-nowhere", "circle", "a"):
            with self.subTest(name=name):
                self.refuse(2, "run", "--hidden", "12", "--output", self.folder / name, says=[name, "cannot be written"])
        os.symlink("same", self.folder / "link")
        self.refuse(2, "run", "--output", self.folder / "link", "--json", self.folder / "same", says=["--output", "--json"])
        self.assertEqual(self.names(), sorted([*before, "link"]))

    def test_all_files_of_a_run_and_nothing_else_are_there(self):
        before = self.names()
        self.succeed("run", *SMALL, "--output", self.folder / "o", "--json", self.folder / "j", "--timeline",
                     self.folder / "t")
        self.assertEqual(self.names(), sorted([*before, "o", "j", "t"]))

    def test_a_full_disk_behind_stdout_is_a_failure(self):
        if not Path("/dev/full").exists():
            self.skipTest("no /dev/full")
        with open("/dev/full", "wb") as full:
            result = subprocess.run([PROGRAM, "info"], stdout=full, stderr=subprocess.PIPE, timeout=WATCHDOG_S)
        self.assertEqual(result.returncode, 1)
        self.assertRegex(result.stderr.decode(), r"\Amoewave: [^\n]+\n\Z")


class Verify(CliTest):
    def test_one_line_a_tensor_and_success(self):
        text = self.succeed("verify", *SMALL, "--shared-intermediate", "8", "--clamp", "2", "--backward")
        for tensor in ("output", "grad_hidden_states", "grad_topk_weights", "grad_gate_up_proj", "grad_down_proj",
                       "grad_shared_gate_proj", "grad_shared_up_proj", "grad_shared_down_proj"):
            self.assertRegex(text, rf"(?m)^  {tensor} .* ok$")
        self.assertNotIn("FAIL", text)

    def test_bounds_are_the_documented_ones(self):
        checks = self.succeed_json("verify", *SMALL, "--backward")["checks"]
        self.assertEqual({check["tensor"]: check["bound"] for check in checks},
                         {"output": 5e-3, "grad_hidden_states": 5e-3, "grad_topk_weights": 1e-2, "grad_gate_up_proj": 1e-2,
                          "grad_down_proj": 1e-2})
        for check in checks:
            self.assertTrue(0 < check["relative_error"] <= check["bound"], check)

    def test_the_reference_passes_its_own_check(self):
        self.assertTrue(self.succeed_json("verify", *SMALL, "--backward", "--backend", "reference")["ok"])

    def test_poison_jitter_and_recomputation_change_nothing(self):
        files = []
        for extra in ([], ["--poison", "--jitter-us", "50"], ["--saved-rows", "0"], ["--saved-rows", "3"], ["--sms", "3"]):
            output = self.folder / "output.safetensors"
            self.succeed("verify", *SMALL, "--backward", "--output", output, *extra)
            files.append(output.read_bytes())
        self.assertEqual(len(set(files)), 1)

    def test_nan_in_a_token_passes_where_the_reference_has_it(self):
        tensors = inputs_tensors(hidden=64)
        dtype, shape, raw = tensors["hidden_states"]
        tensors["hidden_states"] = (dtype, shape, struct.pack("<f", math.nan) + raw[4:])
        write_safetensors(self.inputs, tensors)
        result = self.succeed_json("verify", "--inputs", self.inputs, "--backward", "--ranks", "2")
        self.assertTrue(result["ok"])

    def test_a_result_beyond_its_bound_fails_and_is_written_all_the_same(self):
        """Products beyond FP32 become Inf and NaN where FP64 still has numbers."""
        tensors = inputs_tensors(hidden=64)
        tensors["hidden_states"] = ("F32", [8, 64], struct.pack("<512f", *[(-1) ** i * 1e38 for i in range(512)]))
        write_safetensors(self.inputs, tensors)
        names = {"o": "--output", "j": "--json", "t": "--timeline"}
        destinations = [text for name, option in names.items() for text in (option, self.folder / name)]
        result = self.run_program("verify", "--inputs", self.inputs, "--ranks", "2", *destinations)
        self.assertEqual(result.returncode, 1)
        self.assertRegex(result.stderr.decode(), r"\Amoewave: [^\n]*output[^\n]*\n\Z")
        self.assertRegex(result.stdout.decode(), r"(?m)^  output .* nan .* FAIL \(\d+ NaN or Inf misplaced\)$")
        self.assertLessEqual(set(names), set(self.names()))
        written = json.loads((self.folder / "j").read_text())
        check = written["checks"][0]
        self.assertEqual((written["ok"], check["ok"], check["relative_error"]), (False, False, None))
        self.assertGreater(check["misplaced_non_finite"], 0)

    def test_a_result_of_zeros_is_met_exactly(self):
        tensors = inputs_tensors(hidden=64)
        dtype, shape, raw = tensors["grad_output"]
        tensors["grad_output"] = (dtype, shape, bytes(len(raw)))
        write_safetensors(self.inputs, tensors)
        result = self.succeed_json("verify", "--inputs", self.inputs, "--backward")
        for check in result["checks"][1:]:
            self.assertEqual((check["max_abs_error"], check["relative_error"], check["ok"]), (0, 0, True))


class Json(CliTest):
    def test_a_dash_leaves_nothing_but_json_on_stdout(self):
        json.loads(self.succeed("verify", *SMALL, "--json", "-"))
        self.assertNotIn("-", self.names())

    def test_a_file_leaves_the_tables_on_stdout(self):
        path = self.folder / "result.json"
        text = self.succeed("run", *SMALL, "--json", path)
        self.assertIn("Forward", text)
        self.assertEqual(json.loads(path.read_text())["command"], "run")

    def test_traffic_adds_up(self):
        result = self.succeed_json("run", "--ranks", "3", "--experts", "7", "--topk", "3", "--hidden", "16",
                                   "--intermediate", "8", "--backward")
        self.assertEqual([call["direction"] for call in result["calls"]], ["forward", "backward"])
        self.assertEqual(result["expert_owner"], [0, 0, 0, 1, 1, 2, 2])
        self.assertEqual(sum(result["expert_rows"]), 3 * 64 * 3)
        for call in result["calls"]:
            self.assertEqual(sum(rank["routes"] for rank in call["ranks"]), 3 * 64 * 3)
            for r, rank in enumerate(call["ranks"]):
                owned = [rows for rows, owner in zip(result["expert_rows"], result["expert_owner"]) if owner == r]
                self.assertEqual(rank["rows"], sum(owned))
                self.assertGreaterEqual(rank["padded_rows"], rank["rows"])
                self.assertEqual(sum(call["pulled_bytes"][r]), rank["pulled_bytes"])
                self.assertEqual(sum(call["pushed_bytes"][r]), rank["pushed_bytes"])
                self.assertLess(rank["pulled_bytes"], rank["per_route_bytes"])
                self.assertEqual((call["pulled_bytes"][r][r], call["pushed_bytes"][r][r]), (0, 0))
        forward = result["calls"][0]["ranks"]
        self.assertEqual([r["pulled_bytes"] for r in forward], [2 * 16 * r["pulled_tokens"] for r in forward])

    def test_every_documented_field_is_there_and_no_other(self):
        fields = set(re.findall(r"(?m)^\| `(\w+)`", (Path(__file__).parent.parent / "docs" / "json.md").read_text()))

        def keys(value):
            if isinstance(value, dict):
                return set(value).union(*map(keys, value.values()))
            return set().union(*map(keys, value)) if isinstance(value, list) else set()

        used = keys(self.succeed_json("verify", *SMALL, "--backward")) | keys(self.succeed_json("info"))
        self.assertEqual(used, fields)

    def test_every_table_of_the_documentation_is_that_of_one_object(self):
        text = (Path(__file__).parent.parent / "docs" / "json.md").read_text()

        def rows(start):
            table = text[text.index("| field | |\n|---|---|\n", text.index(start)):].split("\n\n")[0]
            return set(re.findall(r"(?m)^\| `(\w+)`", table))

        result = self.succeed_json("verify", *SMALL, "--backward")
        self.assertEqual(rows("## run and verify"), set(result))
        self.assertEqual(rows("In `shape`:"), set(result["shape"]))
        self.assertEqual(rows("In `files`:"), set(result["files"]))
        self.assertEqual(rows("In `tuning` and `tuning_asked`:"), set(result["tuning"]))
        self.assertEqual(rows("In each of `calls`:"), set(result["calls"][0]))
        self.assertEqual(rows("In each of the `ranks` of a call:"), set(result["calls"][0]["ranks"][0]))
        self.assertEqual(rows("In each of `checks`:"), set(result["checks"][0]))

    def test_timeline_is_a_trace_of_ranks_and_sms(self):
        path = self.folder / "trace.json"
        self.succeed("run", *SMALL, "--backward", "--sms", "3", "--timeline", path)
        events = json.loads(path.read_text())["traceEvents"]
        names = {(e["name"], e["args"]["name"]) for e in events if e["ph"] == "M" and "name" in e["args"]}
        for rank in range(3):
            self.assertIn(("process_name", f"rank {rank}"), names)
        slices = [e for e in events if e["ph"] == "X"]
        self.assertEqual({(e["pid"], e["tid"]) for e in slices}, {(r, s) for r in range(3) for s in range(3)})
        self.assertEqual({e["cat"] for e in slices}, {"forward", "backward"})
        self.assertTrue(all(e["ts"] >= 0 and e["dur"] >= 0 for e in slices))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__.strip())
    PROGRAM = os.path.abspath(sys.argv.pop(1))
    if not os.access(PROGRAM, os.X_OK):
        sys.exit(f"cli_test.py: {PROGRAM} is not a program")
    run = unittest.main(exit=False).result
    bad = len(run.failures) + len(run.errors)
    print(f"cli_test: {run.testsRun - bad - len(run.skipped)} of {run.testsRun} passed, {len(run.skipped)} skipped")
    sys.exit(0 if run.wasSuccessful() else 1)
