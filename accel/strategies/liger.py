"""liger: run parts of Hugging Face's language models on the kernels of Liger-Kernel, where that is installed."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from accel.profiler.bottleneck import Bottleneck
from accel.profiler.interruptions import ours
from accel.run import Run
from accel.strategies.base import Exactness, NothingHelps, Strategy, needs_cuda
from accel.strategies.trial_design import TrialDesign

if TYPE_CHECKING:
    from accel.kernels.dropins import DropIn, SwitchedModules

_ROTATION = "apply_rotary_pos_emb"
_NEAR = 8
"""ε by which a module and its drop-in may differ, as a share of the largest output."""


class Liger(Strategy):
    """Switch RMSNorm, SwiGLU and rotary embeddings to Liger's kernels; parameters and `state_dict` stay.

    Each module is first compared with itself on random inputs. Liger's loss, which never makes the logits, is left
    out: `outputs.logits` would be None in the loop.

    Source: Hsu et al., Liger Kernel, arXiv 2410.10989.
    """

    name = "liger"
    summary = "RMSNorm, SwiGLU and rotary embeddings by Liger-Kernel"
    treats = frozenset({Bottleneck.LAUNCH, Bottleneck.MEMORY})
    exactness = Exactness.REORDERED

    def __init__(self) -> None:
        self._switched: SwitchedModules | None = None
        self._rotations: list[_Rotation] = []

    def refusal(self, run: Run) -> str:
        """Say why it does not apply: no CUDA, no Liger-Kernel, no such module, or graphs that are used twice."""
        if why := needs_cuda(run):
            return why
        if self._switched is None and not any(map(_kind_of, run.model.modules())):
            return "the model has no RMSNorm and no SwiGLU layer as Hugging Face writes them"
        if importlib.util.find_spec("liger_kernel") is None:
            return "Liger-Kernel is not installed; pip install liger-kernel"
        if any(module._forward_hooks for module in run.model.modules() if isinstance(module, nn.Linear)):
            return "hooks on linear layers keep outputs, over which Liger's kernels write"
        if run.observed.needs_graphs:
            return f"{run.observed.needs_graphs}, and Liger's kernels write over what a second pass would read"
        return ""

    def trial_design(self, run: Run) -> TrialDesign:
        """Reckon with the kernels' compilation."""
        return TrialDesign(cost_s=10.0)

    def enable(self, run: Run, setting: Any) -> None:
        """Switch the modules; they are compared with their own results the first time."""
        if self._switched is None:
            switched = _switch(run.model)
            if not switched.names:
                raise NothingHelps("; ".join(f"{name}: {why}" for name, why in switched.refused.items()))
            self._switched, self._rotations = switched, list(_rotations(run.model))
        self._switched.redo()
        for rotation in self._rotations:
            setattr(rotation.module, _ROTATION, rotation.by_liger)

    def disable(self, run: Run) -> None:
        """Let the modules compute as they did."""
        if self._switched is not None:
            self._switched.undo()
        for rotation in self._rotations:
            if getattr(rotation.module, _ROTATION) is rotation.by_liger:
                setattr(rotation.module, _ROTATION, rotation.own)


# -- RMSNorm and SwiGLU ------------------------------------------------------------------------------------------------


