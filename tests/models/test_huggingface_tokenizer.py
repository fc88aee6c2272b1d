"""Tokenizers of Hugging Face's models, and the stage that turns texts into tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from huggingface_models import VOCABULARY, save
from tokenizers import Tokenizer as Words
from tokenizers import models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from kvstages.cli import main
from kvstages.files.read import read_json
from kvstages.models.huggingface_files import convert
from kvstages.models.huggingface_tokenizer import Tokenizer
from kvstages.study.shards import read_shard

WORDS = ["<unk>", "<s>", "the", "cache", "keeps", "what", "a", "head", "has", "seen"]


def tokenizer(folder: Path, begins: bool, words: list[str] = WORDS) -> Path:
    """Write a tokenizer of whole words, which may start a text with <s>."""
    made = Words(models.WordLevel({word: index for index, word in enumerate(words)}, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    if begins:
        made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>").save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("begins", "prefix"), [(True, [1]), (False, [])])
def test_special_tokens_before_a_text_are_the_tokenizer_s_own(tmp_path: Path, begins: bool, prefix: list[int]) -> None:
    opened = Tokenizer(tokenizer(tmp_path, begins))
    assert opened.encode("the cache keeps") == [2, 3, 4]
    assert opened.prefix == prefix
    record = opened.record()
    assert record["prefix_tokens"] == ["<s>"] * begins and record["tokens"] == len(WORDS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tokenizer(save(tmp_path_factory.mktemp("model")), begins=True)
    convert(folder, folder)
    return folder


def run(model: Path, text: Path, tokenizer: Path, folder: Path, *words: str):
    files = {name: folder / name for name in ("output", "documents", "record")}
    options = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    return CliRunner().invoke(
        main,
        [
            "tokenize",
            str(text),
            "--tokenizer",
            str(tokenizer),
            "--model",
            str(model / "decoder.json"),
            *options,
            *words,
        ],
    )


def test_texts_become_tokens_and_documents(tmp_path: Path, model: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("the cache keeps\n\nwhat a head has seen")
    result = run(model, text, model, tmp_path, "--parts", "2")
    assert result.exit_code == 0, result.output
    assert read_shard(tmp_path / "output").tolist() == [2, 3, 4, 5, 6, 7, 8, 9]
    assert read_json(tmp_path / "documents") == [
        {"document": "a.txt/1", "start": 0, "end": 3},
        {"document": "a.txt/2", "start": 3, "end": 8},
    ]
    assert read_json(tmp_path / "record")["prefix"] == [1]


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path, model: Path) -> None:
    other = tokenizer(tmp_path / "other", False, [*WORDS, *(f"word{index}" for index in range(VOCABULARY))])
    text = tmp_path / "a.txt"
    text.write_text("the cache")
    result = run(model, text, other, tmp_path)
    assert result.exit_code == 1 and not (tmp_path / "output").exists()
    assert f"has {len(WORDS) + VOCABULARY} tokens, but the model's vocabulary is {VOCABULARY}" in result.output


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [("x", "", "no tokenizer in it"), ("tokenizer.json", "{", "transformers cannot open its tokenizer")],
)
def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path, name: str, content: str, expected: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=expected):
        Tokenizer(tmp_path)
