"""``kvstages convert``."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("convert")
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path),
    required=True,
    help="PyTorch file (.pt) with config and model_state_dict, or a .safetensors file of this project.",
)
@click.option("--output", type=click.Path(path_type=Path), required=True, help="The model.safetensors to write.")
def command(checkpoint: Path, output: Path) -> None:
    """Check a checkpoint and keep its weights as safetensors.

    Reads a checkpoint of the gpt2-nano architecture without running anything that it holds (weights_only); training
    leftovers and causal masks are dropped. Writes OUTPUT: every tensor in FP32, and the model's shape (vocab_size,
    context_len, embedding_dim, num_layers, num_heads) in the header.

    Refuses a file that holds more than tensors, a truncated one, a shape with missing or unknown keys, and tensors
    that are missing, extra, misshapen, not floating point or not finite.

    \b
    Example:
      kvstages convert --checkpoint resources/gpt2-nano/checkpoint/final.pt \\
          --output resources/gpt2-nano/model.safetensors
    """
    from kvstages.models.checkpoints import read_checkpoint, save_model

    config, state = read_checkpoint(checkpoint)
    save_model(output, config, state)
