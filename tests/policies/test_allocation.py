"""The allocators: the published policies exactly, rules on small grids by exhaustion, and what all of them keep to."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published import PUBLISHED
from score_tables import head_table, published_table, random_table

from kvstages.analysis.published import published_policies
from kvstages.cache.precision_grid import PrecisionGrid, average_payload_bits, policy_bytes
from kvstages.cache.precisions import QUANTIZED
from kvstages.policies import names
from kvstages.policies.allocators import ALLOCATORS, draw, exact, granularity
from kvstages.policies.budgets import Budget
from kvstages.policies.knapsack import frontier
from kvstages.policies.making import allocated_policy
from kvstages.policies.recipes import Recipe

BUDGETS = ["0.01", "0.05", "0.1", "0.25", "0.5"]
LADDERS = [subset for count in range(1, 5) for subset in itertools.combinations(QUANTIZED, count)]


def nats(amount: float) -> Budget:
    return Budget(amount, "nats")


def in_bytes(amount: int) -> Budget:
    return Budget(amount, "bytes")


def greedy(table, budget):
    """Policy [L][H] of the greedy allocator for head units, and its path."""
    found = ALLOCATORS["greedy"](table, budget, 0)
    return [list(row) for row in table.grid(found.choice).keys], found.path


def size(table, choice) -> int:
    return sum(policy_bytes(table.grid(choice), table.widths, table.tokens))


def test_every_allocator_has_a_name():
    assert tuple(ALLOCATORS) == names.ALLOCATORS


@pytest.mark.parametrize("budget", BUDGETS)
def test_the_published_policy_of_every_budget_exactly(budget):
    table = published_table()
    found = ALLOCATORS["greedy"](table, nats(float(budget)), 0)
    expected = published_policies(PUBLISHED)[f"greedy-{budget}"]
    assert table.grid(found.choice) == expected["precisions"]
    assert found.path[-1].proxy == expected["proxy"]


@pytest.mark.parametrize("budget", [nats(0.01), in_bytes(579_840)])
def test_each_of_the_159_published_steps_of_budget_001(budget):
    """In nats, and in bytes: the same order of moves until the bytes fit."""
    table = published_table()
    policy, path = greedy(table, budget)
    steps = published_policies(PUBLISHED)["greedy-0.01"]["steps"]
    assert len(path) == len(steps) == 159
    for move, step in zip(path, steps, strict=True):
        assert (move.layer, move.head, move.part, move.before, move.after) == (
            *(step["layer"], step["head"], "kv"),
            *(step["from"], step["to"]),
        )
        assert (move.added_kl, move.bytes_saved, move.proxy) == (step["added_kl"], step["bytes_saved"], step["proxy"])
    assert (
        path[-1].proxy
        == 0.009985672175389482
        == pytest.approx(table.proxy([p for row in policy for p in row]), rel=1e-12)
    )
    grid = PrecisionGrid.of_heads(policy)
    assert path[-1].cache_bytes == 579_840 == sum(policy_bytes(grid, (64, 64), 64))
    assert [sum(row.count(p) for row in policy) for p in ("int4", "int8", "bf16")] == [70, 19, 7]
    assert average_payload_bits(grid, (64, 64)) == pytest.approx(5.666666666666667)


def test_bits_and_bytes_count_keys_and_values_apart():
    grid = PrecisionGrid((("int8", "bf16"),), (("int2", "int4"),))
    assert average_payload_bits(grid, (5, 5)) == (8 + 16 + 2 + 4) / 4
    assert average_payload_bits(grid, (6, 2)) == (6 * (8 + 16) + 2 * (2 + 4)) / 16
    assert policy_bytes(grid, (5, 5), 3) == (3 * (5 + 10 + 2 + 3), 3 * 2 * 3, 0)


score = st.floats(0, 1, allow_subnormal=False) | st.sampled_from([0.0, 0.5])


@st.composite
def tables(draw, most_units: int = 9, ladders=None):
    """Small score tables of any unit, on any ladder, with keys and values of any width."""
    unit = draw(st.sampled_from(["head", "keys-values", "layer"]))
    layers, heads = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    width = heads * (2 if unit == "keys-values" else 1)
    if layers * width > most_units:
        layers = 1
    rows = st.lists(st.lists(score, min_size=width, max_size=width), min_size=layers, max_size=layers)
    ladder = draw(st.sampled_from(ladders or LADDERS))
    scores = {precision: draw(rows) for precision in ladder}
    table = head_table(scores, draw(st.integers(4, 9)), draw(st.integers(1, 8)), unit, draw(st.integers(4, 9)))
    table.error[:] = table.kl[::-1] + 0.1
    return table


def step_by_exhaustion(table, choice, spent, budget):
    """The best next move by trying every unit: (added KL per byte, unit, after, added), or None."""
    found = []
    for unit, before in enumerate(choice):
        rung = table.ladder.index(before)
        if rung + 1 == len(table.ladder):
            continue
        after = table.ladder[rung + 1]
        had, have = (0.0 if p == "bf16" else table.kl[table.precisions.index(p), unit] for p in (before, after))
        added = max(have - had, 0.0)
        saved = table.unit_bytes(before, table.units[unit].part) - table.unit_bytes(after, table.units[unit].part)
        if spent + added <= budget:
            found.append((added / saved, unit, after, added))
    return min(found) if found else None


@settings(deadline=None)
@given(table=tables(), budget=st.floats(0, 4))
def test_every_greedy_step_is_the_best_that_fits_and_the_last_leaves_none(table, budget):
    found = ALLOCATORS["greedy"](table, nats(budget), 0)
    choice, spent = ["bf16"] * len(table.units), 0.0
    for move in found.path:
        best = step_by_exhaustion(table, choice, spent, budget)
        assert best is not None
        part = "layer" if move.head is None else move.part
        unit = table.units.index((move.layer, move.head or 0, part))
        assert (unit, move.after, move.added_kl) == best[1:]
        choice[unit] = move.after
        spent += move.added_kl
        assert move.proxy == spent and move.cache_bytes == size(table, choice)
    assert step_by_exhaustion(table, choice, spent, budget) is None
    assert choice == found.choice and spent <= budget


def assignments(table):
    """Bytes and proxy of every policy there is."""
    for choice in itertools.product(table.ladder, repeat=len(table.units)):
        yield size(table, choice), table.proxy(choice)


@settings(deadline=None, max_examples=40)
@given(table=tables(most_units=4), budget=st.floats(0, 4), share=st.floats(0, 1))
def test_exact_is_the_best_of_all_policies(table, budget, share):
    every = list(assignments(table))
    found = exact(table, nats(budget))
    fewest = min(total for total, proxy in every if proxy <= budget)
    least = min(proxy for total, proxy in every if total == fewest)
    assert (size(table, found.choice), table.proxy(found.choice)) == (fewest, least)
    low, high = min(every)[0], max(every)[0]
    limit = int(low + share * (high - low))
    found = exact(table, in_bytes(limit))
    least = min(proxy for total, proxy in every if total <= limit)
    fewest = min(total for total, proxy in every if total <= limit and proxy == least)
    assert (size(table, found.choice), table.proxy(found.choice)) == (fewest, least)
    assert found.path == []


@settings(deadline=None, max_examples=60)
@given(table=tables(), share=st.floats(0, 1), seed=st.integers(0, 3))
def test_under_bytes_every_allocator_fits_within_a_unit_and_exact_is_never_worse(table, share, seed):
    low, high = size(table, [table.ladder[-1]] * len(table.units)), size(table, ["bf16"] * len(table.units))
    limit = int(low + share * (high - low))
    best = frontier(table.costs, table.sizes)
    for name, allocator in ALLOCATORS.items():
        choice = allocator(table, in_bytes(limit), seed).choice
        total = size(table, choice)
        assert set(choice) <= set(table.ladder) and total <= limit, name
        if name != "exact":
            assert total > limit - granularity(table) or limit == high, name
        assert (
            exact(table, in_bytes(limit)).choice and best.costs[best.within_size(total)] <= table.proxy(choice) + 1e-12
        )


@settings(deadline=None, max_examples=60)
@given(table=tables(), budget=st.floats(0, 4))
def test_under_nats_every_allocator_with_an_order_keeps_its_budget(table, budget):
    fewest = size(table, exact(table, nats(budget)).choice)
    for name in ("greedy", "by-layer", "by-depth", "reconstruction"):
        found = ALLOCATORS[name](table, nats(budget), 0)
        assert table.proxy(found.choice) <= (found.path[-1].proxy if found.path else 0.0) + 1e-12 <= budget + 2e-12
        assert size(table, found.choice) >= fewest, name


@settings(deadline=None, max_examples=40)
@given(table=tables(), budgets=st.lists(st.floats(0, 4), min_size=2, max_size=2))
def test_a_larger_budget_never_takes_more_bytes_from_exact(table, budgets):
    small, large = (size(table, exact(table, nats(budget)).choice) for budget in sorted(budgets))
    assert large <= small


@pytest.mark.parametrize("unit", ["head", "keys-values", "layer"])
@pytest.mark.parametrize("ladder", LADDERS, ids="-".join)
def test_every_allocator_on_every_ladder(ladder, unit):
    """From all BF16 to the last rung, one rung at a time, each step consistent with the policy it leads to."""
    table = random_table(3, 2, ladder, unit)
    assert table.ladder == ("bf16", *ladder)
    lowest = [ladder[-1]] * len(table.units)
    for name, allocator in ALLOCATORS.items():
        assert allocator(table, in_bytes(size(table, lowest)), 1).choice == lowest, name
        assert allocator(table, in_bytes(size(table, ["bf16"] * len(lowest))), 1).choice == ["bf16"] * len(lowest), name
    for name in ("greedy", "by-layer", "by-depth", "reconstruction"):
        found = ALLOCATORS[name](table, nats(1e9), 0)
        assert found.choice == lowest
        assert found.path[-1].cache_bytes == size(table, lowest)
        last = {}
        for move in found.path:
            place = (move.layer, move.head, move.part)
            assert move.before == last.get(place, "bf16")
            assert table.ladder.index(move.after) == table.ladder.index(move.before) + 1
            last[place] = move.after


@settings(deadline=None, max_examples=40)
@given(data=st.data(), share=st.floats(0, 1), budget=st.floats(0, 4))
def test_layers_as_units_are_the_best_of_all_policies_of_whole_layers(data, share, budget):
    """Against every policy of the heads' own table that gives all heads of a layer one precision."""
    layers, heads = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    rows = st.lists(st.lists(score, min_size=heads, max_size=heads), min_size=layers, max_size=layers)
    ladder = data.draw(st.sampled_from(LADDERS))
    scores = {name: data.draw(rows) for name in ladder}
    of_heads, table = (head_table(scores, 8, 3, unit, value_width=6) for unit in ("head", "layer"))
    every = []
    for choice in itertools.product(table.ladder, repeat=layers):
        grid = PrecisionGrid.of_heads([[name] * heads for name in choice])
        every.append((sum(policy_bytes(grid, (8, 6), 3)), of_heads.proxy(of_heads.choice(grid)), grid))
    low, high = min(each[0] for each in every), max(each[0] for each in every)
    limit = int(low + share * (high - low))
    found = table.grid(exact(table, in_bytes(limit)).choice)
    total, proxy, _ = next(each for each in every if each[2] == found)
    assert total <= limit
    assert proxy == pytest.approx(min(each[1] for each in every if each[0] <= limit), rel=1e-12, abs=1e-12)
    found = table.grid(exact(table, nats(budget)).choice)
    total = next(each[0] for each in every if each[2] == found)
    assert total <= min(each[0] for each in every if each[1] <= budget - 1e-9 * budget)
    # Greedy by layer on heads makes the same moves as greedy on layers.
    first, second = (
        ALLOCATORS[name](each, nats(budget), 0) for name, each in (("by-layer", of_heads), ("greedy", table))
    )
    assert of_heads.grid(first.choice) == table.grid(second.choice) and first.path == second.path


