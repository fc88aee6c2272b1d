"""The digest of a model's weights: the same however they are stored, another for another model."""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_models
import numpy as np
import pytest
import torch
import transformers
from click.testing import CliRunner
from models import random_model

from kvstages.cli import main
from kvstages.models import identity, weights
from kvstages.models.checkpoints import save_model
from kvstages.models.load import open_decoder
from kvstages.models.weights import model_digest


def convert(folder: Path) -> Path:
    result = CliRunner().invoke(main, ["convert", "--checkpoint", str(folder), "--output", str(folder)])
    assert result.exit_code == 0, result.output
    return folder


@pytest.mark.parametrize("size", [1, 7, identity.SAMPLE, 3 * identity.SAMPLE + 5])
def test_arrays_and_tensors_have_the_same_sample(size):
    values = torch.randn(size) * torch.logspace(-30, 30, size)
    array = identity.sample(values.numpy())
    for dtype in (torch.float32, torch.float64):
        tensor = weights.sample(values.to(dtype))
        assert np.array_equal(array.bits, tensor.bits) and array.shape == tensor.shape == (size,)
    assert len(array.bits) <= identity.SAMPLE
    assert np.array_equal(array.bits, weights.sample(values.bfloat16()).bits)


def test_a_file_has_the_digest_of_the_model_in_it(tmp_path):
    model = random_model()
    save_model(tmp_path / "model.safetensors", model.config, model.state_dict())
    found = identity.read_identity(tmp_path / "model.safetensors")
    assert found.shape == model.shape and found.origin is None
    assert {found.weights} == {model_digest(model.to(dtype)) for dtype in (torch.float64, torch.bfloat16)}


def test_it_hangs_on_every_tensor_and_its_shape_and_on_nothing_else(tmp_path):
    model = random_model()
    before = model_digest(model)
    for parameter in model.parameters():
        kept = parameter.clone()
        parameter.view(-1)[0] += 0.5
        assert model_digest(model) != before
        parameter.copy_(kept)
    assert model_digest(model) == before
    flat = [identity.Sample((parameter.numel(),), weights.sample(parameter).bits) for parameter in model.parameters()]
    assert identity.weights_digest(flat) != before
    shaped = [weights.sample(parameter) for parameter in model.parameters()]
    assert identity.weights_digest(reversed(shaped)) == before


def test_a_folder_has_the_digest_of_the_model_that_users_open(tmp_path):
    folder = convert(huggingface_models.save(tmp_path / "m", max_shard_size="10KB"))
    assert len(list(folder.glob("*.safetensors"))) > 1
    found = identity.read_identity(folder)
    for dtype in (torch.float32, torch.bfloat16):
        opened = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        assert model_digest(opened) == found.weights


def test_weights_that_changed_after_their_record_are_refused(tmp_path):
    folder = convert(huggingface_models.save(tmp_path / "m"))
    open_decoder(folder, torch.float32, "cpu")
    other = huggingface_models.model("llama", torch.float32)
    other.lm_head.weight.mul_(2)
    other.save_pretrained(folder)
    with pytest.raises(ValueError, match=r"m: its weights are not those that its record was made of \(digest [0-9a-f]"):
        open_decoder(folder, torch.float32, "cpu")
    open_decoder(convert(folder), torch.float32, "cpu")


def test_a_record_without_a_digest_is_refused(tmp_path):
    folder = convert(huggingface_models.save(tmp_path / "m"))
    record = json.loads((folder / "decoder.json").read_text())
    del record["weights"]["digest"]
    (folder / "decoder.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"decoder\.json: no digest of the weights; make it again with"):
        identity.read_identity(folder)


def test_a_model_without_numbers_has_no_digest():
    with torch.device("meta"):
        model = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="weight has a shape and no numbers"):
        model_digest(model)
