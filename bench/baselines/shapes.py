"""The shapes that the project measures itself on; T and the experts are those of one rank."""
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    hidden: int
    intermediate: int
    experts_per_rank: int
    topk: int
    tokens: int


SHAPES = {
    "A": Shape(7168, 2048, 32, 8, 8192),
    "B": Shape(4096, 1536, 16, 8, 8192),
    "C": Shape(2048, 768, 16, 8, 16384),
}
