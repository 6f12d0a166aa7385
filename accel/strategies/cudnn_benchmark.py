"""cudnn_benchmark: let cuDNN time its convolution algorithms once per shape and keep the fastest."""

from __future__ import annotations

import torch
from torch import nn

from accel.profiler.bottleneck import Bottleneck
from accel.run import Run
from accel.strategies.base import Exactness, needs_cuda
from accel.strategies.process_setting import ProcessSetting, ProcessSwitch
from accel.strategies.trial_design import TrialDesign

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def _set(benchmark: bool) -> None:
    torch.backends.cudnn.benchmark = benchmark


class CudnnBenchmark(ProcessSwitch):
    """Set `torch.backends.cudnn.benchmark`."""

    name = "cudnn_benchmark"
    summary = "cuDNN picks its algorithm by timing"
    treats = frozenset({Bottleneck.COMPUTE})
    exactness = Exactness.REORDERED
    switch = ProcessSetting(lambda: bool(torch.backends.cudnn.benchmark), _set)

    def refusal(self, run: Run) -> str:
        """Say why it does not apply: no CUDA, no convolution, on already, or deterministic algorithms asked for."""
        if why := needs_cuda(run):
            return why
        if not run.has_module(*_CONVOLUTIONS):
            return "the model has no convolution"
        if torch.backends.cudnn.benchmark:
            return "it is on already"
        if torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled():
            return "the run asks for deterministic algorithms"
        return ""

    def trial_design(self, run: Run) -> TrialDesign:
        """Leave out the first step of each shape, which times every algorithm."""
        return TrialDesign(settle_steps=2)
