"""Routes for a comparison: one file that moewave bench and the baselines both read, so that all do the same work."""
import heapq
import json
import random
import struct

HIDDEN = 8  # of the tokens in the file, which nobody uses


def odds(routing, experts, generator):
    """Of each expert: equal for `uniform`; for `zipf:S` those of the ranks 1 to E to the power -S, shuffled."""
    if routing == "uniform":
        return [1.0] * experts
    kind, _, exponent = routing.partition(":")
    if kind != "zipf":
        raise ValueError(f"routing '{routing}' is unknown; allowed are uniform, zipf:S")
    values = [(i + 1)**-float(exponent) for i in range(experts)]
    generator.shuffle(values)
    return values


def draw(shape, ranks, tokens, routing, seed):
    """ids [ranks * tokens][k], without repeats in a token."""
    generator = random.Random(f"{seed} {shape} {ranks} {tokens} {routing}")
    experts = shape.experts_per_rank * ranks
    shares = odds(routing, experts, generator)
    # Exponential waiting times: the k shortest are a draw without replacement in proportion to the odds.
    return [heapq.nsmallest(shape.topk, range(experts), key=[generator.expovariate(s) for s in shares].__getitem__)
            for _ in range(ranks * tokens)]


def write(path, ids):
    """An inputs file of moewave (docs/files.md). Router weights are equal: no time depends on them."""
    tokens, topk = len(ids), len(ids[0])
    parts = {
        "hidden_states": ("BF16", [tokens, HIDDEN], bytes(2 * tokens * HIDDEN)),
        "topk_ids": ("I32", [tokens, topk], struct.pack(f"<{tokens * topk}i", *(e for token in ids for e in token))),
        "topk_weights": ("F32", [tokens, topk], struct.pack("<f", 1 / topk) * (tokens * topk)),
    }
    header, body = {}, b""
    for name, (dtype, size, raw) in parts.items():
        header[name] = {"dtype": dtype, "shape": size, "data_offsets": [len(body), len(body) + len(raw)]}
        body += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def busiest(shape, ranks, ids):
    """Rows on the GPU with the most, relative to the mean."""
    rows = [0] * ranks
    for token in ids:
        for expert in token:
            rows[expert // shape.experts_per_rank] += 1
    return max(rows) * ranks / sum(rows)
