"""Tiny random decoders of Hugging Face's, one a family, and folders that hold them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

from kvstages.models.huggingface import HuggingFaceDecoder

VOCABULARY, CONTEXT, LAYERS = 61, 64, 3
# Of a width that is no power of two, and large enough weights that attention is far from even.
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 40,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,
}
GROUPED = {**COMMON, "num_key_value_heads": 2, "intermediate_size": 48}
WIDE_HEADS = {**GROUPED, "head_dim": 12}
GPT2 = {"n_embd": 40, "n_layer": LAYERS, "n_head": 4, "n_positions": CONTEXT}
GPT2 = {**GPT2, "vocab_size": VOCABULARY, "initializer_range": 0.3}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
FULL = ["full_attention"] * LAYERS
MIMO_ROPE = {"full_attention": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}}
# Family: configuration class, its settings, and (KV heads, width of keys, width of values).
FAMILIES: dict[str, tuple[str, dict[str, Any], tuple[int, int, int]]] = {
    "gpt2": ("GPT2Config", GPT2, (4, 10, 10)),
    "llama": ("LlamaConfig", WIDE_HEADS, (2, 12, 12)),
    "mistral": ("MistralConfig", {**WIDE_HEADS, "sliding_window": 48}, (2, 12, 12)),
    "qwen2": ("Qwen2Config", GROUPED, (2, 10, 10)),
    "qwen3": ("Qwen3Config", WIDE_HEADS, (2, 12, 12)),
    "gemma2": ("Gemma2Config", {**WIDE_HEADS, "sliding_window": 32, "attn_logit_softcapping": 5.0}, (2, 12, 12)),
    "gemma3": ("Gemma3TextConfig", {**WIDE_HEADS, "sliding_window": 32}, (2, 12, 12)),
    "phi3": ("Phi3Config", {**GROUPED, "pad_token_id": 0}, (2, 10, 10)),
    "gpt-neox": ("GPTNeoXConfig", {**COMMON, "intermediate_size": 48}, (4, 10, 10)),
    "olmo2": ("Olmo2Config", GROUPED, (2, 10, 10)),
    "stablelm": ("StableLmConfig", {**GROUPED, "use_parallel_residual": True}, (2, 10, 10)),
    "gpt-bigcode": ("GPTBigCodeConfig", GPT2, (1, 10, 10)),
    "mixtral": ("MixtralConfig", {**WIDE_HEADS, "num_local_experts": 4}, (2, 12, 12)),
    # Keys and values of different width, and experts.
    "mimo-v2": (
        "MiMoV2FlashConfig",
        {
            **WIDE_HEADS,
            **EXPERTS,
            "v_head_dim": 7,
            "n_routed_experts": 4,
            "layer_types": FULL,
            "rope_parameters": MIMO_ROPE,
        },
        (2, 12, 7),
    ),
}


def config(family: str, **changed: Any) -> transformers.PreTrainedConfig:
    """The configuration of a family's tiny decoder."""
    name, settings, _ = FAMILIES[family]
    return getattr(transformers, name)(**{**settings, **changed})


def model(family: str, dtype: torch.dtype = torch.float64, **changed: Any) -> transformers.PreTrainedModel:
    """A random model, the same each time; biases and norms are random too."""
    torch.manual_seed(5)
    made = transformers.AutoModelForCausalLM.from_config(config(family, **changed), dtype=dtype)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape, dtype=dtype))
    return made.eval().requires_grad_(False)


@cache
def shared(family: str, dtype: torch.dtype = torch.float64) -> transformers.PreTrainedModel:
    """The same, made once: for tests that change nothing of it."""
    return model(family, dtype)


@cache
def decoder(family: str, dtype: torch.dtype = torch.float64) -> HuggingFaceDecoder:
    """The same, opened for measuring."""
    return HuggingFaceDecoder(shared(family, dtype), family, 32, "the limit")


def save(folder: Path, family: str = "llama", **settings: Any) -> Path:
    """A folder as a hub has it, in FP32: config.json and safetensors, in several files where ``settings`` say so."""
    model(family, torch.float32).save_pretrained(folder, **settings)
    return folder
