"""Leave the multiplication of `clip_grad_norm_` to the fused update that follows it.

torch's `clip_grad_norm_` finds the norm, then multiplies all gradients by c = min(1, max_norm / norm). Its fused update
divides them by `optimizer.grad_scale` and writes them back, so with 1 / c there the gradients are the clipped ones once
it has ended, and are read and written once less. Nothing waits for the device.

Between the two, `.grad` of parameters is a property: whoever reads or sets one, as `zero_grad` and hooks of the loop
do, has the gradients multiplied first, and so has the next backward pass. A gradient that somebody else holds as well
(in a list, as a view) could be read past that, so then all are multiplied at once. What can't be seen is a CUDA graph
of the loop's own that is replayed between the two: it must hold both or come before both.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterable
from functools import partial
from importlib import import_module
from itertools import compress
from operator import attrgetter, is_not
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from accel.profiler.loop import backward
from accel.strategies.process_setting import ProcessSetting

_MODULE, _FUNCTION = "torch.nn.utils.clip_grad", "_clip_grads_with_norm_"
"""What `clip_grad_norm_` calls, from wherever it was imported."""
_BASE: Any = torch._C.TensorBase
_OWN = _BASE.grad
_GRAD, _IS_SOME = _OWN.__get__, partial(is_not, None)
_KINDS: Any = (type, attrgetter("dtype"), attrgetter("layout"), Tensor.get_device)
_HELD, _USES = Tensor._use_count, torch._C._storage_Use_Count  # type: ignore[attr-defined]
_CDATA = attrgetter("_cdata")
_SCALING = ("grad_scale", "found_inf")
FORGETS_CHANGES = sys.version_info < (3, 13)
"""Later versions look attributes up without their cache once a class has been changed a thousand times."""


class _Waiting(NamedTuple):
    optimizer: Optimizer
    grads: list[Tensor]
    coefficient: Tensor


_torchs: list[Any] = []
"""torch's own function, while the other one stands in its place."""
_waiting: list[_Waiting] = []
"""The clipping that waits for its update, if one does."""
_lock = threading.RLock()
_attached: weakref.WeakKeyDictionary[Optimizer, list[RemovableHandle]] = weakref.WeakKeyDictionary()
"""Optimizer → its hooks, of which the first comes before its step."""
_alone: list[Any] = []
"""What `_holders` finds if nobody else holds a gradient, which depends on the version of torch; empty to find it."""


def _settle(*_: Any) -> None:
    """Multiply the gradients of the clipping that waits, as torch does."""
    if _waiting:
        with _lock, torch.no_grad():
            for waiting in _taken():
                torch._foreach_mul_(waiting.grads, waiting.coefficient)


def _taken() -> list[_Waiting]:
    """Return the clipping that waits, which then waits no more."""
    taken = _waiting.copy()
    _waiting.clear()
    if "grad" in vars(nn.Parameter):
        del nn.Parameter.grad
    return taken


def _read(parameter: Tensor) -> Any:
    _settle()
    return _GRAD(parameter)


def _write(parameter: Tensor, grad: Tensor | None) -> None:
    _settle()
    _OWN.__set__(parameter, grad)


def _delete(parameter: Tensor) -> None:
    _settle()
    _OWN.__delete__(parameter)


_given: weakref.WeakKeyDictionary[Optimizer, Tensor] = weakref.WeakKeyDictionary()
"""Optimizer in its step → what it divides by."""


class _Passes:
    """Hears of backward passes, which add to gradients without a line of Python."""

    backward_begins = staticmethod(_settle)


_passes = _Passes()


def _clip(parameters: Any, max_norm: float, total_norm: Tensor, foreach: bool | None = None) -> None:
    """Stand in for torch's function of this signature."""
    if torch.compiler.is_compiling():  # within a step that the loop has compiled as a whole
        _torchs[0](parameters, max_norm, total_norm, foreach)
        return
    _settle()
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    waiting = _prepared(parameters, float(max_norm), total_norm)
    if waiting is None:
        _torchs[0](parameters, max_norm, total_norm, foreach)
        return
    with _lock:
        _waiting.append(waiting)
        nn.Parameter.grad = property(_read, _write, _delete)  # type: ignore[assignment]


