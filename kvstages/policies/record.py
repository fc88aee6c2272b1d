"""Reading a policy's record: checks of its keys, its shape and its precisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstages.cache.precision_grid import PrecisionGrid, average_payload_bits, byte_record, tensor_counts
from kvstages.cache.precisions import check
from kvstages.files.read import read_json
from kvstages.policies.identity import check_identity

if TYPE_CHECKING:
    from kvstages.models.config import DecoderShape
    from kvstages.models.identity import ModelIdentity


# What an evaluation reads of a policy's record.
POLICY_KEYS = ("policy", "precisions", "proxy", "average_payload_bits")


# What a set of policies says of each.
SET_KEYS = ("policy", "recipe", "allocator", "sensitivity", "unit", "ladder", "limit", "bytes", "proxy", "precisions")


def check_keys(policy: Any) -> None:
    """ValueError where a policy's record lacks what an evaluation reads of it."""
    if not isinstance(policy, Mapping):
        raise ValueError(f"a policy is a JSON object, found {type(policy).__name__}")
    missing = [key for key in POLICY_KEYS if key not in policy]
    if missing:
        raise ValueError(f"key {missing[0]!r} is missing, expected a policy of the stage allocate")


def check_policy(policy: Any, shape: DecoderShape | None) -> PrecisionGrid:
    """The grid of a policy's record; ValueError if it is not one for a decoder of this shape (None: of any)."""
    check_keys(policy)
    for key in ("proxy", "average_payload_bits"):
        if key == "proxy" and policy[key] is None:
            continue
        if isinstance(policy[key], bool) or not isinstance(policy[key], int | float):
            raise ValueError(f"{key} is {policy[key]!r}, expected a number")
    grid = PrecisionGrid.of_record(policy["precisions"])
    check_precisions(grid, shape)
    check_figures(policy, grid, shape)
    return grid


def check_precisions(grid: PrecisionGrid, shape: DecoderShape | None) -> None:
    """ValueError where a grid is not one for a decoder of this shape, or has a precision that there is not."""
    expected = grid.shape if shape is None else [shape.heads] * shape.layers
    if grid.shape != expected:
        raise ValueError(f"precisions for heads {grid.shape} a layer, but the model has {expected}")
    for side, rows in grid.as_record().items():
        for layer, row in enumerate(rows):
            for head, precision in enumerate(row):
                try:
                    check(precision)
                except ValueError:
                    raise ValueError(
                        f"layer {layer}, head {head}, {side}: {precision!r}, expected a precision such as bf16, int8 "
                        "or centred4"
                    ) from None


def check_named(grid: PrecisionGrid, record: Mapping[str, Any]) -> None:
    """ValueError where a policy has a precision whose scheme its file does not state."""
    for name in grid.flat():
        if name not in record["schemes"]:
            raise ValueError(f"schemes: {name} is missing, which the policy has")


def check_figures(policy: Mapping[str, Any], grid: PrecisionGrid, shape: DecoderShape | None) -> None:
    """ValueError where a figure of a policy's record is not what its precisions give.

    The proxy is a sum of scores, which are not there: only that it is not negative, and 0 where nothing is quantized.
    It is None where nothing has scored the policy's precisions.
    """
    computed: dict[str, Any] = {"tensors": tensor_counts(grid)}
    tokens = policy.get("tokens")
    if "tokens" in policy and (type(tokens) is not int or tokens < 1):
        raise ValueError(f"tokens is {tokens!r}, expected a whole number from 1")
    if shape is not None:
        computed["average_payload_bits"] = average_payload_bits(grid, shape.widths)
    if shape is not None and tokens is not None:
        computed["bytes"] = byte_record(grid, shape.widths, tokens)
        computed["compression"] = computed["bytes"]["bf16"] / computed["bytes"]["total"]
    for key, value in computed.items():
        if key in policy and policy[key] != value:
            raise ValueError(f"{key} is {policy[key]}, but its precisions give {value}")
    if policy["proxy"] is None:
        return
    if policy["proxy"] < 0 or (policy["proxy"] > 0 and set(grid.flat()) == {"bf16"}):
        raise ValueError(f"proxy is {policy['proxy']}, expected a KL of 0 or more, and 0 where every head is in BF16")


def read_policy(path: Path, model: ModelIdentity | None) -> dict[str, Any]:
    """A policy's record; ValueError names ``path`` where it is not one for this model (None: for any)."""
    policy = read_json(path)
    try:
        check_keys(policy)
        check_identity(policy, model)
        check_named(check_policy(policy, None if model is None else model.shape), policy)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return policy


def read_policies(paths: Sequence[Path], model: ModelIdentity) -> list[dict[str, Any]]:
    """The policies of sets, one after the other.

    Uniform policies stand in every set and are taken once. ValueError names the file where it is not one for this
    model, and a policy that is none, or another whose name comes twice.
    """
    policies: dict[str, dict[str, Any]] = {}
    for path in paths:
        record = read_json(path)
        found = record.get("policies") if isinstance(record, Mapping) else None
        if not isinstance(found, list) or not found:
            raise ValueError(f"{path}: no list under the key policies, expected a set of the stage policy-set")
        try:
            check_identity(record, model)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        for index, policy in enumerate(found):
            try:
                check_named(check_policy(policy, model.shape), record)
                missing = [key for key in SET_KEYS if key not in policy]
                if missing:
                    raise ValueError(f"key {missing[0]!r} is missing, expected a set of the stage policy-set")
                if policy["recipe"] == "uniform" and policy["policy"] in policies:
                    continue
                if policy["policy"] in policies:
                    raise ValueError(f"a second policy of the name {policy['policy']}")
            except ValueError as error:
                raise ValueError(f"{path}: policies[{index}]: {error}") from None
            policies[policy["policy"]] = policy
    return list(policies.values())
