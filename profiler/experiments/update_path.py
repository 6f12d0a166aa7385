"""The path an optimizer's step takes: parameter by parameter, foreach or fused; and switching it between two steps.

On a CPU torch's fused path takes the elements of parameter, gradient and state in the order of memory, as if all were
laid out alike and of one size: where they are not, the update is wrong, or beyond the memory of one, without a word
(torch 2.13). On CUDA, by its source, it raises. The foreach path raises at states of another dtype, and at tensors in
place of numbers. SGD's fused path wants a momentum buffer for all parameters of a group or for none. A loop may change
all of that between any two steps, so what a path relies on is looked at in each: an optimizer that lacks it takes the
path that it had before in that step.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from accel.profiler.interruptions import ours
from accel.profiler.loop.optimizers import Arguments, followed_by

_FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
_FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu")
_CPU = torch.device("cpu")
_CPU = torch.device("cpu")
_CPU_DTYPES = (torch.float32, torch.float64)
"""The CPU's fused SGD without momentum leaves 16-bit weights as they are, without a word (torch 2.13)."""
_DTYPES = (*_CPU_DTYPES, torch.float16, torch.bfloat16)
_PARAMS, _GRAD, _DTYPE = itemgetter("params"), attrgetter("grad"), attrgetter("dtype")
_CONTIGUOUS, _IS_NONE = Tensor.is_contiguous, partial(is_, None)
_OTHERWISE = "a weight, its gradient and its state are no longer of one shape, dtype and memory layout"
_TENSOR = "a number of its parameter groups, such as the learning rate, is a tensor"


def refusal(optimizer: Optimizer) -> str:
    """Say why the path can't be switched, '' if it can; only torch's own optimizers have paths."""
    kind = type(optimizer)
    if kind.__module__.split(".")[0] != "torch":
        return f"{kind.__name__} is not one of torch's own"
    groups = optimizer.param_groups
    if not all("foreach" in group for group in groups):
        return f"{kind.__name__} has no fused or foreach path"
    if any(group.get("differentiable") or group.get("capturable") for group in groups):
        return f"{kind.__name__} is differentiable or capturable"
    if any(p.is_sparse or (p.grad is not None and p.grad.is_sparse) for group in groups for p in group["params"]):
        return f"{kind.__name__} has sparse gradients"
    return compiled(optimizer)


def compiled(optimizer: Optimizer) -> str:
    """Say so if the loop has compiled its step, else ''; another path would be compiled as well, or fail in Dynamo."""
    # As Dynamo marks the state that a compiled step updates. It marks parameters for other reasons as well.
    state = chain.from_iterable(map(dict.values, optimizer.state.values()))
    is_compiled = any(getattr(value, "_dynamo_static_input_type", "") == "guarded" for value in state)
    return f"the loop has compiled the step of {type(optimizer).__name__}" if is_compiled else ""


def set_by_hand(optimizer: Optimizer) -> bool:
    """Return whether the loop chose the path itself."""
    return any(map(_is_set, optimizer.param_groups))


def _is_set(group: dict[str, Any]) -> bool:
    return bool(group.get("fused")) or group.get("foreach") is not None


def updates_at_once(optimizer: Optimizer) -> bool:
    """Return whether the loop chose the fused or the foreach path."""
    return any(group.get("fused") or group.get("foreach") for group in optimizer.param_groups)


def has_fused(optimizer: Optimizer) -> bool:
    """Return whether torch has a fused path for this optimizer and all its parameters, as they are now."""
    groups = optimizer.param_groups
    return type(optimizer).__name__ in _FUSED and not any(_unfit(optimizer, group, fused=True) for group in groups)


def _unfit(optimizer: Optimizer, group: dict[str, Any], *, fused: bool) -> str:
    """Say why a path would not update a group as the plain one does, '' if it would."""
    if why := _has_tensors(group, fused=fused):
        return why
    is_fit = all(_is_regular(p, optimizer.state.get(p, {}), fused=fused) for p in group["params"])
    return "" if is_fit else _OTHERWISE


def _has_tensors(group: dict[str, Any], *, fused: bool) -> str:
    """Say so if tensors stand where a path takes numbers, else ''; torch's fused one reads some of them itself."""
    takes = ("params", "lr", "betas") if fused else ("params",)
    given = [value for name, value in group.items() if name not in takes]
    pairs = [value for value in given if type(value) is tuple]
    kinds = {*map(type, given), *map(type, chain.from_iterable(pairs))}
    return _TENSOR if any(issubclass(kind, Tensor) for kind in kinds) else ""


