#!/usr/bin/env python3
"""Trains a small mixture-of-experts language model on real text and exports one layer of it with real inputs.

    examples/train/get_text.sh .text/corpus.txt
    python3 examples/train/train_tiny_moe.py --text .text/corpus.txt --out examples/data

Writes to --out: layer.safetensors, inputs.safetensors, routing.safetensors, facts.json, loss.json, loss.png, load.png.
Needs PyTorch 2.4 or later, numpy, safetensors and matplotlib; runs on a GPU if there is one.
"""

import argparse
import copy
import json
import math
import time
from dataclasses import asdict
from pathlib import Path

import torch
from torch.nn import functional as F

import export
from data import even_windows, load_corpus, random_batch
from load import load_facts, routing_facts
from model import LanguageModel, ModelConfig
from plots import plot_load, plot_loss

PRINT_EVERY = 20
WARMUP_STEPS = 100


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, required=True, help="corpus file from get_text.sh")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop training after this time and export")
    parser.add_argument("--batch", type=int, default=64, help="sequences a step")
    parser.add_argument("--learning-rate", type=float, default=1.5e-3)
    parser.add_argument("--balance", type=float, default=1e-2, help="weight of the load-balancing loss")
    parser.add_argument("--eval-every", type=int, default=100)
    parser.add_argument("--eval-windows", type=int, default=32, help="held-out sequences of each source")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    if args.steps < 1 or args.batch < 1 or args.eval_every < 1 or args.eval_windows < 1 or args.minutes <= 0:
        parser.error("--steps, --batch, --eval-every, --eval-windows and --minutes must be positive")
    return args


def learning_rate(peak, step, progress):
    """Linear warm-up, then a cosine down to 5 % of the peak; progress from 0 to 1 is that of steps or time."""
    return peak * min((step + 1) / WARMUP_STEPS, 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0))))


@torch.no_grad()
def held_out_loss(model, corpus, device, windows):
    """Mean loss in nats a token of each source."""
    model.eval()
    losses = {}
    for source, stream in corpus.held_out.items():
        inputs, targets = even_windows(stream, windows, model.config.context)
        total = 0.0
        for x, y in zip(inputs.split(8), targets.split(8)):
            with torch.autocast(device.type, dtype=torch.bfloat16):
                logits, _ = model(x.to(device))
            total += F.cross_entropy(logits.flatten(0, 1), y.to(device).flatten(), reduction="sum").item()
        losses[source] = total / inputs.numel()
    model.train()
    return losses


def mean(losses):
    return sum(losses.values()) / len(losses)


def make_optimizer(model, peak):
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95))


