"""Gradients kept in a file score another precision as the pass itself does."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from click.testing import CliRunner
from models import random_model, random_tokens

from kvstages.cli import main
from kvstages.files.atomic import tensor_stream, write_tensors
from kvstages.files.read import read_tensors
from kvstages.measure.gradients import Timing, joined, project, timings_of, window_projections
from kvstages.measure.kept_gradients import keeping, kept_bytes, read_kept
from kvstages.models.checkpoints import save_model
from kvstages.scores.projections import read_projections

MEMORY = 1 << 30
NAMES = ("int4", "rotated3", "int4-k.bias", "int3-k.channel3", "int2-first1+recent2")


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A model, its tokens, a file of its gradients, and what the pass itself found."""
    model, tokens = random_model(2, 2, 6), random_tokens(3, 9)
    path = tmp_path_factory.mktemp("kept") / "kept.safetensors"
    timings = timings_of(NAMES)
    with keeping(path, model.shape, tokens, 5, timings, "calibration") as keep:
        found = window_projections(model, tokens, NAMES, 5, MEMORY, keep=keep)
    return model, tokens, path, found


def test_the_file_gives_the_scores_of_the_pass(kept):
    model, _, path, (values, error) = kept
    file = read_kept(path)
    assert (file.blocks, file.probes, file.tokens, file.window) == (3, 5, 9, "calibration")
    assert file.timings == (Timing(), Timing(0, 3, 0), Timing(1, 1, 2)) == timings_of(NAMES)
    again, wrong = joined(project(found, file.timings, NAMES, model.contexts) for found in file.slices())
    assert torch.allclose(again, values, rtol=0.02, atol=1e-2 * float(values.std()))
    assert all(torch.equal(wrong[change], error[change]) for change in error)
    # A precision that no pass was told of.
    more, _ = joined(project(found, file.timings, ("lloyd3-mse",), model.contexts) for found in file.slices())
    alone, _ = window_projections(model, kept[1], ("lloyd3-mse",), 5, MEMORY)
    assert torch.allclose(more, alone, rtol=0.02, atol=1e-2 * float(alone.std()))


def test_its_size_is_the_formulas(kept):
    model, tokens, path, _ = kept
    size = kept_bytes(model.shape, *tokens.shape, 5, 3)
    assert size == 2 * (3 * 2 * 4 * 9 * 6) * (5 * 3 + 1)
    assert 0 < path.stat().st_size - size < 2000


def test_a_precision_of_another_timing_is_refused(kept):
    file = read_kept(kept[2])
    with pytest.raises(ValueError, match=r"precision int4-channel2: no gradients of its timing .* share a scale 2"):
        project(next(file.slices()), file.timings, ("int4-channel2",))


def test_a_stream_is_a_file_of_its_tensors(tmp_path):
    tensors = {"b": torch.tensor([[1.0, 2.0], [3.0, -4.0]]).bfloat16(), "a": torch.tensor([0.5, 7.0]).bfloat16()}
    with tensor_stream(tmp_path / "s", {name: each.shape for name, each in tensors.items()}, {"x": 1}) as append:
        for each in tensors.values():
            append(each.view(torch.uint8).numpy().data)
    read, record = read_tensors(tmp_path / "s")
    assert record == {"x": 1} and all(torch.equal(read[name], each) for name, each in tensors.items())


def test_a_stream_that_ends_early_or_goes_wrong_leaves_no_file(tmp_path):
    layout = {"a": (2,), "b": (3,)}
    with pytest.raises(ValueError, match="b was not written"), tensor_stream(tmp_path / "s", layout, {}) as append:
        append(memoryview(bytes(4)))
    with pytest.raises(ValueError, match=r"6 bytes for a of shape \(2,\)"):  # noqa: SIM117
        with tensor_stream(tmp_path / "s", layout, {}) as append:
            append(memoryview(bytes(6)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("tensors", "record", "message"),
    [
        ({"logits": torch.zeros(1)}, {}, "no kept gradients; expected those of the stage gradients"),
        (None, {"blocks": 2}, "tensors of 3 blocks, expected those of 2"),
        (None, {"timings": None}, "kept gradients without"),
    ],
)
def test_another_file_is_named(kept, tmp_path, tensors, record, message):
    kept_tensors, kept_record = read_tensors(kept[2])
    write_tensors(tmp_path / "k.safetensors", tensors or kept_tensors, kept_record | record if tensors is None else {})
    with pytest.raises(ValueError, match=f"k.safetensors: {message}"):
        read_kept(tmp_path / "k.safetensors")
    (tmp_path / "k.safetensors").write_text("text")
    with pytest.raises(ValueError, match="not a safetensors file of this project"):
        read_kept(tmp_path / "k.safetensors")


def test_the_stages_keep_gradients_and_score_from_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = random_model(2, 2, 8)
    save_model(tmp_path / "model.safetensors", model.config, model.state_dict())
    write_tensors(tmp_path / "windows.safetensors", {"calibration": random_tokens(3, 12)})
    read = ("--model", "model.safetensors", "--windows", "windows.safetensors", "--device", "cpu")

    def run(*words: str) -> None:
        result = CliRunner().invoke(main, list(words), catch_exceptions=False)
        assert result.exit_code == 0, result.output

    def outputs(name: str) -> tuple[str, ...]:
        return ("--output-table", f"{name}.csv", "--projections", f"{name}.safetensors")

    run("calibrate", *read, "--output", "calibration.safetensors")
    known = ("--calibration", "calibration.safetensors")
    run(
        "gradients", *read, *known, "--probes", "4", "--precision", "centred4", "--precision", "int8",
        "--keep", "kept.safetensors", *outputs("pass"),
    )  # fmt: skip
    run("project", "kept.safetensors", *known, "--precision", "int8", "--precision", "centred4", *outputs("file"))
    found, again = (pd.read_csv(f"{name}.csv") for name in ("pass", "file"))
    assert list(found["precision"].unique()) == ["int8", "centred4"]
    assert np.allclose(found["mean_kl"], again["mean_kl"], rtol=0.02)
    assert found.drop(columns=["mean_kl", "standard_error"]).equals(again.drop(columns=["mean_kl", "standard_error"]))
    assert read_projections(tmp_path / "file.safetensors").precisions == ("int8", "centred4")
    result = CliRunner().invoke(main, ["project", "kept.safetensors", "--precision", "int7", *outputs("x")])
    assert result.exit_code == 2 and "precision 'int7': 'int7' has 7 bits" in result.output
    # A sweep and an evaluation take the same names.
    run(
        "sweep",
        *read,
        *known,
        "--layer",
        "1",
        "--precision",
        "centred4",
        "--precision",
        "int4-channel4",
        "--output",
        "s.csv",
    )
    assert set(pd.read_csv("s.csv")["precision"]) == {"centred4", "int4-channel4"}