def _is_regular(parameter: Tensor, state: dict[str, Any], *, fused: bool) -> bool:
    """Return whether a parameter's state has its dtype; for the fused path, whether all has its layout and no gaps."""
    where = parameter.device.type
    dtypes = _CPU_DTYPES if where == "cpu" else _DTYPES
    if fused and (where not in _FUSED_DEVICES or parameter.dtype not in dtypes):
        return False
    like = [value for name, value in state.items() if name != "step" and isinstance(value, Tensor)]
    if not fused:
        return all(value.dtype == parameter.dtype for value in like)
    if not parameter.is_contiguous():
        like.append(torch.empty_like(parameter))  # of other strides if there are gaps, or elements overlap
    if (grad := parameter.grad) is not None:
        like.append(grad)
    own = parameter.shape, parameter.dtype, parameter.layout
    return all((v.shape, v.dtype, v.layout) == own and v.stride() == parameter.stride() for v in like)


def _signature(optimizer: Optimizer) -> Any:
    """Return what a path relies on of all tensors; None where it can't be said, as of sparse gradients.

    It is made at every step, so each line goes through all tensors without Python for each. Other data lie elsewhere,
    so where a parameter's begin says most of it; a contiguous tensor is known sooner than its strides.
    """
    params = list(chain.from_iterable(map(_PARAMS, optimizer.param_groups)))
    state = list(chain.from_iterable(map(dict.values, optimizer.state.values())))
    grads = list(map(_GRAD, params))
    missing: tuple[int, ...] = ()
    try:
        if any(map(_IS_NONE, grads)):
            missing = tuple(number for number, grad in enumerate(grads) if grad is None)
            grads = [grad for grad in grads if grad is not None]
        is_plain = all(map(_CONTIGUOUS, params)) and all(map(_CONTIGUOUS, grads)) and all(map(_CONTIGUOUS, state))
        others = None if is_plain else (list(map(id, state)), list(map(Tensor.stride, params + grads + state)))
        own = list(map(Tensor.data_ptr, params)), list(map(Tensor.numel, params)), list(map(_DTYPE, params + state))
        where = list(map(Tensor.get_device, state)) if params and params[0].is_cuda else None  # of counters, too
    except ours(RuntimeError, TypeError, AttributeError):  # AttributeError: numbers among the state
        return None
    momentum = [group.get("momentum") for group in optimizer.param_groups]
    return list(map(id, params)), len(state), momentum, missing, own, others, where


