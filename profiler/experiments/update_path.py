"""The path an optimizer's step takes: parameter by parameter, foreach or fused; and switching it between two steps.

On a CPU torch's fused path takes the elements of parameter, gradient and state in the order of memory, as if all were
laid out alike: the update of a parameter with gaps between its elements, or of one whose gradient has other strides, is
wrong without a word (torch 2.13). By its source it raises on CUDA, where it was not run. So it is not offered for such
parameters, and gradients that a loop has assigned itself are laid out as their parameters first.

SGD's fused path wants a momentum buffer for all parameters of a group or for none. In the first step after a loop has
unfrozen some of them, the foreach path makes the buffers that are missing.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from accel.profiler.closures import Arguments, followed_by

_FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
_FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu")
_CPU = torch.device("cpu")


def refusal(optimizer: Optimizer) -> str:
    """Say why the path can't be switched, '' if it can.

    Args:
        optimizer: any; only torch's own have paths.
    """
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
    return ""


def set_by_hand(optimizer: Optimizer) -> bool:
    """Return whether the loop chose the path itself."""
    return any(map(_is_set, optimizer.param_groups))


def _is_set(group: dict[str, Any]) -> bool:
    return bool(group.get("fused")) or group.get("foreach") is not None


def updates_at_once(optimizer: Optimizer) -> bool:
    """Return whether the loop chose the fused or the foreach path."""
    return any(group.get("fused") or group.get("foreach") for group in optimizer.param_groups)


def has_fused(optimizer: Optimizer) -> bool:
    """Return whether torch has a fused path for this optimizer and all its parameters."""
    return type(optimizer).__name__ in _FUSED and all(
        p.is_floating_point() and p.device.type in _FUSED_DEVICES and _is_regular(p, optimizer.state.get(p, {}))
        for group in optimizer.param_groups
        for p in group["params"]
    )


def _is_regular(parameter: Tensor, state: dict[str, Any]) -> bool:
    """Return whether a parameter has no gaps, and its state is laid out as it is."""
    like = [value for value in state.values() if isinstance(value, Tensor) and value.shape == parameter.shape]
    like.append(torch.empty_like(parameter, device="meta"))  # of other strides if there are gaps, or elements overlap
    return all(value.stride() == parameter.stride() for value in like)


def _lay_out_gradients(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            grad = p.grad
            if grad is None:
                continue
            if grad.layout is not torch.strided:  # it had none when the path was switched; a fused step would raise
                _set(group, foreach=False, fused=False)
            elif grad.stride() != p.stride():  # 0.2 µs each
                p.grad = torch.empty_like(p, dtype=grad.dtype).copy_(grad)


def _lacks_some_buffers(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Return whether some of the parameters to be updated have a momentum buffer, and some none."""
    if not group.get("momentum") or not isinstance(optimizer, torch.optim.SGD):
        return False
    have = {_has_buffer(optimizer.state.get(p)) for p in group["params"] if p.grad is not None}
    return len(have) > 1


def _has_buffer(state: dict[str, Any] | None) -> bool:
    return state is not None and state.get("momentum_buffer") is not None


class Paths:
    """Switches the paths of some optimizers, and back.

    Groups that an optimizer gets meanwhile, by `load_state_dict` or `add_param_group`, are switched when it steps;
    those that name a path themselves stay as they are.

    Attributes:
        saved: id of a parameter group → its original `foreach` and `fused`; empty while nothing is switched.
    """

    def __init__(self) -> None:
        self.saved: dict[int, tuple[Any, Any]] = {}
        self._known: dict[int, dict[str, Any]] = {}
        """All groups that have been looked at; kept, since another one could get the id of one that is gone."""
        self._switched: list[weakref.ref[Optimizer]] = []
        self._fused = False
        self._hooks: list[RemovableHandle] = []
        self._for_this_step: list[dict[str, Any]] = []
        """Groups that take the foreach path in one step."""

    def switch(self, optimizers: Iterable[Optimizer], *, fused: bool) -> None:
        """Take the fused path, or foreach."""
        self._fused = fused
        for optimizer in optimizers:
            self._switched.append(weakref.ref(optimizer))
            self._take(optimizer, optimizer.param_groups)
            self._hooks.append(optimizer.register_step_pre_hook(self._step_begins))
            if fused:
                self._hooks.append(optimizer.register_step_post_hook(self._step_ended))
        self._note_groups()

    def switches(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer takes the path, in some of its groups at least."""
        if all(reference() is not optimizer for reference in self._switched):
            return False
        self._take_new(optimizer)
        path = "fused" if self._fused else "foreach"
        return any(id(group) in self.saved and group.get(path) for group in optimizer.param_groups)

    def _take(self, optimizer: Optimizer, groups: Iterable[dict[str, Any]]) -> None:
        for group in groups:
            self.saved[id(group)] = group["foreach"], group.get("fused")
            _set(group, not self._fused, self._fused)
        if self._fused:
            _move_step_counters(optimizer, on_device=True)

    def _take_new(self, optimizer: Optimizer) -> None:
        """Switch the groups that it has got since it was switched, if they can be."""
        new = [group for group in optimizer.param_groups if id(group) not in self._known]
        if not new:
            return
        if not refusal(optimizer) and (has_fused(optimizer) or not self._fused):
            self._take(optimizer, [group for group in new if not _is_set(group)])
        self._note_groups()

    def _note_groups(self) -> None:
        """Note the present groups, and forget those that are gone."""
        groups = [group for optimizer in self._optimizers() for group in optimizer.param_groups]
        self._known = {id(group): group for group in groups}
        self.saved = {key: paths for key, paths in self.saved.items() if key in self._known}

    def _optimizers(self) -> list[Optimizer]:
        """Return the switched ones; a loop may have replaced some, and these are not kept alive."""
        return [optimizer for reference in self._switched if (optimizer := reference()) is not None]

    def _step_begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Arguments | None:
        self._take_new(optimizer)
        if not self._fused:
            return None
        self._step_ended(optimizer)  # the step before may have raised
        arguments = followed_by(partial(self._gradients_ready, optimizer), args, kwargs)
        if arguments is None:
            self._gradients_ready(optimizer)
        return arguments

    def _gradients_ready(self, optimizer: Optimizer) -> None:
        _lay_out_gradients(optimizer)
        for group in optimizer.param_groups:
            if group.get("fused") and _lacks_some_buffers(optimizer, group):
                self._for_this_step.append(group)
                _set(group, foreach=True, fused=False)

    def _step_ended(self, optimizer: Optimizer, args: Any = None, kwargs: Any = None) -> None:
        for group in self._for_this_step:
            _set(group, foreach=False, fused=True)
        self._for_this_step.clear()

    def restore(self) -> None:
        """Restore the original paths."""
        for optimizer in self._optimizers():
            for group in optimizer.param_groups:
                if id(group) in self.saved:
                    _set(group, *self.saved[id(group)])
            _move_step_counters(optimizer, on_device=any(group.get("fused") for group in optimizer.param_groups))
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._switched.clear()
        self._for_this_step.clear()
        self.saved.clear()
        self._known.clear()


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

    Args:
        counters: tensors of one element or few.
        device: where they are wanted.
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
