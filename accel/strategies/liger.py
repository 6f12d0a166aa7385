"""liger: run parts of Hugging Face's language models on the kernels of Liger-Kernel, where that is installed."""

from __future__ import annotations

import functools
import importlib.util
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from accel.profiler.bottleneck import Bottleneck
from accel.profiler.interruptions import ours
from accel.run import Run
from accel.strategies.base import Exactness, NothingHelps, needs_cuda
from accel.strategies.module_switch import ModuleSwitch
from accel.strategies.trial_design import TrialDesign

if TYPE_CHECKING:
    from accel.kernels.dropins import DropIn, SwitchedModules

_NEAR = 8
"""ε by which a module and its drop-in may differ, as a share of the largest output."""
_LARGE = 15.0
"""Inputs that a module is tried on are also so many times as large: some variants clamp what is large."""


class Liger(ModuleSwitch):
    """Switch RMSNorm and SwiGLU layers to Liger's kernels; parameters and `state_dict` stay.

    Each module is first compared with itself on random weights and inputs. Two of Liger's kernels are left out: its
    rotary embedding replaces a function of the library for all models and writes over what the projections return, and
    its loss never makes the logits, so that `outputs.logits` would be None in the loop.

    Source: Hsu et al., Liger Kernel, arXiv 2410.10989.
    """

    name = "liger"
    summary = "RMSNorm and SwiGLU by Liger-Kernel"
    treats = frozenset({Bottleneck.LAUNCH, Bottleneck.MEMORY})
    exactness = Exactness.REORDERED

    def refusal(self, run: Run) -> str:
        """Say why it does not apply: no CUDA, no Liger-Kernel, no such module, or second derivatives."""
        if why := needs_cuda(run):
            return why
        if self._switched is None and not any(map(_kind_of, run.model.modules())):
            return "the model has no RMSNorm and no SwiGLU layer as Hugging Face writes them"
        if importlib.util.find_spec("liger_kernel") is None:
            return "Liger-Kernel is not installed; pip install liger-kernel"
        if run.observed.needs_graphs:
            return f"{run.observed.needs_graphs}, and Liger's kernels can be differentiated once"
        return ""

    def trial_design(self, run: Run) -> TrialDesign:
        """Reckon with the kernels' compilation."""
        return TrialDesign(cost_s=10.0)

    def switch(self, model: nn.Module, switched: SwitchedModules) -> None:
        """Switch the modules that give their own results by Liger's kernels."""
        _switch(model, switched)
        if not switched.names:
            reasons = Counter(switched.refused.values())
            raise NothingHelps("; ".join(f"{count} modules: {why}" for why, count in reasons.items()))


def _kind_of(module: nn.Module) -> str:
    """Return `norm` or `swiglu` for a module written as Hugging Face does, else ''."""
    is_norm = type(module).__name__.endswith("RMSNorm") and not isinstance(module, nn.RMSNorm)
    if is_norm and _eps(module) is not None and getattr(module, "weight", None) is not None:
        return "norm"
    gates = all(isinstance(getattr(module, name, None), nn.Linear) for name in ("gate_proj", "up_proj", "down_proj"))
    is_silu = type(getattr(module, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation")
    drops = any(isinstance(part, nn.Dropout) for part in module.modules())
    return "swiglu" if gates and is_silu and not drops else ""


def _eps(norm: Any) -> float | None:
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


@functools.cache
def _dropins() -> dict[str, list[type[DropIn]]]:
    """Return the classes to lay over a kind of module, in the order in which they are tried."""
    from liger_kernel.ops import LigerRMSNormFunction, LigerSiLUMulFunction

    from accel.kernels.dropins import DropIn, is_hooked, is_transformed, runs_fused

    class Normalised(LigerRMSNormFunction):  # type: ignore[misc]
        backward = staticmethod(once_differentiable(LigerRMSNormFunction.backward))

    class Product(LigerSiLUMulFunction):  # type: ignore[misc]
        @staticmethod
        @once_differentiable
        def backward(ctx: Any, gradient: Tensor) -> Any:
            return LigerSiLUMulFunction.backward(_Reusable(ctx), gradient)

    class LlamaNorm(DropIn):
        casting, offset = "llama", 0.0

        def forward(self: Any, hidden_states: Tensor) -> Tensor:
            if hidden_states.dtype != self.weight.dtype or not runs_fused(hidden_states) or is_transformed():
                return super().forward(hidden_states)  # type: ignore[misc, no-any-return]
            # In place, the gradient would be written over the one that a residual still needs.
            arguments = (_eps(self), self.offset, self.casting, False)
            return Normalised.apply(hidden_states, self.weight, *arguments)  # type: ignore[no-any-return]

    class GemmaNorm(LlamaNorm):
        casting, offset = "gemma", 1.0

    class SwiGLU(DropIn):
        def forward(self: Any, x: Tensor) -> Tensor:
            # A hook on a projection keeps what Liger's kernel writes over; one on the activation would not be called.
            # A compiler fuses the product itself, and can't trace a backward pass that looks at autograd's state.
            if torch.compiler.is_compiling() or not runs_fused(x) or is_transformed():
                return super().forward(x)  # type: ignore[misc, no-any-return]
            if is_hooked(self.gate_proj, self.up_proj, self.act_fn):
                return super().forward(x)  # type: ignore[misc, no-any-return]
            product = Product.apply(self.gate_proj(x), self.up_proj(x))
            return self.down_proj(product)  # type: ignore[no-any-return]

    return {"norm": [LlamaNorm, GemmaNorm], "swiglu": [SwiGLU]}


class _Reusable:
    """What Liger's backward pass reads, in copies where the graph is kept: it writes gradients over what was saved."""

    def __init__(self, ctx: Any) -> None:
        is_kept = torch._C._autograd._get_current_graph_task_keep_graph()
        self.saved_tensors = tuple(each.clone() if is_kept else each for each in ctx.saved_tensors)
        self._ctx = ctx

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


def _switch(model: nn.Module, switched: SwitchedModules) -> None:
    kinds = _dropins()
    with torch.no_grad(), torch.random.fork_rng(sorted({p.device for p in model.parameters() if p.is_cuda}, key=str)):
        for name, module in model.named_modules():
            if not (kind := _kind_of(module)):
                continue
            try:
                fits = next((each for each in kinds[kind] if _is_alike(module, each)), None)
            except ours() as error:  # a kernel that this GPU or these sizes can't have
                switched.refused[name] = f"it can't be tried: {type(error).__name__}: {error}"
                continue
            if fits is None:
                switched.refused[name] = "it computes something else than Liger's kernel"
                continue
            switched.switch(module, fits)
            switched.names.append(name)


def _is_alike(module: nn.Module, dropin: type[DropIn]) -> bool:
    """Return whether a module and its drop-in give the same results, but for rounding."""
    from accel.kernels.dropins import dropin_class, without_hooks

    plain, other = without_hooks(module), without_hooks(module)
    for parameter in plain.parameters():  # those of a new model, ones or zeros, hide what differs
        parameter.normal_(std=parameter.shape[-1] ** -0.5)
    other.load_state_dict(plain.state_dict())
    other.__class__ = dropin_class(dropin, type(other))
    weight = next(module.parameters())
    x = torch.randn(2, 8, weight.shape[-1], device=weight.device, dtype=weight.dtype)
    return all(_agree(plain(each), other(each)) for each in (x, _LARGE * x))


def _agree(expected: Tensor, actual: Tensor) -> bool:
    off = (expected - actual).abs().max()
    return bool(off <= _NEAR * torch.finfo(expected.dtype).eps * expected.abs().max())
