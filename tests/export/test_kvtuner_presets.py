"""KVTuner's presets as policies: read, refused, and measured like any other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvstages.cli import main
from kvstages.export.kvtuner import read_preset
from kvstages.files.atomic import write_json, write_text
from kvstages.models.identity import read_identity
from kvstages.policies.record import read_policy

# As KVTuner writes them.
PRESET = "0:\n  nbits_key: 8\n  nbits_value: 4\n1:\n  nbits_key: 4\n  nbits_value: 2\n"


def read(path: Path, text: str, quantizer: str = "per-token"):
    write_text(path, text)
    return read_preset(path, 2, quantizer)


def test_a_preset_is_a_policy_of_layers(tmp_path):
    grid = read(tmp_path / "p.yaml", PRESET)
    assert grid.keys == (("int8-zero",) * 2, ("int4-zero",) * 2)
    assert grid.values == (("int4-zero",) * 2, ("int2-zero",) * 2)
    assert read(tmp_path / "p.yaml", PRESET, "kivi").keys == (("kivi8",) * 2, ("kivi4",) * 2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1, 2]", "expected the layers 0, 1, ... as keys, in order"),
        ("1:\n  nbits_key: 8\n  nbits_value: 4\n", "expected the layers 0, 1, ... as keys, in order"),
        ("0: 8\n", "layer 0: 8, expected the keys nbits_key and nbits_value"),
        ("0:\n  nbits_key: 7\n  nbits_value: 4\n", "layer 0, nbits_key: 7, expected 8, 4, 2"),
        ("0: {", "not YAML"),
        ("", "expected the layers"),
    ],
)
def test_what_is_no_preset_is_refused(tmp_path, text, said):
    with pytest.raises(ValueError, match=r"p\.yaml") as error:
        read(tmp_path / "p.yaml", text)
    assert said in str(error.value)


def test_an_imported_policy_has_bytes_and_no_proxy(tmp_path):
    write_text(tmp_path / "p.yaml", PRESET)
    shape = {"vocab_size": 64, "context_len": 16, "embedding_dim": 16, "num_layers": 2, "num_heads": 2}
    write_json(tmp_path / "config.json", shape)
    from conftest import decoder

    from kvstages.files.atomic import write_tensors

    write_tensors(tmp_path / "model.safetensors", decoder().state_dict(), {"config": shape})
    words = ["import-policy", str(tmp_path / "p.yaml"), "--quantizer", "per-token", "--tokens", "8"]
    words += ["--model", str(tmp_path / "model.safetensors"), "--policy", "kvtuner"]
    result = CliRunner().invoke(main, [*words, "--output", str(tmp_path / "policy.json")])
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "policy.json").read_text())
    assert (record["proxy"], record["allocator"], record["unit"]) == (None, "imported", "layer")
    model = read_identity(tmp_path / "model.safetensors")
    assert read_policy(tmp_path / "policy.json", model)["model"]["weights"] == model.weights
    # Width 8, two heads, 8 tokens; a step and a zero point of 2 bytes each for a vector.
    assert record["bytes"]["total"] == 8 * 2 * ((8 + 4) + (4 + 4) + (4 + 4) + (2 + 4))
    write_text(tmp_path / "p.yaml", PRESET + "2:\n  nbits_key: 4\n  nbits_value: 2\n")
    result = CliRunner().invoke(main, [*words, "--output", str(tmp_path / "other.json")])
    assert result.exit_code == 1 and "precisions for heads [2, 2, 2] a layer" in result.output
    assert not (tmp_path / "other.json").exists()