def _kind_of(module: nn.Module) -> str:
    """Return `norm` or `swiglu` for a module written as Hugging Face does, else ''."""
    is_norm = type(module).__name__.endswith("RMSNorm") and not isinstance(module, nn.RMSNorm)
    if is_norm and _eps(module) is not None and getattr(module, "weight", None) is not None:
        return "norm"
    gates = all(isinstance(getattr(module, name, None), nn.Linear) for name in ("gate_proj", "up_proj", "down_proj"))
    return "swiglu" if gates and type(getattr(module, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation") else ""


def _eps(norm: Any) -> float | None:
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


@functools.cache
def _dropins() -> dict[str, list[type[DropIn]]]:
    """Return the classes to lay over a kind of module, in the order in which they are tried."""
    from liger_kernel.ops import LigerRMSNormFunction, LigerSiLUMulFunction

    from accel.kernels import support
    from accel.kernels.dropins import DropIn

    class LlamaNorm(DropIn):
        casting, offset = "llama", 0.0

        def forward(self: Any, hidden_states: Tensor) -> Tensor:
            if not support.runs_triton(hidden_states):
                return super().forward(hidden_states)  # type: ignore[misc, no-any-return]
            # In place, the gradient would be written over the one that a residual still needs.
            arguments = (_eps(self), self.offset, self.casting, False)
            return LigerRMSNormFunction.apply(hidden_states, self.weight, *arguments)  # type: ignore[no-any-return]

    class GemmaNorm(LlamaNorm):
        casting, offset = "gemma", 1.0

    class SwiGLU(DropIn):
        def forward(self: Any, x: Tensor) -> Tensor:
            if not support.runs_triton(x):
                return super().forward(x)  # type: ignore[misc, no-any-return]
            product = LigerSiLUMulFunction.apply(self.gate_proj(x), self.up_proj(x))
            return self.down_proj(product)  # type: ignore[no-any-return]

    return {"norm": [LlamaNorm, GemmaNorm], "swiglu": [SwiGLU]}


def _switch(model: nn.Module) -> SwitchedModules:
    from accel.kernels.dropins import SwitchedModules

    switched = SwitchedModules()
    with torch.no_grad(), torch.random.fork_rng(sorted({p.device for p in model.parameters() if p.is_cuda}, key=str)):
        for name, module in model.named_modules():
            if kind := _kind_of(module):
                try:
                    fits = next((each for each in _dropins()[kind] if _is_alike(module, each)), None)
                except ours() as error:  # a kernel that this GPU or these sizes can't have
                    switched.refused[name] = f"it can't be tried: {type(error).__name__}: {error}"
                    continue
                if fits is None:
                    switched.refused[name] = "it computes something else than Liger's kernel"
                    continue
                switched.switch(module, fits)
                switched.names.append(name)
    return switched


def _is_alike(module: nn.Module, dropin: type[DropIn]) -> bool:
    """Return whether a module and its drop-in give the same result on random inputs, but for rounding."""
    from accel.kernels.dropins import dropin_class, without_hooks

    plain, other = without_hooks(module), without_hooks(module)
    other.__class__ = dropin_class(dropin, type(other))
    weight = next(module.parameters())
    x = torch.randn(2, 8, weight.shape[-1], device=weight.device, dtype=weight.dtype)
    return _agree(plain(x), other(x))


def _agree(expected: Tensor, actual: Tensor) -> bool:
    off = (expected - actual).abs().max()
    return bool(off <= _NEAR * torch.finfo(expected.dtype).eps * expected.abs().max())


# -- rotary embeddings: a function of the library's module -------------------------------------------------------------


class _Rotation(NamedTuple):
    module: ModuleType
    own: Callable[..., tuple[Tensor, Tensor]]
    by_liger: Callable[..., tuple[Tensor, Tensor]]


def _rotations(model: nn.Module) -> Iterator[_Rotation]:
    """Yield the library's modules whose rotation Liger's kernel computes; other models of theirs have it as well."""
    device = next(model.parameters()).device
    for name in sorted({type(module).__module__ for module in model.modules()}):
        module = sys.modules.get(name)
        own = getattr(module, _ROTATION, None)
        if module is None or own is None or not name.startswith("transformers.models."):
            continue
        by_liger = _rotation(own)
        q, k, half = (torch.randn(size, device=device) for size in ((1, 2, 8, 16), (1, 1, 8, 16), (1, 8, 8)))
        cos, sin = (torch.cat((part, part), dim=-1) for part in (half.cos(), half.sin()))
        if list(inspect.signature(own).parameters)[:4] == ["q", "k", "cos", "sin"] and all(
            map(_agree, own(q, k, cos, sin), by_liger(q.clone(), k.clone(), cos, sin))
        ):
            yield _Rotation(module, own, by_liger)


def _rotation(own: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    from liger_kernel.transformers.rope import liger_rotary_pos_emb

    from accel.kernels import support

    @functools.wraps(own)
    def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or not (support.runs_triton(q) and q.shape[-1] == k.shape[-1] == cos.shape[-1]):
            return own(q, k, cos, sin, *args, **kwargs)
        return liger_rotary_pos_emb(q, k, cos, sin)

    return apply_rotary_pos_emb
