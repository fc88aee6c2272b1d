"""Rotations are orthonormal for every width, and Hadamard's where they can be."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstages.cache.rotation import rotate, rotation_matrix
from kvstages.cache.schemes import Method

HADAMARD = Method(rotation="hadamard")


@given(st.integers(1, 300))
def test_any_width_has_an_orthonormal_matrix_that_spreads_outliers(width):
    matrix = rotation_matrix(HADAMARD, width)
    assert matrix.dtype == torch.float64
    assert torch.allclose(matrix @ matrix.T, torch.eye(width, dtype=torch.float64), atol=1e-12)
    odd = width // (width & -width)
    # A value of 1 in one channel comes out at most this large in any.
    assert matrix.abs().max() <= (1 if odd == 1 else math.sqrt(2)) / math.sqrt(width) + 1e-12


def test_powers_of_two_give_hadamard_matrices():
    assert (rotation_matrix(HADAMARD, 4) * 2).tolist() == [[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]
    for width in (1, 2, 64, 128):
        assert torch.allclose(rotation_matrix(HADAMARD, width).abs(), torch.tensor(width**-0.5, dtype=torch.float64))


def test_blocks_are_rotated_each_by_itself():
    matrix = rotation_matrix(Method(rotation="hadamard4"), 12)
    block = rotation_matrix(HADAMARD, 4)
    assert torch.equal(matrix, torch.block_diag(block, block, block))


def test_random_signs_are_always_the_same_and_come_first():
    matrix = rotation_matrix(Method(rotation="randomized"), 64)
    signs = matrix[:, 0].sign()
    assert set(signs.tolist()) == {-1.0, 1.0}
    assert torch.allclose(matrix, signs.unsqueeze(1) * rotation_matrix(HADAMARD, 64))
    rotation_matrix.cache_clear()
    assert torch.equal(rotation_matrix(Method(rotation="randomized"), 64), matrix)


def test_no_rotation_has_no_matrix():
    assert rotation_matrix(Method(), 64) is None


@pytest.mark.parametrize("width", [5, 64, 80])
def test_rows_come_out_alike_however_many_go_through_together(width):
    x = torch.randn(50, 7, width, generator=torch.Generator().manual_seed(0))
    matrix = rotation_matrix(HADAMARD, width)
    together = rotate(x, matrix).float()
    assert all(torch.equal(rotate(row, matrix).float(), own) for row, own in zip(x, together, strict=True))
    assert torch.allclose(rotate(together, matrix.T).float(), x, atol=1e-6)
