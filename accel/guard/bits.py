"""Tensors bit by bit, complex ones by their parts."""

from __future__ import annotations

import torch
from torch import Tensor


def same_bits(expected: Tensor, actual: Tensor) -> bool:
    """Return whether two tensors of one shape and dtype have the same bits; NaN equals NaN."""
    expected, actual = as_real(expected), as_real(actual)
    if not expected.is_floating_point():
        return torch.equal(expected, actual)
    return torch.equal(expected.isnan(), actual.isnan()) and torch.equal(expected.nan_to_num(), actual.nan_to_num())


def as_real(tensor: Tensor) -> Tensor:
    """Return the real and imaginary parts of a complex tensor; any other as it is."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
