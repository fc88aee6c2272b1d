"""Our AdamW against PyTorch's class."""

from __future__ import annotations

import pytest
import torch
from models import random_model, random_tokens
from torch.nn import functional as F

from kvstages.measure.adamw import AdamW


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize(("dtype", "fused"), [(torch.float32, True), (torch.bfloat16, False)])
def test_ten_steps_are_those_of_pytorch_bit_for_bit(dtype, fused, decay):
    """In BF16 those of its loop over single operations, which rounds after each of them."""
    tokens = random_tokens(10)
    trained = []
    for ours in (True, False):
        model = random_model(dtype=dtype).requires_grad_(True)
        if ours:
            optimizer = AdamW(model.parameters(), 1e-2, decay)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=decay, fused=fused, foreach=False)
        for step in range(10):
            model.zero_grad()
            logits = model(tokens[step : step + 1, :-1])
            F.cross_entropy(logits.flatten(0, 1), tokens[step, 1:]).backward()
            optimizer.step()
        trained.append(list(model.parameters()))
    start = random_model(dtype=dtype).parameters()
    for own, theirs, before in zip(*trained, start, strict=True):
        assert torch.equal(own, theirs) and not torch.equal(own, before)
