"""Byte-pair encoding (Sennrich et al. 2016, https://arxiv.org/abs/1508.07909) over bytes, trained on the corpus itself.

Tokens 0 to 255 are the bytes, later ones are merges. Byte 0 does not occur in text and marks the start of a document.
"""

import heapq
import re
from collections import Counter, defaultdict
from itertools import pairwise

import numpy as np

DOCUMENT_START = 0

# Merges never cross these pieces: a word with the space before it, one digit, a run of signs, a run of white space.
_PIECES = re.compile(r" ?[^\W\d_]+|\d| ?(?:[^\w\s]|_)+|\s+(?=\s)|\s+")


def _replace(tokens, pair, merged):
    out = []
    i = 0
    while i < len(tokens):
        if i + 1 < len(tokens) and (tokens[i], tokens[i + 1]) == pair:
            out.append(merged)
            i += 2
        else:
            out.append(tokens[i])
            i += 1
    return out


def _most_frequent(heap, pair_count):
    """Pops the most frequent pair; an entry whose count has fallen since it was pushed goes back with the new count."""
    while heap:
        negative_count, pair = heapq.heappop(heap)
        count = pair_count[pair]
        if -negative_count == count and count > 0:
            return pair
        if 0 < count < -negative_count:
            heapq.heappush(heap, (-count, pair))
    raise ValueError("the text is too short for this vocabulary")


class BytePairEncoder:
    def __init__(self, texts, vocabulary):
        """Learns vocabulary - 256 merges; ties between pairs go to the smaller pair, so that the result is fixed."""
        self.rank = {}
        self.cache = {}
        counts = Counter()
        for text in texts:
            counts.update(_PIECES.findall(text))
        pieces = [(list(piece.encode()), count) for piece, count in counts.items() if count > 1]
        self._learn([tokens for tokens, _ in pieces], [count for _, count in pieces], vocabulary)

    def _learn(self, words, counts, vocabulary):
        pair_count = Counter()
        words_with = defaultdict(set)
        for index, tokens in enumerate(words):
            for pair in pairwise(tokens):
                pair_count[pair] += counts[index]
                words_with[pair].add(index)
        heap = [(-count, pair) for pair, count in pair_count.items()]
        heapq.heapify(heap)
        for merged in range(256, vocabulary):
            pair = _most_frequent(heap, pair_count)
            self.rank[pair] = merged
            new_pairs = set()
            for index in words_with.pop(pair):
                old = words[index]
                words[index] = new = _replace(old, pair, merged)
                for gone in pairwise(old):
                    pair_count[gone] -= counts[index]
                for come in pairwise(new):
                    pair_count[come] += counts[index]
                    words_with[come].add(index)
                    new_pairs.add(come)
            for come in new_pairs:
                heapq.heappush(heap, (-pair_count[come], come))

    def _encode_piece(self, piece):
        tokens = list(piece.encode())
        while len(tokens) > 1:
            pair = min(pairwise(tokens), key=lambda p: self.rank.get(p, 1 << 30))
            if pair not in self.rank:
                break
            tokens = _replace(tokens, pair, self.rank[pair])
        return tokens

    def encode(self, texts):
        """One array of all texts, DOCUMENT_START before each."""
        out = []
        for text in texts:
            out.append(DOCUMENT_START)
            for piece in _PIECES.findall(text):
                tokens = self.cache.get(piece)
                if tokens is None:
                    tokens = self.cache[piece] = self._encode_piece(piece)
                out.extend(tokens)
        return np.array(out, dtype=np.uint16)
