import os
import pickle
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner

from kvstages.cli import main
from kvstages.files.atomic import write_tensors
from kvstages.files.read import read_tensors
from kvstages.models.checkpoints import load_model, read_checkpoint, save_model
from kvstages.models.config import GPTConfig, read_config
from kvstages.models.gpt2_nano import GPT

CONFIG = GPTConfig(vocab_size=11, context_len=8, embedding_dim=12, num_layers=2, num_heads=3)


@pytest.fixture
def state():
    torch.manual_seed(3)
    return GPT(CONFIG).state_dict()


def published_form(state, **config):
    """What the published checkpoint holds: masks among the tensors, leftovers of training beside them."""
    masks = {f"blocks.{layer}.causal_mask": torch.ones(8, 8).tril() for layer in range(CONFIG.num_layers)}
    return {
        "config": {**CONFIG.as_dict(), "dropout": 0.0, **config},
        "model_state_dict": {**state, **masks},
        "optimizer_state_dict": {"state": {0: {"exp_avg": torch.zeros(2)}}, "param_groups": [{"lr": 1e-3}]},
        "step": 7,
        "loss": 3.5,
    }


def convert(tmp_path, content):
    """Run the command on a checkpoint (bytes, or what torch.save is to keep); the one line it ends with."""
    checkpoint, output = tmp_path / "final.pt", tmp_path / "out" / "model.safetensors"
    if isinstance(content, bytes):
        checkpoint.write_bytes(content)
    else:
        torch.save(content, checkpoint)
    result = CliRunner().invoke(main, ["convert", "--checkpoint", str(checkpoint), "--output", str(output)])
    if result.exit_code == 0:
        return output
    assert result.exit_code == 1
    assert not output.parent.exists()
    lines = result.output.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"Error: {checkpoint}: ")
    return lines[0].removeprefix(f"Error: {checkpoint}: ")


def test_convert_keeps_the_model_and_nothing_else(tmp_path, state):
    output = convert(tmp_path, published_form(state))
    tensors, record = read_tensors(output)
    assert record == {"config": CONFIG.as_dict()}
    assert tensors.keys() == state.keys()
    assert all(torch.equal(tensors[name], state[name]) for name in state)
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())
    assert read_config(output) == CONFIG


def test_converting_again_gives_the_same_bytes(tmp_path, state):
    first = convert(tmp_path, published_form(state))
    second = tmp_path / "second.safetensors"
    arguments = ["convert", "--checkpoint", str(first), "--output", str(second)]
    assert CliRunner().invoke(main, arguments).exit_code == 0
    assert first.read_bytes() == second.read_bytes()


def test_bfloat16_weights_are_kept_exactly_in_fp32(tmp_path, state):
    halved = {name: tensor.to(torch.bfloat16) for name, tensor in state.items()}
    tensors, _ = read_tensors(convert(tmp_path, published_form(halved)))
    assert tensors["lm_head.weight"].dtype == torch.float32
    assert torch.equal(tensors["lm_head.weight"], halved["lm_head.weight"].float())


def test_loaded_model_computes_the_same_and_is_frozen(tmp_path, state):
    original = GPT(CONFIG)
    original.load_state_dict(state)
    path = tmp_path / "model.safetensors"
    save_model(path, CONFIG, state)
    before = torch.get_rng_state()
    model = load_model(path, torch.float32, "cpu")
    assert torch.equal(torch.get_rng_state(), before), "loading draws no random numbers"
    tokens = torch.tensor([[1, 2, 3, 10]])
    with torch.no_grad():
        assert torch.equal(model(tokens), original(tokens))
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    halved = load_model(path, torch.bfloat16, "cpu")
    assert {tensor.dtype for tensor in halved.state_dict().values()} == {torch.bfloat16}


class RunsCode:
    """Unpickled carelessly, leaves a file behind."""

    def __init__(self, witness):
        self.witness = witness

    def __reduce__(self):
        return os.mkdir, (str(self.witness),)


@pytest.mark.parametrize("form", ["zip", "legacy", "pickle 2", "pickle 4"])
def test_a_pickle_that_tries_to_run_code_is_refused(tmp_path, state, form):
    witness, checkpoint = tmp_path / "ran", tmp_path / "evil.pt"
    content = {**published_form(state), "step": RunsCode(witness)}
    if form.startswith("pickle"):
        checkpoint.write_bytes(pickle.dumps(RunsCode(witness), protocol=int(form[-1])))
    else:
        torch.save(content, checkpoint, _use_new_zipfile_serialization=form == "zip")
    message = convert(tmp_path, checkpoint.read_bytes())
    assert "holds more than tensors" in message
    assert "is refused: loading it could run code" in message
    assert ("posix.mkdir" in message) == (form == "zip")
    assert not witness.exists()


def test_a_whole_module_is_refused(tmp_path):
    assert "holds more than tensors" in convert(tmp_path, {"config": torch.nn.Linear(2, 2)})


