"""channels_last: hand images to the model in the memory order that convolutions are fastest in.

Only the inputs are laid out anew; the layout then spreads from convolution to convolution by
itself. Parameters keep theirs, so checkpoints, optimizer state and gradient buckets don't notice.
On two Zen 5 cores this gives all of what converting the parameters too would give (17.4 against
17.3 ms for a step that took 27.6 ms).

The loop gets what it would have got, since `.view` on another layout fails: outputs and gradients
of inputs are laid out as in a plain call. Hooks see the activations before that, so that the
strategy does not apply to a model with hooks of the user's; what a model keeps in attributes, or
puts into its arguments, the guard looks at.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from accel.profiler.bottleneck import Bottleneck
from accel.profiler.trees import map_tensors, tensors, with_entries
from accel.run import Run
from accel.run.context import Observed
from accel.run.gate import Call, hooks_of
from accel.run.layouts import in_order
from accel.strategies.base import Exactness, NothingHelps, Strategy

_LAST = torch.channels_last
_CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)
_IN_ORDER = "the weights of the model's convolutions are in this order already"
_WRITTEN = "the model writes to its input, and in another layout it would write to a copy"
_CONTAINED = "the model takes its images in a list or dict, in which it might exchange them: they stay as they are"
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
        self._is_contained = False
        """A call has found its images in a list or dict."""
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
        if why := self._why_not():  # as the guard's replay has shown
            raise NothingHelps(why)
        self._observed = run.observed
        run.gate.add(self.name, self._in_channels_last)

    def disable(self, run: Run) -> None:
        """Pass the inputs as they come."""
        run.gate.remove(self.name)

    def failure(self, run: Run) -> str:
        """Say that the model writes to its input, takes images in a container, or has got a hook."""
        return self._why_not() or (_HOOKED if _has_users_hooks(run.model) else "")

    def _why_not(self) -> str:
        return _WRITTEN if self._is_written else _CONTAINED if self._is_contained else ""

    def _in_channels_last(self, call: Call) -> Call:
        def run_call(*args: Any, **kwargs: Any) -> Any:
            laid_out = LaidOut()
            own_args = [laid_out.of(value) for value in args]
            own_kwargs = {name: laid_out.of(value) for name, value in kwargs.items()}
            if not laid_out.pairs:  # a plain call: images that come in this order leave so
                self._is_contained = self._is_contained or _holds_images((args, kwargs))
                return call(*args, **kwargs)
            versions = [_version(other) for _, other in laid_out.pairs]
            outputs = call(*own_args, **own_kwargs)
            for (tensor, other), version in zip(laid_out.pairs, versions, strict=True):
                if _version(other) != version:
                    tensor.copy_(other)  # with its gradients, if it has any
                    self._is_written = True
            return map_tensors(self._as_in_plain_calls(laid_out, outputs), outputs)

        return run_call

    def _as_in_plain_calls(self, laid_out: LaidOut, outputs: Any) -> Callable[[Tensor], Tensor]:
        """Return what makes of each tensor among the outputs what the loop would have got."""
        returned = tensors(outputs)
        orders = self._observed.orders_of(returned)
        known = dict(zip(map(id, returned), orders, strict=True)) if len(returned) == len(orders) else {}
        own = {id(other): tensor for tensor, other in laid_out.pairs}

        def as_in_plain_calls(tensor: Tensor) -> Tensor:
            return own[id(tensor)] if id(tensor) in own else in_order(tensor, known.get(id(tensor)))

        return as_in_plain_calls


class LaidOut:
    """The images among the arguments of a call, laid out anew.

    Attributes:
        pairs: the loop's tensors, each once, with what the call gets.
    """

    def __init__(self) -> None:
        self.pairs: list[tuple[Tensor, Tensor]] = []

    def of(self, value: Any) -> Any:
        """Return what the call gets for an argument: a tensor or a tuple. What stands in lists and dicts stays.

        The call may put others there, as in `batch["image"] = normalised`, which copies would hide from the loop.
        """
        if isinstance(value, tuple):
            return with_entries(value, [self.of(entry) for entry in value])
        if not isinstance(value, Tensor):
            return value
        for tensor, other in self.pairs:
            if tensor is value:
                return other
        other = _to_last(value)
        if other is not value:
            self.pairs.append((value, other))
        return other


def _holds_images(arguments: Any) -> bool:
    return any(_is_image(each) and not each.is_contiguous(memory_format=_LAST) for each in tensors(arguments))


def _is_image(tensor: Tensor) -> bool:
    return tensor.dim() == 4 and tensor.is_floating_point()


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _is_in_order(module: nn.Module) -> bool:
    """Return whether a module is a convolution whose weights are in this order, and in no other at once."""
    # Not by the attribute: a parametrised one is computed at each access.
    weight = module._parameters.get("weight") if isinstance(module, _CONVOLUTIONS) else None
    if weight is None or is_lazy(weight) or weight.dim() != 4 or weight.is_contiguous():
        return False
    return weight.is_contiguous(memory_format=_LAST)


def _has_users_hooks(model: nn.Module) -> bool:
    return any(not _home(hook).startswith(_OUR_HOOKS) for hooks in hooks_of(model) for hook in hooks.values())


def _home(hook: Any) -> str:
    """Return the module that a hook comes from."""
    function = hook.func if isinstance(hook, partial) else hook
    return f"{getattr(function, '__module__', None) or ''}."


def _to_last(tensor: Tensor) -> Tensor:
    if not _is_image(tensor):
        return tensor
    # The loop looks at gradients of inputs, too: on the way back they get their own order again.
    given = tensor.view_as(tensor) if tensor.requires_grad else tensor
    # `.contiguous` would leave a one-channel image alone: its strides already pass for either order, and the first
    # convolution would then choose the plain one.
    laid_out = given.to(memory_format=_LAST)
    if laid_out is given:
        return tensor
    if given.requires_grad:
        given.register_hook(in_order)  # type: ignore[no-untyped-call]
    return laid_out
