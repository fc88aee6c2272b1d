"""Continuations through the packed cache, on any decoder, and the stage that compares them."""

from __future__ import annotations

from pathlib import Path

import huggingface_models
import pandas as pd
import pytest
import torch
from click.testing import CliRunner
from dictionaries import schema, validator
from models import identified, identity_of, random_model, random_tokens
from plain_cache import PlainCache

from kvstages import MixedPrecisionCache
from kvstages.analysis.survival import read_runs, survival
from kvstages.cache.precision_grid import PrecisionGrid
from kvstages.cache.precisions import BITS
from kvstages.cli import main
from kvstages.files.atomic import write_json, write_tensors
from kvstages.measure.execution import dense_grid
from kvstages.measure.generation import PREFILLS, continued, same_tokens
from kvstages.models.checkpoints import save_model
from kvstages.models.decoder import CausalCache
from kvstages.models.huggingface import HuggingFaceDecoder
from kvstages.policies.making import policy_record

GRID = PrecisionGrid((("int4", "int3"), ("bf16", "int2"), ("int8", "int4")), (("int2", "int4"),) * 3)
TOKENS = 8


@pytest.mark.parametrize("prefill", PREFILLS)
def test_of_the_unquantized_cache_they_are_the_plain_search(prefill):
    """Whole forward passes without a cache; its rounding to BF16 is finer than what parts the first tokens."""
    model, prompts = random_model(dtype=torch.float64), random_tokens()
    ids = prompts
    for _ in range(TOKENS):
        ids = torch.cat((ids, model(ids, CausalCache())[:, -1:].argmax(-1)), dim=1)
    found = continued(model, prompts, dense_grid(model), TOKENS, prefill, 2)
    assert found.shape == (3, TOKENS) and (found == ids[:, 12:]).double().mean() > 0.8
    assert torch.equal(found[:, 0], ids[:, 12])


def test_stepwise_they_are_those_of_a_plain_cache_token_by_token():
    model, prompts = random_model(dtype=torch.float64), random_tokens()
    expected = []
    for prompt in prompts:
        cache, tokens = PlainCache(GRID), list(prompt)
        for position in range(len(prompt) + TOKENS - 1):
            logits = model(tokens[position].view(1, 1), cache)
            if position + 1 == len(tokens):
                tokens.append(logits[0, -1].argmax())
        expected.append(torch.stack(tokens[len(prompt) :]))
    found = continued(model, prompts, GRID, TOKENS, "stepwise", 3)
    assert torch.equal(found, torch.stack(expected))
    assert torch.equal(found, continued(model, prompts, GRID, TOKENS, "stepwise", 1))
    assert not torch.equal(found, continued(model, prompts, dense_grid(model), TOKENS, "stepwise", 3))


@pytest.mark.parametrize("prefill", PREFILLS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_of_a_decoder_of_hugging_faces_they_are_those_of_generate(family, prefill):
    model = huggingface_models.shared(family)
    decoder = HuggingFaceDecoder(model, family, 32, "the limit")
    grid = PrecisionGrid.uniform(3, decoder.shape.heads, "int3")
    prompts = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(1))
    options = {"prefill_chunk_size": 1} if prefill == "stepwise" else {}
    with torch.no_grad():
        expected = model.generate(
            prompts, cache=MixedPrecisionCache(grid, model, prefill), max_new_tokens=TOKENS, do_sample=False,
            pad_token_id=0, eos_token_id=None, **options,
        )  # fmt: skip
    assert torch.equal(continued(decoder, prompts, grid, TOKENS, prefill, 2), expected[:, 9:])


def test_tokens_count_until_the_first_that_differs():
    reference = torch.tensor([[1, 2, 3], [1, 2, 3], [1, 2, 3]])
    found = torch.tensor([[1, 2, 3], [1, 9, 3], [9, 2, 3]])
    assert same_tokens(found, reference).tolist() == [3, 1, 0]


