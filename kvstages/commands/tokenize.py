"""``kvstages tokenize``."""

from __future__ import annotations

from pathlib import Path

import click

from kvstages.commands import options


@click.command("tokenize")
@click.argument("texts", type=options.INPUT, nargs=-1, required=True, metavar="TEXT...")
@click.option(
    "--tokenizer",
    type=click.Path(exists=True, path_type=Path),
    required=True,
    help="Folder or .gguf file of a model of Hugging Face's that holds the tokenizer.",
)
@options.model
@click.option(
    "--parts",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Documents that each file is cut into, at ends of paragraphs.",
)
@click.option("--output", type=options.OUTPUT, required=True, help="Token shard to write.")
@click.option("--documents", type=options.OUTPUT, required=True, help="Where each document lies in it, JSON to write.")
@click.option("--record", type=options.OUTPUT, required=True, help="What the tokenizer is, JSON to write.")
def command(
    texts: tuple[Path, ...], tokenizer: Path, model: Path, parts: int, output: Path, documents: Path, record: Path
) -> None:
    """Turn UTF-8 text files into a shard of token ids, with the tokenizer of a model of Hugging Face's.

    Each TEXT is a document, or --parts of them. Documents are tokenized apart and without special tokens; the stage
    windows then puts those that the tokenizer starts a text with before every block (they are in --record).

    Refuses bytes that are not UTF-8 text, and a tokenizer with more tokens than the model's vocabulary.

    Example: kvstages tokenize speech.txt letter.txt --tokenizer resources/my/model --model
    resources/my/model/decoder.json --output shard.bin --documents documents.json --record tokenizer.json
    """
    from kvstages.files.atomic import write_json
    from kvstages.models.config import read_shape
    from kvstages.study.shards import WIDE, write_shard
    from kvstages.study.texts import encode_texts, read_texts

    try:
        from kvstages.models.huggingface_tokenizer import Tokenizer
    except ModuleNotFoundError as error:
        raise ValueError(f"{tokenizer}: this needs {error.name}: pip install 'kvstages[huggingface]'") from error

    shape = read_shape(model)
    read = read_texts(texts, parts)
    opened = Tokenizer(tokenizer)
    ids, entries = encode_texts(read, opened.encode)
    opened.check(shape.vocabulary, ids.tolist())
    write_shard(output, ids, WIDE)
    write_json(documents, entries)
    write_json(record, opened.record())
