"""Rotation: vectors times an orthonormal matrix, so that an outlier of one channel is spread over all of them.

Products are taken in FP64. A product's order of summation depends on how many rows go through it together; rounded
from FP64 the result does not, and token-by-token and one-pass executions store the same codes.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from kvstages.cache.schemes import Method

# The seed of vLLM's signs (vllm/v1/attention/ops/int4_per_token_head.py), so that ours are the same.
SIGNS_SEED = 0x9E3779B9


def rotate(x: Tensor, matrix: Tensor) -> Tensor:
    """x [..., D] times matrix [D, D], in FP64."""
    return x.double() @ matrix


@cache
def rotation_matrix(method: Method, width: int, device: torch.device | str = "cpu") -> Tensor | None:
    """The orthonormal matrix FP64 [width, width] of a method; None where it rotates nothing.

    A Hadamard matrix (Sylvester's) divided by the root of its width; in blocks along D if the method says so.
    A width that is no power of two is 2^k times an odd number: the Kronecker product of the Hadamard matrix of
    2^k and the orthonormal cosine transform (DCT-II) of the odd number. "randomized": random signs first.
    """
    if not method.rotation:
        return None
    block = method.rotation_block or width
    matrix = torch.block_diag(*[_hadamard_product(block)] * (width // block))
    if method.rotation == "randomized":
        generator = torch.Generator().manual_seed(SIGNS_SEED)
        signs = 2.0 * torch.bernoulli(torch.full((width,), 0.5), generator=generator) - 1.0
        matrix = signs.double().unsqueeze(1) * matrix
    return matrix.to(device)


def _hadamard_product(width: int) -> Tensor:
    power = width & -width
    signs = torch.ones(1, 1, dtype=torch.float64)
    while signs.shape[0] < power:
        signs = torch.cat((torch.cat((signs, signs), 1), torch.cat((signs, -signs), 1)))
    return torch.kron(signs, _cosine_transform(width // power)) / math.sqrt(power)


def _cosine_transform(width: int) -> Tensor:
    index = torch.arange(width, dtype=torch.float64)
    matrix = math.sqrt(2 / width) * torch.cos(torch.outer(index, 2 * index + 1) * (math.pi / (2 * width)))
    matrix[0] = math.sqrt(1 / width)
    return matrix