class Run:
    """One training run: the model, its loss curve, and the weights of the best held-out loss so far."""

    def __init__(self, args, corpus, device):
        self.args, self.corpus, self.device = args, corpus, device
        self.model = LanguageModel(ModelConfig()).to(device)
        self.optimizer = make_optimizer(self.model, args.learning_rate)
        self.generator = torch.Generator().manual_seed(args.seed)
        self.curve = {"train": [], "held_out": []}
        self.best = {"loss": math.inf}
        self.steps_done = 0
        self.seconds = 0.0

    def step(self, progress):
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.args.learning_rate, self.steps_done, progress)
        inputs, targets = random_batch(self.stream, self.args.batch, self.model.config.context, self.generator)
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            logits, balance = self.model(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        (loss + self.args.balance * balance).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps_done += 1
        return loss, balance

    def evaluate(self):
        losses = held_out_loss(self.model, self.corpus, self.device, self.args.eval_windows)
        point = {"step": self.steps_done, "loss": mean(losses), "by_source": losses}
        self.curve["held_out"].append(point)
        if point["loss"] < self.best["loss"]:
            state = copy.deepcopy(self.model.state_dict())
            self.best = {"loss": point["loss"], "step": self.steps_done, "state": state}
        print(f"step {self.steps_done}: held-out loss {point['loss']:.4f}", flush=True)

    def train(self):
        self.stream = self.corpus.train.to(self.device)
        self.evaluate()
        start = time.monotonic()
        while self.steps_done < self.args.steps and self.seconds < 60 * self.args.minutes:
            loss, balance = self.step(max(self.steps_done / self.args.steps, self.seconds / (60 * self.args.minutes)))
            if self.steps_done % PRINT_EVERY == 0 or self.steps_done == self.args.steps:
                self.print_progress(loss.item(), balance.item())
            if self.steps_done % self.args.eval_every == 0:
                self.evaluate()
            self.seconds = time.monotonic() - start
        if self.curve["held_out"][-1]["step"] != self.steps_done:
            self.evaluate()
        self.model.load_state_dict(self.best["state"])
        self.model.eval()

    def print_progress(self, loss, balance):
        self.curve["train"].append({"step": self.steps_done, "loss": loss, "balance": balance})
        tokens = self.steps_done * self.args.batch * self.model.config.context
        rate = tokens / max(self.seconds, 1e-9)
        print(f"step {self.steps_done}: loss {loss:.4f}, balance {balance:.3f}, {rate:,.0f} tokens/s", flush=True)


def run_facts(run, exported_losses):
    args, model, corpus = run.args, run.model, run.corpus
    packages = args.text.parent / "packages.txt"
    bits = {s: exported_losses[s] / math.log(2) / corpus.bytes_per_token[s] for s in exported_losses}
    return {
        "text": {"packages": packages.read_text().split("\n")[:-1] if packages.exists() else [], **corpus.facts},
        "model": {**asdict(model.config), "parameters": sum(p.numel() for p in model.parameters())},
        "training": {
            "steps": run.steps_done,
            "batch": args.batch,
            "tokens": run.steps_done * args.batch * model.config.context,
            "seconds": round(run.seconds, 1),
            "device": torch.cuda.get_device_name() if run.device.type == "cuda" else "CPU",
            "torch": torch.__version__,
            "learning_rate": args.learning_rate,
            "balance_weight": args.balance,
            "seed": args.seed,
            "first_held_out_loss": run.curve["held_out"][0]["loss"],
            "last_training_loss": run.curve["train"][-1]["loss"] if run.curve["train"] else None,
            "best_step": run.best["step"],
            "best_held_out_loss": run.best["loss"],
            "exported_held_out_loss": exported_losses,
            "exported_held_out_bits_per_byte": bits,
        },
    }


def export_run(run, out):
    """Rounds the model to BF16, writes and checks every file of the run, returns its facts."""
    model, corpus, device, context = run.model, run.corpus, run.device, run.model.config.context
    sources = list(corpus.held_out)
    export.round_to_bf16(model)
    facts = run_facts(run, held_out_loss(model, corpus, device, run.args.eval_windows))
    model.eval()
    inputs = export.run_layer_inputs(model, corpus, device, context)
    routing_ids, window_source = export.run_routing(model, corpus, device, context)
    export.write_files(out, model, inputs, routing_ids, window_source, sources)
    facts["check"] = export.check_files(out, inputs.output)
    facts["inputs_load"] = load_facts(inputs.topk_ids.numpy(), model.config.experts)
    facts["expert_load"] = routing_facts(routing_ids, window_source, sources, model.config.experts)
    facts["files"] = export.file_facts(out)
    plot_loss(out / "loss.png", run.curve, run.best["step"])
    plot_load(out / "load.png", facts["expert_load"], sources, export.LAYER)
    (out / "loss.json").write_text(json.dumps(run.curve, indent=1) + "\n")
    (out / "facts.json").write_text(json.dumps(facts, indent=1) + "\n")
    return facts


def main():
    args = parse_arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    device = torch.device(args.device)
    torch.manual_seed(args.seed)

    start = time.monotonic()
    corpus = load_corpus(args.text, ModelConfig.vocabulary)
    print(f"{len(corpus.train):,} training tokens, prepared in {time.monotonic() - start:.0f} s", flush=True)
    run = Run(args, corpus, device)
    run.train()
    facts = export_run(run, args.out)
    print(json.dumps({"check": facts["check"], "files": facts["files"]}, indent=1))
    for layer in facts["expert_load"]:
        busiest, idlest = layer["all"]["max_over_mean"], layer["all"]["min_over_mean"]
        print(f"layer {layer['layer']}: busiest expert {busiest:.2f} x the mean, idlest {idlest:.2f} x")


if __name__ == "__main__":
    main()
