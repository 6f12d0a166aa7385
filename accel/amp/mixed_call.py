"""A call of a model in mixed precision: 16-bit copies of its weights stand in for them until it returns.

              ┌─────────────────────── the call ───────────────────────┐
    x ──cast──▶ x₁₆ ──▶  model, with weights W₁₆ = cast(W)  ──▶ y₁₆ ──cast──▶ y
              └──────────────────────────▲──────────────────────────────┘
                                         └── W: float32, what optimizer, checkpoint and loop see

The casts are part of the graph (`casts.py`), so W gets float32 gradients without a loss scale.

Source: as `torch.func.functional_call` puts tensors in; FSDP2's mixed precision keeps float32 parameters, too.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from accel.amp.casts import cast_weights, enter, leave
from accel.amp.loss_scale import DynamicLossScale, skip_overflowed_steps
from accel.errors import InvalidArgument
from accel.precision import autocast_of_call
from accel.profiler.loop import backward
from accel.profiler.trees import map_tensors

_F = TypeVar("_F", bound=Callable[..., Any])
_HALF = (torch.float16, torch.bfloat16)
_CASTABLE = (torch.float64, torch.float32, *_HALF)
# Its operators take 16-bit images beside float32 weights and statistics.
_NORMS = nn.modules.batchnorm._BatchNorm
_OF_NORMS = frozenset({"weight", "bias", "running_mean", "running_var"})

_FIRST, _EVERY = 2, 64
"""Calls of a model whose backward pass is looked at: so many at first, and then one of so many. It takes 2 µs for each
node of the graph."""
_OR = "or take bfloat16, or torch.amp.GradScaler and loss_scale=None."

_disable: Any = torch.compiler.disable


def _never_compiled(function: _F) -> _F:
    disabled: _F = _disable(function)
    return disabled


class Swap(NamedTuple):
    """A name in a dictionary of a module, what belongs there, and what stands in for it."""

    where: dict[str, Any]
    name: str
    before: Any
    now: Any
    mark: tuple[int, int] | None = None
    """Of what stands in, as it came: see `_mark`."""

    def restore(self) -> None:
        """Put back what belongs there, with what the call has written to a stand-in."""
        own = self.where.get(self.name)
        if own is self.now or not isinstance(self.before, Tensor):
            self.where[self.name] = self.before
        elif isinstance(own, Tensor) and own.is_floating_point():  # the model has put another there
            self.where[self.name] = own.to(self.before.dtype)


class Wanted(NamedTuple):
    """A tensor of a module that a call needs in another dtype, or with its gradient unscaled."""

    module: nn.Module
    where: dict[str, Any]
    name: str
    tensor: Tensor
    dtype: torch.dtype


class MixedCall:
    """Makes calls of one model in mixed precision.

    Args:
        dtype: float16 or bfloat16.
        scale: of the gradients within the model; None for none.
        kept: modules that compute in float32, beside batch normalisation.
        autocast: leave weights and inputs in float32, and compute under autocast.
        warns: say so, once, if the model writes to its weights or buffers within a call; else `rounded` has its name.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        scale: DynamicLossScale | None = None,
        kept: Sequence[nn.Module] = (),
        *,
        autocast: bool = False,
        warns: bool = True,
    ) -> None:
        self.dtype, self.scale, self.kept, self.autocast = dtype, scale, list(kept), autocast
        self._calls = 0
        """With a scale."""
        self._thread: int | None = None
        """That in which a call is under way."""
        self._runs_again = False
        """A backward pass runs a part of a call again."""
        self._model: weakref.ref[nn.Module] | None = None
        """That of the last call with a scale."""
        self.rounded, self._warns = "", warns
        """The first weight or buffer that the model was seen to write to, in 16 bits."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_thread": None, "_runs_again": False, "_model": None}

    @property
    def is_under_way(self) -> bool:
        """True within a call, and where a backward pass runs a part of one again."""
        return self._thread is not None or self._runs_again

    @property
    def trained(self) -> set[int]:
        """The ids of the parameters whose gradients may have come through the loss scale."""
        model = None if self._model is None else self._model()
        return set() if model is None else set(map(id, model.parameters()))

    @functools.partial(_disable, recursive=False)  # the model's own code may be compiled
    def __call__(self, model: nn.Module, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Make a call.

        Args:
            *args: floating-point tensors in them are cast, in structures too.

        Raises:
            InvalidArgument: if another thread is within a call, or a weight that is trained is not float32.
        """
        if self._thread == threading.get_ident():  # the model calls itself
            return call(*args, **kwargs)
        if self._thread is not None:
            raise InvalidArgument(
                "a decorated model must be called by one thread at a time. Found: a call while another is under way, "
                "as of DataParallel; use DistributedDataParallel."
            )
        places: list[Swap] = []
        try:
            self._thread = threading.get_ident()
            args, kwargs, scale = self._begin(model, places, args, kwargs)
            with self._context(model):
                output = call(*args, **kwargs)
        finally:
            self._end(places)
        return _left(output, scale)

    @_never_compiled
    def _begin(self, model: nn.Module, places: list[Swap], args: Any, kwargs: Any) -> tuple[Any, Any, Tensor | None]:
        scale, inputs = self._scale_of_call(model), None if self.autocast else self.dtype
        args, kwargs = _mapped(lambda x: enter(x, inputs, scale), (args, kwargs))
        _follow_checkpointing()
        _under_way.calls.append(_Call(self, weakref.ref(model), scale))
        self._put_in(model, places, scale)
        return args, kwargs, scale

    @_never_compiled
    def _end(self, places: list[Swap]) -> None:
        try:
            self._restore(places)
        finally:  # a warning may be an error
            if _under_way.calls and _under_way.calls[-1].calls is self:
                _under_way.calls.pop()
            self._thread = None

    def _restore(self, places: list[Swap]) -> None:
        try:
            rounded = [place.name for place in places if _keep_written(place)]
        finally:
            for place in reversed(places):
                place.restore()
        if not rounded or self.rounded:
            return
        self.rounded = rounded[0]
        if self._warns:
            warnings.warn(
                f"accel.amp: the model writes to {self.rounded!r} within its call, where it has 16 bits: small changes "
                "are lost. Write to it outside of the call, or name its module in keep_fp32",
                RuntimeWarning,
                stacklevel=2,
            )

    def run_again(self, model: nn.Module, scale: Tensor | None, function: Callable[..., Any], *args: Any) -> Any:
        """Run a part of a call again within the backward pass, on casts of the weights as they were in the call."""
        places: list[Swap] = []
        _under_way.calls.append(_Call(self, weakref.ref(model), scale))
        self._runs_again = True
        try:
            with _disable_current_modes():  # selective checkpointing counts the operators of the part
                self._put_in(model, places, scale, one_by_one=True)  # each part runs backward by itself
            return function(*args)
        finally:
            self._runs_again = False
            _under_way.calls.pop()
            with _disable_current_modes():
                self._restore(places)

    def _scale_of_call(self, model: nn.Module) -> Tensor | None:
        if self.scale is None or not torch.is_grad_enabled():
            return None
        self._model = weakref.ref(model)
        skip_overflowed_steps(self)
        self._calls += 1
        _BYPASSES.expect(self._calls)
        return self.scale.of_call()

    def _context(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        if not self.autocast:
            return contextlib.nullcontext()
        return autocast_of_call(next((p.device.type for p in model.parameters()), "cpu"), self.dtype)

    def _put_in(self, model: nn.Module, places: list[Swap], scale: Tensor | None, *, one_by_one: bool = False) -> None:
        """Put casts in the places of weights and buffers, and note each place."""
        wanted = list(self._wanted(model, scale is not None))
        each = {(id(own.tensor), own.dtype): own for own in wanted}  # tied weights are cast once
        tensors, dtypes = [own.tensor for own in each.values()], [own.dtype for own in each.values()]
        if one_by_one:
            cast = [cast_weights([tensor], [dtype], scale)[0] for tensor, dtype in zip(tensors, dtypes, strict=True)]
        else:
            cast = cast_weights(tensors, dtypes, scale)
        by_key = dict(zip(each, cast, strict=True))
        places.extend(_lists_of_weights(wanted))
        for own in wanted:
            now = by_key[id(own.tensor), own.dtype]
            places.append(Swap(own.where, own.name, own.tensor, now, _mark(now)))
            own.where[own.name] = now

    def _wanted(self, model: nn.Module, is_scaled: bool) -> Iterator[Wanted]:
        kept = {id(inner) for module in self.kept for inner in module.modules()}
        for module in model.modules():
            own_names = _OF_NORMS if isinstance(module, _NORMS) else ()
            is_kept = self.autocast or id(module) in kept
            for name, p in module._parameters.items():
                if p is None or p.dtype not in _CASTABLE:
                    continue
                if hasattr(p, "device_mesh"):
                    raise InvalidArgument(
                        f"a decorated model can't be sharded. Found: {name!r} of {type(module).__name__}; use "
                        "fully_shard's MixedPrecisionPolicy in place of decorate."
                    )
                if p.requires_grad and p.is_leaf and p.dtype in _HALF:
                    raise InvalidArgument(
                        "the trained weights of a decorated model must be float32: they are what the optimizer "
                        f"updates. Found: {name!r} of {type(module).__name__}, {p.dtype}; call float() on it."
                    )
                dtype = p.dtype if is_kept or name in own_names else self.dtype
                if p.dtype != dtype or (is_scaled and p.requires_grad):
                    yield Wanted(module, module._parameters, name, p, dtype)
            for name, buffer in () if is_kept else module._buffers.items():
                is_cast = buffer is None or buffer.dtype not in _CASTABLE or buffer.dtype == self.dtype
                if buffer is not None and not is_cast and name not in own_names:
                    yield Wanted(module, module._buffers, name, buffer, self.dtype)


class _Call(NamedTuple):
    """A call under way in this thread, or a part of one that runs again."""

    calls: MixedCall
    model: weakref.ref[nn.Module]
    scale: Tensor | None


class _UnderWay(threading.local):
    def __init__(self) -> None:
        self.calls: list[_Call] = []


_under_way = _UnderWay()


@functools.cache
def _follow_checkpointing() -> None:
    """Have what is checkpointed within a call run again on that call's weights; others' checkpoints are left alone."""
    module: Any = torch.utils.checkpoint
    name = "_checkpoint_without_reentrant_generator"
    name = f"{name}_impl" if hasattr(module, f"{name}_impl") else name  # since torch 2.14
    plain, apply = getattr(module, name), module.CheckpointFunction.apply

    def generator(function: Callable[..., Any], *rest: Any, **more: Any) -> Any:
        return plain(_bound(function), *rest, **more)

    def applied(function: Callable[..., Any], *rest: Any) -> Any:
        return apply(_bound(function), *rest)

    setattr(module, name, generator)
    module.CheckpointFunction.apply = applied


def _bound(function: Callable[..., Any]) -> Callable[..., Any]:
    if not _under_way.calls:
        return function
    calls, model, scale = _under_way.calls[-1]

    def bound(*args: Any, **kwargs: Any) -> Any:
        whole = model()
        if whole is None or calls.is_under_way or not backward.is_running():
            return function(*args, **kwargs)
        return calls.run_again(whole, scale, functools.partial(function, **kwargs), *args)

    return bound


class Float32Island:
    """Hooks of a module that computes in float32 within a 16-bit model.

    Args:
        calls: makes the calls of the model around it; outside of them the module is left alone.
    """

    is_capturable = True

    def __init__(self, calls: MixedCall) -> None:
        self.calls = calls

    def register(self, module: nn.Module) -> None:
        """Put the hooks on a module."""
        module.register_forward_pre_hook(self.enter, with_kwargs=True)
        module.register_forward_hook(self.leave)

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Cast what goes in to float32."""
        return _mapped(Tensor.float, (args, kwargs)) if self.calls.is_under_way else None

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Cast what comes out to the dtype around it."""
        return _mapped(lambda y: y.to(self.calls.dtype), output) if self.calls.is_under_way else None


def _lists_of_weights(wanted: Iterable[Wanted]) -> Iterator[Swap]:
    """Yield the lists that a recurrent layer keeps of its weights: it makes them anew of those that it finds."""
    for module in {id(own.module): own.module for own in wanted}.values():
        for name in ("_flat_weights", "_flat_weight_refs"):
            if name in vars(module):
                yield Swap(vars(module), name, vars(module)[name], None)


@torch.no_grad()
def _keep_written(place: Swap) -> bool:
    """Bring back what the model has written to a buffer or weight, but for what still rounds to the same.

    Returns:
        Whether it was written in fewer bits than it has.
    """
    own, before = place.where.get(place.name), place.before
    if own is not place.now or not isinstance(before, Tensor):
        return False
    if place.mark == _mark(own) and not (own.is_inference() and not before.requires_grad):
        return False
    own = own.detach()
    if own.shape != before.shape:
        before.data = own.to(before.dtype)
        return False
    same = before.to(own.dtype) == own
    before.copy_(torch.where(same, before, own.to(before.dtype)))
    return own.dtype != before.dtype and not bool(same.all())


def _mark(tensor: Tensor) -> tuple[int, int]:
    """Return where a tensor lies and how often it was written to; torch counts no writes in inference mode."""
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version


@_never_compiled
def _left(output: Any, scale: Tensor | None) -> Any:
    return _mapped(lambda y: leave(y, scale), output)


def _mapped(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    return map_tensors(lambda x: function(x) if x.is_floating_point() else x, value)


class _BypassWatch:
    """Find gradients that get into a model, or out of it, past the border where the loss scale is put in and taken out.

    A loss that reads a layer's activation by a hook, or a loss that the model leaves in an attribute: weights would
    divide such gradients by a scale that they never had. A weight that the model finds elsewhere than in its modules:
    it would keep the scale.
    """

    def expect(self, call: int) -> None:
        """Look at the next backward pass, if it is the turn of this call, counted from 1, of a model with a scale."""
        if call <= _FIRST or call % _EVERY == 0:
            backward.listen(self)

    def backward_begins(self, roots: list[Tensor]) -> None:
        """Raise InvalidArgument if a weight would get a gradient that is not scaled."""
        backward.forget(self)
        waiting = [(node, False) for root in roots if (node := getattr(root, "grad_fn", None)) is not None]
        seen = set(waiting)
        while waiting:
            node, is_scaled = waiting.pop()
            name = node.name()
            if getattr(node, "inverse", None) is not None and not is_scaled and name == "_WeightsBackward":
                raise InvalidArgument(
                    "gradients must get into a decorated model by its output, where the loss scale is applied. Found: "
                    "a loss of something else that the model has computed, in a hook or in an attribute. Return it "
                    f"with the output, {_OR}"
                )
            if is_scaled and (name == "_LeaveBackward" or isinstance(getattr(node, "variable", None), nn.Parameter)):
                raise InvalidArgument(
                    "gradients must leave a decorated model by its weights and inputs, where the loss scale is taken "
                    "out. Found: a tensor that it uses and that is neither: a weight in a list, or of a module "
                    f"that is no part of it. Make it one, {_OR}"
                )
            is_scaled = _after(node, is_scaled)
            for following, _ in node.next_functions:
                if following is not None and (following, is_scaled) not in seen:
                    seen.add((following, is_scaled))
                    waiting.append((following, is_scaled))


def _after(node: Any, is_scaled: bool) -> bool:
    """Return whether gradients are scaled behind a node."""
    name = node.name()
    if name == "_CrossingBackward":
        return bool(node.goes_in)
    return name == "_LeaveBackward" or (is_scaled and name not in ("_EnterBackward", "_WeightsBackward"))


_BYPASSES = _BypassWatch()