def test_layers_move_whole():
    table = random_table(4, 3, ("int8", "int4"), "keys-values", seed=2)
    found = ALLOCATORS["by-layer"](table, nats(2e-3), 0)
    grid = table.grid(found.choice)
    assert found.path and {move.head for move in found.path} == {None}
    assert all(len(set(row)) == 1 for side in (grid.keys, grid.values) for row in side)
    assert len({row for side in (grid.keys, grid.values) for row in side}) > 1
    first = found.path[0]
    units = [index for index, unit in enumerate(table.units) if (unit.layer, unit.part) == (first.layer, first.part)]
    assert first.added_kl == pytest.approx(table.kl[0, units].sum())
    rates = {(u.layer, u.part): 0.0 for u in table.units}
    for index, unit in enumerate(table.units):
        rates[unit.layer, unit.part] += table.kl[0, index]
    assert min(rates, key=rates.get) == (first.layer, first.part)


def test_under_bytes_the_last_layer_moves_head_by_head():
    table = random_table(2, 4, ("int8",), widths=(8, 8), tokens=1)
    # Three heads need to move of one layer and all four of the other: 32 - 20 bytes each.
    found = ALLOCATORS["by-layer"](table, in_bytes(8 * 32 - 6 * 12), 0)
    assert [move.head for move in found.path] == [None, 0, 1]
    mixed = found.path[1].layer
    assert table.grid(found.choice).keys[mixed] == ("int8", "int8", "bf16", "bf16")
    assert found.path[-1].cache_bytes == size(table, found.choice) == 8 * 32 - 6 * 12