@pytest.mark.parametrize("content", [b"", b"hello world" * 20, bytes(1000), bytes(range(256)) * 4, b"PK\x03\x04junk"])
def test_garbage(tmp_path, content):
    assert convert(tmp_path, content) == "not a readable PyTorch file (truncated, damaged or of another kind)"


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_truncated(tmp_path, state, share):
    torch.save(published_form(state), tmp_path / "whole.pt")
    data = (tmp_path / "whole.pt").read_bytes()
    message = convert(tmp_path, data[: int(share * len(data))])
    assert message == "not a readable PyTorch file (truncated, damaged or of another kind)"


def test_truncated_safetensors(tmp_path, state):
    path, output = tmp_path / "model.safetensors", tmp_path / "out.safetensors"
    save_model(path, CONFIG, state)
    path.write_bytes(path.read_bytes()[:-8])
    result = CliRunner().invoke(main, ["convert", "--checkpoint", str(path), "--output", str(output)])
    assert result.exit_code == 1
    assert result.output.startswith(f"Error: {path}: not a safetensors file")
    assert len(result.output.splitlines()) == 1
    assert not output.exists()


def test_safetensors_without_a_configuration(tmp_path, state):
    write_tensors(tmp_path / "model.safetensors", state)
    with pytest.raises(ValueError, match="no model configuration in its header"):
        read_checkpoint(tmp_path / "model.safetensors")


def test_missing_file_and_other_ending(tmp_path):
    with pytest.raises(OSError, match=r"No such file or directory: .*none\.pt"):
        read_checkpoint(tmp_path / "none.pt")
    with pytest.raises(ValueError, match=r"model\.bin: a checkpoint ends in \.pt or \.safetensors"):
        read_checkpoint(tmp_path / "model.bin")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ([1], "holds list, expected config and model_state_dict"),
        ({"config": {}}, "lacks model_state_dict; expected config and model_state_dict, found config"),
        ({"step": 1}, "lacks config and model_state_dict; expected config and model_state_dict, found step"),
        ({"config": {}, "model_state_dict": 3}, "model_state_dict is int, expected tensors by name"),
        ({"config": [], "model_state_dict": {}}, "config is list, expected a mapping of the model's shape"),
    ],
)
def test_other_contents(tmp_path, content, expected):
    assert convert(tmp_path, content) == expected


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"num_kv_heads": 1}, "config has unknown keys num_kv_heads; expected vocab_size, context_len,"),
        ({"num_heads": 5}, "config embedding_dim 12 is not a multiple of num_heads 5"),
        ({"embedding_dim": 9}, "config embedding_dim 9 is odd"),
        ({"num_layers": 0}, "config num_layers is 0, expected a whole number of at least 1"),
        ({"vocab_size": 11.0}, "config vocab_size is 11.0, expected a whole number of at least 1"),
        ({"context_len": True}, "config context_len is True, expected a whole number of at least 1"),
    ],
)
def test_wrong_config(tmp_path, state, change, expected):
    assert convert(tmp_path, published_form(state, **change)).startswith(expected)


def test_config_lacks_keys(tmp_path, state):
    content = published_form(state)
    del content["config"]["num_heads"], content["config"]["vocab_size"]
    assert convert(tmp_path, content) == "config lacks vocab_size, num_heads"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"lm_head.bias": None}, "missing tensors: lm_head.bias"),
        ({"lm_head.bias": None, "head.b": torch.ones(11)}, "missing tensors: lm_head.bias; found instead: head.b"),
        ({"ln_f.weight": torch.ones(12)}, "tensors that the model does not have: ln_f.weight"),
        ({"blocks.2.causal_mask": torch.ones(8, 8)}, "tensors that the model does not have: blocks.2.causal_mask"),
        ({"blocks.1.K.weight": torch.ones(12, 6)}, "blocks.1.K.weight has shape [12, 6], expected [12, 12]"),
        ({"pos_embedding": torch.ones(8, 12)}, "pos_embedding has shape [8, 12], expected [1, 8, 12]"),
        ({"lm_head.bias": torch.ones(11, dtype=torch.int64)}, "lm_head.bias is int64, expected floating point"),
        ({"lm_head.bias": [0.0] * 11}, "lm_head.bias is list, expected a tensor"),
        ({"lm_head.bias": torch.ones(11).to_sparse()}, "lm_head.bias is stored as sparse_coo, expected a dense tensor"),
        (
            {"lm_head.bias": torch.ones(11, device="meta")},
            "lm_head.bias has a shape and no numbers (device meta): save the model with its weights loaded",
        ),
        (
            {"module.lm_head.bias": torch.ones(11)},
            "lm_head.bias and module.lm_head.bias are both lm_head.bias once prefixes are taken off",
        ),
        ({"lm_head.bias": torch.ones(11).to(torch.complex64)}, "lm_head.bias is complex64, expected floating point"),
        ({"lm_head.bias": torch.full((11,), float("nan"))}, "lm_head.bias holds NaN or infinity"),
        ({"lm_head.bias": torch.full((11,), 1e300, dtype=torch.float64)}, "lm_head.bias holds NaN or infinity"),
    ],
)
def test_wrong_tensors(tmp_path, state, change, expected):
    content = published_form(state)
    for name, tensor in change.items():
        if tensor is None:
            del content["model_state_dict"][name]
        else:
            content["model_state_dict"][name] = tensor
    assert convert(tmp_path, content) == expected


