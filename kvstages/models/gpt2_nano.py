"""The gpt2-nano decoder. It hands keys and values to a KV cache's ``update`` and attends to what comes back; all else
that it asks is how many tokens the cache has ``seen`` and which of them a query may see (``mask``).

Architecture (docs/method.md, "Decoder"): token embedding plus fixed sinusoidal positions; each block is
pre-norm, x + attention(LayerNorm(x)) with separate Q, K, V and *no* output projection, then
x + MLP(LayerNorm(x)) with a ReLU; no final norm; an untied ``lm_head`` with bias.

Axes: B batch (blocks), T new tokens, S tokens seen, L layers, H heads, D head width, E = H * D, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from kvstages.files import ledger
from kvstages.models.block_attention import attend
from kvstages.models.config import DecoderShape, GPTConfig
from kvstages.models.decoder import Cache, CausalCache, Choice, Key, Known, mix_heads
from kvstages.models.packed_linear import Linear, Packed, packs, product, vendor


def sinusoidal_positions(context_len: int, embedding_dim: int) -> Tensor:
    """Fixed positions [1, context, E]: sine on even dimensions, cosine on odd ones, base 10,000.

    On the CPU, whatever the default device: the same numbers for each device, and on the meta device arithmetic would
    import PyTorch's compiler.
    """
    positions = torch.arange(context_len, dtype=torch.float32, device="cpu").unsqueeze(1)
    dimensions = torch.arange(0, embedding_dim, 2, dtype=torch.float32, device="cpu")
    rates = torch.exp(dimensions * (-math.log(10_000.0) / embedding_dim))
    table = torch.zeros(context_len, embedding_dim, device="cpu")
    table[:, 0::2] = torch.sin(positions * rates)
    table[:, 1::2] = torch.cos(positions * rates[: embedding_dim // 2])
    return table.unsqueeze(0)


def attend_through(cache: Cache, queries: Tensor, keys: Tensor, values: Tensor, layer: int) -> Tensor:
    """Hand the new keys and values to the cache and attend to what it gives back: [B, H, T, D]."""
    mask = cache.mask(queries.shape[2], layer)
    keys, values = cache.update(keys, values, layer)
    return attend(queries, keys, values, mask)


class Block(nn.Module):
    """One pre-norm decoder block. Once packed it makes queries, keys and values in one product."""

    packed: Packed | None = None

    def __init__(self, embedding_dim: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.attn_norm = nn.LayerNorm(embedding_dim)
        self.Q = Linear(embedding_dim, embedding_dim)
        self.K = Linear(embedding_dim, embedding_dim)
        self.V = Linear(embedding_dim, embedding_dim)
        self.mlp_norm = nn.LayerNorm(embedding_dim)
        self.mlp = nn.Sequential(
            Linear(embedding_dim, 4 * embedding_dim),
            nn.ReLU(inplace=True),
            Linear(4 * embedding_dim, embedding_dim),
        )

    def pack(self) -> None:
        """Multiply with copies of the weights from now on."""
        self.packed = Packed((self.Q, self.K, self.V))
        for layer in self.mlp:
            if isinstance(layer, Linear):
                layer.pack()

    def split_heads(self, x: Tensor) -> Tensor:
        """[B, T, E] to [B, H, T, D]."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def projections(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [B, H, T, D] of the hidden states x [B, T, E]."""
        normed = self.attn_norm(x)
        if self.packed is None:
            found = self.Q(normed), self.K(normed), self.V(normed)
        else:
            found = self.packed(normed).chunk(3, dim=-1)
        queries, keys, values = map(self.split_heads, found)
        return queries, keys, values

    def finish(self, x: Tensor, heads: Tensor) -> Tensor:
        """Add the heads' outputs [B, H, T, D] and then the MLP to the hidden states x [B, T, E]."""
        x = x + heads.transpose(1, 2).flatten(-2)
        return x + self.mlp(self.mlp_norm(x))

    def forward(self, x: Tensor, cache: Cache, layer: int) -> Tensor:
        queries, keys, values = self.projections(x)
        return self.finish(x, attend_through(cache, queries, keys, values, layer))


class GPT(Known, nn.Module):
    """The decoder (see ``decoder``); parameter names are those of the published checkpoint."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.input_embedding = nn.Embedding.from_pretrained(
            torch.empty(config.vocab_size, config.embedding_dim), freeze=False
        )
        # nn.Embedding would do this itself; on the meta device (shapes alone) it would import PyTorch's compiler.
        if not self.input_embedding.weight.is_meta:
            nn.init.normal_(self.input_embedding.weight)
        self.register_buffer("pos_embedding", sinusoidal_positions(config.context_len, config.embedding_dim))
        self.blocks = nn.ModuleList(Block(config.embedding_dim, config.num_heads) for _ in range(config.num_layers))
        self.lm_head = Linear(config.embedding_dim, config.vocab_size)

    def pack(self) -> GPT:
        """The same decoder with the faster product (``packed_linear``), for inference alone: its weights must not
        change any more. Which product that is goes into the record of the stage's files.
        """
        packed = packs(self.dtype, self.device, vendor())
        ledger.state(product=product(self.dtype, self.device, packed))
        if packed:
            for block in self.blocks:
                block.pack()
            self.lm_head.pack()
        return self

    @property
    def shape(self) -> DecoderShape:
        return self.config.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    def key_bias(self, layer: int) -> Tensor:
        return self.blocks[layer].K.bias.detach().unflatten(0, (self.config.num_heads, -1))

    def embed(self, tokens: Tensor, start: int = 0) -> Tensor:
        """Hidden states [B, T, E] of token ids [B, T] at positions start, start + 1, ..."""
        return self.input_embedding(tokens) + self.pos_embedding[:, start : start + tokens.shape[1]]

    def run_layers(self, x: Tensor, cache: Cache, first: int = 0, last: int | None = None) -> Tensor:
        """Hidden states [B, T, E] after layers first, first + 1, ... up to but without ``last``."""
        for layer in range(first, self.config.num_layers if last is None else last):
            x = self.blocks[layer](x, cache, layer)
        return x

    def branch(
        self, x: Tensor, layer: int, caches: Mapping[Key | None, Cache]
    ) -> Callable[[Sequence[Choice[Key]]], Tensor]:
        """As in ``decoder.Decoder``; projections and attention are computed once, whatever the number of choices."""
        block = self.blocks[layer]
        projections = block.projections(x)
        outputs = {key: attend_through(cache, *projections, layer) for key, cache in caches.items()}

        def states(choices: Sequence[Choice[Key]]) -> Tensor:
            return block.finish(x.repeat(len(choices), 1, 1), mix_heads(outputs, choices))

        return states

    def logits(self, x: Tensor) -> Tensor:
        """Logits [B, T, V] of the state [B, T, E] after the last layer."""
        return self.lm_head(x)

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """Logits [B, T, V] of token ids [B, T], which follow the tokens that ``cache`` has already seen."""
        cache = CausalCache(tokens.device) if cache is None else cache
        return self.logits(self.run_layers(self.embed(tokens, cache.seen()), cache))