# --- the stage ---


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory with a model, windows of five texts, and two policies."""
    monkeypatch.chdir(tmp_path)
    model = random_model()
    save_model(Path("model.safetensors"), model.config, model.state_dict())
    places = {"validation": {"starts": [0, 12, 24, 36, 48, 60], "documents": ["a", "b", "c", "d", "e", "e"]}}
    write_tensors(tmp_path / "windows.safetensors", {"validation": random_tokens(6)}, {"block": 12, "windows": places})
    for name in ("int2", "int8"):
        grid = PrecisionGrid.uniform(3, 2, name)
        record = policy_record(
            name, "uniform", None, grid, 0.5, 0, (8, 8), 12, unit="head", ladder=list(BITS), sensitivity="made-up"
        )
        write_json(tmp_path / f"{name}.json", identified(record, identity_of(model)))
    return tmp_path


def generate(*more: object) -> tuple[int, str]:
    files = ["--model", "model.safetensors", "--windows", "windows.safetensors", "--policy", "int2.json"]
    words = ["generate", *files, "--policy", "int8.json", "--device", "cpu", "--output", "c.csv", *map(str, more)]
    result = CliRunner().invoke(main, words)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_the_stage_compares_policies_and_a_control(folder):
    assert generate("--prompts", 6, "--tokens", 5) == (0, "")
    table = pd.read_csv("c.csv")
    assert list(table) == schema("generation")["required"]
    for row in table.to_dict("records"):
        validator("generation").validate(row)
    assert len(table) == 2 * 3 * 6 and set(table["prompt_tokens"]) == {7}
    means = table.groupby(["prefill", "policy"])["same"].mean()
    assert means["exact", "bf16"] == means["stepwise", "bf16"] == 5
    assert means["stepwise", "int2"] < means["stepwise", "int8"]
    assert set(table[table["policy"] == "bf16"]["together"]) == {1}
    assert set(table[table["policy"] == "int2"]["together"]) == {6}
    before = Path("c.csv").read_bytes()
    assert generate("--prompts", 6, "--tokens", 5) == (0, "") and Path("c.csv").read_bytes() == before
    runs = read_runs(Path("c.csv"))
    assert [(run.prefill, run.policy) for run in runs[:3]] == [("exact", "bf16"), ("exact", "int8"), ("exact", "int2")]
    assert runs[0].documents == ["a", "b", "c", "d", "e", "e"]


def test_a_shorter_prompt_is_the_beginning_of_its_block(folder):
    assert generate("--prompts", 6, "--tokens", 5, "--prompt", 4) == (0, "")
    assert set(pd.read_csv("c.csv")["prompt_tokens"]) == {4}
    tokens = random_tokens(6)[:, :9]
    write_tensors(folder / "windows.safetensors", {"validation": tokens}, {"block": 9})
    before = pd.read_csv("c.csv")["same"]
    assert generate("--prompts", 6, "--tokens", 5) == (0, "") and pd.read_csv("c.csv")["same"].equals(before)
    status, output = generate("--prompts", 6, "--tokens", 5, "--prompt", 5)
    assert status == 1 and output.count("\n") == 1 and "6 prompts of 5 tokens and 5 tokens after each, but" in output


@pytest.mark.parametrize(("prompts", "tokens"), [(7, 5), (6, 12)])
def test_more_than_the_window_has_is_refused(folder, prompts, tokens):
    status, output = generate("--prompts", prompts, "--tokens", tokens)
    assert status == 1 and output == (
        f"Error: windows.safetensors: {prompts} prompts and {tokens} tokens after each, but validation has 6 blocks of "
        "12 tokens\n"
    )
    assert not Path("c.csv").exists()


def test_a_policy_of_another_model_is_refused(folder):
    other = random_model(seed=3)
    save_model(Path("model.safetensors"), other.config, other.state_dict())
    status, output = generate("--prompts", 2, "--tokens", 5)
    assert status == 1 and "int2.json: made for another model of this shape" in output
    assert not Path("c.csv").exists()


def test_the_survival_curve_by_hand(tmp_path):
    rows = [("int4", "exact", 3, block, "t", 4, 3, same, "float32") for block, same in enumerate([3, 1, 0, 3])]
    names = ["policy", "prefill", "together", "block", "document", "prompt_tokens", "tokens", "same", "compute_dtype"]
    pd.DataFrame(rows, columns=names).to_csv(tmp_path / "c.csv", index=False)
    (run,) = read_runs(tmp_path / "c.csv")
    curve = dict(survival(run))
    assert [curve[count].value for count in (1, 2, 3)] == [0.75, 0.5, 0.5]
    assert all(share.low <= share.value <= share.high for share in curve.values())
    # Of one document there is no interval over documents: it is over prompts.
    assert curve[2].low == 0.0 and curve[2].high == 1.0
