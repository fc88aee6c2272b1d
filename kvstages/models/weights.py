"""The digest of an opened model's weights (see ``identity``)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from kvstages.models.identity import ModelIdentity, Sample, step, weights_digest


def sample(tensor: Tensor) -> Sample:
    """The sample of a tensor of any floating point dtype; what BF16, FP32 and FP64 share is the rounding to BF16."""
    values = tensor.detach().reshape(-1)[:: step(tensor.numel())].to(torch.bfloat16)
    return Sample(tuple(tensor.shape), values.view(torch.int16).cpu().numpy().view(np.uint16))


def model_digest(model: nn.Module) -> str:
    """The digest of a model's parameters, each once however often it is used; ValueError where one has no numbers."""
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if parameter.is_meta:
            raise ValueError(f"{name} has a shape and no numbers (device meta): load the model's weights first")
    return weights_digest(map(sample, parameters.values()))


def check_weights(name: str, identity: ModelIdentity, model: nn.Module) -> None:
    """ValueError if a model's weights are not those of the identity that was recorded of it."""
    found = model_digest(model)
    if found != identity.weights:
        raise ValueError(
            f"{name}: its weights are not those that its record was made of (digest {found:.12}..., recorded "
            f"{identity.weights:.12}...); make the record again with `kvstages convert`"
        )
