"""window_attention: run the window attention of Swin models on one fused kernel each way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from accel.errors import InvalidArgument
from accel.profiler.bottleneck import Bottleneck
from accel.run import Run
from accel.strategies.base import Exactness
from accel.strategies.module_switch import ModuleSwitch
from accel.strategies.trial_design import TrialDesign

if TYPE_CHECKING:
    from accel.kernels.dropins import SwitchedModules


class WindowAttention(ModuleSwitch):
    """Switch the attention modules of timm, torchvision, Hugging Face and official Swin models to the fused op.

    Source: https://arxiv.org/abs/2103.14030.
    """

    name = "window_attention"
    summary = "Swin's window attention as one fused kernel each way"
    treats = frozenset({Bottleneck.LAUNCH, Bottleneck.MEMORY, Bottleneck.COMPUTE})
    exactness = Exactness.REORDERED

    def refusal(self, run: Run) -> str:
        """Say why it does not apply: no GPU, no triton, or no window attention that is known."""
        if run.device.type != "cuda":
            return "its kernels need a CUDA device; on a CPU the op is plain torch, up to 10 % slower than timm's own"
        from accel.kernels import support
        from accel.kernels.window_dropins import candidates

        if not support.has_triton():
            return "triton is not installed; pip install 'accel-train[gpu]'"
        if not candidates(run.model):
            return "the model has no window attention of a known library"
        return ""

    def trial_design(self, run: Run) -> TrialDesign:
        """Reckon with the kernels' compilation: 1 to 2 s for each kind of layer."""
        return TrialDesign(cost_s=10.0)

    def switch(self, model: nn.Module, switched: SwitchedModules) -> None:
        """Switch the modules that give their own results on the fused op."""
        from accel.kernels.window_dropins import switch_window_attention

        switch_window_attention(model, switched)
        if not switched.names:
            raise InvalidArgument("; ".join(f"{name}: {why}" for name, why in switched.refused.items()))
