"""The decoder against its description, written out position by position."""

from __future__ import annotations

import math

import pytest
import torch
from models import random_model, random_tokens

from kvstages.models.decoder import CausalCache
from kvstages.models.gpt2_nano import GPT, GPTConfig, sinusoidal_positions


def layer_norm(x, norm):
    centred = x - x.mean()
    return centred / torch.sqrt((centred**2).mean() + 1e-5) * norm.weight + norm.bias


def by_hand(model: GPT, tokens: list[int]) -> torch.Tensor:
    """Logits [T, V]: pre-norm, no output projection, ReLU, no final norm, an untied head with bias."""
    width = model.config.head_dim
    xs = []
    for position, token in enumerate(tokens):
        place = torch.zeros(model.config.embedding_dim)
        for i in range(0, model.config.embedding_dim, 2):
            angle = position / 10_000 ** (i / model.config.embedding_dim)
            place[i], place[i + 1] = math.sin(angle), math.cos(angle)
        xs.append(model.input_embedding.weight[token] + place)
    for block in model.blocks:
        normed = [layer_norm(x, block.attn_norm) for x in xs]
        q, k, v = ([linear.weight @ x + linear.bias for x in normed] for linear in (block.Q, block.K, block.V))
        for t in range(len(xs)):
            for head in range(model.config.num_heads):
                part = slice(head * width, (head + 1) * width)
                scores = torch.stack([q[t][part] @ k[s][part] / math.sqrt(width) for s in range(t + 1)])
                weights = torch.softmax(scores, 0)
                xs[t] = xs[t].clone()
                xs[t][part] += sum(weights[s] * v[s][part] for s in range(t + 1))
        for t in range(len(xs)):
            up, down = block.mlp[0], block.mlp[2]
            hidden = torch.clamp(up.weight @ layer_norm(xs[t], block.mlp_norm) + up.bias, min=0)
            xs[t] = xs[t] + down.weight @ hidden + down.bias
    return torch.stack([model.lm_head.weight @ x + model.lm_head.bias for x in xs])


def test_the_decoder_is_the_one_described():
    model, tokens = random_model(2, 2, 4), random_tokens(2, 7)
    logits = model(tokens)
    for block in range(2):
        assert torch.allclose(logits[block], by_hand(model, tokens[block].tolist()), atol=1e-4)


def test_parameters_have_the_published_names_and_number():
    """184 tensors with the published causal masks, which this model does not need: 172 without."""
    state = GPT(GPTConfig(30, 16, 16, 12, 2)).state_dict()
    assert len(state) + 12 == 184
    assert state["pos_embedding"].shape == (1, 16, 16)
    assert {name.split(".", 2)[2] for name in state if name.startswith("blocks.3.")} == {
        f"{part}.{kind}"
        for part in ("Q", "K", "V", "attn_norm", "mlp_norm", "mlp.0", "mlp.2")
        for kind in ("weight", "bias")
    }
    assert {name for name in state if not name.startswith("blocks.")} == {
        "input_embedding.weight",
        "pos_embedding",
        "lm_head.weight",
        "lm_head.bias",
    }


def test_positions_of_odd_widths_are_cut():
    table = sinusoidal_positions(5, 7)
    assert table.shape == (1, 5, 7)
    assert float(table[0, 3, 6]) == pytest.approx(math.sin(3 / 10_000 ** (6 / 7)), rel=1e-5)


def test_without_a_cache_attention_is_causal():
    model, tokens = random_model(), random_tokens()
    changed = tokens.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % 50
    before, after = model(tokens, CausalCache()), model(changed)
    assert torch.equal(before[:, :6], after[:, :6]) and not torch.equal(before[:, 6:], after[:, 6:])


@pytest.mark.parametrize("maker", ["GenuineIntel", "AuthenticAMD"])
@pytest.mark.parametrize("vocab", [50, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packing_changes_neither_results_nor_parameters(dtype, vocab, maker, monkeypatch):
    monkeypatch.setattr("kvstages.models.gpt2_nano.vendor", lambda: maker)
    plain = random_model(3, 2, 8, vocab, dtype=dtype)
    packed = random_model(3, 2, 8, vocab, dtype=dtype).pack()
    for shape in ((1, 1), (3, 1), (4, 9)):
        tokens = random_tokens(*shape, vocab=vocab)
        expected, found = plain(tokens), packed(tokens)
        assert found.shape == expected.shape and found.dtype == dtype
        within = {"rtol": 0.02, "atol": 0.02} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
        assert torch.allclose(found, expected, **within)
    assert plain.state_dict().keys() == packed.state_dict().keys()
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, packed.state_dict()[name])


def test_a_packed_decoder_multiplies_with_its_copy():
    model, tokens = random_model(dtype=torch.bfloat16).pack(), random_tokens()
    if model.lm_head.packed is None:
        pytest.skip("oneDNN has no BF16 on this processor")
    before = model(tokens)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.zero_()
    assert torch.equal(model(tokens), before)
