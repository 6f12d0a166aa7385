"""Which tokens of a window may see each other, and how far apart they are: the two small index tables of Swin.

After a cyclic shift a window may hold patches that were not neighbours. Swin numbers the nine regions of the shifted
map and lets a token see only its own region. One byte per token says the same as a mask of N numbers per token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from accel.kernels.tables import hides_values, kept

_CPU = torch.device("cpu")
_MOST_REGIONS = 256
"""Numbers of a uint8: as many as the largest window has tokens."""


@kept(256)
def shift_regions(
    size: tuple[int, int], window: tuple[int, int], shift: tuple[int, int], device: torch.device
) -> Tensor:
    """Return the region of each token of each window of a shifted map.

    Args:
        size: height and width of the map, multiples of the window's.
        window: height and width of a window, tokens.
        shift: tokens by which the map is rolled up and to the left.
        device: where the table lies.

    Returns:
        uint8 [height · width ÷ N, N] with N tokens in a window; it is kept, so don't write to it.
    """
    at = _maker(device)
    rows, columns = (_bands(*axis, at) for axis in zip(size, window, shift, strict=True))
    regions = rows[:, None] * 3 + columns[None, :]
    return partition(regions[None, :, :, None], window).squeeze(-1).to(device)


def _maker(device: torch.device) -> torch.device:
    """Return where a table is made: traced, on the device, so that no step copies; else in few launches, on the CPU."""
    return device if hides_values() else _CPU


def _bands(size: int, window: int, shift: int, device: torch.device) -> Tensor:
    """Return 0 before the last window, 1 in it, 2 where the roll brought the first tokens; all 0 without a shift."""
    place = torch.arange(size, device=device)
    if shift == 0:
        return torch.zeros(size, dtype=torch.uint8, device=device)
    return ((place >= size - window).to(torch.uint8) + (place >= size - shift)).to(torch.uint8)


def regions_of_mask(mask: Tensor) -> tuple[Tensor, float] | None:
    """Return the regions of an additive mask, and its value between them.

    Args:
        mask: [windows, N, N]; 0 between tokens that see each other, one negative number elsewhere.

    Returns:
        uint8 [windows, N] and the number; None if the mask can't be written as regions, as one of more than 256 tokens.
    """
    if mask.dim() != 3 or mask.shape[1] != mask.shape[2] or mask.shape[1] > _MOST_REGIONS or mask.numel() == 0:
        return None
    visible = mask == 0
    regions = visible.to(torch.uint8).argmax(-1)  # the first token that each token sees
    value = float(mask.min())
    if not torch.equal(mask, mask_of_regions(regions, value, mask.dtype)):
        return None
    return regions.to(torch.uint8), value


def mask_of_regions(regions: Tensor, value: float, dtype: torch.dtype) -> Tensor:
    """Return the additive mask [windows, N, N] of regions [windows, N]: 0 within a region, `value` between two."""
    apart = regions[:, :, None] != regions[:, None, :]
    return torch.zeros(apart.shape, dtype=dtype, device=regions.device).masked_fill_(apart, value)


def partition(x: Tensor, window: tuple[int, int]) -> Tensor:
    """Cut a map [B, Y, X, C] into windows [B · Y·X ÷ N, N, C], row by row."""
    batch, height, width, channels = x.shape
    tall, wide = window
    cut = x.view(batch, height // tall, tall, width // wide, wide, channels)
    return cut.permute(0, 1, 3, 2, 4, 5).reshape(-1, tall * wide, channels)


def merge(x: Tensor, window: tuple[int, int], size: tuple[int, int]) -> Tensor:
    """Put windows [B · Y·X ÷ N, N, C] together to a map [B, Y, X, C] again."""
    tall, wide = window
    height, width = size
    cut = x.view(-1, height // tall, width // wide, tall, wide, x.shape[-1])
    return cut.permute(0, 1, 3, 2, 4, 5).reshape(-1, height, width, x.shape[-1])


@kept(64)
def relative_index(window: tuple[int, int], device: torch.device) -> Tensor:
    """Return the row of the bias table for each pair of tokens in a window.

        index[i, j] = (y_i − y_j + tall − 1) · (2·wide − 1) + x_i − x_j + wide − 1

    Args:
        window: its height (tall) and width (wide), tokens.
        device: where the index lies.

    Returns:
        int64 [N, N]; it is kept, so don't write to it.
    """
    tall, wide = window
    token = torch.arange(tall * wide, device=_maker(device))
    y, x = token // wide, token % wide
    down, right = y[:, None] - y[None, :] + tall - 1, x[:, None] - x[None, :] + wide - 1
    return (down * (2 * wide - 1) + right).to(device)
