"""channels_last: hand images to the model in the memory order that convolutions are fastest in.

Only the inputs are laid out anew; the layout then spreads from convolution to convolution by itself. Parameters keep
theirs, so checkpoints, optimizer state and gradient buckets don't notice. On two Zen 5 cores this gives all of what
converting the parameters too would give (17.4 against 17.3 ms for a step that took 27.6 ms).

The loop gets what it would have got, since `.view` on another layout fails: outputs, gradients of inputs and what the
call has put into its arguments are laid out as in a plain call. Hooks see the activations before that, so that the
strategy does not apply to a model with hooks of the user's; what a model keeps in attributes the guard looks at.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from accel.profiler.bottleneck import Bottleneck
from accel.profiler.trees import is_dataclass, map_tensors, tensors, with_entries
from accel.run import Run
from accel.run.context import Observed
from accel.run.gate import Call, hooks_of
from accel.run.layouts import in_order
from accel.strategies.base import Exactness, NothingHelps, Strategy

_CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)
_IN_ORDER = "the weights of the model's convolutions are in this order already"
_WRITTEN = "the model writes to its input, and in another layout it would write to a copy"
_HOOKED = "a hook on a module of the model would see its values in another layout"
_OUR_HOOKS = ("torch.", "accel.")
"""Modules whose hooks bear any layout, such as those of spectral norms."""


class ChannelsLast(Strategy):
    """Convert 4-d floating-point inputs to `torch.channels_last`, and what the loop gets back.

    A model that writes to its input would write to a copy. What it has written is handed on, and the strategy left.

    Source: the memory-format tutorial of PyTorch.
    """

    name = "channels_last"
    summary = "images in NHWC memory order"
    treats = frozenset({Bottleneck.COMPUTE, Bottleneck.MEMORY})
    exactness = Exactness.REORDERED

    def __init__(self) -> None:
        self._is_written = False
        """A call has written to its input."""
        self._observed = Observed()

    def refusal(self, run: Run) -> str:
        """Say why it does not apply: no 2-d convolution, no 4-d input seen, weights in this order already, or hooks."""
        if not run.has_module(*_CONVOLUTIONS):
            return "the model has no 2-d convolution"
        if not run.observed.conv_input:
            return "the model is not called with a 4-d floating-point tensor"
        # The convolutions spread the order by themselves then, and the loop gets its outputs in it.
        if any(map(_is_in_order, run.model.modules())):
            return _IN_ORDER
        return _HOOKED if _has_users_hooks(run.model) else ""

    def enable(self, run: Run, setting: Any) -> None:
        """Convert the inputs of each call."""
        if self._is_written:  # as the guard's replay has shown
            raise NothingHelps(_WRITTEN)
        self._observed = run.observed
        run.gate.add(self.name, self._in_channels_last)

    def disable(self, run: Run) -> None:
        """Pass the inputs as they come."""
        run.gate.remove(self.name)

    def failure(self, run: Run) -> str:
        """Say that the model writes to its input, or has got a hook."""
        if self._is_written:
            return _WRITTEN
        return _HOOKED if _has_users_hooks(run.model) else ""

    def _in_channels_last(self, call: Call) -> Call:
        def run_call(*args: Any, **kwargs: Any) -> Any:
            exchanged = SubstitutedTensors(_to_last, in_order)
            try:
                args, kwargs = exchanged.put_in((args, kwargs))
                versions = [_version(laid_out) for _, laid_out in exchanged.pairs]
                outputs = call(*args, **kwargs)
            finally:
                if exchanged.pairs:
                    exchanged.take_out()
            if not exchanged.pairs:  # a plain call: images that come in this order leave so
                return outputs
            for (tensor, laid_out), version in zip(exchanged.pairs, versions, strict=True):
                if _version(laid_out) != version:
                    tensor.copy_(laid_out)  # with its gradients, if it has any
                    self._is_written = True
            return map_tensors(self._as_in_plain_calls(exchanged, outputs), outputs)

        return run_call

    def _as_in_plain_calls(self, exchanged: SubstitutedTensors, outputs: Any) -> Callable[[Tensor], Tensor]:
        """Return what makes of each tensor among the outputs what the loop would have got."""
        returned = tensors(outputs)
        orders = self._observed.orders_of(returned)
        known = dict(zip(map(id, returned), orders, strict=True)) if len(returned) == len(orders) else {}

        def as_in_plain_calls(tensor: Tensor) -> Tensor:
            own = exchanged.own(tensor)
            return in_order(tensor, known.get(id(tensor))) if own is None else own

        return as_in_plain_calls


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _is_in_order(module: nn.Module) -> bool:
    """Return whether a module is a convolution whose weights are in this order, and in no other at once."""
    # Not by the attribute: a parametrised one is computed at each access.
    weight = module._parameters.get("weight") if isinstance(module, _CONVOLUTIONS) else None
    if weight is None or is_lazy(weight) or weight.dim() != 4 or weight.is_contiguous():
        return False
    return weight.is_contiguous(memory_format=torch.channels_last)


def _has_users_hooks(model: nn.Module) -> bool:
    return any(not _home(hook).startswith(_OUR_HOOKS) for hooks in hooks_of(model) for hook in hooks.values())


def _home(hook: Any) -> str:
    """Return the module that a hook comes from."""
    function = hook.func if isinstance(hook, partial) else hook
    return f"{getattr(function, '__module__', None) or ''}."


def _to_last(tensor: Tensor) -> Tensor:
    if tensor.dim() != 4 or not tensor.is_floating_point():
        return tensor
    # The loop looks at gradients of inputs, too: on the way back they get their own order again.
    given = tensor.view_as(tensor) if tensor.requires_grad else tensor
    # `.contiguous` would leave a one-channel image alone: its strides already pass for either order, and the first
    # convolution would then choose the plain one.
    laid_out = given.to(memory_format=torch.channels_last)
    if laid_out is given:
        return tensor
    if given.requires_grad:
        given.register_hook(in_order)  # type: ignore[no-untyped-call]
    return laid_out


class SubstitutedTensors:
    """Other tensors in the place of the loop's own for one call, within the very containers that the loop passes.

    Copies of these would hide from the loop what the call writes into them, as in `batch["image"] = normalised`.

    Args:
        exchange: returns what the call gets for a tensor; the tensor itself where that is fine.
        back: returns what the loop gets for a tensor that the call has put into one of its containers.

    Attributes:
        pairs: the loop's tensors that were exchanged, with what the call gets.
    """

    def __init__(self, exchange: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> None:
        self._exchange, self._back = exchange, back
        self.pairs: list[tuple[Tensor, Tensor]] = []
        self._given: dict[int, tuple[Any, Any]] = {}
        """What the loop has passed, and what the call gets for it, by the former's id."""
        self._own: dict[int, Any] = {}
        """What the loop has passed, by the id of what the call gets for it."""
        self._before: list[tuple[Any, list[tuple[Any, Any]]]] = []
        """The loop's containers, and the entries that they had."""

    def put_in(self, value: Any) -> Any:
        """Return arguments for the call: the loop's containers are the same objects, and hold other tensors.

        Args:
            value: arguments of the call, or a part of them.
        """
        if id(value) in self._given:  # twice among the arguments, or a link to what it is a part of
            return self._given[id(value)][1]
        held = _held(value)
        if held is not None:
            self._given[id(value)] = value, value
            self._put_into(held)
            return value
        if isinstance(value, Tensor):
            other: Any = self._exchange(value)
            if other is not value:
                self.pairs.append((value, other))
        elif isinstance(value, tuple):
            other = with_entries(value, [self.put_in(entry) for entry in value])
        else:
            other = map_tensors(self.put_in, value)
        self._given[id(value)] = value, other
        self._own[id(other)] = value
        return other

    def _put_into(self, held: Any) -> None:
        before = _entries(held)
        self._before.append((held, before))
        for key, entry in before:
            other = self.put_in(entry)
            if other is not entry:
                held[key] = other

    def take_out(self) -> None:
        """Put the loop's own tensors back into its containers, and what the call has put there as the loop knows it."""
        for held, before in self._before:
            known = {id(entry) for _, entry in before}
            for key, entry in _entries(held):
                own = self._own.get(id(entry), entry)
                if own is entry and id(entry) not in known:
                    own = map_tensors(self.returned, entry)
                if own is not entry:
                    held[key] = own

    def returned(self, tensor: Tensor) -> Tensor:
        """Return the loop's own tensor for one that was exchanged for it; for another one what `back` does.

        Args:
            tensor: that the call has put into a container.
        """
        own: Tensor | None = self.own(tensor)
        return self._back(tensor) if own is None else own

    def own(self, tensor: Tensor) -> Tensor | None:
        """Return the loop's own tensor that the call got this one for; None if it comes from elsewhere.

        Args:
            tensor: that the call returns, say.
        """
        return self._own.get(id(tensor))


def _held(value: Any) -> Any:
    """Return the list or dict in which a container has its entries; None if it is no such container."""
    if isinstance(value, list | dict):
        return value
    if isinstance(value, UserDict):
        return value.data
    # Also of a frozen dataclass, which is what it was when the call has ended.
    return getattr(value, "__dict__", None) if is_dataclass(value) else None


def _entries(held: Any) -> list[tuple[Any, Any]]:
    return list(enumerate(held)) if isinstance(held, list) else list(held.items())
