"""A new study from a model and texts: pinned, checked, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from conftest import SHAPE, bundle
from hub import hub
from huggingface_models import model as huggingface_model
from huggingface_models import save
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvstages.cache.schemes import precision
from kvstages.cli import main
from kvstages.files.ledger import sha256
from kvstages.models.config import DecoderShape
from kvstages.study.configuration import check_study, load_study
from kvstages.study.documents import Document
from kvstages.study.new_study import cut_stretches, drawn_windows
from kvstages.study.shards import write_shard
from kvstages.study.windows import cut_windows, window_of

COMMIT = 40 * "5"
WORDS = ["<unk>", "the", "cache", "keeps", "what", "a", "head", "has", "seen"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny decoder in two files of weights, with a tokenizer of whole words."""
    folder = save(tmp_path_factory.mktemp("model"), max_shard_size="20KB")
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>").save_pretrained(folder)
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A folder with one long text."""
    words = np.random.default_rng(3).choice(WORDS[1:], size=4000)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "long.txt").write_text(" ".join(words))
    return tmp_path / "texts"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config" / "studies").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)


def run(model: object, *texts: object, name: str = "mine", more: tuple[str, ...] = ()) -> Result:
    options = [word for text in texts for word in ("--text", str(text))]
    return CliRunner().invoke(main, ["new-study", name, "--model", str(model), *options, *more])


def study(result: Result) -> dict:
    assert result.exit_code == 0, result.output
    found = load_study(Path("config/studies/mine.yaml"))
    check_study("mine", found)
    return found


def test_a_folder_and_a_text_become_a_pinned_study(model: Path, text: Path) -> None:
    result = run(model, text)
    found = study(result)
    assert (found["layers"], found["heads"], found["sensitivity"]) == (3, 2, "gradients")
    names = {file["path"] for file in found["model"]["files"]}
    shards = {path.name for path in model.glob("*.safetensors")}
    assert len(shards) > 1 and names >= {"config.json", "model.safetensors.index.json", "tokenizer.json", *shards}
    for key, folder in (("model", model), ("text", text)):
        assert found[key]["location"] == str(folder.resolve())
        assert all(file["sha256"] == sha256(folder / file["path"]) for file in found[key]["files"])
    assert_screened(result, found["screening"])
    # 4 bits and a scale of 16 bits for 12 numbers, rounded up.
    assert found["screening"]["budgets"] == ["5.5bits", "4.5bits"]
    assert "3 layers, 2 KV heads of width 12" in result.output and "adaptation: left out" in result.output
    assert "snakemake --cores 2 --resources gpu=1 --config 'studies=[mine]'" in result.output


def assert_screened(result: Result, settings: dict) -> None:
    """The command said which scheme is best and why, and the study compares it with the published one."""
    said = {
        line.split(":")[0].strip(): float(line.split()[1])
        for line in result.output.splitlines()
        if "nats (proxy" in line
    }
    assert {"int4", "rotated4", "centred4"} <= set(said)
    ranked = sorted(said, key=said.get)
    assert list(said) == ranked and set(settings["schemes"]) == {"int4", *ranked[:2]}
    assert f"scheme: {ranked[0]}, from 4 blocks" in result.output


def test_key_biases_decide_what_is_chosen(text: Path, model: Path, tmp_path: Path) -> None:
    """Evidence on the model at hand: with large key biases the schemes that subtract an offset win."""
    import torch

    made = huggingface_model("qwen2", torch.float32)
    for layer in made.model.layers:
        layer.self_attn.k_proj.bias.normal_(std=20, generator=torch.Generator().manual_seed(2))
    made.save_pretrained(tmp_path / "biased")
    for path in model.glob("tokenizer*"):
        (tmp_path / "biased" / path.name).write_bytes(path.read_bytes())
    result = run(tmp_path / "biased", text)
    found = study(result)
    assert_screened(result, found["screening"])
    assert all(precision(name).keys.offset for name in found["screening"]["schemes"][1:])
    assert "debiased4" in result.output


def test_weights_that_are_too_large_are_not_screened(model: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstages.commands.new_study.LARGEST_SCREENED", 1)
    result = run(model, text)
    assert "schemes: not screened here" in result.output
    assert study(result)["screening"]["schemes"][:2] == ["int4", "rotated4"]


def test_keys_and_values_of_different_width_become_a_study(tmp_path: Path, model: Path, text: Path) -> None:
    uneven = save(tmp_path / "uneven", "mimo-v2")
    for path in model.glob("tokenizer*"):
        (uneven / path.name).write_bytes(path.read_bytes())
    result = run(uneven, text)
    assert "2 KV heads of width 12 and 7" in result.output
    # INT4 of 12 and of 7 values, with a scale each: 8 · (6 + 2 + 4 + 2) / 19 bits an element, rounded up to a quarter.
    assert study(result)["screening"]["budgets"] == ["6bits", "5bits"]


def test_a_repository_is_pinned_at_its_commit_and_its_weights_stay_there(
    model: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, asked = {path.name: path.read_bytes() for path in model.iterdir()}, []
    repositories = {"ada/tiny": {"main": files, COMMIT: files}}
    with hub(repositories, answered_commit=COMMIT) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        monkeypatch.setattr("kvstages.study.hub.receive", recording(asked))
        found = study(run("ada/tiny", text))
    assert (found["model"]["source"], found["model"]["revision"]) == ("hub", COMMIT)
    assert "centred4" in found["screening"]["schemes"]
    pinned = {file["path"]: file["sha256"] for file in found["model"]["files"]}
    assert {name: sha256(model / name) for name in pinned} == pinned
    assert {name for name in pinned if name.endswith(".safetensors")}
    assert asked and not any(url.endswith(".safetensors") for url in asked)


def recording(asked: list[str]):
    """``hub.receive`` that notes what it is asked for."""
    from kvstages.study import hub as module

    receive = module.receive

    def noting(url, *arguments):
        asked.append(url)
        return receive(url, *arguments)

    return noting


def test_a_repository_that_is_gated_or_unreachable_is_refused(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub({}) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        assert "private or gated and needs HF_TOKEN" in run("ada/secret", text).output
    result = run("ada/tiny", text)  # the hub is gone
    assert result.exit_code == 1 and len(result.output.strip().splitlines()) == 1, result.output


def test_a_gpt2_nano_checkpoint_and_its_shard_become_a_study(tmp_path: Path) -> None:
    bundle(tmp_path / "nano")
    write_shard(tmp_path / "tokens.bin", np.random.default_rng(1).integers(SHAPE["vocab_size"], size=2000))
    result = run(tmp_path / "nano" / "model.safetensors", tmp_path / "tokens.bin")
    found = study(result)
    assert_screened(result, found["screening"])
    assert found["screening"]["budgets"] == ["6bits", "5bits"]
    assert found["layers"] == SHAPE["num_layers"] and found["block"] == SHAPE["context_len"]
    assert found["artifacts"]["files"]["shard"]["sha256"] == sha256(tmp_path / "tokens.bin")
    assert found["windows"]["validation"] == [1280, 1792]


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ("shard", "the file model-00002-of-"),
        ("binary", "not UTF-8 text"),
        ("short", "too short for any windows"),
        ("no text", "no text in it"),
        ("no model", "no such file or folder, and no owner/name of a repository"),
        ("there", "is there already"),
    ],
)
def test_what_makes_no_study_is_refused_in_one_line(
    tmp_path: Path, model: Path, text: Path, wrong: str, expected: str
) -> None:
    used, long = tmp_path / "model", text / "long.txt"
    used.mkdir()
    for path in model.iterdir():
        (used / path.name).write_bytes(path.read_bytes())
    if wrong == "shard":
        next(used.glob("model-00002*.safetensors")).unlink()
    elif wrong == "binary":
        long.write_bytes(b"\xff\xfe\x00")
    elif wrong == "short":
        long.write_text("the cache keeps")
    elif wrong == "no text":
        long.unlink()
    elif wrong == "there":
        Path("config/studies/mine.yaml").write_text("title: x\n")
    result = run("/nothing/there.gg" if wrong == "no model" else used, text)
    assert result.exit_code == 1 and expected in result.output, result.output
    assert len(result.output.strip().splitlines()) == 1
    assert Path("config/studies/mine.yaml").exists() == (wrong == "there")


@pytest.mark.parametrize(
    ("count", "length", "context"), [(16, 5000, 8192), (16, 300, 64), (3, 700, 2048), (40, 90, 512)]
)
def test_windows_that_are_chosen_can_be_cut(tmp_path: Path, count: int, length: int, context: int) -> None:
    documents = [Document(str(place), place * length, (place + 1) * length) for place in range(count)]
    block, windows = drawn_windows(documents, context, prefix=1)
    assert block <= context
    shard, listed = tmp_path / "shard.bin", tmp_path / "documents.json"
    write_shard(shard, np.zeros(count * length, dtype=int))
    listed.write_text(
        str([document._asdict() for document in documents]).replace("'name'", "'document'").replace("'", '"')
    )
    shape = DecoderShape(1, 1, 1, 1, 9, context, 1, 1)
    cut = cut_windows(shard, {name: window_of(value) for name, value in windows.items()}, block, shape, listed, [1])
    assert cut["validation"].tokens.shape[1] == block
    assert not set(cut["validation"].documents) & set(cut["calibration"].documents)


def test_a_shard_that_is_too_short_is_refused() -> None:
    assert cut_stretches(112 * 64, 1024)[0] == 64
    with pytest.raises(ValueError, match="7167 tokens: shorter than the windows, expected 7168 or more"):
        cut_stretches(112 * 64 - 1, 1024)
