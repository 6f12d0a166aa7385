"""Normalise uint8 batches where they are used, on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from accel.profiler.errors import InvalidArgument

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class Normalize(nn.Module):
    """Turn uint8 images into (x / 255 - mean) / std.

    Computed as x · 1/(255 · std) - mean/std in float32 and rounded once, in one pass, so that uint8 crosses the bus
    (a quarter of the bytes of float32) and no copy in between is made.

    Args:
        mean: of each channel, of x / 255; default ImageNet's.
        std: of each channel, more than 0; default ImageNet's.
        dtype: of the result, default float32.
        memory_format: of the result; default that of the input, channels_last for batches of `ImageDataset`.

    Raises:
        InvalidArgument: if there are not as many `std` as `mean`, or one is not more than 0.

    Example:
        >>> normalize = Normalize(dtype=torch.bfloat16)
        >>> normalize(torch.zeros(2, 3, 8, 8, dtype=torch.uint8)).dtype
        torch.bfloat16
    """

    def __init__(
        self,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        dtype: torch.dtype = torch.float32,
        memory_format: torch.memory_format = torch.preserve_format,
    ) -> None:
        super().__init__()
        if not isinstance(dtype, torch.dtype):
            raise InvalidArgument(f"dtype must be one of torch's, got {dtype!r}; pass torch.float16, say")
        if not hasattr(mean, "__len__") or not hasattr(std, "__len__"):
            raise InvalidArgument(f"mean and std must be a number for each channel, got {mean} and {std}; pass (0.5,)")
        if len(mean) != len(std) or not mean or min(std) <= 0:
            raise InvalidArgument(f"mean and std must be as many, std more than 0, got {tuple(mean)} and {tuple(std)}")
        if not dtype.is_floating_point:
            raise InvalidArgument(f"dtype must be a floating-point one, got {dtype}")
        self.mean, self.std = tuple(map(float, mean)), tuple(map(float, std))
        self.dtype, self.memory_format = dtype, memory_format
        # No buffers: `model.half()` would round them, and each pixel with them.
        self._constants: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def forward(self, images: Tensor) -> Tensor:
        """Return the normalised images.

        Args:
            images: (B, C, H, W) or (C, H, W) uint8.

        Raises:
            InvalidArgument: if they are of another type, or have another number of channels.
        """
        if images.dtype != torch.uint8:
            raise InvalidArgument(f"images must be uint8, 0 to 255, got {images.dtype}; normalise once only")
        if images.dim() not in (3, 4) or images.shape[-3] != len(self.mean):
            raise InvalidArgument(
                f"images must be (B, {len(self.mean)}, H, W) or without B, got {tuple(images.shape)}; permute them"
            )
        scale, shift = self._on(images.device)
        out = torch.empty_like(images, dtype=self.dtype, memory_format=self.memory_format)
        return torch.addcmul(shift, images, scale, out=out)

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._constants:
            mean, std = (torch.tensor(values, dtype=torch.float64).view(-1, 1, 1) for values in (self.mean, self.std))
            self._constants[device] = (1 / (255 * std)).float().to(device), (-mean / std).float().to(device)
        return self._constants[device]

    def extra_repr(self) -> str:
        """Return the settings."""
        return f"mean={self.mean}, std={self.std}, dtype={self.dtype}"
