"""Whether two leaves have the same gradient."""

from __future__ import annotations

import torch
from torch import Tensor


def same_gradient(one: Tensor, other: Tensor) -> bool:
    """Tell whether both have a gradient, of the same values; they may differ in precision."""
    assert one.grad is not None
    assert other.grad is not None
    return torch.equal(one.grad.to(other.grad.dtype), other.grad)
