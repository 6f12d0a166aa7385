"""Half-precision floats on the wire."""

from __future__ import annotations

import torch
from torch import Tensor

from accel.comm.compressor import Quantised
from accel.profiler.errors import InvalidArgument


class Half(Quantised):
    """Send float16 or bfloat16 and sum in float32: one rounding of each rank's values and one of the sum.

    A ring over half-precision tensors, as in torch's own hooks, rounds at each of its n − 1 additions. Works on gloo
    with either dtype.

    Args:
        dtype: torch.bfloat16 (default), which has float32's range, or torch.float16, which is finer and overflows above
            65,504: the step is then void, as under GradScaler.
    """

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        if dtype not in (torch.float16, torch.bfloat16):
            raise InvalidArgument(f"dtype must be torch.float16 or torch.bfloat16, got {dtype}")
        self.dtype = dtype

    def encoded_bytes(self, numel: int) -> int:
        return 2 * numel

    def encode(self, values: Tensor, out: Tensor, lost: Tensor | None) -> None:
        half = out.view(self.dtype)
        half.copy_(values)
        if lost is not None:
            torch.sub(values, half, out=lost)

    def decode(self, encoded: Tensor, out: Tensor, add: bool = False) -> None:
        half = encoded.view(self.dtype)
        if add:
            out += half
        else:
            out.copy_(half)
