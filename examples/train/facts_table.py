#!/usr/bin/env python3
"""Prints the tables of docs/example-data.md from a run's facts.json: facts_table.py examples/data/facts.json"""

import json
import sys


def print_table(head, rows):
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(str(cell) for cell in row) + " |")
    print()


def main(path):
    with open(path, encoding="utf-8") as file:
        facts = json.load(file)
    text, training, check = facts["text"], facts["training"], facts["check"]
    sources = [name for name in text if name != "packages"]

    print_table(["package", "version"], [line.split() for line in text["packages"]])
    columns = ["documents", "bytes", "train_tokens", "held_out_tokens"]
    rows = [[name] + [f"{text[name][c]:,}" for c in columns] for name in sources]
    print_table(["source", "documents", "bytes", "training tokens", "held-out tokens"], rows)

    print_table(
        ["training", ""],
        [
            ["parameters", f"{facts['model']['parameters']:,}"],
            ["steps, tokens", f"{training['steps']:,}, {training['tokens']:,}"],
            ["device, time", f"{training['device']}, {training['seconds']} s, PyTorch {training['torch']}"],
            ["held-out loss before training", f"{training['first_held_out_loss']:.3f}"],
            ["best held-out loss", f"{training['best_held_out_loss']:.3f} at step {training['best_step']:,}"],
            ["last training loss", f"{training['last_training_loss']:.3f}"],
        ],
    )
    loss, bits = training["exported_held_out_loss"], training["exported_held_out_bits_per_byte"]
    rows = [[name, f"{loss[name]:.3f}", f"{bits[name]:.3f}"] for name in sources]
    print_table(["exported model, held out", "nats a token", "bits a byte"], rows)

    columns = ["max_over_mean", "min_over_mean", "busiest_quarter_share", "entropy_over_uniform"]
    rows = []
    for layer in facts["expert_load"]:
        numbers = [f"{layer['all'][c]:.2f}" for c in columns]
        rows.append([layer["layer"]] + numbers + [f"{layer[name]['max_over_mean']:.2f}" for name in sources])
    head = ["layer", "busiest", "idlest", "share of the busiest 8", "entropy / uniform"]
    print_table(head + [f"busiest, {name}" for name in sources], rows)

    print_table(["check", ""], [[name.replace("_", " "), f"{value:.3g}"] for name, value in check.items()])
    print_table(["file", "bytes"], [[name, f"{file['bytes']:,}"] for name, file in facts["files"].items()])


if __name__ == "__main__":
    main(sys.argv[1])
