"""``kvstages new-study``."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvstages.commands import options

if TYPE_CHECKING:
    import numpy as np

    from kvstages.models.config import DecoderShape
    from kvstages.models.decoder import Decoder

# A repository of a hub, where nothing of that name is on this machine.
REPOSITORY = r"[\w.-]+/[\w.-]+"
# Files of weights up to which a model is screened here: more takes minutes, and gigabytes of memory.
LARGEST_SCREENED = 1 << 30


@click.command("new-study")
@click.argument("name")
@click.option(
    "--model",
    required=True,
    help="A folder with config.json and safetensors, a .gguf file, owner/name of a Hugging Face repository, or a "
    "checkpoint of gpt2-nano (.pt, .safetensors).",
)
@click.option("--revision", default=None, help="Of a repository: branch, tag or commit; the commit of now is pinned.")
@click.option(
    "--text",
    "texts",
    type=click.Path(path_type=Path),
    multiple=True,
    required=True,
    help="A UTF-8 text file, or a folder of them (.txt, .md); of gpt2-nano its shard of tokens. Repeat.",
)
@click.option("--title", default=None, help="Title of the study in its report.  [default: the model's name]")
def command(name: str, model: str, revision: str | None, texts: tuple[Path, ...], title: str | None) -> None:
    """Write the pinned file of a new study, config/studies/NAME.yaml, from a model and texts.

    Checks that the model can be measured, pins every file by its sha256 (a repository by its commit), tokenizes the
    texts, chooses block, windows, probes and budgets from both, screens quantizer schemes on a few blocks, and prints
    what it chose and what to run next. Of a repository it downloads the configuration and the tokenizer alone, and the
    study itself screens the schemes; so it does where the weights are larger than 1 GiB. Run it in the repository's
    folder.

    Example: kvstages new-study mine --model ~/models/my-llama --text ~/texts
    """
    from kvstages.files.atomic import write_text
    from kvstages.study.configuration import check_study, study_file
    from kvstages.study.new_study import study_text

    output = Path(study_file(name))
    if not output.parent.is_dir():
        raise ValueError(f"no folder {output.parent} here: run this in the repository's folder")
    if output.exists():
        raise ValueError(f"{output}: is there already; choose another name or delete it")
    path = Path(model).expanduser()
    if path.suffix in (".pt", ".safetensors"):
        settings, said = of_gpt2_nano(path, texts, title)
    elif path.exists():
        settings, said = of_files(path, texts, title)
    elif re.fullmatch(REPOSITORY, model, re.ASCII):
        settings, said = of_repository(model, revision, texts, title)
    else:
        raise ValueError(f"{model}: no such file or folder, and no owner/name of a repository")
    check_study(name, settings)
    write_text(output, study_text(settings))
    for line in said:
        click.echo(line)
    click.echo(f"wrote {output}; next:")
    click.echo(f"  snakemake --cores 2 --resources gpu=1 --config 'studies=[{name}]'")
    click.echo(f"  snakemake --config 'studies=[{name}]' --report report-{name}.html")


def of_files(path: Path, texts: Sequence[Path], title: str | None) -> tuple[dict[str, Any], list[str]]:
    """The study of a folder or GGUF file, and what was chosen."""
    from kvstages.models.load import huggingface_files
    from kvstages.study.new_study import local

    files = huggingface_files(path).model_files(path)
    if path.is_dir():
        files = [*files, *tokenizer_files(path)]
    small = sum(file.stat().st_size for file in files) <= LARGEST_SCREENED
    return of_huggingface(path, local(files), texts, title or path.stem, small)


def tokenizer_files(folder: Path) -> list[Path]:
    """The files of the tokenizer in a folder."""
    from kvstages.models.huggingface_tokenizer import FILES

    return [folder / name for name in FILES if (folder / name).is_file()]


def of_repository(
    repository: str, revision: str | None, texts: Sequence[Path], title: str | None
) -> tuple[dict[str, Any], list[str]]:
    """The study of a repository of a hub at its commit of now, and what was chosen."""
    from kvstages.models.huggingface_files import CONFIG, INDEX, WEIGHTS
    from kvstages.models.huggingface_tokenizer import FILES
    from kvstages.study.hub import resolve, resolved_files

    commit = resolve(repository, revision or "main", CONFIG)
    with tempfile.TemporaryDirectory() as made:
        pinned = resolved_files(repository, commit, [CONFIG], [WEIGHTS], INDEX, FILES, Path(made))
        where = {"source": "hub", "location": repository, "revision": commit, "files": pinned}
        return of_huggingface(Path(made), where, texts, title or repository, weights=False)


def of_huggingface(
    path: Path, pinned: dict[str, Any], texts: Sequence[Path], title: str, weights: bool
) -> tuple[dict[str, Any], list[str]]:
    """The study of a model whose configuration and tokenizer are at ``path``, and what was chosen.

    ``weights``: whether it is to be screened, with the weights that are there too.
    """
    from kvstages.models.huggingface_files import planned_shape
    from kvstages.models.huggingface_tokenizer import Tokenizer
    from kvstages.study import new_study
    from kvstages.study.documents import Document
    from kvstages.study.texts import encode_texts, read_texts

    shape = planned_shape(path)
    widths = " and ".join(dict.fromkeys(map(str, shape.widths)))
    files = new_study.text_files(texts)
    parts = new_study.parts_of(len(files))
    tokenizer = Tokenizer(path)
    ids, entries = encode_texts(read_texts(files, parts), tokenizer.encode)
    tokenizer.check(shape.vocabulary, ids.tolist())
    documents = [Document(entry["document"], entry["start"], entry["end"]) for entry in entries]
    block, windows = new_study.drawn_windows(documents, shape.context, len(tokenizer.prefix))
    text = {**new_study.local(files), "parts": parts}
    settings = new_study.huggingface_study(title, shape.layers, shape.heads, pinned, text, block, windows)
    settings["screening"], schemes = screened_or_not(path, weights, shape, ids, entries, tokenizer.prefix, settings)
    return settings, [
        f"model: {shape.layers} layers, {shape.heads} KV heads of width {widths}, context {shape.context}",
        f"text: {len(ids)} tokens in {len(documents)} documents, {len(tokenizer.prefix)} special tokens before a block",
        *(
            f"{name}: {window['blocks']} blocks of {window.get('block', block)} tokens, {window['documents']} documents"
            for name, window in windows.items()
        ),
        f"scores: from gradients, {settings['probes']} probes; {settings['sample']} heads measured to check them",
        *schemes,
        "adaptation: left out for this family",
    ]


def of_gpt2_nano(path: Path, texts: Sequence[Path], title: str | None) -> tuple[dict[str, Any], list[str]]:
    """The study of a gpt2-nano checkpoint and its shard of tokens, and what was chosen."""
    from kvstages.measure.setting import DTYPES, prepare
    from kvstages.models.checkpoints import load_model
    from kvstages.study import new_study
    from kvstages.study.shards import read_shard
    from kvstages.study.windows import cut_windows, window_of

    if len(texts) > 1:
        raise ValueError(f"{len(texts)} texts, expected one: the shard of tokens that gpt2-nano is measured on")
    decoder = load_model(path, DTYPES["float32"], prepare("cpu", 1))
    config = decoder.config
    tokens = read_shard(texts[0])
    block, windows = new_study.cut_stretches(len(tokens), config.context_len)
    pinned = new_study.local([path, texts[0]])
    checkpoint, shard = pinned.pop("files")
    artifacts = {**pinned, "files": {"checkpoint": checkpoint, "shard": shard}}
    settings = new_study.gpt2_nano_study(title or path.stem, config.num_layers, artifacts, block, windows)
    stretches = {name: window_of(value) for name, value in windows.items()}
    cut = cut_windows(texts[0], stretches, block, decoder.shape)
    settings["screening"], schemes = screened(path, decoder, cut["calibration"].tokens, block)
    return settings, [
        f"model: {config.num_layers} layers, {config.num_heads} heads, context {config.context_len}",
        f"windows of {len(tokens)} tokens: "
        + ", ".join(f"{name} {start} to {end}" for name, (start, end) in windows.items()),
        *schemes,
    ]


def screened_or_not(
    path: Path,
    weights: bool,
    shape: DecoderShape,
    ids: Sequence[int],
    entries: Sequence[dict[str, Any]],
    prefix: Sequence[int],
    settings: dict[str, Any],
) -> tuple[dict[str, Any], list[str]]:
    """The screening of a Hugging Face model's study and why: of the best schemes, or of all that fit where the
    ``weights`` are not to be read. Token ids of the texts, and where each document lies in them."""
    from kvstages.files.atomic import write_json
    from kvstages.measure.screening import fitting
    from kvstages.measure.setting import DTYPES, prepare
    from kvstages.models.load import open_decoder
    from kvstages.study import new_study
    from kvstages.study.shards import WIDE, write_shard
    from kvstages.study.windows import cut_windows, window_of

    block = settings["block"]
    if not weights:
        schemes = fitting(shape.widths, biased=False)
        found = new_study.screening(schemes, new_study.screening_budgets(shape.widths, block))
        return found, [f"schemes: not screened here, so the study compares {', '.join(found['schemes'])}"]
    with tempfile.TemporaryDirectory() as made:
        shard, documents = Path(made, "shard.bin"), Path(made, "documents.json")
        write_shard(shard, ids, WIDE)
        write_json(documents, entries)
        drawn = {name: window_of(value) for name, value in settings["windows"].items()}
        tokens = cut_windows(shard, drawn, block, shape, documents, prefix)["calibration"].tokens
    return screened(path, open_decoder(path, DTYPES["float32"], prepare("cpu", 1)), tokens, block)


def screened(path: Path, decoder: Decoder, tokens: np.ndarray, block: int) -> tuple[dict[str, Any], list[str]]:
    """The screening of a study whose caches hold ``block`` tokens, and why: schemes are compared on a few of the
    calibration window's blocks, token ids [B, T]. ValueError names the model where none can be allocated."""
    import torch

    from kvstages.measure.screening import advise
    from kvstages.study import new_study

    count = min(new_study.SCREENED_BLOCKS, len(tokens))
    few = torch.from_numpy(tokens[:: len(tokens) // count][:count].copy())
    budgets = new_study.screening_budgets(decoder.shape.widths, block)
    try:
        with options.progress("screen") as report:
            advice = advise(decoder, few, budgets[0], progress=report, cached=block)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    found = new_study.screening(new_study.best_schemes(advice.choice.proxies), budgets)
    return found, [
        f"scheme: {advice.choice.scheme}, from {len(few)} blocks of {few.shape[1]} tokens and scores from gradients; "
        f"the study compares {', '.join(found['schemes'])}",
        *(f"  {reason}" for reason in advice.reasons),
    ]
