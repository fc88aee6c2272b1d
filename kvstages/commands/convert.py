"""``kvstages convert``."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("convert")
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path),
    required=True,
    help="PyTorch file (.pt) with config and model_state_dict, or a .safetensors file of this project; or a folder or "
    ".gguf file with a model of Hugging Face's.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    help="The model.safetensors to write, or the folder, which the path of its decoder.json names too.",
)
@click.option("--layers", type=click.IntRange(min=1), help="Layers that the model must have.  [default: any number]")
@click.option("--heads", type=click.IntRange(min=1), help="KV heads that each layer must have.  [default: any number]")
def command(checkpoint: Path, output: Path, layers: int | None, heads: int | None) -> None:
    """Check a checkpoint and keep its weights as safetensors.

    Reads a checkpoint of the gpt2-nano architecture without running anything that it holds (weights_only); training
    leftovers and causal masks are dropped. Writes OUTPUT: every tensor in FP32, and the model's shape (vocab_size,
    context_len, embedding_dim, num_layers, num_heads) in the header.

    Refuses a file that holds more than tensors, a truncated one, a shape with missing or unknown keys, and tensors
    that are missing, extra, misshapen, not floating point or not finite.

    Of a model of Hugging Face's (pip install 'kvstages[huggingface]') OUTPUT is a folder. A GGUF file is dequantized
    into it, in FP32; a folder with config.json and safetensors stays as it is, is OUTPUT itself, and gets a record of
    its shape beside them. No code that comes with a model is run.

    \b
    Example:
      kvstages convert --checkpoint resources/gpt2-nano/checkpoint/final.pt \\
          --output resources/gpt2-nano/model.safetensors
    """
    from kvstages.models.checkpoints import read_checkpoint, save_model
    from kvstages.models.config import check_shape, is_huggingface, model_folder
    from kvstages.models.load import huggingface_files

    if is_huggingface(checkpoint):
        huggingface_files(checkpoint).convert(checkpoint, model_folder(output), layers, heads)
        return
    config, state = read_checkpoint(checkpoint)
    check_shape(checkpoint, config.shape, layers, heads)
    save_model(output, config, state)