def test_depth_lowers_the_last_layer_first_whatever_the_scores():
    table = head_table({"int8": [[9.0, 0.1], [1.0, 2.0]], "int4": [[9.0, 5.0], [7.0, 8.0]]})
    path = ALLOCATORS["by-depth"](table, in_bytes(0 + size(table, ["int4"] * 4)), 0).path
    assert [(move.layer, move.head, move.after) for move in path] == [
        *((layer, head, "int8") for layer in (1, 0) for head in (0, 1)),
        *((layer, head, "int4") for layer in (1, 0) for head in (0, 1)),
    ]
    # 1 and 2 fit, then 9 does not: the order ends there, though 0.1 would fit.
    assert ALLOCATORS["by-depth"](table, nats(5.0), 0).choice == ["bf16", "bf16", "int8", "int8"]


def test_reconstruction_follows_the_errors_and_stops_by_the_kl():
    table = head_table({"int8": [[0.3, 0.2, 0.1]]})
    table.error[:] = [[1.0, 3.0, 2.0]]
    assert [move.head for move in ALLOCATORS["reconstruction"](table, nats(9.0), 0).path] == [0, 2, 1]
    assert ALLOCATORS["reconstruction"](table, nats(0.45), 0).choice == ["int8", "bf16", "int8"]
    assert ALLOCATORS["reconstruction"](table, nats(0.25), 0).choice == ["bf16"] * 3