def _lacks_some_buffers(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Return whether some of the parameters to be updated have a momentum buffer, and some none."""
    if not group.get("momentum") or not isinstance(optimizer, torch.optim.SGD):
        return False
    states = [optimizer.state.get(p) or {} for p in group["params"] if p.grad is not None]
    return len({state.get("momentum_buffer") is None for state in states}) > 1


class Paths:
    """Switches the paths of some optimizers, and back.

    Groups that an optimizer gets meanwhile, by `load_state_dict` or `add_param_group`, are switched when it steps;
    those that name a path themselves stay as they are.
    """

    def __init__(self) -> None:
        self.saved: dict[int, tuple[Any, Any]] = {}
        self._groups: list[dict[str, Any]] = []
        """Those of `saved`; kept, since another one could get the id of one that is gone."""
        self._signatures: WeakKeyDictionary[Optimizer, Any] = WeakKeyDictionary()
        """Switched optimizers, which a loop may replace → what the path relies on, as it was last found fit."""
        self._fused = False
        self._hooks: list[RemovableHandle] = []
        self._for_this_step: list[dict[str, Any]] = []
        """Groups that take their own path in one step."""
        self._reasons: WeakKeyDictionary[Optimizer, str] = WeakKeyDictionary()
        """Optimizer → why the path was not fit for it in its last step."""

    def switch(self, optimizers: Iterable[Optimizer], *, fused: bool) -> None:
        """Take the fused path, or foreach."""
        self._fused = fused
        for optimizer in optimizers:
            self._signatures[optimizer] = None
            self._take(optimizer, optimizer.param_groups, optimizer.param_groups)
            self._hooks.append(optimizer.register_step_pre_hook(self._step_begins))
            self._hooks.append(optimizer.register_step_post_hook(self._step_ended))

    def switches(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer takes the path, in some of its groups at least."""
        self._take_new(optimizer)
        return optimizer in self._signatures and optimizer not in self._reasons and bool(self._switched(optimizer))

    def reason(self) -> str:
        """Say why an optimizer did not take the path in its last step, '' if all did."""
        return next(iter(self._reasons.values()), "")

    def _take(self, optimizer: Optimizer, groups: list[dict[str, Any]], switched: list[dict[str, Any]]) -> None:
        """Know these groups, and switch some of them."""
        self._groups += groups
        self.saved |= {id(group): (group.get("foreach"), group.get("fused")) for group in groups}
        for group in switched:
            _set(group, not self._fused, self._fused)
        if self._fused and switched:
            _move_step_counters(optimizer, on_device=True)

    def _take_new(self, optimizer: Optimizer) -> None:
        """Switch the groups that it has got since it was switched, if they can be."""
        new = [group for group in optimizer.param_groups if id(group) not in self.saved]
        if new and optimizer in self._signatures:
            is_fit = not refusal(optimizer) and (has_fused(optimizer) or not self._fused)
            self._take(optimizer, new, [group for group in new if is_fit and not _is_set(group)])

    def _switched(self, optimizer: Optimizer) -> list[dict[str, Any]]:
        path = "fused" if self._fused else "foreach"
        return [group for group in optimizer.param_groups if id(group) in self.saved and group.get(path)]

    def _step_begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Arguments | None:
        self._step_ended(optimizer)  # the step before may have raised
        self._take_new(optimizer)
        arguments = followed_by(partial(self._gradients_ready, optimizer), args, kwargs)
        if arguments is None:
            self._gradients_ready(optimizer)
        return arguments

    def _gradients_ready(self, optimizer: Optimizer) -> None:
        """Have an optimizer that lacks what the path relies on take its own path in this step."""
        groups = self._switched(optimizer)
        if not groups:  # the closure may have ended in a restored path
            return
        signature = _signature(optimizer)
        is_known = signature is not None and signature == self._signatures[optimizer]
        find = _has_tensors if is_known else partial(_unfit, optimizer)
        why = next((reason for group in groups if (reason := find(group, fused=self._fused))), "")
        is_looked_at = self._fused and not is_known
        if is_looked_at and not why:
            _move_step_counters(optimizer, on_device=True)
            signature = _signature(optimizer)
        lacks_buffers = is_looked_at and any(_lacks_some_buffers(optimizer, group) for group in groups)
        self._reasons.pop(optimizer, None)
        if why:
            self._reasons[optimizer] = why
        if why or lacks_buffers:
            signature, self._for_this_step = None, groups
            for group in groups:
                _set(group, *self.saved[id(group)])
        self._signatures[optimizer] = signature

    def _step_ended(self, optimizer: Optimizer, args: Any = None, kwargs: Any = None) -> None:
        for group in self._for_this_step:
            _set(group, not self._fused, self._fused)
        self._for_this_step = []

    def restore(self) -> None:
        """Restore the original paths."""
        for optimizer in self._signatures:
            for group in optimizer.param_groups:
                if id(group) in self.saved:
                    _set(group, *self.saved[id(group)])
            _move_step_counters(optimizer, on_device=any(group.get("fused") for group in optimizer.param_groups))
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._groups, self._for_this_step = [], [], []
        self._signatures.clear()
        self._reasons.clear()
        self.saved.clear()


def _set(group: dict[str, Any], foreach: bool | None, fused: bool | None) -> None:
    group["foreach"] = foreach
    if "fused" in group:
        group["fused"] = fused


def _move_step_counters(optimizer: Optimizer, *, on_device: bool) -> None:
    """Move the step counters: the fused path wants them on the parameter's device, the others on the CPU."""
    by_device: dict[torch.device, list[dict[str, Any]]] = {}
    for parameter, state in optimizer.state.items():
        if isinstance(state.get("step"), Tensor) and isinstance(parameter, Tensor):
            by_device.setdefault(parameter.device if on_device else _CPU, []).append(state)
    for device, states in by_device.items():
        for state, step in zip(states, moved([state["step"] for state in states], device), strict=True):
            state["step"] = step


def moved(counters: list[Tensor], device: torch.device) -> list[Tensor]:
    """Return counters on a device: those that are there as they are, copies of the others.

    All of a kind are copied at once. Each copy between a GPU and the host waits for both, by 10 µs.
    """
    by_kind: dict[Any, list[int]] = {}
    for number, counter in enumerate(counters):
        if counter.device != device:
            by_kind.setdefault((counter.device, counter.dtype, counter.shape), []).append(number)
    there = list(counters)
    for numbers in by_kind.values():
        copied = torch.stack([counters[number] for number in numbers]).to(device).unbind()
        for number, own in zip(numbers, torch._foreach_add(copied, 0), strict=True):  # each with memory of its own
            there[number] = own
    return there
