"""amp_o2: the model runs on bfloat16 copies of its weights; parameters, gradients and optimizer stay in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from accel.precision import why_no_bfloat16
from accel.profiler.bottleneck import Bottleneck
from accel.run import Run
from accel.run.gate import Call
from accel.strategies.base import Exactness, Strategy


class AmpO2(Strategy):
    """Make each call of the model at level O2 in bfloat16 (`accel.amp`), which needs no loss scale.

    Source: Micikevicius et al., Mixed Precision Training, arXiv 1710.03740; Kalamkar et al., arXiv 1905.12322.
    """

    name = "amp_o2"
    summary = "all of the model in bfloat16 but batch norm, weights in fp32"
    treats = frozenset({Bottleneck.COMPUTE, Bottleneck.MEMORY})
    exactness = Exactness.REDUCED

    def __init__(self) -> None:
        self._rounded: Callable[[], str] = str

    def failure(self, run: Run) -> str:
        """Say so if the model writes to its weights or buffers within its call, where they have 16 bits."""
        name = self._rounded()
        return f"the model writes to {name!r} within its call, in 16 bits, where small changes are lost" if name else ""

    def refusal(self, run: Run) -> str:
        """Say why it does not apply: an autocast of the loop's own, weights that aren't fp32, a device that can't."""
        if why := why_no_bfloat16(run):
            return why
        if "_accel_mixed_call" in vars(getattr(run.model, "module", run.model)):
            return "the model is decorated by accel.amp already"
        dtypes = {p.dtype for p in run.model.parameters() if p.is_floating_point()}
        if dtypes != {torch.float32}:
            return f"the model's weights are not all fp32 ({', '.join(sorted(map(str, dtypes))) or 'no parameters'})"
        if any(hasattr(p, "device_mesh") for p in run.model.parameters()):
            return "the model's weights are sharded; fully_shard has a MixedPrecisionPolicy"
        if getattr(run.model, "broadcast_buffers", False) and any(_are_cast(run.model)):
            return "DistributedDataParallel broadcasts buffers of the model, which each call casts"
        return ""

    def enable(self, run: Run, setting: Any) -> None:
        """Make calls on bfloat16 copies of the weights."""
        from accel.amp.mixed_call import MixedCall

        model, mixed = run.model, MixedCall(torch.bfloat16, warns=False)
        self._rounded = lambda: mixed.rounded

        def wrap(call: Call) -> Call:
            def run_call(*args: Any, **kwargs: Any) -> Any:
                return mixed(model, call, *args, **kwargs)

            return run_call

        run.gate.add(self.name, wrap)

    def disable(self, run: Run) -> None:
        """Call the model as it is."""
        run.gate.remove(self.name)
        self._rounded = str


def _are_cast(model: nn.Module) -> Iterator[bool]:
    """Yield, for each floating-point buffer, whether it is none of batch normalisation's."""
    for module in model.modules():
        is_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
        yield from (not is_norm for b in module._buffers.values() if b is not None and b.is_floating_point())
