"""Options of the stages that train and measure adapted models: policies by file or precision, and how to train."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvstages.study.arms import ORDERS, SEQUENTIAL

if TYPE_CHECKING:
    from kvstages.cache.precision_grid import PrecisionGrid
    from kvstages.models.identity import ModelIdentity

POLICY_FILE = ".json"


class PolicyOrPrecision(click.ParamType):
    """The file of a policy (.json), or the precision of a uniform one by its name."""

    name = "policy"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from kvstages.policies.names import parse_policy

        if value.endswith(POLICY_FILE):
            return value
        try:
            allocator, _ = parse_policy(value)
        except ValueError:
            allocator = ""
        if allocator != "uniform":
            self.fail(f"{value}: neither a policy's file (.json) nor a precision such as int4", param, ctx)
        return value


def named_grid(policy: str, model: ModelIdentity) -> tuple[str, PrecisionGrid]:
    """Name and grid of what ``PolicyOrPrecision`` gives; ValueError names a file that is no policy for this model."""
    from kvstages.cache.precision_grid import PrecisionGrid
    from kvstages.policies.record import read_policy

    if not policy.endswith(POLICY_FILE):
        return policy, PrecisionGrid.uniform(model.shape.layers, model.shape.heads, policy)
    if not Path(policy).exists():
        raise ValueError(f"{policy}: there is no such file, expected a policy of the stage allocate")
    record = read_policy(Path(policy), model)
    return record["policy"], PrecisionGrid.of_record(record["precisions"])


def training(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of the stages that train: what the cache does meanwhile, seed, batches and the optimizer's."""
    policy = {"type": PolicyOrPrecision(), "default": None, "metavar": "POLICY"}
    for option in (
        click.option(
            "--clip",
            type=click.FloatRange(min=0, min_open=True),
            default=1.0,
            show_default=True,
            help="Largest gradient norm.",
        ),
        click.option(
            "--weight-decay", type=click.FloatRange(min=0), default=0.01, show_default=True, help="That of AdamW."
        ),
        click.option("--batch", type=click.IntRange(min=1), default=4, show_default=True, help="Blocks a step."),
        click.option("--seed", type=int, required=True, help="Seed of the noise, and of the order if it is shuffled."),
        click.option(
            "--order",
            type=click.Choice(ORDERS),
            default=SEQUENTIAL,
            show_default=True,
            help="Batches in order and round the window, or each round of them in an order drawn by the seed.",
        ),
        click.option(
            "--straight-through",
            **policy,
            help="Quantize the cache by this policy (a file, or a precision); gradients pass through the rounding.",
        ),
        click.option(
            "--noise", **policy, help="Noise of half a step of this policy's precisions on all keys and values."
        ),
        click.option("--window", default="adaptation", show_default=True, help="Window to train on."),
    ):
        command = option(command)
    return command
