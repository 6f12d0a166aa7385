"""Fixed noise in the place of a gradient that has not arrived."""

from __future__ import annotations

import torch
from torch import Tensor


def noise_like(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Return normal noise of a tensor's shape, dtype and device; that of a complex one has an imaginary part."""
    drawn = torch.complex64 if tensor.is_complex() else torch.float32
    return torch.randn(tensor.shape, generator=generator, dtype=drawn).to(tensor.device, tensor.dtype)