def test_reconstruction_without_errors_is_refused():
    with pytest.raises(ValueError, match="sensitivity made-up: no reconstruction error of layer 0, head 0, part kv"):
        ALLOCATORS["reconstruction"](published_table(), nats(0.1), 0)


def test_random_policies_are_as_many_bytes_and_come_from_the_seed():
    table = random_table(6, 4, QUANTIZED, "keys-values")
    limit = 200_000
    drawn = draw(table, limit, 500, seed=7)
    totals = table.sizes[0][drawn].sum(axis=1)
    assert drawn.shape == (500, 48) and len(np.unique(drawn, axis=0)) == 500
    assert totals.max() <= limit and totals.min() > limit - granularity(table)
    assert (draw(table, limit, 500, seed=7) == drawn).all() and (draw(table, limit, 500, seed=8) != drawn).any()
    found = ALLOCATORS["at-random"](table, in_bytes(limit), 7)
    assert found.choice == [table.ladder[rung] for rung in draw(table, limit, 1, seed=7)[0]] and found.path == []


def test_a_random_policy_has_no_budget_in_nats():
    with pytest.raises(ValueError, match="allocator at-random: the budget is in nats, expected bytes, such as 400000B"):
        ALLOCATORS["at-random"](published_table(), nats(0.1), 0)


