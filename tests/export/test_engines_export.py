"""Exports: what each engine makes of a policy, word for word, its bytes by hand, and what it cannot express."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from models import identified

from kvstages.cache.precision_grid import PrecisionGrid
from kvstages.cache.precisions import bits_of
from kvstages.cache.schemes import precision
from kvstages.cli import main
from kvstages.export.engine import Cache, allocated, engine_bytes, projected
from kvstages.export.engines import ENGINES
from kvstages.export.llama_cpp import rotation
from kvstages.files.atomic import write_json
from kvstages.models.config import DecoderShape
from kvstages.models.identity import ModelIdentity
from kvstages.policies.making import policy_record
from kvstages.policies.record import read_policy

CACHE = Cache(layers=4, heads=2, widths=(64, 64), tokens=10)
# Highest of the layers: bf16, int8, int4, int4.
ROWS = [["bf16", "int8"], ["int8", "int4"], ["int4", "int4"], ["int4", "int3"]]
# bf16, int8, int8, int4.
HIGHER = [["bf16", "int8"], ["int8", "int4"], ["int8", "int8"], ["int4", "int3"]]


def words(engine: str, rows: list[list[str]], cache: Cache = CACHE, values: list[list[str]] | None = None) -> str:
    grid = PrecisionGrid(tuple(map(tuple, rows)), tuple(map(tuple, values or rows)))
    layers, _ = projected(ENGINES[engine], grid, cache)
    return ENGINES[engine].text(layers)


def policy(rows: list[list[str]], path: Path, cache: Cache = CACHE) -> Path:
    grid = PrecisionGrid.of_heads(rows)
    record = policy_record(
        "mine", "exact", None, grid, 0.5, 0, cache.widths, cache.tokens,
        unit="head", ladder=["bf16", "int8", "int4", "int3"], sensitivity="measured-float32",
    )  # fmt: skip
    shape = DecoderShape(cache.layers, cache.heads, *cache.widths, 64, 64, 64, cache.heads)
    made = identified(record, ModelIdentity(shape, "a" * 64), record["ladder"])
    write_json(path, made | {"execution": "one-pass", "compute_dtype": "float32"})
    return path


def test_vllm_has_two_tiers():
    # A vector takes 128, 68 or 36 bytes. INT4 where it is enough, the rest in BF16: 328; with INT8 it would be 332.
    assert words("vllm", ROWS) == "--kv-cache-dtype int4_per_token_head --kv-cache-dtype-skip-layers 0 1\n"
    # 332 with INT8, 420 with INT4.
    assert words("vllm", HIGHER) == "--kv-cache-dtype int8_per_token_head --kv-cache-dtype-skip-layers 0\n"
    assert words("vllm", [["int8", "int8"]] * 4) == "--kv-cache-dtype int8_per_token_head\n"
    assert words("vllm", [["bf16", "bf16"]] * 4) == "--kv-cache-dtype auto\n"


def test_a_policy_of_an_engines_own_formats_stays_as_it_is():
    assert words("vllm", [["fp8_e4m3", "fp8_e4m3"]] * 4) == "--kv-cache-dtype fp8_e4m3\n"
    assert words("llama-cpp", [["q4_1-hadamard"] * 2] * 4) == (
        "--cache-type-k q4_1 --cache-type-v q4_1 --flash-attn on\n"
    )


def test_modelopt_names_layers():
    found = json.loads(words("modelopt", ROWS))
    assert found["producer"] == {"name": "modelopt"}
    assert found["quantization"] == {
        "kv_cache_quant_algo": "MIXED_PRECISION",
        "kv_cache_quantized_layers": {
            "model.layers.1.self_attn": {"quant_algo": "FP8"},
            "model.layers.2.self_attn": {"quant_algo": "NVFP4"},
            "model.layers.3.self_attn": {"quant_algo": "NVFP4"},
        },
        "kv_cache_schema_version": 1,
    }
    apart = json.loads(words("modelopt", [["int8"] * 2] * 4, values=[["int4"] * 2] * 3 + [["bf16"] * 2]))
    algorithms = apart["quantization"]["kv_cache_quantized_layers"]
    # INT8 keys with BF16 values are nothing that ModelOpt has: that layer stays as it is.
    assert [each["quant_algo"] for each in algorithms.values()] == ["FP8_K_NVFP4_V"] * 3
    # INT4 keys with INT8 values become FP8 for both.
    raised = json.loads(words("modelopt", [["int4"] * 2] * 4, values=[["int8"] * 2] * 4))
    assert raised["quantization"] == {"kv_cache_quant_algo": "FP8"}


def test_llama_cpp_has_one_type_for_keys_and_one_for_values():
    keys, values = [["int8", "int4"]] * 4, [["int4", "int3"]] * 4
    assert words("llama-cpp", keys, values=values) == "--cache-type-k q8_0 --cache-type-v q4_0 --flash-attn on\n"
    assert words("llama-cpp", ROWS) == "--cache-type-k f16 --cache-type-v f16\n"


def test_ik_llama_cpp_has_first_and_last_layers():
    assert words("ik-llama-cpp", ROWS) == (
        "-ctk q8_0 -ctk-first f16,1 -ctk-last q4_0,2 -ctv q8_0 -ctv-first f16,1 -ctv-last q4_0,2 -khad -vhad -fa on\n"
    )
    # The layer in the middle takes its neighbours with it.
    middle = [["int4"] * 2, ["int8"] * 2, ["int4"] * 2, ["int8"] * 2]
    assert words("ik-llama-cpp", middle, values=[["bf16"] * 2] * 4) == ("-ctk q8_0 -ctk-first q4_0,1 -ctv f16 -khad\n")


def test_kvtuner_has_every_layer_but_no_16_bits():
    found = yaml.safe_load(words("kvtuner", [["int8", "int4"], ["int2", "int3"]], Cache(2, 2, (64, 64), 10)))
    assert found == {0: {"nbits_key": 8, "nbits_value": 8}, 1: {"nbits_key": 4, "nbits_value": 4}}
    with pytest.raises(ValueError, match=r"^kvtuner: has nothing of 16 bits or more for bf16$"):
        words("kvtuner", ROWS)


@pytest.mark.parametrize("name", ENGINES)
@given(data=st.data())
def test_no_unit_gets_fewer_bits(name, data):
    engine, cache = ENGINES[name], Cache(3, 2, (32, 32), 5)
    ladder = ["int8", "int4", "int3", "int2"] + (["bf16"] if name != "kvtuner" else [])
    draw = st.lists(st.lists(st.sampled_from(ladder), min_size=2, max_size=2), min_size=3, max_size=3)
    grid = PrecisionGrid(*(tuple(map(tuple, data.draw(draw))) for _ in "kv"))
    layers, _ = projected(engine, grid, cache)
    own = cache.grid(layers)
    assert all(bits_of(b) >= bits_of(a) for a, b in zip(grid.flat(), own.flat(), strict=True))
    # What the engine runs, exported again, is the same.
    assert projected(engine, own, cache)[0] == layers and engine.text(layers).endswith("\n")


def test_bytes_are_those_of_the_engines_layouts():
    """One layer, one token, two heads of width 64: what each engine's source says a vector takes."""
    one = Cache(1, 2, (64, 64), 1)
    by_hand = {
        "int8_per_token_head": 64 + 4,
        "int4_per_token_head": 32 + 4,
        "fp8_per_token_head": 64 + 4,
        "fp8_e4m3": 64,
        "nvfp4": 32 + 4,
        "q8_0-hadamard": 2 * 34,
        "q5_1-hadamard": 2 * 24,
        "q5_0-hadamard": 2 * 22,
        "q4_1-hadamard": 2 * 20,
        "q4_0-hadamard": 2 * 18,
        "int8-zero": 64 + 4,
        "int4-zero": 32 + 4,
        "int2-zero": 16 + 4,
        "bf16": 128,
    }
    found = {
        form.precision: engine_bytes([(form, form)], one)
        for engine in ENGINES.values()
        for form in engine.formats((64, 64))
    }
    assert found == {name: 2 * 2 * size for name, size in by_hand.items()}


