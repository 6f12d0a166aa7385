"""autocast_bf16: run the model's forward and backward in bfloat16 where autocast thinks it safe.

Parameters, gradients and optimizer state stay in fp32; outputs are cast back to fp32, so that the user's loss sees what
it always saw. bfloat16 has fp32's range, so no gradient scaling is needed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from accel.precision import autocast_of_call, why_no_bfloat16
from accel.profiler.bottleneck import Bottleneck
from accel.profiler.trees import map_tensors
from accel.run import Run
from accel.run.gate import Call
from accel.strategies.base import Exactness, Strategy


class AutocastBf16(Strategy):
    """Wrap each call of the model in `torch.autocast(device, dtype=torch.bfloat16)`.

    Source: Micikevicius et al., Mixed Precision Training, arXiv 1710.03740; Kalamkar et al., arXiv 1905.12322.
    """

    name = "autocast_bf16"
    summary = "forward and backward in bfloat16, weights in fp32"
    treats = frozenset({Bottleneck.COMPUTE, Bottleneck.MEMORY})
    exactness = Exactness.REDUCED
    touches = frozenset({"model", "shards"})

    def __init__(self) -> None:
        self._device = "cpu"

    def refusal(self, run: Run) -> str:
        """Say why it does not apply: the loop has its own autocast, the weights aren't fp32, or the device can't."""
        if why := why_no_bfloat16(run):
            return why
        dtypes = {p.dtype for p in run.model.parameters()}
        if torch.float32 not in dtypes:
            return f"the model has no fp32 parameter ({', '.join(sorted(map(str, dtypes))) or 'no parameters'})"
        if run.device.type not in ("cpu", "cuda"):
            return f"it is written for CPU and CUDA, the model is on {run.device.type}"
        return ""

    def enable(self, run: Run, setting: Any) -> None:
        """Autocast each call."""
        self._device = run.device.type
        run.gate.add(self.name, self._under_autocast)  # the same wrapper each time: graphs are kept for it

    def disable(self, run: Run) -> None:
        """Call the model as it is."""
        run.gate.remove(self.name)

    def _under_autocast(self, call: Call) -> Call:
        device = self._device

        def run_call(*args: Any, **kwargs: Any) -> Any:
            with autocast_of_call(device, torch.bfloat16):
                output = call(*args, **kwargs)
            return map_tensors(_to_fp32, output)

        return run_call


def _to_fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor
