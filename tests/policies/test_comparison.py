"""Sets of policies: equal bytes, random ones beside them, frontiers; and the stage policy-set."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from dictionaries import validator
from models import random_model
from score_tables import published_table, random_table, write_sensitivities

from kvstages.cache.precision_grid import PrecisionGrid
from kvstages.cache.precisions import QUANTIZED
from kvstages.cli import main
from kvstages.files.read import read_json
from kvstages.models.checkpoints import save_model
from kvstages.policies.allocators import ALLOCATORS
from kvstages.policies.budgets import Budget
from kvstages.policies.recipes import Recipe, equal_bytes, frontier_policies, parse_recipe

NATS = Budget(0.01, "nats")


def recipes() -> list[Recipe]:
    """The published recipe, every other allocator on other scores, a finer unit with more precisions, random ones."""
    scores = random_table(12, 8, ("int8", "int4"))
    fine = random_table(12, 8, QUANTIZED, "keys-values", seed=1)
    return [
        Recipe("published", "greedy", published_table()),
        *(Recipe(name, name, scores) for name in ALLOCATORS if name != "at-random"),
        Recipe("exact-kv", "exact", fine),
        Recipe("random", "at-random", scores),
        Recipe("random-kv", "at-random", fine),
    ]


@pytest.fixture(scope="module")
def at_001() -> dict:
    return equal_bytes(recipes(), NATS, random=20, draws=2000, seed=3)


def test_every_recipe_takes_the_published_bytes_or_a_little_less(at_001):
    assert at_001["limit"] == 579_840
    assert at_001["granularity"]["published"] == 7936 and at_001["granularity"]["exact-kv"] == 3968
    names = [policy["policy"] for policy in at_001["policies"]]
    uniform = ["bf16", *QUANTIZED]
    assert names[:13] == ["published", *list(ALLOCATORS)[:5], "exact-kv", *uniform, "random-0001"]
    assert len(names) == len(set(names)) == 12 + 2 * 20 and at_001["left_out"] == []
    for policy in at_001["policies"]:
        if policy["policy"] in uniform:
            continue
        assert policy["limit"] == 579_840
        total = policy["bytes"]["total"]
        assert total <= 579_840 and total > 579_840 - at_001["granularity"][policy["recipe"]], policy["policy"]


def test_the_first_policy_is_the_published_one(at_001):
    first = at_001["policies"][0]
    assert first["proxy"] == pytest.approx(0.009985672175389482, rel=1e-12) and first["proxy_steps"] == 159
    assert (first["budget"], first["budget_in"]) == (0.01, "nats")
    assert {policy["budget_in"] for policy in at_001["policies"][1:]} == {"bytes", None}
    assert first["tensors"]["int4"] == 140


def test_uniform_policies_stand_in_every_set_at_their_own_bytes(at_001):
    uniform = {policy["policy"]: policy for policy in at_001["policies"] if policy["recipe"] == "uniform"}
    assert list(uniform) == ["bf16", *QUANTIZED]
    sizes = {"bf16": 1_572_864, "int8": 811_008, "int4": 417_792, "int3": 319_488, "int2": 221_184}
    for name, size in sizes.items():
        assert uniform[name]["bytes"]["total"] == uniform[name]["limit"] == size
        assert uniform[name]["tensors"][name] == 192
    # By the scores of the first recipe that has them: the published ones.
    assert uniform["int8"]["proxy"] == pytest.approx(published_table().proxy(["int8"] * 96))
    assert uniform["bf16"]["proxy"] == 0


def test_exact_has_the_least_proxy_of_its_table(at_001):
    policies = {policy["policy"]: policy for policy in at_001["policies"]}
    least = policies["exact"]["proxy"]
    assert all(policies[name]["proxy"] >= least for name in ("greedy", "by-layer", "by-depth", "reconstruction"))
    assert all(policy["proxy"] > least for name, policy in policies.items() if name.startswith("random-0"))


def test_random_policies_spread_and_the_others_fall_among_them(at_001):
    plain, fine = at_001["draws"]
    assert (plain["recipe"], plain["count"], plain["ladder"]) == ("random", 2000, ["bf16", "int8", "int4"])
    levels = [row["proxy"] for row in plain["quantiles"]]
    assert levels == sorted(levels) and levels[0] < levels[-1]
    # Policies of heads can be scored by tensors, too; those of tensors not by heads.
    assert set(plain["policies"]) == {"published", *list(ALLOCATORS)[:5], "bf16", "int8", "int4"}
    assert set(fine["policies"]) == {*plain["policies"], "exact-kv", "int3", "int2"}
    assert plain["policies"]["exact"]["share_below"] == 0 < plain["policies"]["by-depth"]["share_below"]
    drawn = [policy["proxy"] for policy in at_001["policies"] if policy["recipe"] == "random"]
    assert len(drawn) == 20 and levels[0] <= min(drawn) and max(drawn) <= levels[-1]
    table = recipes()[1].table
    published = table.choice(PrecisionGrid.of_record(at_001["policies"][0]["precisions"]))
    assert plain["policies"]["published"]["proxy"] == table.proxy(published)


def test_a_budget_in_bytes_and_the_seed():
    few = recipes()[-3:]
    first = [equal_bytes(few, Budget(500_000, "bytes"), 5, 50, seed) for seed in (1, 1, 2)]
    assert first[0] == first[1] != first[2]
    assert 496_032 < first[0]["limit"] <= 500_000
    assert first[0]["policies"][0] == first[2]["policies"][0]
    seeds = [policy["seed"] for policy in first[2]["policies"] if policy["recipe"] != "uniform"]
    assert seeds == [None, *[2] * 10]


def test_a_recipe_that_cannot_take_so_few_bytes_is_left_out_and_named():
    short = Recipe("int8-only", "exact", random_table(12, 8, ("int8",)))
    found = equal_bytes([recipes()[0], short], NATS, 1, 1, 0)
    assert found["left_out"] == ["int8-only"]
    assert [policy["policy"] for policy in found["policies"]] == ["published", "bf16", "int8", "int4"]
    wide = equal_bytes([recipes()[0], short], Budget(900_000, "bytes"), 1, 1, 0)
    assert wide["left_out"] == [] and wide["policies"][1]["policy"] == "int8-only"


@pytest.mark.parametrize(
    ("order", "message"),
    [([0, 0], "two recipes have the name published"), ([-1, 0], "recipe random-kv: the first recipe sets the bytes")],
)
def test_recipes_that_make_no_set_are_refused(order, message):
    with pytest.raises(ValueError, match=message):
        equal_bytes([recipes()[index] for index in order], NATS, 1, 1, 0)


def test_the_frontier_has_the_same_totals_for_all_families_and_those_of_the_uniform_policies():
    table = random_table(12, 8, QUANTIZED, "keys-values")
    plain = random_table(12, 8, ("int8", "int4"), seed=4)
    found = frontier_policies([Recipe("exact", "exact", table), Recipe("greedy", "greedy", plain)], 24)["policies"]
    names = [policy["policy"] for policy in found]
    assert names[:5] == ["bf16", *QUANTIZED] and len(names) == len(set(names))
    families = {name: [policy for policy in found if policy["recipe"] == name] for name in ("exact", "greedy")}
    uniform = {policy["bytes"]["total"] for policy in found[:5]}
    limits = [policy["limit"] for policy in families["exact"]]
    even = np.linspace(192 * 64 * 128, 192 * 64 * 18, 24).astype(int)
    assert limits == sorted({*even.tolist(), *uniform}, reverse=True)
    # A family ends where it can save no more.
    assert [policy["limit"] for policy in families["greedy"]] == [limit for limit in limits if limit >= 417_792]
    for family in families.values():
        assert all(policy["bytes"]["total"] <= policy["limit"] for policy in family)
        proxies = [policy["proxy"] for policy in family]
        assert proxies == sorted(proxies) and proxies[0] == 0.0
        assert family[0]["tensors"]["bf16"] == 192
    assert families["exact"][-1]["tensors"]["int2"] == families["greedy"][-1]["tensors"]["int4"] == 192
    # Each uniform policy costs no less than the frontier at its bytes.
    for policy in found[1:5]:
        best = next(own for own in families["exact"] if own["limit"] == policy["bytes"]["total"])
        assert best["proxy"] <= policy["proxy"] == table.proxy([policy["policy"]] * 192)
        assert (policy["recipe"], policy["allocator"], policy["budget"]) == ("uniform", "uniform", None)


def test_few_units_give_a_policy_for_every_total():
    found = frontier_policies([Recipe("exact", "exact", random_table(1, 2, ("int8",)))], 4)["policies"]
    assert [policy["policy"] for policy in found] == [
        *("bf16", "int8", "exact-32768B", "exact-27477B", "exact-22186B", "exact-16896B")
    ]
    assert [policy["bytes"]["total"] for policy in found[2:]] == [32768, 24832, 16896, 16896]


def test_a_frontier_cannot_be_random():
    with pytest.raises(ValueError, match="recipe random-kv: a frontier cannot be random"):
        frontier_policies(recipes()[-1:], 3)


def test_recipes_are_written_in_one_way():
    assert parse_recipe("kv.2=exact:measured-float32:keys-values:int8,int2") == (
        *("kv.2", "exact", "measured-float32", "keys-values", ("int8", "int2")),
    )
    for text in (
        "exact:s:head:int8",
        "a=best:s:head:int8",
        "a=exact:s:model:int8",
        "a=exact:s:head",
        "A=exact:s:head:x",
    ):
        with pytest.raises(ValueError, match=r"expected NAME=ALLOCATOR:SOURCE:UNIT:PRECISIONS, such as exact=exact:"):
            parse_recipe(text)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a model of 3 layers × 2 heads and its scores of two sources."""
    monkeypatch.chdir(tmp_path)
    model = random_model()
    save_model(Path("model.safetensors"), model.config, model.state_dict())
    write_sensitivities(tmp_path / "a.csv", QUANTIZED, source="a")
    write_sensitivities(tmp_path / "b.csv", QUANTIZED, source="b", seed=1)
    return tmp_path


