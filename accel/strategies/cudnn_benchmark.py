"""cudnn_benchmark: let cuDNN time its convolution algorithms once per shape and keep the fastest."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from accel.profiler.bottleneck import Bottleneck
from accel.run import Run
from accel.strategies.base import Exactness, Strategy
from accel.strategies.process_setting import ProcessSetting
from accel.strategies.trial_design import TrialDesign

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def _set(benchmark: bool) -> None:
    torch.backends.cudnn.benchmark = benchmark


_BENCHMARK = ProcessSetting(lambda: bool(torch.backends.cudnn.benchmark), _set)


class CudnnBenchmark(Strategy):
    """Set `torch.backends.cudnn.benchmark`."""

    name = "cudnn_benchmark"
    summary = "cuDNN picks its algorithm by timing"
    treats = frozenset({Bottleneck.COMPUTE})
    exactness = Exactness.REORDERED

    def refusal(self, run: Run) -> str:
        """Say why it does not apply: no CUDA, no convolution, on already, or deterministic algorithms asked for."""
        if not run.cuda:
            return "it needs a CUDA device; the model is on the " + run.device.type.upper()
        if not run.has_module(*_CONVOLUTIONS):
            return "the model has no convolution"
        if torch.backends.cudnn.benchmark:
            return "it is on already"
        if torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled():
            return "the run asks for deterministic algorithms"
        return ""

    def comparison(self, run: Run) -> TrialDesign:
        """Leave out the first step of each shape, which times every algorithm."""
        return TrialDesign(settle_steps=2)

    def enable(self, run: Run, setting: Any) -> None:
        """Switch the timing on."""
        _BENCHMARK.use(self, True)

    def disable(self, run: Run) -> None:
        """Switch it off again, unless another model wants it."""
        _BENCHMARK.leave(self)
