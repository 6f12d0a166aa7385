"""batched_muon: let `torch.optim.Muon` update all weights of one shape at once instead of one after the other."""

from __future__ import annotations

from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from accel.profiler.bottleneck import Bottleneck
from accel.profiler.experiments import update_path
from accel.run import Run
from accel.strategies.base import Exactness, Strategy
from accel.strategies.process_setting import ProcessSetting
from accel.strategies.trial_design import TrialDesign

_MUON: Any = getattr(torch.optim, "Muon", None)
_COEFFICIENTS = "ns_coefficients"
_PLAIN = (nn.Parameter, Tensor)


class _Batched(tuple[float, ...]):
    """Coefficients of a group that is updated in batches: torch hands them from the group to the function below."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (tuple(self),)  # a copy of the optimizer has the plain ones


def _update(params: list[Tensor], grads: list[Tensor], buffers: list[Tensor], **options: Any) -> None:
    if type(options[_COEFFICIENTS]) is not _Batched:
        _torchs[0](params, grads, buffers, **options)
        return
    from accel.kernels.optimizers import muon_update

    options.pop("foreach", None)
    options.pop("has_complex")
    muon_update(params, grads, buffers, **options)


_torchs: list[Any] = []
"""torch's own function, while the other one stands in its place."""


def _stand_in(is_on: bool) -> None:
    module: Any = import_module("torch.optim._muon")

    if is_on and not _torchs:
        _torchs.append(module.muon)
        module.muon = _update
    elif not is_on and _torchs:
        module.muon = _torchs.pop()


class BatchedMuon(Strategy):
    """Make one Newton-Schulz iteration for all weights of a shape, in the optimizer's own step.

    Source: https://kellerjordan.github.io/posts/muon/.
    """

    name = "batched_muon"
    summary = "Muon's weights of one shape updated at once"
    treats = frozenset({Bottleneck.OPTIMIZER, Bottleneck.LAUNCH})
    exactness = Exactness.REORDERED
    touches = frozenset({"optimizer"})
    _function = ProcessSetting(lambda: bool(_torchs), _stand_in)

    def __init__(self) -> None:
        self._hooks: WeakKeyDictionary[Optimizer, list[RemovableHandle]] = WeakKeyDictionary()

    def refusal(self, run: Run) -> str:
        """Say why it does not apply: no `torch.optim.Muon`, or none whose groups it can update."""
        muons = [optimizer for optimizer in run.optimizers if type(optimizer) is _MUON]
        if not muons:
            return "no torch.optim.Muon of the model has been seen"
        if why := next(filter(None, map(update_path.compiled, muons)), ""):
            return why
        return next((why for each in muons for group in each.param_groups if (why := _unfit(group))), "")

    def trial_design(self, run: Run) -> TrialDesign:
        """Try it where the update is a part of the step; on a GPU the host's time in it is that of launching."""
        return TrialDesign(phase="" if run.cuda else "optimizer")

    def enable(self, run: Run, setting: Any) -> None:
        """Mark the groups, and again in each step: a loaded state brings others."""
        self._function.use(self, True)
        for optimizer in run.optimizers:
            if type(optimizer) is _MUON:
                _mark(optimizer)
                self._hooks[optimizer] = [
                    optimizer.register_step_pre_hook(_mark),
                    optimizer.register_state_dict_post_hook(_plain_checkpoint, prepend=True),
                ]

    def failure(self, run: Run) -> str:
        """Say that no optimizer of the run is updated so any more."""
        for optimizer in self._hooks:
            _mark(optimizer)
        groups = [group for optimizer in run.optimizers for group in optimizer.param_groups]
        if not groups or any(type(group.get(_COEFFICIENTS)) is _Batched for group in groups):
            return ""
        return "no torch.optim.Muon updates in batches any more: the loop has replaced it, or its groups have changed"

    def disable(self, run: Run) -> None:
        """Let torch's own function update."""
        for optimizer, hooks in self._hooks.items():
            for hook in hooks:
                hook.remove()
            for group in optimizer.param_groups:
                group[_COEFFICIENTS] = _plain(group[_COEFFICIENTS])
        self._hooks.clear()
        self._function.leave(self)


def _unfit(group: dict[str, Any]) -> str:
    if any(type(p) not in _PLAIN for p in group["params"]):
        return "a parameter is sharded or of a class of its own"
    if not group["nesterov"] and any(p.dtype == torch.bfloat16 for p in group["params"]):
        return "without Nesterov torch scales the momentum of bfloat16 weights in place, which this would not"
    return ""


def _mark(optimizer: Optimizer, *arguments: Any) -> None:
    for group in optimizer.param_groups:
        is_fit = not _unfit(group)
        if is_fit is not (type(group[_COEFFICIENTS]) is _Batched):
            group[_COEFFICIENTS] = _Batched(group[_COEFFICIENTS]) if is_fit else _plain(group[_COEFFICIENTS])


def _plain(coefficients: Any) -> Any:
    return tuple(coefficients) if type(coefficients) is _Batched else coefficients


def _plain_checkpoint(optimizer: Optimizer, state: dict[str, Any]) -> None:
    for saved in state["param_groups"]:
        saved[_COEFFICIENTS] = _plain(saved[_COEFFICIENTS])
