"""Token streams of the corpus: a training stream, and one held-out stream a source."""

from dataclasses import dataclass

import numpy as np
import torch

from bpe import BytePairEncoder
from make_corpus import SOURCES, read_corpus

HELD_OUT_EVERY = 16  # of each source's documents, in file order


@dataclass
class Corpus:
    train: torch.Tensor  # int64
    held_out: dict  # source -> int64
    bytes_per_token: dict  # source -> mean over its held-out text
    facts: dict


def load_corpus(path, vocabulary):
    train = {source: [] for source in SOURCES}
    held_out = {source: [] for source in SOURCES}
    seen = {source: 0 for source in SOURCES}
    for source, text in read_corpus(path):
        seen[source] += 1
        (train if seen[source] % HELD_OUT_EVERY else held_out)[source].append(text)

    encoder = BytePairEncoder((text for source in SOURCES for text in train[source]), vocabulary)
    train_tokens = {source: encoder.encode(train[source]) for source in SOURCES}
    held_out_tokens = {source: encoder.encode(held_out[source]) for source in SOURCES}
    held_out_bytes = {source: sum(len(text.encode()) for text in held_out[source]) for source in SOURCES}
    facts = {
        source: {
            "documents": seen[source],
            "bytes": held_out_bytes[source] + sum(len(text.encode()) for text in train[source]),
            "train_tokens": len(train_tokens[source]),
            "held_out_tokens": len(held_out_tokens[source]),
        }
        for source in SOURCES
    }
    return Corpus(
        train=_tensor(np.concatenate(list(train_tokens.values()))),
        held_out={source: _tensor(tokens) for source, tokens in held_out_tokens.items()},
        bytes_per_token={source: held_out_bytes[source] / len(held_out_tokens[source]) for source in SOURCES},
        facts=facts,
    )


def _tensor(tokens):
    return torch.from_numpy(tokens.astype(np.int64))


def random_batch(stream, batch, context, generator):
    """Inputs and targets [batch, context] at random places of the stream."""
    starts = torch.randint(len(stream) - context, (batch, 1), generator=generator)
    window = stream[(starts + torch.arange(context + 1)).to(stream.device)]
    return window[:, :-1], window[:, 1:]


def even_windows(stream, count, length, first=0):
    """Inputs and targets [count, length] that do not overlap, spread evenly over the stream from `first` on."""
    stride = (len(stream) - 1 - first) // count
    if stride < length:
        raise ValueError(f"{count} windows of {length} tokens after {first} do not fit in {len(stream)} tokens")
    window = torch.stack([stream[first + i * stride :][: length + 1] for i in range(count)])
    return window[:, :-1], window[:, 1:]
