"""Models of Hugging Face's on disk: which are opened, and which are refused in one line that says why."""

from __future__ import annotations

import json
import shutil
import socket
import sys
from pathlib import Path

import gguf
import pytest
import torch
import transformers
from click.testing import CliRunner
from huggingface_models import FAMILIES, VOCABULARY, model, save
from safetensors.torch import load_file, save_file

from kvstages.cli import main
from kvstages.models import load
from kvstages.models.config import DecoderShape, read_shape
from kvstages.models.decoder import CausalCache
from kvstages.models.huggingface_files import longest_text, planned_shape, read_config, record, weights_record
from kvstages.models.weights import model_digest

IDS = torch.arange(12).view(2, 6)
SHAPE = DecoderShape(3, 2, 12, 12, VOCABULARY, 64, 40, 4).as_dict()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("models") / "sharded", max_shard_size="20KB")


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    """A folder that a test may spoil."""
    return Path(shutil.copytree(folder, tmp_path / "model"))


def opened(path: Path, dtype: torch.dtype = torch.float32):
    return load.open_decoder(path, dtype, "cpu")


def invoke(*arguments: object) -> None:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output


def refused(path: Path, why: str) -> None:
    """One line that names the path and says ``why``."""
    with pytest.raises(ValueError, match=why) as caught:
        opened(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def configured(tmp_path: Path, config: transformers.PreTrainedConfig) -> Path:
    """A folder of which only the configuration is ever read."""
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not read")
    return tmp_path


def edit(path: Path, **changed: object) -> None:
    found = json.loads(path.read_text())
    path.write_text(json.dumps({**found, **changed}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_folder_is_opened_in_the_dtype_asked_for(folder, dtype):
    decoder = opened(folder, dtype)
    assert decoder.dtype == dtype
    assert decoder.device == torch.device("cpu")
    assert decoder.shape.as_dict() == SHAPE
    assert not any(parameter.requires_grad for parameter in decoder.model.parameters())
    assert not decoder.model.training


@torch.no_grad()
def test_one_file_and_several_hold_the_same_model(folder, sharded):
    assert len(list(sharded.glob("*.safetensors"))) > 2
    logits = [opened(path)(IDS, CausalCache()) for path in (folder, sharded)]
    assert torch.equal(*logits)


def test_nothing_is_downloaded_and_nothing_is_printed(folder, monkeypatch, capfd):
    def no_network(*_: object) -> None:
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    opened(folder)
    assert capfd.readouterr() == ("", "")


def test_without_the_library_one_line_says_what_to_install(folder, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("kvstages.models.huggingface")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("kvstages.models.huggingface_files")
    monkeypatch.setitem(sys.modules, "transformers", None)
    refused(folder, r"this needs transformers: pip install 'kvstages\[huggingface\]'$")


def test_the_record_says_what_the_model_is(folder):
    found = record(folder, opened(folder))
    assert found["architecture"] == "LlamaForCausalLM"
    assert found["shape"]["heads"] == 2
    digest = found["weights"].pop("digest")
    assert found["weights"] == {"format": "safetensors", "dequantized": False, "tensors": {"F32": 30}}
    assert digest == model_digest(model("llama", torch.float32))


# --- GGUF ---


def as_gguf(path: Path, quantized: gguf.GGMLQuantizationType) -> transformers.PreTrainedModel:
    """A Llama of width 64 in llama.cpp's format, and the model that it was made of, quantized likewise."""
    made = model("llama", torch.float32, hidden_size=64, head_dim=16, intermediate_size=96, tie_word_embeddings=False)
    config, state = made.config, made.state_dict()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in state.items():
        kind = quantized if tensor.dim() == 2 else gguf.GGMLQuantizationType.F32
        stored = gguf.quants.quantize(tensor.numpy(), kind)
        state[name] = torch.from_numpy(gguf.quants.dequantize(stored, kind))
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            # llama.cpp turns neighbouring values of a head, transformers the two halves.
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            stored = stored.reshape(heads, 2, -1, stored.shape[-1]).swapaxes(1, 2).reshape(stored.shape)
        writer.add_tensor(names.get_name(name, (".weight",)), stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    made.load_state_dict(state)
    return made


@torch.no_grad()
def test_a_gguf_file_is_opened_and_its_record_says_that_weights_are_dequantized(tmp_path, capfd):
    path = tmp_path / "tiny.gguf"
    made = as_gguf(path, gguf.GGMLQuantizationType.Q8_0)
    decoder = opened(path)
    assert capfd.readouterr() == ("", "")
    assert (decoder(IDS, CausalCache()) - made(IDS).logits).abs().max() < 1e-4
    assert decoder.shape.context == 64
    assert weights_record(path) == {"format": "gguf", "dequantized": True, "tensors": {"F32": 7, "Q8_0": 23}}


@torch.no_grad()
def test_a_gguf_file_is_converted_into_a_folder_that_every_stage_opens(tmp_path):
    path, folder = tmp_path / "tiny.gguf", tmp_path / "converted"
    as_gguf(path, gguf.GGMLQuantizationType.Q8_0)
    invoke("convert", "--checkpoint", path, "--output", folder)
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "decoder.json", "model.safetensors"]
    first, second = opened(path), opened(folder)
    assert torch.equal(first(IDS, CausalCache()), second(IDS, CausalCache()))
    assert read_shape(folder) == first.shape == second.shape
    made = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert json.loads(made["decoder.json"])["weights"]["dequantized"] is True
    invoke("convert", "--checkpoint", path, "--output", folder)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == made


def test_a_folder_gets_its_record_and_is_left_alone_otherwise(copied, tmp_path):
    before = {file.name: file.read_bytes() for file in copied.iterdir()}
    invoke("convert", "--checkpoint", copied, "--output", copied)
    after = {file.name: file.read_bytes() for file in copied.iterdir()}
    assert json.loads(after.pop("decoder.json"))["shape"] == read_shape(copied).as_dict()
    assert after == before
    result = CliRunner().invoke(main, ["convert", "--checkpoint", str(copied), "--output", str(tmp_path / "other")])
    assert result.exit_code == 1
    assert "a folder is measured where it is" in result.output


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (None, r"no decoder\.json in it"),
        ("{}", "expected a shape with layers, heads"),
        ('{"shape": {"layers": 3}}', "expected a shape with layers, heads"),
        (json.dumps({"shape": {**SHAPE, "heads": 0}}), "shape heads is 0, expected a whole number from 1"),
        (json.dumps({"shape": {**SHAPE, "width": "x"}}), "shape width is 'x', expected a whole number from 1"),
    ],
)
def test_a_record_without_a_shape_is_refused(tmp_path, record, message):
    if record is not None:
        (tmp_path / "decoder.json").write_text(record)
    with pytest.raises(ValueError, match=message):
        read_shape(tmp_path)


def test_gguf_files_that_are_none_are_refused(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"GGML and more")
    refused(tmp_path / "a.gguf", "not a GGUF file$")
    (tmp_path / "b.gguf").write_bytes(b"GGUF" + bytes(40))
    refused(tmp_path / "b.gguf", "cannot read its configuration: ")


# --- Limits of length ---


@pytest.mark.parametrize(
    ("family", "changed", "limit", "what"),
    [
        ("llama", {}, 64, "the model's context"),
        ("mistral", {}, 48, "the window of layer 0's attention"),
        ("gemma3", {"layer_types": ["full_attention", *["sliding_attention"] * 2]}, 32, "the window of layer 1's"),
        ("qwen2", {"sliding_window": 16}, 64, "the model's context"),  # use_sliding_window is off
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            64,
            "the model's context",
        ),
    ],
)
def test_the_longest_text_is_that_for_which_all_layers_are_full_attention(tmp_path, family, changed, limit, what):
    config = getattr(transformers, FAMILIES[family][0])(**{**FAMILIES[family][1], **changed})
    found, why = longest_text(tmp_path, read_config(configured(tmp_path, config)))
    assert found == limit
    assert why.startswith(what)


def test_a_text_longer_than_the_window_is_refused(tmp_path):
    decoder = opened(save(tmp_path / "model", "gemma2"))
    ids = torch.zeros(1, 33, dtype=torch.long)
    assert decoder.embed(ids[:, :32]).shape == (1, 32, 40)
    with pytest.raises(ValueError, match="33 tokens, but the window of layer 0's attention is 32 tokens"):
        decoder.embed(ids)


# --- Refused by configuration ---

SMALL = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 20}
REFUSED = {
    "deepseek": (lambda: transformers.DeepseekV3Config(**SMALL), "latent attention"),
    "t5": (lambda: transformers.T5Config(), "cross attention"),
    "gpt2 with an encoder": (lambda: transformers.GPT2Config(add_cross_attention=True), "cross attention"),
    "shared keys and values": (lambda: transformers.Gemma3nTextConfig(), "no keys and values of its own"),
    "recurrent": (lambda: transformers.MambaConfig(), "layer 0 is linear_attention"),
    "recurrent and attention": (lambda: transformers.Qwen3NextConfig(), "layer 0 is linear_attention"),
    "convolution": (
        lambda: transformers.Lfm2Config(**SMALL, layer_types=["full_attention", "conv"]),
        "layer 1 is conv",
    ),
    "no language model": (lambda: transformers.ViTConfig(), "no causal language model for vit"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_without_a_kv_cache_of_full_attention_are_refused(tmp_path, name):
    config, why = REFUSED[name]
    refused(configured(tmp_path, config()), why)


def test_a_model_that_sees_the_future_is_refused(tmp_path):
    config = transformers.BertConfig(**SMALL, intermediate_size=16, is_decoder=False, initializer_range=0.5)
    transformers.BertLMHeadModel(config).save_pretrained(tmp_path)
    refused(tmp_path, "run layer by layer, in one pass, its logits differ by .* from the library's")


def test_code_that_comes_with_a_model_is_never_run(copied):
    (copied / "modeling.py").write_text("raise SystemExit('ran')")
    edit(copied / "config.json", model_type="mine", auto_map={"AutoModelForCausalLM": "modeling.Mine"})
    refused(
        copied, r"'mine', is not one of transformers 5\.24\.0; code that comes with a model \(auto_map\) is never run"
    )


def test_a_model_that_the_library_knows_is_opened_without_the_code_beside_it(copied):
    (copied / "modeling.py").write_text("raise SystemExit('ran')")
    edit(copied / "config.json", auto_map={"AutoModelForCausalLM": "modeling.Mine"})
    assert opened(copied).shape.layers == 3


def test_quantized_weights_and_adapters_are_refused(copied):
    edit(copied / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    refused(copied, r"its weights are quantized \(gptq\)")
    (copied / "adapter_config.json").write_text("{}")
    refused(copied, "an adapter to another model")


# --- Refused by their files ---


def test_a_missing_shard_is_named(sharded, tmp_path):
    copy = Path(shutil.copytree(sharded, tmp_path / "model"))
    lost = sorted(copy.glob("*.safetensors"))[1]
    lost.unlink()
    refused(copy, f"the file {lost.name} is missing")


def test_an_index_cannot_point_out_of_its_folder(sharded, tmp_path):
    copy = Path(shutil.copytree(sharded, tmp_path / "model"))
    edit(copy / "model.safetensors.index.json", weight_map={"a": "../other/model.safetensors"})
    refused(copy, "is not a file of this folder")


def test_missing_tensors_are_never_drawn_at_random(copied):
    state = load_file(copied / "model.safetensors")
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, copied / "model.safetensors", {"format": "pt"})
    refused(copied, r"1 tensors of the model are missing, such as model\.layers\.1\.mlp\.up_proj\.weight")


def test_a_vocabulary_larger_than_the_embedding_is_refused(copied):
    edit(copied / "config.json", vocab_size=VOCABULARY + 3)
    refused(copied, r"weight has shape \[61, 40\], but its configuration asks for \[64, 40\]")


def test_damaged_weights_are_refused(copied):
    whole = (copied / "model.safetensors").read_bytes()
    (copied / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    refused(copied, "transformers cannot open it: ")


def test_weights_that_are_not_numbers_are_refused(copied):
    state = load_file(copied / "model.safetensors")
    state["model.norm.weight"][0] = float("nan")
    save_file(state, copied / "model.safetensors", {"format": "pt"})
    refused(copied, "its logits are not finite")


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({}, r"no config\.json"),
        ({"config.json": "{"}, "not JSON"),
        ({"config.json": "[1]"}, "expected an object, found list"),
        ({"config.json": "{}"}, "no weights in it"),
        ({"config.json": "{}", "pytorch_model.bin": ""}, r"found pytorch_model\.bin"),
        ({"config.json": "{}", "model.safetensors.index.json": "{}"}, "expected a weight_map"),
        (
            {"config.json": '{"model_type": "llama", "num_hidden_layers": "x"}', "model.safetensors": ""},
            "configuration",
        ),
    ],
)
def test_folders_without_a_model_are_refused(tmp_path, files, why):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    refused(tmp_path, why)


def test_a_dtype_that_the_device_lacks_is_refused(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Old GPU")
    with pytest.raises(ValueError, match="Old GPU does not compute in bfloat16"):
        load.open_decoder(folder, torch.bfloat16, "cuda")


@pytest.mark.parametrize("family", ["gpt-bigcode", "mixtral", "mimo-v2"])
def test_the_shape_is_known_from_the_configuration_alone(tmp_path, family):
    """With experts, too, and where keys and values differ in width."""
    saved = save(tmp_path / "model", family)
    (saved / "model.safetensors").unlink()
    shape = planned_shape(saved)
    assert (shape.heads, *shape.widths, shape.vocabulary) == (*FAMILIES[family][2], VOCABULARY)
