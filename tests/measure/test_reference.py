"""The reference's logits: written and read in parts, never whole."""

from __future__ import annotations

import pytest
import torch
from models import all_logits, random_model, random_tokens

from kvstages.files.atomic import write_tensors
from kvstages.measure.execution import dense_grid
from kvstages.measure.reference import ComputedLogits, read_reference, write_reference
from kvstages.measure.setting import Setting

SETTING = Setting("one-pass", "float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("memory", [1, 1 << 30])
def test_what_is_written_in_parts_is_the_file_that_is_written_at_once(dtype, memory, tmp_path):
    setting = Setting("one-pass", dtype)
    model, tokens = random_model(dtype=setting.dtype), random_tokens()
    logits = all_logits(model, tokens, dense_grid(model), setting, memory)
    record = {"window": "validation", "memory_mb": 1}
    write_reference(tmp_path / "parts", model, tokens, setting, memory, record)
    write_tensors(tmp_path / "whole", {"logits": logits}, record)
    assert (tmp_path / "parts").read_bytes() == (tmp_path / "whole").read_bytes()
    found = read_reference(tmp_path / "parts", record)
    assert found.shape == (3, 12, 50)
    assert torch.equal(found[slice(1, 3), slice(2, 7)], logits[1:3, 2:7])


@pytest.mark.parametrize("execution", ["one-pass", "token-by-token"])
def test_logits_that_are_computed_when_asked_for_are_those_of_the_same_blocks_together(execution):
    setting = Setting(execution, "float32")
    model, tokens = random_model(), random_tokens()
    whole, pair = (all_logits(model, tokens[:count], dense_grid(model), setting) for count in (3, 2))
    found = ComputedLogits(model, tokens, setting)
    assert found.shape == (3, 12, 50)
    for blocks, expected in ((slice(0, 3), whole), (slice(0, 2), pair), (slice(0, 3), whole)):
        assert torch.equal(found[blocks, slice(0, 12)], expected)
    assert torch.allclose(found[slice(1, 3), slice(2, 7)], whole[1:3, 2:7], atol=1e-5)


def test_logits_that_are_not_finite_are_neither_written_nor_handed_out(tmp_path):
    model = random_model()
    model.lm_head.bias[3] = torch.inf
    with pytest.raises(ValueError, match="block 1, position 2: NaN or infinity in the logits"):
        ComputedLogits(model, random_tokens(), SETTING)[slice(1, 3), slice(2, 7)]
    with pytest.raises(ValueError, match="block 0, position 0: NaN or infinity in the logits"):
        write_reference(tmp_path / "reference", model, random_tokens(), SETTING, 1 << 30, {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {"validation": torch.zeros(2), "adaptation": torch.zeros(2)},
            "holds adaptation, validation; expected the tensor",
        ),
        ({}, "holds no tensors; expected the tensor logits"),
        ({"logits": torch.zeros(12, 50)}, r"logits \(12, 50\) of F32, expected blocks"),
        ({"logits": torch.zeros(3, 12, 50)}, "computed with window None, not validation: compute it as"),
    ],
)
def test_what_is_no_reference_is_refused_by_name(tensors, message, tmp_path):
    write_tensors(tmp_path / "reference.safetensors", tensors, {})
    with pytest.raises(ValueError, match=rf"reference\.safetensors: {message}"):
        read_reference(tmp_path / "reference.safetensors", {"window": "validation"})
