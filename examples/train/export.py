"""Writes the trained model's middle layer, real inputs for it and routing of a longer text as safetensors files.

The model is rounded to BF16 first, as a published checkpoint would be, so that the files hold exactly what ran.
"""

from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from data import even_windows

LAYER = 3
PREFIX = f"model.layers.{LAYER}.mlp"
# Tokens of each rank and the source of its text: uneven on purpose, and each rank reads something else, as it would
# with a batch of documents. Rank 3 reads one window of every source.
RANKS = ((800, "bible"), (672, "postgresql"), (544, "python"), (384, "mixed"))
ROUTING_WINDOWS = 40  # of context tokens each, over all sources

OUTPUT_BOUND = 1e-2  # relative Frobenius error of the exported layer in FP64 against the model's own BF16 output
ROUTING_BOUND = 0.995  # share of tokens whose ids follow from the exported hidden states and router in FP64


@dataclass
class Inputs:
    hidden_states: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    grad_output: torch.Tensor
    output: torch.Tensor  # of the model, for the check


def round_to_bf16(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())


def rank_windows(corpus, context):
    """For each rank its windows (inputs, targets), each [1, length], length <= context."""
    sources = list(corpus.held_out)
    ranks = []
    for index, (tokens, source) in enumerate(RANKS):
        parts = sources if source == "mixed" else [source] * -(-tokens // context)
        lengths = [tokens // len(parts) + (i < tokens % len(parts)) for i in range(len(parts))]
        # A start of its own for each window keeps windows of one source apart from each other.
        starts = [(index * len(parts) + i) * 2 * context for i in range(len(parts))]
        ranks.append([even_windows(corpus.held_out[s], 1, n, first) for s, n, first in zip(parts, lengths, starts)])
    return ranks


def run_layer_inputs(model, corpus, device, context):
    """The middle layer's inputs, and the gradient of the sum of the tokens' losses with respect to its MoE output."""
    moe = model.layers[LAYER].moe
    moe.records = []
    for rank in rank_windows(corpus, context):
        for inputs, targets in rank:
            with torch.autocast(device.type, dtype=torch.bfloat16):
                logits, _ = model(inputs.to(device))
            F.cross_entropy(logits.flatten(0, 1), targets.to(device).flatten(), reduction="sum").backward()
            model.zero_grad(set_to_none=True)
    records, moe.records = moe.records, None
    return Inputs(
        hidden_states=torch.cat([r.hidden_states for r in records]).detach().cpu(),
        topk_ids=torch.cat([r.topk_ids for r in records]).to(torch.int32).cpu(),
        topk_weights=torch.cat([r.topk_weights for r in records]).detach().cpu(),
        grad_output=torch.cat([r.output.grad for r in records]).cpu(),
        output=torch.cat([r.output for r in records]).detach().cpu(),
    )


@torch.no_grad()
def run_routing(model, corpus, device, context):
    """Ids of all layers, U8 [layers, tokens, k], and the source of each window of `context` tokens, I32 [windows]."""
    sources = list(corpus.held_out)
    share = [ROUTING_WINDOWS // len(sources) + (i < ROUTING_WINDOWS % len(sources)) for i in range(len(sources))]
    for layer in model.layers:
        layer.moe.records = []
    for source, windows in zip(sources, share):
        inputs, _ = even_windows(corpus.held_out[source], windows, context)
        for window in inputs.split(8):
            with torch.autocast(device.type, dtype=torch.bfloat16):
                model(window.to(device))
    ids = torch.stack([torch.cat([r.topk_ids for r in layer.moe.records]) for layer in model.layers])
    for layer in model.layers:
        layer.moe.records = None
    return ids.to(torch.uint8).cpu(), torch.repeat_interleave(torch.arange(len(sources)), torch.tensor(share)).int()


def write_files(folder, model, inputs, routing_ids, window_source, sources):
    moe = model.layers[LAYER].moe
    save_file(
        {
            f"{PREFIX}.experts.gate_up_proj": moe.gate_up_proj.detach().bfloat16().cpu(),
            f"{PREFIX}.experts.down_proj": moe.down_proj.detach().bfloat16().cpu(),
            f"{PREFIX}.gate.weight": moe.gate.detach().bfloat16().cpu(),
        },
        folder / "layer.safetensors",
    )
    save_file(
        {
            "hidden_states": inputs.hidden_states,
            "topk_ids": inputs.topk_ids,
            "topk_weights": inputs.topk_weights,
            "grad_output": inputs.grad_output,
            "tokens_per_rank": torch.tensor([tokens for tokens, _ in RANKS], dtype=torch.int64),
        },
        folder / "inputs.safetensors",
        metadata={"source_of_rank": ",".join(source for _, source in RANKS)},
    )
    save_file(
        {"topk_ids": routing_ids, "window_source": window_source},
        folder / "routing.safetensors",
        metadata={"sources": ",".join(sources), "window_tokens": str(routing_ids.shape[1] // len(window_source))},
    )
    for path in folder.glob("*.safetensors"):
        path.chmod(0o644)  # safetensors writes files that only their owner can read


def moe_fp64(layer, hidden_states, ids, weights):
    """The MoE layer from the exported tensors, in FP64 NumPy and in the order of the formula."""
    gate_up = layer[f"{PREFIX}.experts.gate_up_proj"]
    down = layer[f"{PREFIX}.experts.down_proj"]
    output = np.zeros_like(hidden_states)
    for expert in range(len(gate_up)):
        token, choice = np.nonzero(ids == expert)
        gate, up = np.split(hidden_states[token] @ gate_up[expert].T, 2, axis=1)
        y = (gate / (1 + np.exp(-gate)) * up) @ down[expert].T
        np.add.at(output, token, weights[token, choice, None] * y)
    return output


def check_files(folder, model_output):
    """Recomputes routing and layer from the files alone; raises if they do not reproduce what the model did."""
    layer = {name: t.double().numpy() for name, t in load_file(folder / "layer.safetensors").items()}
    inputs = {name: t.double().numpy() for name, t in load_file(folder / "inputs.safetensors").items()}
    x, ids, weights = inputs["hidden_states"], inputs["topk_ids"], inputs["topk_weights"]

    logits = x @ layer[f"{PREFIX}.gate.weight"].T
    probabilities = np.exp(logits - logits.max(axis=1, keepdims=True))
    expected_ids = np.argsort(-probabilities, axis=1, kind="stable")[:, : ids.shape[1]]
    same = (expected_ids == ids).all(axis=1)
    chosen = np.take_along_axis(probabilities, ids.astype(np.int64), axis=1)
    weight_error = np.abs(chosen / chosen.sum(axis=1, keepdims=True) - weights).max()

    wanted = model_output.double().numpy()
    error = np.linalg.norm(moe_fp64(layer, x, ids, weights) - wanted) / np.linalg.norm(wanted)
    gradient = inputs["grad_output"]
    result = {
        "output_relative_frobenius_error": float(error),
        "tokens_with_same_ids": float(same.mean()),
        "largest_router_weight_error": float(weight_error),
        "hidden_states_rms": float(np.sqrt((x**2).mean())),
        "output_rms": float(np.sqrt((wanted**2).mean())),
        "grad_output_rms": float(np.sqrt((gradient**2).mean())),
    }
    if not (error <= OUTPUT_BOUND and same.mean() >= ROUTING_BOUND and weight_error <= 1e-4):
        raise SystemExit(f"the exported files do not reproduce the model: {result}")
    if not np.isfinite(gradient).all() or (gradient == 0).all(axis=1).any():
        raise SystemExit("grad_output holds a token without a gradient, or a value that is not finite")
    return result


def file_facts(folder):
    return {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256(path.read_bytes()).hexdigest()}
        for path in sorted(folder.glob("*.safetensors"))
    }