@pytest.mark.parametrize("name", ALLOCATORS)
def test_bytes_too_few_for_any_policy_are_refused(name):
    table = random_table(12, 8, ("int8", "int4"))
    message = "budget 417791 bytes: too small for any policy of bf16, int8, int4; the smallest takes 417792 bytes"
    with pytest.raises(ValueError, match=message):
        ALLOCATORS[name](table, in_bytes(417_791), 0)
    assert set(ALLOCATORS[name](table, in_bytes(417_792), 0).choice) == {"int4"}


@pytest.mark.parametrize("precision", QUANTIZED)
def test_a_single_precision_makes_a_ladder_of_one_rung(precision):
    policy, path = greedy(head_table({precision: [[0.1, 0.2, 0.3]]}), nats(0.35))
    assert policy == [[precision, precision, "bf16"]]
    assert [(move.before, move.after) for move in path] == [("bf16", precision)] * 2


def test_ties_go_to_the_lower_layer_then_the_lower_head_then_the_keys():
    path = greedy(head_table({"int8": [[0.1, 0.1], [0.1, 0.1]], "int4": [[1.0, 1.0]] * 2}), nats(0.45))[1]
    assert [(move.layer, move.head) for move in path] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    path = greedy(head_table({"int8": [[0.1, 0.1], [0.1, 0.1]]}, unit="keys-values"), nats(0.45))[1]
    assert [(move.layer, move.part) for move in path] == [(0, "k"), (0, "v"), (1, "k"), (1, "v")]


def test_rounding_below_zero_counts_as_zero():
    policy, path = greedy(head_table({"int8": [[-1e-13]], "int4": [[-2e-13]]}), nats(0.0))
    assert policy == [["int4"]] and [move.added_kl for move in path] == [0.0, 0.0]


def test_a_move_that_saves_nothing_is_not_made():
    """With one element a head, codes and scale take more than BF16; with two, INT8 does and INT4 does not."""
    assert greedy(head_table({"int8": [[0.0]], "int4": [[0.0]]}, head_dim=1), nats(1.0)) == ([["bf16"]], [])
    policy, path = greedy(head_table({"int8": [[0.0]], "int4": [[0.0]]}, head_dim=2), nats(1.0))
    assert policy == [["int4"]] and [(move.before, move.after) for move in path] == [("bf16", "int4")]


def test_a_budget_in_bits_is_one_in_bytes_with_everything_counted():
    ladder = ("centred8", "centred6", "centred5", "centred4", "centred3", "centred2")
    scores = {name: [[(unit + 1) * 4.0**rung for unit in range(4)]] * 2 for rung, name in enumerate(ladder, start=-8)}
    table = head_table(scores, 64, 512, "keys-values")
    record, _ = allocated_policy("exact-4.25bits", "exact", Budget.parse("4.25bits"), table)
    elements = 2 * 2 * 2 * 64 * 512
    assert table.dense_bytes == 2 * elements == record["bytes"]["bf16"]
    bits = 8 * record["bytes"]["total"] / elements
    assert 4.15 < bits <= 4.25 and (record["budget"], record["budget_in"]) == (4.25, "bits")
    # One cache's offsets and exact first tokens are among what was counted.
    grid = PrecisionGrid.of_record(record["precisions"])
    size = policy_bytes(grid, (64, 64), 512)
    assert size.once and sum(size) == record["bytes"]["total"]
    same, _ = allocated_policy("same", "exact", Budget(int(4.25 * elements / 8), "bytes"), table)
    assert same["precisions"] == record["precisions"]
    assert Recipe("bits", "exact", table).policy(Budget(4.25, "bits"))["limit"] == int(4.25 * elements / 8)
