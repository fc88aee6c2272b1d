"""Names of policies and layers, and budgets as they are written."""

from __future__ import annotations

import re

import pytest

from kvstages.cache.precisions import BITS
from kvstages.policies.budgets import Budget
from kvstages.policies.names import ALLOCATORS, POLICY, layer_name, parse_policy, policy_name, split_policy


@pytest.mark.parametrize("precision", BITS)
def test_uniform_policies(precision):
    assert parse_policy(precision) == ("uniform", None) == split_policy(precision)


@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("0.01", Budget(0.01, "nats")),
        ("1e-06", Budget(1e-6, "nats")),
        ("0", Budget(0.0, "nats")),
        ("400000B", Budget(400_000, "bytes")),
        ("4.25bits", Budget(4.25, "bits")),
        ("3bits", Budget(3.0, "bits")),
    ],
)
def test_allocators_and_budgets(allocator, text, budget):
    policy = policy_name(allocator, text)
    assert policy == f"{allocator}-{text}" and re.fullmatch(POLICY, policy)
    assert split_policy(policy) == (allocator, text)
    assert parse_policy(policy) == (allocator, budget)


@pytest.mark.parametrize("text", ["0." + 300 * "1", f"{10**300}", f"{10**300}B"])
def test_a_budget_that_no_folder_could_be_named_after(text):
    with pytest.raises(ValueError, match="expected"):
        split_policy(f"greedy-{text}")
    with pytest.raises(ValueError, match=r"expected nats, such as 0\.01, or bytes"):
        Budget.parse(text)


def test_numbers_are_written_as_python_does():
    assert policy_name("greedy", 0.01) == "greedy-0.01" and policy_name("greedy", 1e-6) == "greedy-1e-06"


@pytest.mark.parametrize(
    "policy", ["int16", "greedy", "greedy-", "best-0.1", "greedy--1", "greedy-0.1B", "exact-1/2", ""]
)
def test_other_names_are_refused(policy):
    with pytest.raises(
        ValueError, match=r"a precision such as bf16, .* or one of greedy, exact, .* such as greedy-0\.01"
    ):
        parse_policy(policy)


@pytest.mark.parametrize(
    "text",
    ["", "-0.1", "1.2.3", "inf", "nan", "1_000", "12KB", "0.5B", "1e5B", "4.250bits", "04bits", "4.bits", "-4bits"],
)
def test_what_is_no_budget_is_refused(text):
    with pytest.raises(ValueError, match=r"expected nats, such as 0\.01, or bytes, such as 400000B"):
        Budget.parse(text)


@pytest.mark.parametrize("amount", [-0.1, float("nan")])
def test_a_budget_is_zero_or_more(amount):
    with pytest.raises(ValueError, match="expected 0 nats or more"):
        Budget(amount, "nats")


def test_layers():
    assert layer_name(3) == "03" and layer_name(11) == "11"
