import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from kvstages.cli import main
from kvstages.files.atomic import write_tensors
from kvstages.files.read import read_tensors
from kvstages.models.config import GPTConfig
from kvstages.study.shards import write_shard
from kvstages.study.windows import check_tokens, check_windows, cut_windows, load_window, parse_windows

CONFIG = GPTConfig(vocab_size=50, context_len=16, embedding_dim=4, num_layers=1, num_heads=2)


@pytest.fixture
def shard(tmp_path):
    path = tmp_path / "shard.bin"
    write_shard(path, np.arange(100) % 50)
    return path


@pytest.fixture
def model(tmp_path):
    """A file with the shape of a model in its header, which is all that the stage reads."""
    path = tmp_path / "model.safetensors"
    write_tensors(path, {"any": torch.zeros(1)}, {"config": CONFIG.as_dict()})
    return path


def run(shard, model, output, *windows, block=8):
    arguments = ["windows", "--shard", shard, "--model", model, "--block", block, "--output", output]
    arguments += [part for window in windows for part in ("--window", window)]
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_command_cuts_blocks_in_order(shard, model, tmp_path):
    output = tmp_path / "windows.safetensors"
    result = run(shard, model, output, "calibration=0:16", "validation=40:64")
    assert (result.exit_code, result.output) == (0, "")
    tensors, record = read_tensors(output)
    assert record == {"block": 8, "windows": {"calibration": [0, 16], "validation": [40, 64]}}
    assert tensors["calibration"].tolist() == [list(range(8)), list(range(8, 16))]
    assert tensors["validation"].dtype == torch.int64
    assert tensors["validation"].flatten().tolist() == [position % 50 for position in range(40, 64)]
    assert torch.equal(load_window(output, "validation"), tensors["validation"])
    with pytest.raises(ValueError, match=r"no window 'valid'; it holds calibration, validation"):
        load_window(output, "valid")


def test_a_window_cut_for_another_model_is_refused(shard, model, tmp_path):
    path = tmp_path / "windows.safetensors"
    run(shard, model, path, "validation=40:56")
    assert torch.equal(load_window(path, "validation", CONFIG), load_window(path, "validation"))
    shorter = dataclasses.replace(CONFIG, context_len=7)
    with pytest.raises(ValueError, match=r"windows\.safetensors: blocks of 8 tokens are longer than .* context of 7"):
        load_window(path, "validation", shorter)
    smaller = dataclasses.replace(CONFIG, vocab_size=49)
    with pytest.raises(ValueError, match=r"windows\.safetensors: token id 49 is outside the model's vocabulary of 49"):
        load_window(path, "validation", smaller)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.tensor([[3, -1]]), "token id -1 is outside the model's vocabulary of 50"),
        (torch.zeros(2, 8), r"a tensor \(2, 8\) of torch.float32, expected token ids \[blocks, block\]"),
        (torch.zeros(8, dtype=torch.int64), r"a tensor \(8,\) of torch.int64, expected token ids"),
        (torch.zeros(0, 8, dtype=torch.int64), r"a tensor \(0, 8\) of torch.int64, expected token ids"),
    ],
)
def test_what_are_no_token_blocks_is_refused(tokens, message):
    with pytest.raises(ValueError, match=f"w.safetensors: {message}"):
        check_tokens(tokens, CONFIG, Path("w.safetensors"))


def test_command_is_byte_stable(shard, model, tmp_path):
    for name in ("a", "b"):
        run(shard, model, tmp_path / name, "calibration=0:16", "validation=40:64")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_windows_may_touch_and_end_with_the_shard(shard):
    blocks = cut_windows(shard, {"one": (0, 48), "two": (48, 96)}, 16, CONFIG)
    assert [ids.shape for ids in blocks.values()] == [(3, 16), (3, 16)]
    assert np.concatenate([ids.ravel() for ids in blocks.values()]).tolist() == [i % 50 for i in range(96)]


@pytest.mark.parametrize(
    ("windows", "block", "expected"),
    [
        (["b=16:32", "a=0:16"], 8, "window a (0 to 16) starts before b ends at 32"),
        (["a=0:16", "b=8:24"], 8, "window b (8 to 24) starts before a ends at 16"),
        (["a=0:12"], 8, "window a (0 to 12) holds 12 tokens, not a multiple of the block of 8"),
        (["a=-8:8"], 8, "window a (-8 to 8) starts before the shard"),
        (["a=8:8"], 8, "window a (8 to 8) is empty"),
        (["a=16:8"], 8, "window a (16 to 8) is empty"),
        (["a=0:104"], 8, "window a ends at 104, past the shard's 100 tokens"),
        (["a=0:34"], 17, "block of 17 tokens is longer than the model's context of 16"),
        (["a=0:8"], 1, "block of 1 tokens: expected at least 2"),
        (["a=0:8", "a=8:16"], 8, "window a is given twice"),
        (["a=0-8"], 8, "window 'a=0-8': expected name=start:end, such as calibration=0:512"),
    ],
)
def test_wrong_windows(shard, model, tmp_path, windows, block, expected):
    result = run(shard, model, tmp_path / "out" / "windows.safetensors", *windows, block=block)
    assert result.exit_code == 1
    assert len(result.output.splitlines()) == 1
    assert expected in result.output
    assert not (tmp_path / "out").exists()


def test_token_beyond_the_vocabulary_names_id_position_and_window(tmp_path, model):
    tokens = np.arange(100) % 50
    tokens[[37, 38]] = 51, 60
    write_shard(tmp_path / "shard.bin", tokens)
    result = run(tmp_path / "shard.bin", model, tmp_path / "out", "a=0:16", "b=32:40")
    assert result.exit_code == 1
    assert "token id 51 at position 37 (window b) is not below the model's vocabulary of 50" in result.output
    assert not (tmp_path / "out").exists()


def test_ids_outside_the_windows_do_not_matter(tmp_path):
    tokens = np.full(32, 60000)
    tokens[8:16] = 49
    write_shard(tmp_path / "shard.bin", tokens)
    assert cut_windows(tmp_path / "shard.bin", {"a": (8, 16)}, 8, CONFIG)["a"].tolist() == [[49] * 8]


def test_wrong_shard_and_wrong_model(shard, model, tmp_path):
    result = run(model, model, tmp_path / "out", "a=0:8")
    assert result.exit_code == 1
    assert "not a token shard" in result.output or "but a token shard opens with" in result.output
    result = run(shard, shard, tmp_path / "out", "a=0:8")
    assert (result.exit_code, result.output) == (1, f"Error: {shard}: not a safetensors file, or a truncated one\n")
    write_tensors(tmp_path / "bare.safetensors", {"any": torch.zeros(1)})
    result = run(shard, tmp_path / "bare.safetensors", tmp_path / "out", "a=0:8")
    assert "no model configuration in its header; make it with `kvstages convert`" in result.output
    assert not (tmp_path / "out").exists()


def test_parse_keeps_the_order_given():
    assert list(parse_windows(["b=0:8", "a=8:16"]).items()) == [("b", (0, 8)), ("a", (8, 16))]


def test_check_windows_accepts_the_published_ones():
    published = json.loads('{"c": [0, 512], "a": [512, 4096], "r": [4096, 5120], "v": [9000000, 9002048]}')
    check_windows({name: tuple(ends) for name, ends in published.items()}, 64)
