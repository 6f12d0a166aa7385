"""tf32: let fp32 matrix products and convolutions use the TF32 tensor cores (10-bit mantissa, fp32 range)."""

from __future__ import annotations

import torch

from accel.precision import allows_tf32, fp32_precision
from accel.profiler.bottleneck import Bottleneck
from accel.run import Run
from accel.strategies.base import Exactness, needs_cuda
from accel.strategies.process_setting import ProcessSetting, ProcessSwitch

_set: list[fp32_precision] = []
"""What puts the precision back; empty while TF32 is not allowed."""


def _allow(tf32: bool) -> None:
    if tf32 and not _set:
        _set.append(fp32_precision("tf32"))
    while not tf32 and _set:
        _set.pop().restore()


class TF32(ProcessSwitch):
    """Let CUDA's matrix products, convolutions and recurrent layers use TF32 (`accel.precision`).

    Source: NVIDIA A100 architecture white paper; PyTorch notes, "TensorFloat-32 on Ampere".
    """

    name = "tf32"
    summary = "fp32 products on TF32 tensor cores"
    treats = frozenset({Bottleneck.COMPUTE})
    exactness = Exactness.REDUCED
    switch = ProcessSetting(lambda: False, _allow)

    def refusal(self, run: Run) -> str:
        """Say why it does not apply: no CUDA, too old a GPU, or on already."""
        if why := needs_cuda(run):
            return why
        if torch.cuda.get_device_capability(run.device)[0] < 8:
            return "the GPU has no TF32 (compute capability 8.0 or newer has)"
        return "TF32 is on already" if allows_tf32() else ""
