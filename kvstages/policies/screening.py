"""Screening: quantizer schemes beside each other at the same bits, and what allocation adds to the best of them.

A scheme is named by its precision at some number of bits (centred4); its *ladder* is that precision at every number of
bits that its levels have. A screening makes a set of policies that are to be measured together: each scheme everywhere,
on keys alone and on values alone; and at each budget the published recipe, the exact allocator on the published
quantizer, and the recommended recipe.

The *recommended* recipe is the exact allocator, keys and values apart, on the ladder of the scheme whose policy of that
budget has the least proxy. What decides is the calibration window's scores; held-out text is for measuring. A scheme
that stores tokens later than their own step is no candidate: its size at the end of a block is not what steps find.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from kvstages.cache.precisions import by_size
from kvstages.cache.schemes import LEVELS, precision
from kvstages.policies.budgets import Budget
from kvstages.policies.recipes import Recipe
from kvstages.scores.table import ScoreTable

# A score table of a unit (head or keys-values) and of some precisions.
Scores = Callable[[str, Sequence[str]], ScoreTable]
PUBLISHED, EXACT, RECOMMENDED = "published", "exact-published", "recommended"
# The published quantizer, and the rungs that the published recipe goes down to where INT8 and INT4 are too many bytes.
PUBLISHED_SCHEME = "int4"
PUBLISHED_LADDERS = (("int8", "int4"), ("int8", "int4", "int3", "int2"))
# The recipes of a scheme everywhere, on keys alone, and on values alone; what is not quantized stays in BF16.
BOTH, KEYS, VALUES = "uniform", "keys", "values"
SIDES = {KEYS: "k", VALUES: "v"}


class Choice(NamedTuple):
    """The recommended policy of a budget, the scheme that it is of, and the least proxy of every scheme (nats)."""

    budget: str
    scheme: str
    policy: dict[str, Any]
    proxies: dict[str, float]

    def as_record(self) -> dict[str, Any]:
        candidates = [{"scheme": scheme, "proxy": proxy} for scheme, proxy in self.proxies.items()]
        return {"budget": self.budget, "scheme": self.scheme, "candidates": candidates}


def at_bits(scheme: str, bits: Iterable[int]) -> list[str]:
    """The ladder of a scheme: its precision at those of some numbers of bits that its levels have, most bytes first."""
    found = precision(scheme)
    # vLLM's format at 4 bits is more than its levels, so it has no ladder.
    known = {found.bits} if found.keys.levels == "per_token_head" else set(LEVELS[found.keys.levels])
    return by_size(replace(found, bits=each).text for each in bits if each in known)


def is_candidate(scheme: str) -> bool:
    """Whether a scheme may be recommended: it stores each token at once."""
    found = precision(scheme)
    return not (found.keys.delayed or found.values.delayed)


def recommend(ladders: Mapping[str, Sequence[str]], budget: str, scores: Scores) -> Choice:
    """The best policy of a budget by proxy, over the ladders of some schemes; of equal ones the first.

    ValueError where none of them has a policy of that budget.
    """
    made: dict[str, dict[str, Any]] = {}
    reason = ValueError(f"budget {budget}: no scheme may be recommended, expected one that stores each token at once")
    for scheme, ladder in ladders.items():
        recipe = Recipe(RECOMMENDED, "exact", scores("keys-values", ladder))
        try:
            made[scheme] = recipe.policy(Budget.parse(budget))
        except ValueError as error:
            reason = error
    if not made:
        raise reason
    proxies = {scheme: policy["proxy"] for scheme, policy in made.items()}
    best = min(proxies, key=proxies.__getitem__)
    return Choice(budget, best, made[best], proxies)


def screening_set(
    schemes: Sequence[str], bits: Sequence[int], measured: Sequence[int], budgets: Sequence[str], scores: Scores
) -> dict[str, Any]:
    """Record of the policies to measure. ``bits``: of the ladders; ``measured``: those at which schemes are measured.

    ``recommended`` says for each budget which scheme was chosen, and the proxy of every candidate.
    """
    policies = []
    for scheme in schemes:
        for name in at_bits(scheme, measured):
            whole, apart = scores("head", [name]), scores("keys-values", [name])
            policies.append(Recipe(BOTH, "uniform", whole).record(name, [name] * len(whole.units), None))
            for recipe, side in SIDES.items():
                choice = [name if unit.part == side else "bf16" for unit in apart.units]
                policies.append(Recipe(recipe, "uniform", apart).record(f"{name}-{recipe}", choice, None))
    ladders = {scheme: at_bits(scheme, bits) for scheme in schemes if is_candidate(scheme)}
    choices = [recommend(ladders, budget, scores) for budget in budgets]
    for choice in choices:
        own = [_published(choice.budget, scores), _exact_published(choice.budget, bits, scores), choice.policy]
        policies += [policy | {"policy": f"{policy['recipe']}-{choice.budget}"} for policy in own]
    return {"policies": policies, "recommended": [choice.as_record() for choice in choices]}


def _published(budget: str, scores: Scores) -> dict[str, Any]:
    """The published recipe: greedy, whole heads, INT8 and INT4, and below them INT3 and INT2 where it must."""
    for ladder in PUBLISHED_LADDERS:
        recipe = Recipe(PUBLISHED, "greedy", scores("head", ladder))
        limit = Budget.parse(budget).of_cache(recipe.table.dense_bytes)
        if limit.measure != "bytes" or recipe.least <= limit.amount:
            break
    return recipe.policy(Budget.parse(budget))


def _exact_published(budget: str, bits: Sequence[int], scores: Scores) -> dict[str, Any]:
    """What allocation alone adds: the exact allocator, keys and values apart, on the published quantizer."""
    return Recipe(EXACT, "exact", scores("keys-values", at_bits(PUBLISHED_SCHEME, bits))).policy(Budget.parse(budget))


def precisions_of(schemes: Sequence[str], bits: Sequence[int], measured: Sequence[int]) -> list[str]:
    """Every precision that a screening needs scores of: the published quantizer's among them."""
    names = at_bits(PUBLISHED_SCHEME, {*bits, *measured})
    for scheme in schemes:
        names += at_bits(scheme, {*bits, *measured} if is_candidate(scheme) else measured)
    return by_size([*names, *PUBLISHED_LADDERS[1]])
