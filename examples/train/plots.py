"""The two pictures of a training run."""

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np


def plot_loss(path, curve, best_step):
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    train, held_out = curve["train"], curve["held_out"]
    train_steps, steps = [p["step"] for p in train], [p["step"] for p in held_out]
    axes.plot(train_steps, [p["loss"] for p in train], linewidth=0.8, color="0.6", label="training batch")
    axes.plot(steps, [p["loss"] for p in held_out], marker="o", markersize=3, label="held out, mean of sources")
    for source in held_out[0]["by_source"]:
        loss = [p["by_source"][source] for p in held_out]
        axes.plot(steps, loss, linewidth=0.8, linestyle="--", label=f"held out: {source}")
    axes.axvline(best_step, color="0.8", linewidth=0.8)
    axes.set(xlabel="step", ylabel="loss (nats a token)", ylim=(0, None))
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def plot_load(path, layers, sources, middle):
    """Left: sorted expert load of every layer. Right: the middle layer's load by source, experts in one order."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    experts = len(layers[0]["all"]["share"])
    for layer in layers:
        left.plot(np.sort(layer["all"]["share"])[::-1] * experts, marker=".", label=f"layer {layer['layer']}")
    left.axhline(1, color="0.7", linewidth=0.8)
    left.set(xlabel="expert, busiest first", ylabel="load (1 = even)", title="All held-out text", ylim=(0, None))
    left.legend(frameon=False)
    order = np.argsort(layers[middle]["all"]["share"])[::-1]
    width = 0.8 / len(sources)
    for i, source in enumerate(sources):
        load = np.array(layers[middle][source]["share"])[order] * experts
        right.bar(np.arange(experts) + (i - (len(sources) - 1) / 2) * width, load, width, label=source)
    right.axhline(1, color="0.7", linewidth=0.8)
    right.set(xlabel="expert, busiest first over all text", ylabel="load (1 = even)", title=f"Layer {middle} by source")
    right.legend(frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)
