"""The set of policies that tells what an engine's restrictions cost: who is in it, at which bytes, with which proxy."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from gappy import write_gappy
from made_up import GROWTH, sensitivity_table
from models import identified

from kvstages.cache.precision_grid import PrecisionGrid, policy_bytes
from kvstages.export.comparison import engine_set, read_costs
from kvstages.export.engine import Cache
from kvstages.export.engines import ENGINES
from kvstages.models.config import DecoderShape
from kvstages.models.identity import ModelIdentity
from kvstages.policies.allocators import exact
from kvstages.policies.budgets import Budget
from kvstages.policies.making import allocated_policy, uniform_policy
from kvstages.scores.table import read_scores

SHAPE = DecoderShape(4, 2, 64, 64, 64, 64, 128, 2)
NAMED = ["vllm", "modelopt", "llama-cpp", "ik-llama-cpp"]


def files(folder: Path) -> tuple[Path, Path]:
    """Scores of the policy's precisions, and those of the engines' formats: as those of equal bits."""
    formats = {form.precision for name in NAMED for form in ENGINES[name].formats((64, 64))} - {"bf16"}
    growth = {name: GROWTH["int4"] * (0.5 if "5" in name else 1.1) for name in formats if "8" not in name}
    growth |= dict.fromkeys(formats - set(growth), GROWTH["int8"] * 1.2)
    own = sensitivity_table(layers=4, heads=2, seed=1)
    parts = [own.assign(part=part, mean_kl=own["mean_kl"] / 2) for part in "kv"]
    int8 = pd.concat(parts).query("precision == 'int8'")
    scores = [int8.assign(precision=name, mean_kl=int8["mean_kl"] * factor) for name, factor in growth.items()]
    write_gappy(folder / "own.csv", own)
    write_gappy(folder / "engines.csv", pd.concat(scores).assign(source="gradients"))
    return folder / "own.csv", folder / "engines.csv"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory):
    own, scores = files(tmp_path_factory.mktemp("scores"))
    table = read_scores(own, SHAPE, 10, "head", ["int8", "int4"])
    policy, _ = allocated_policy("greedy-mine", "greedy", Budget(table.sizes.mean() * 6, "bytes"), table)
    policy = identified(policy, ModelIdentity(SHAPE, "a" * 64), policy["ladder"])
    found = engine_set(policy, table, [ENGINES[name] for name in NAMED], scores, SHAPE)
    return policy, scores, found


def test_every_engine_has_its_policies_and_the_own_one_comes_first(made):
    policy, _, found = made
    recipes = [each["recipe"] for each in found["policies"]]
    assert recipes[0] == "own" and found["policies"][0]["precisions"] == policy["precisions"]
    expected = ["own"]
    for name in NAMED:
        every = [f"{name}-{kind}" for kind in ("projected", "allocated", "layer", "own", "allocated-own")]
        expected += [recipe for recipe in every if recipe not in found["left_out"]]
    assert recipes == expected and {each["policy"] for each in found["policies"][1:]} == set(expected[1:])
    # Whole-model formats cannot take so few bytes as the policy takes only where the smallest is larger.
    assert all(recipe.endswith("allocated-own") for recipe in found["left_out"])


def test_allocated_ones_cost_less_and_take_no_more(made):
    _, _, found = made
    by_name = {each["recipe"]: each for each in found["policies"]}
    for name in NAMED:
        projected, allocated, layer, own = (
            by_name[f"{name}-{kind}"] for kind in ("projected", "allocated", "layer", "own")
        )
        assert projected["limit"] == allocated["limit"] == layer["limit"] == own["limit"]
        # What is projected is expressible, so the best of these bytes has no larger proxy.
        assert allocated["proxy"] <= projected["proxy"]
        assert own["bytes"]["total"] <= own["limit"]
        for each in (projected, allocated, layer):
            size = policy_bytes(PrecisionGrid.of_record(each["precisions"]), (64, 64), 10)
            assert size.payload + size.scales <= each["limit"] and each["bytes"]["total"] == sum(size)


def test_a_free_choice_for_each_layer_is_the_exact_allocation_of_layers(made):
    """What ``allocate --unit layer`` gives on the engine's formats, where these have no static scales of their own."""
    _, scores, found = made
    by_name = {each["recipe"]: each for each in found["policies"]}
    for name in ("vllm", "llama-cpp", "ik-llama-cpp"):
        layer = by_name[f"{name}-layer"]
        ladder = [each for each in layer["ladder"] if each not in ("bf16", "fp8_e4m3", "nvfp4")]
        free = read_scores(scores, SHAPE, 10, "keys-values", ladder).by_layer()
        choice = exact(free, Budget(layer["limit"], "bytes")).choice
        assert layer["proxy"] == pytest.approx(free.proxy(choice), rel=1e-12)
        assert layer["precisions"]["keys"] == layer["precisions"]["values"]
        # Two tiers, whole-model types, or ends: what the engine asks beyond that costs.
        assert name != "vllm" or layer["proxy"] <= by_name[f"{name}-allocated"]["proxy"]


def test_a_proxy_is_the_sum_of_the_layers_scores(made):
    _, scores, found = made
    table = pd.read_csv(scores)
    for each in found["policies"][1:]:
        if not each["recipe"].endswith("-own") or each["recipe"].endswith("allocated-own"):
            by_hand = sum(
                table.query("layer == @layer and head == @head and part == @part and precision == @name")[
                    "mean_kl"
                ].sum()
                for side, part in (("keys", "k"), ("values", "v"))
                for layer, row in enumerate(each["precisions"][side])
                for head, name in enumerate(row)
            )
            assert each["proxy"] == pytest.approx(by_hand)


def test_costs_are_by_layer_and_side(made):
    _, scores, _ = made
    costs, source = read_costs(scores, ENGINES["vllm"], Cache(4, 2, (64, 64), 10), SHAPE)
    table = pd.read_csv(scores).query("precision == 'int8_per_token_head'")
    assert source == "gradients" and not costs["bf16"].any()
    by_hand = table.groupby(["layer", "part"])["mean_kl"].sum().to_numpy()
    assert costs["int8_per_token_head"].tolist() == pytest.approx(by_hand.tolist())


def test_a_policy_of_other_scores_is_refused(tmp_path):
    own, scores = files(tmp_path)
    table = read_scores(own, SHAPE, 10, "head", ["int8", "int4"])
    record, _ = uniform_policy("int8", "int8", table)
    with pytest.raises(ValueError, match="policy int8: expected one that an allocator made of the scores"):
        engine_set(record, table, [ENGINES["vllm"]], scores, SHAPE)