def candidates(*more: object) -> tuple[int, str]:
    words = ["policy-set", "--sensitivity", "a.csv", "--sensitivity", "b.csv", "--model", "model.safetensors"]
    result = CliRunner().invoke(main, [*words, "--tokens", "12", "--output", "set.json", *map(str, more)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


RECIPES = ("--recipe", "published=greedy:b:head:int8,int4", "--recipe", "kv=exact:a:keys-values:int8,int4,int3,int2",
           "--recipe", "random=at-random:a:keys-values:int8,int4,int3,int2")  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [(*RECIPES, "--budget", "0.001", "--random", "7", "--draws", "30"), (*RECIPES[:4], "--points", "5")],
    ids=["equal bytes", "frontier"],
)
def test_the_stage_writes_a_set(folder, words):
    assert candidates(*words) == (0, "")
    record = read_json(folder / "set.json")
    validator("policy-set").validate(record)
    assert record["tokens"] == 12 and record["sources"]["b"] == {"execution": "one-pass", "compute_dtype": "float32"}
    for policy in record["policies"]:
        shared = {key: value for key, value in policy.items() if key not in ("recipe", "limit")}
        identity = {key: record[key] for key in ("schema_version", "model", "schemes", "provenance")}
        validator("policy").validate({**shared, **record["sources"][policy["sensitivity"]], **identity})
    if "--budget" in words:
        assert len(record["policies"]) == 2 + 5 + 7 and record["draws"][0]["count"] == 30
        assert record["policies"][0]["sensitivity"] == "b" and record["budget"] == "0.001"
    else:
        assert record["budget"] is None and "limit" not in record


@pytest.mark.parametrize("words", [(), ("--budget", "0.1", "--points", "5")])
def test_a_set_is_one_of_two(folder, words):
    status, output = candidates(*RECIPES, *words)
    assert status == 2 and "give either --budget (equal bytes) or --points (a frontier)" in output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--recipe", "x=exact:c:head:int8"), "recipe x: no --sensitivity of the source c; a, b"),
        (("--recipe", "x"), "recipe 'x': expected NAME=ALLOCATOR:SOURCE:UNIT:PRECISIONS"),
        (("--recipe", "x=exact:a:head:int8", "--sensitivity", "a.csv"), "a.csv: scores of the source a, as in a.csv"),
    ],
)
def test_one_line_says_what_is_wrong(folder, words, message):
    status, output = candidates("--points", "3", *words)
    assert status == 1 and output.count("\n") == 1 and message in output
    assert not (folder / "set.json").exists()
