"""amp_o2: 16-bit weights in the model, float32 master weights in the optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from accel.profiler.bottleneck import Bottleneck
from accel.run import Run
from accel.strategies.base import Exactness, Strategy


class AmpO2(Strategy):
    """Decorate the model and its optimizers at level O2 in bfloat16 (`accel.amp`); bfloat16 needs no loss scale.

    Master weights take part in trials and are kept bit for bit when it is switched off.

    Source: Micikevicius et al., Mixed Precision Training, arXiv 1710.03740; Kalamkar et al., arXiv 1905.12322.
    """

    name = "amp_o2"
    summary = "bfloat16 weights, float32 master weights"
    treats = frozenset({Bottleneck.COMPUTE, Bottleneck.MEMORY})
    exactness = Exactness.REDUCED
    opt_in = "the model's weights become 16-bit, which code that reads them sees"

    def __init__(self) -> None:
        self._hooks: list[RemovableHandle] = []
        self._decorated: list[Optimizer] = []
        """Those that hold master weights: kept, though the loop may drop one, until the weights have been put back."""

    def refusal(self, run: Run) -> str:
        """Say why it does not apply: no optimizer, an autocast of the loop's own, weights that aren't fp32."""
        if not run.optimizers:
            return "no optimizer of the model has been seen"
        if run.world_size > 1:
            return "decorate the model before wrapping it in DistributedDataParallel (accel.amp.decorate)"
        if run.observed.autocast:
            return "the loop runs the model under an autocast of its own"
        if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in run.optimizers):
            return "LBFGS builds its curvature from differences of gradients, which bfloat16 rounds away"
        dtypes = {p.dtype for p in run.model.parameters() if p.is_floating_point()}
        if dtypes != {torch.float32} and not self._hooks:
            return f"the model's weights are not all fp32 ({', '.join(sorted(map(str, dtypes))) or 'no parameters'})"
        if run.cuda and not torch.cuda.is_bf16_supported(including_emulation=False):
            return "the GPU has no bfloat16 arithmetic (compute capability 8.0 or newer has)"
        own = {id(p) for p in run.model.parameters()}
        if any(id(p) not in own for each in run.optimizers for group in each.param_groups for p in group["params"]):
            return "an optimizer updates parameters of other models, too; decorate them together (accel.amp.decorate)"
        return ""

    def failure(self, run: Run) -> str:
        """Say so if an optimizer has come since: it would update 16-bit weights, without master weights."""
        if all(any(each is known for known in self._decorated) for each in run.optimizers):
            return ""
        return "an optimizer came after the model was decorated, and has no master weights"

    def enable(self, run: Run, setting: Any) -> None:
        """Cast weights, and keep their fp32 values as master weights."""
        from accel.amp import decorate

        self._decorated = list(run.optimizers)
        decorate(run.model, self._decorated, level="O2", dtype=torch.bfloat16)
        # A checkpoint is the plain loop's: the model's has the master weights already.
        self._hooks = [each.register_state_dict_post_hook(_without_masters) for each in self._decorated]

    def disable(self, run: Run) -> None:
        """Give the weights back the values of their masters."""
        from accel.amp import undecorate

        undecorate(run.model)
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._decorated = [], []


def _without_masters(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    state = {
        key: {name: value for name, value in own.items() if name != "master"}
        for key, own in state_dict["state"].items()
    }
    return {**state_dict, "state": {key: own for key, own in state.items() if own}}