@pytest.mark.parametrize(
    ("width", "options"),
    [(32, ""), (64, "-hadamard"), (96, ""), (128, "-k.hadamard+v.hadamard64"), (192, "-hadamard64"),
     (256, "-k.hadamard+v.hadamard64"), (384, "-k.hadamard128+v.hadamard64")],
)  # fmt: skip
def test_llama_cpps_rotation_is_by_width(width, options):
    assert rotation((width, width)) == options


@pytest.mark.parametrize("widths", [(64, 32), (128, 64), (192, 128), (96, 64)])
@pytest.mark.parametrize("name", ["llama-cpp", "ik-llama-cpp", "vllm"])
def test_keys_and_values_of_different_width_have_formats_of_their_own(name, widths):
    cache = Cache(2, 2, widths, 10)
    formats = ENGINES[name].fitting(widths)
    assert all(form.precision == "bf16" or precision(form.precision).text == form.precision for form in formats)
    eight = next(form for form in formats if bits_of(form.precision) == 8)
    # 34 bytes a block of 32, or a byte a value and an FP32 scale.
    each = [width // 32 * 34 if "q8_0" in eight.precision else width + 4 for width in widths]
    assert engine_bytes([(eight, eight)] * 2, cache) == 2 * 2 * 10 * sum(each)
    layers, _ = projected(ENGINES[name], PrecisionGrid.uniform(2, 2, "int8"), cache)
    assert layers == [(eight, eight)] * 2


def test_what_is_not_rotated_is_not_asked_to_be():
    assert rotation((64, 32)) == "-k.hadamard" and rotation((32, 64)) == "-v.hadamard"
    told = words("ik-llama-cpp", [["int8"] * 2] * 2, Cache(2, 2, (96, 64), 10))
    assert told == "-ctk q8_0 -ctv q8_0 -vhad -fa on\n"


def test_narrow_heads_are_refused_in_a_line():
    with pytest.raises(ValueError, match=r"^llama-cpp: heads of width 16 have no whole groups of 32$"):
        words("llama-cpp", ROWS, Cache(4, 2, (16, 16), 10))
    assert words("vllm", HIGHER, Cache(4, 2, (16, 16), 10)).startswith("--kv-cache-dtype int8_per_token_head")
    # A randomized Hadamard matrix has a power of two: no INT4 here, and INT8 stands for it.
    assert words("vllm", [["int4"] * 2] * 4, Cache(4, 2, (24, 24), 10)) == "--kv-cache-dtype int8_per_token_head\n"


def test_an_allocation_for_the_engine_has_its_bytes():
    import numpy as np

    engine, cache = ENGINES["vllm"], Cache(3, 2, (64, 64), 10)
    costs = {"int8_per_token_head": np.array([9.0, 9.0, 1.0, 1.0, 1.0, 1.0]), "int4_per_token_head": np.full(6, 90.0)}
    full, int8 = cache.sizes(engine.formats((64, 64)))[0][:2]
    layers = allocated(engine, costs, cache, int(2 * full + 4 * int8))
    assert engine.text(layers) == "--kv-cache-dtype int8_per_token_head --kv-cache-dtype-skip-layers 0\n"
    with pytest.raises(ValueError, match=r"^vllm: no setting of the engine takes 10 bytes"):
        allocated(engine, costs, cache, 10)


def test_export_writes_the_policy_that_the_engine_runs(tmp_path):
    path = policy(HIGHER, tmp_path / "policy.json")
    result = CliRunner().invoke(main, ["export", str(path), "--engine", "vllm", "--output", str(tmp_path / "out")])
    assert result.exit_code == 0 and "Triton" in result.output
    made = json.loads((tmp_path / "out" / "policy.json").read_text())
    assert made["precisions"]["keys"] == [["bf16"] * 2, *[["int8_per_token_head"] * 2] * 3]
    assert (made["policy"], made["allocator"], made["unit"], made["proxy"]) == ("mine", "projected", "layer", None)
    record = json.loads((tmp_path / "out" / "export.json").read_text())
    assert record["formats"] == {
        "bf16": "auto", "int8": "int8_per_token_head", "int4": "int4_per_token_head", "int3": "int4_per_token_head"
    }  # fmt: skip
    # One head of layer 0, one of layer 1, both of layer 3 have more bits than before: keys and values.
    assert record["tensors"] == 16 and record["tensors_with_more_bits"] == 2 * (1 + 1 + 2)
    assert record["bytes"]["engine"] == 10 * 2 * 2 * (128 + 3 * 68) and record["bytes"]["bf16"] == 10 * 16 * 128
    assert record["bytes"]["policy"] == 10 * 2 * (128 + 66 + 66 + 34 + 66 + 66 + 34 + 26)
    assert (tmp_path / "out" / "flags.txt").read_text().startswith("--kv-cache-dtype")
    made = json.loads((tmp_path / "out" / "policy.json").read_text())
    assert made["model"]["weights"] == "a" * 64 and "int8_per_token_head" in made["schemes"]
    read_policy(tmp_path / "out" / "policy.json", None)


def test_what_is_no_policy_is_refused_without_output(tmp_path):
    write_json(tmp_path / "policy.json", {"policy": "x"})
    words_ = ["export", str(tmp_path / "policy.json"), "--engine", "vllm", "--output", str(tmp_path / "out")]
    result = CliRunner().invoke(main, words_)
    assert result.exit_code == 1 and "key 'precisions' is missing" in result.output
    narrow = policy(ROWS, tmp_path / "narrow.json", Cache(4, 2, (16, 16), 10))
    result = CliRunner().invoke(main, ["export", str(narrow), "--engine", "llama-cpp", "--output", str(tmp_path / "o")])
    assert result.exit_code == 1 and "no whole groups of 32" in result.output
    assert not (tmp_path / "out").exists() and not (tmp_path / "o").exists()
