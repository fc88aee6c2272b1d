"""Greedy allocation of precisions to heads under a KL budget (STUDY.md, "Sensitivity and allocation").

The budget bounds a sum of single-head scores: a calibration proxy, not a bound on the joint model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvstages.quantizer import BITS, bytes_per_token

# Scores this little below zero are the rounding of a KL of zero; anything lower is an error.
ROUNDING = -1e-12
# Precisions from most bits to fewest: a head moves down this ladder, one rung at a time.
LADDER = ("bf16", "int8", "int4")

Scores = Mapping[str, Sequence[Sequence[float]]]


@dataclass(frozen=True)
class Move:
    """One step of the greedy path; KL in nats, bytes of one cache of the given number of tokens."""

    layer: int
    head: int
    before: str
    after: str
    added_kl: float
    bytes_saved: int
    proxy: float
    cache_bytes: int


def head_bytes(precision: str, head_dim: int, tokens: int) -> int:
    """Payload and scales of one head over ``tokens`` positions, keys and values together."""
    return tokens * sum(bytes_per_token(precision, head_dim))


def policy_bytes(precisions: Sequence[Sequence[str]], head_dim: int, tokens: int) -> tuple[int, int]:
    """Payload and scale bytes of a policy [L][H], by formula (STUDY.md, "The quantizer")."""
    pairs = [bytes_per_token(precision, head_dim) for row in precisions for precision in row]
    return tokens * sum(payload for payload, _ in pairs), tokens * sum(scale for _, scale in pairs)


def average_payload_bits(precisions: Sequence[Sequence[str]]) -> float:
    """Mean bits a stored element over all heads, scales aside."""
    bits = [BITS[precision] for row in precisions for precision in row]
    return sum(bits) / len(bits)


def check_scores(scores: Scores) -> None:
    """ValueError that names a head whose score is NaN, infinite or negative beyond rounding, or a ragged table."""
    shapes = {precision: [len(row) for row in table] for precision, table in scores.items()}
    if len({tuple(shape) for shape in shapes.values()}) > 1:
        raise ValueError(f"the precisions' scores have different shapes: {shapes}")
    for precision, table in scores.items():
        for layer, row in enumerate(table):
            for head, score in enumerate(row):
                if not math.isfinite(score) or score < ROUNDING:
                    raise ValueError(
                        f"sensitivity of layer {layer}, head {head}, {precision}: {score}; "
                        f"expected a finite KL of 0 or more"
                    )


def uniform(layers: int, heads: int, precision: str) -> list[list[str]]:
    """The policy [L][H] with one precision everywhere."""
    return [[precision] * heads for _ in range(layers)]


def proxy(precisions: Sequence[Sequence[str]], scores: Scores) -> float:
    """Sum of the single-head scores (nats) of a policy [L][H]; BF16 heads count 0."""
    check_scores(scores)
    return sum(
        max(scores[precision][layer][head], 0.0)
        for layer, row in enumerate(precisions)
        for head, precision in enumerate(row)
        if precision != "bf16"
    )


def greedy(scores: Scores, budget: float, head_dim: int, tokens: int) -> tuple[list[list[str]], list[Move]]:
    """The greedy policy [L][H] of a budget (nats) and its path.

    ``scores``: {precision: [L][H]} in nats, for one or both of int8 and int4. Every head starts in BF16; a move goes
    one rung down the ladder and adds max(score after − score before, 0). Of the moves that still fit the budget,
    the one with the least added KL per byte saved is taken (ties: lower layer, then lower head), until none fits.
    """
    if not budget >= 0:
        raise ValueError(f"budget {budget}: expected 0 nats or more")
    check_scores(scores)
    ladder = ["bf16", *(precision for precision in LADDER if precision in scores)]
    shape = scores[ladder[-1]]
    policy = [["bf16"] * len(row) for row in shape]
    spent, size = 0.0, sum(policy_bytes(policy, head_dim, tokens))

    def move(layer: int, head: int) -> tuple[str, float, int] | None:
        """The head's next move: precision after, added KL, bytes saved."""
        before = policy[layer][head]
        if before == ladder[-1]:
            return None
        after = ladder[ladder.index(before) + 1]
        score = max(scores[after][layer][head], 0.0)
        had = max(scores[before][layer][head], 0.0) if before != "bf16" else 0.0
        saved = head_bytes(before, head_dim, tokens) - head_bytes(after, head_dim, tokens)
        return (after, max(score - had, 0.0), saved) if saved > 0 else None

    moves = {(layer, head): move(layer, head) for layer, row in enumerate(shape) for head in range(len(row))}
    path: list[Move] = []
    while True:
        fitting = [
            (found[1] / found[2], place) for place, found in moves.items() if found and spent + found[1] <= budget
        ]
        if not fitting:
            return policy, path
        _, (layer, head) = min(fitting)
        after, added, saved = moves[layer, head]
        spent, size = spent + added, size - saved
        path.append(Move(layer, head, policy[layer][head], after, added, saved, spent, size))
        policy[layer][head] = after
        moves[layer, head] = move(layer, head)