def _prepared(parameters: list[Any], max_norm: float, total_norm: Tensor) -> _Waiting | None:
    """Return a clipping that can wait; None where it has to be done at once."""
    # In each step, so each line goes through all tensors without Python for each.
    if set(map(type, parameters)) != {nn.Parameter} or type(total_norm) is not Tensor:
        return None
    given = list(map(_GRAD, parameters))
    grads = [grad for grad in given if grad is not None]
    clipped = set(map(id, compress(parameters, map(_IS_SOME, given))))
    del given
    if not _alone:
        _alone.append(_holders(grads))
        return None
    kinds = [set(map(kind, grads)) for kind in _KINDS]
    if kinds != [{Tensor}, {torch.float32}, {torch.strided}, {total_norm.get_device()}]:
        return None
    optimizer = next((each for each in _attached if _updates(each, clipped)), None)
    if optimizer is None or len(clipped) != len(grads) or not max_norm > 0 or _holders(grads) != _alone[0]:
        return None
    coefficient = torch.clamp(max_norm / (total_norm + 1e-6), max=1.0)
    return _Waiting(optimizer, grads, coefficient)


def _holders(grads: list[Any]) -> list[Any]:
    """Count who holds gradients: in Python, in autograd, as other tensors on the same memory."""
    storages = map(_USES, map(_CDATA, map(Tensor.untyped_storage, grads)))
    return [set(map(sys.getrefcount, grads)), set(map(_HELD, grads)), set(storages)]


def _updates(optimizer: Optimizer, clipped: set[int]) -> bool:
    """Return whether an optimizer updates all that were clipped, by their ids, and nothing else."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    own = set(map(id, params))
    return own == clipped or (own > clipped and all(p.grad is None for p in params if id(p) not in clipped))


def _step_begins(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Hand the coefficient that waits to the update; where it can't be, the update's own look at gradients has it."""
    _step_ended(optimizer)  # the step before may have raised
    has_closure = len(args) > 1 or bool(kwargs)
    if has_closure or not _waiting or _waiting[0].optimizer is not optimizer:
        return
    hooks = optimizer._optimizer_step_pre_hooks
    is_last = next(reversed(hooks)) == _attached[optimizer][0].id  # those of the loop see clipped gradients
    is_scaled = any(getattr(optimizer, name, None) is not None for name in _SCALING)
    if is_scaled or not is_last or not all(group.get("fused") for group in optimizer.param_groups):
        _settle()
        return
    with _lock:
        for waiting in _taken():
            _given[optimizer] = optimizer.grad_scale = waiting.coefficient.reciprocal()  # type: ignore[attr-defined]


def _step_ended(optimizer: Optimizer, *_: Any) -> None:
    given = _given.pop(optimizer, None)
    if given is not None and getattr(optimizer, "grad_scale", None) is given:
        del optimizer.grad_scale  # type: ignore[attr-defined]


def _stand_in(is_on: bool) -> None:
    module: Any = import_module(_MODULE)
    if is_on and not _torchs and hasattr(module, _FUNCTION):
        _torchs.append(getattr(module, _FUNCTION))
        setattr(module, _FUNCTION, _clip)
        backward.listen(_passes)
        _find_out_who_holds_one()
    elif not is_on and _torchs:
        setattr(module, _FUNCTION, _torchs.pop())
        backward.forget(_passes)


def _find_out_who_holds_one() -> None:
    probe = nn.Parameter(torch.zeros(1))
    probe.grad = torch.zeros(1)
    _alone.clear()
    nn.utils.clip_grad_norm_([probe], 1.0)


_FUNCTION_IN_PLACE = ProcessSetting(lambda: bool(_torchs), _stand_in)


class LateClipping:
    """What a strategy that takes the fused path switches on with it, for some optimizers.

    Example:
        >>> weight = nn.Parameter(torch.zeros(2))
        >>> optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
        >>> late = LateClipping()
        >>> late.attach([optimizer])
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> float(nn.utils.clip_grad_norm_([weight], 1.0))
        5.0
        >>> optimizer.step()
        >>> weight.detach()
        tensor([-0.6000, -0.8000])
        >>> late.detach()
    """

    def __init__(self) -> None:
        self._optimizers: list[weakref.ref[Optimizer]] = []

    def attach(self, optimizers: Iterable[Optimizer]) -> None:
        """Let their clippings wait from now on; hooks that come before their steps later end that."""
        if not FORGETS_CHANGES:
            return
        _FUNCTION_IN_PLACE.use(self, True)
        begins: Any = torch._disable_dynamo(_step_begins)  # type: ignore[attr-defined]
        for optimizer in optimizers:
            self._optimizers.append(weakref.ref(optimizer))
            _attached[optimizer] = [
                optimizer.register_step_pre_hook(begins),
                optimizer.register_step_post_hook(_step_ended),
            ]

    def detach(self) -> None:
        """Clip at once again, as what waits is now."""
        _settle()
        for optimizer in filter(None, (reference() for reference in self._optimizers)):
            for handle in _attached.pop(optimizer, []):
                handle.remove()
        self._optimizers.clear()
        _FUNCTION_IN_PLACE.leave(self)