def test_many_missing_tensors_are_counted(tmp_path):
    message = convert(tmp_path, published_form({}))
    assert message == (
        "missing tensors: input_embedding.weight, blocks.0.attn_norm.weight, blocks.0.attn_norm.bias and 28 more"
    )


def test_tied_tensors_convert_to_tensors_of_their_own(tmp_path, state):
    """The output layer with the embedding, one bias for three projections, and parts of one tensor."""
    state["lm_head.weight"] = state["input_embedding.weight"]
    state["blocks.0.V.bias"] = state["blocks.0.Q.bias"] = state["blocks.0.K.bias"]
    both = torch.randn(2 * CONFIG.embedding_dim)
    state["blocks.1.Q.bias"], state["blocks.1.V.bias"] = both.chunk(2)
    tensors, _ = read_tensors(convert(tmp_path, published_form(state)))
    assert all(torch.equal(tensors[name], state[name]) for name in state)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "model.", "module._orig_mod.", "_orig_mod.module.model."])
def test_prefixes_of_wrappers_are_taken_off(tmp_path, state, prefix):
    content = published_form(state)
    content["model_state_dict"] = {prefix + name: tensor for name, tensor in content["model_state_dict"].items()}
    tensors, _ = read_tensors(convert(tmp_path, content))
    assert tensors.keys() == state.keys() and all(torch.equal(tensors[name], state[name]) for name in state)


def test_layers_that_were_compiled_one_by_one(tmp_path, state):
    content = published_form({name.replace("blocks.1.", "blocks.1._orig_mod."): state[name] for name in state})
    assert read_tensors(convert(tmp_path, content))[0].keys() == state.keys()


def test_positions_are_a_formula_and_may_be_missing(tmp_path, state):
    fewer = {name: tensor for name, tensor in state.items() if name != "pos_embedding"}
    tensors, _ = read_tensors(convert(tmp_path, published_form(fewer)))
    assert torch.equal(tensors["pos_embedding"], state["pos_embedding"])


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
INDEX = b'{"weight_map": {"a": "x-1.safetensors", "b": "x-2.safetensors", "c": "x-2.safetensors"}}'


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("final.pt", POINTER, "a pointer of Git LFS, not the weights: run `git lfs pull` where it comes from"),
        ("model.safetensors", POINTER, "a pointer of Git LFS, not the weights: run `git lfs pull`"),
        ("model.safetensors.index.json", INDEX, "an index of weights in 2 files, not the weights: join these into one"),
        ("pytorch_model.bin.index.json", b"[]", "an index of weights in several files, not the weights: join these"),
        ("model-00001-of-00012.safetensors", b"", "one of 12 files with a part of the weights each: join these into"),
        ("pytorch_model-2-of-2.pt", b"", "one of 2 files with a part of the weights each: join these into one file"),
        ("model-00001-of-00001.safetensors", b"", "not a safetensors file"),
    ],
)
def test_what_stands_for_weights_says_what_to_do(tmp_path, name, content, expected):
    (tmp_path / name).write_bytes(content)
    words = ["convert", "--checkpoint", str(tmp_path / name), "--output", str(tmp_path / "out.safetensors")]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 1 and result.output.count("\n") == 1
    assert result.output.startswith(f"Error: {tmp_path / name}: {expected}")


def test_the_shape_is_read_without_torch(tmp_path, state):
    save_model(tmp_path / "model.safetensors", CONFIG, state)
    program = (
        "import sys; from pathlib import Path; from kvstages.models.config import read_config;"
        "print(read_config(Path(sys.argv[1])).num_heads, 'torch' in sys.modules, 'numpy' in sys.modules)"
    )
    arguments = [sys.executable, "-c", program, str(tmp_path / "model.safetensors")]
    assert subprocess.run(arguments, capture_output=True, text=True, check=True).stdout == "3 False False\n"


@pytest.mark.parametrize("content", [b"", b"\x05", (100).to_bytes(8, "little") + b"{}", b"\x02" + bytes(7) + b"[]"])
def test_read_config_of_other_files(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="not a safetensors file, or a truncated one"):
        read_config(tmp_path / "model.safetensors")


def test_save_model_refuses_a_state_that_is_not_the_models(tmp_path, state):
    del state["lm_head.bias"]
    with pytest.raises(ValueError, match=r"missing tensors: lm_head\.bias"):
        save_model(tmp_path / "model.safetensors", CONFIG, state)
    assert list(tmp_path.iterdir()) == []


def test_another_number_of_layers_than_the_study_says_is_refused(tmp_path, state):
    torch.save(published_form(state), tmp_path / "model.pt")
    output = tmp_path / "model.safetensors"
    words = ["convert", "--checkpoint", str(tmp_path / "model.pt"), "--output", str(output), "--layers"]
    result = CliRunner().invoke(main, [*words, "3"])
    assert result.exit_code == 1 and not output.exists()
    assert result.output == f"Error: {tmp_path}/model.pt: a model of 2 layers, expected 3, as its study says\n"
    assert CliRunner().invoke(main, [*words, "2"]).exit_code == 0
