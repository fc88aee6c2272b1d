"""Device, threads, determinism and dtypes."""

from __future__ import annotations

import pytest
import torch
from click.testing import CliRunner
from models import random_model, random_tokens

from kvstages.cli import main
from kvstages.files.atomic import write_tensors
from kvstages.measure.setting import Setting, prepare
from kvstages.models.checkpoints import save_model


@pytest.fixture
def restored():
    """PyTorch's switches as they were."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture
def no_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_threads_are_set_and_determinism_is_on(device, no_cuda, restored):
    torch.use_deterministic_algorithms(False)
    for threads in (2, 1):
        assert prepare(device, threads) == torch.device("cpu")
        assert torch.get_num_threads() == threads
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()


def test_cuda_where_there_is_none_is_an_error(no_cuda):
    with pytest.raises(ValueError, match="device cuda: PyTorch finds no CUDA device here; set device to cpu or auto"):
        prepare("cuda", 1)


@pytest.mark.parametrize(
    "stage",
    [
        ["reference", "--window", "validation", "--output", "out"],
        ["sweep", "--window", "validation", "--layer", "0", "--output", "out"],
        [
            *("adapt", "--window", "validation", "--seed", "1", "--steps", "1", "--learning-rate", "1", "--beta", "1"),
            *("--output", "out", "--curve", "curve", "--record", "record"),
        ],
    ],
)
def test_a_stage_that_is_to_use_cuda_says_so_in_one_line(stage, no_cuda, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = random_model()
    save_model(tmp_path / "model.safetensors", model.config, model.state_dict())
    write_tensors(tmp_path / "windows.safetensors", {"validation": random_tokens()})
    files = ["--model", "model.safetensors", "--windows", "windows.safetensors"]
    result = CliRunner().invoke(main, [*stage, *files, "--device", "cuda"])
    assert result.exit_code == 1
    assert result.output == "Error: device cuda: PyTorch finds no CUDA device here; set device to cpu or auto\n"
    assert not (tmp_path / "out").exists()


def test_an_unknown_device_is_an_error():
    with pytest.raises(ValueError, match="device 'gpu': expected auto, cpu or cuda"):
        prepare("gpu", 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("serial", "float32"), "execution 'serial': expected one of one-pass, token-by-token"),
        (("one-pass", "float16"), "compute_dtype 'float16': expected one of bfloat16, float32, float64"),
    ],
)
def test_an_unknown_execution_or_dtype_is_an_error(words, message):
    with pytest.raises(ValueError, match=message):
        Setting(*words)
