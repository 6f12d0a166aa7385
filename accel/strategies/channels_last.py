"""channels_last: hand images to the model in the memory order that convolutions are fastest in.

Only the inputs are laid out anew; the layout then spreads from convolution to convolution by itself. Parameters keep
theirs, so checkpoints, optimizer state and gradient buckets don't notice. On two Zen 5 cores this gives all of what
converting the parameters too would give (17.4 against 17.3 ms for a step that took 27.6 ms).

The loop gets what it would have got, since `.view` on another layout fails: outputs and gradients of inputs are laid
out as in a plain call. A call with containers of tensors is left as it is: it may write into them. Hooks see the
activations in between, so that the strategy does not apply to a model with hooks of the user's; what a model keeps in
attributes the guard looks at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from accel.profiler.bottleneck import Bottleneck
from accel.profiler.loop.backward import on_gradient
from accel.profiler.loop.module_hooks import hooks_of, of_the_loop
from accel.profiler.trees import map_tensors, tensors
from accel.run import Run
from accel.run.context import Observed
from accel.run.gate import Call
from accel.run.layouts import in_order
from accel.strategies.base import Exactness, NothingHelps, Strategy

_CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)
_IN_ORDER = "the weights of the model's convolutions are in this order already"
_WRITTEN = "the model writes to its input, and in another layout it would write to a copy"
_NESTED = "the model is called with a container of tensors, which would get what it writes there in another layout"
_HOOKED = "a hook on a module of the model would see its values in another layout"


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
        self._stopped = ""
        """Why it does not go with the calls that were made: they write to their inputs, or get containers."""
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
        return _HOOKED if of_the_loop(hooks_of(run.model)) else ""

    def enable(self, run: Run, setting: Any) -> None:
        """Convert the inputs of each call."""
        if self._stopped:  # as the guard's replay has shown
            raise NothingHelps(self._stopped)
        self._observed = run.observed
        run.gate.add(self.name, self._in_channels_last)

    def disable(self, run: Run) -> None:
        """Pass the inputs as they come."""
        run.gate.remove(self.name)

    def failure(self, run: Run) -> str:
        """Say that the model writes to its input, is called with containers, or has got a hook."""
        return self._stopped or (_HOOKED if of_the_loop(hooks_of(run.model)) else "")

    def _in_channels_last(self, call: Call) -> Call:
        def run_call(*args: Any, **kwargs: Any) -> Any:
            if any(not _is_flat(value) and tensors(value) for value in (*args, *kwargs.values())):
                self._stopped = _NESTED
                return call(*args, **kwargs)
            pairs: dict[int, tuple[Tensor, Tensor]] = {}

            def laid_out(value: Any) -> Any:
                other = _to_last(value) if isinstance(value, Tensor) and id(value) not in pairs else value
                if other is not value:
                    pairs[id(value)] = value, other
                return pairs[id(value)][1] if id(value) in pairs else value

            given = [laid_out(value) for value in args], {name: laid_out(value) for name, value in kwargs.items()}
            versions = [_version(other) for _, other in pairs.values()]
            outputs = call(*given[0], **given[1])
            if not pairs:  # a plain call: images that come in this order leave so
                return outputs
            for (tensor, other), version in zip(pairs.values(), versions, strict=True):
                if _version(other) != version:
                    tensor.copy_(other)  # with its gradients, if it has any
                    self._stopped = _WRITTEN
            own = {id(other): tensor for tensor, other in pairs.values()}
            return map_tensors(self._as_in_plain_calls(own, outputs), outputs)

        return run_call

    def _as_in_plain_calls(self, own: dict[int, Tensor], outputs: Any) -> Callable[[Tensor], Tensor]:
        """Return what makes of each tensor among the outputs what the loop would have got.

        Args:
            own: the loop's tensors, by the ids of what the call has got for them.
        """
        returned = tensors(outputs)
        orders = self._observed.orders_of(returned)
        known = dict(zip(map(id, returned), orders, strict=True)) if len(returned) == len(orders) else {}

        def as_in_plain_calls(tensor: Tensor) -> Tensor:
            return own[id(tensor)] if id(tensor) in own else in_order(tensor, known.get(id(tensor)))

        return as_in_plain_calls


def _is_flat(value: Any) -> bool:
    return value is None or isinstance(value, Tensor | str | int | float)


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _is_in_order(module: nn.Module) -> bool:
    # Not by the attribute: a parametrised one is computed at each access.
    weight = module._parameters.get("weight") if isinstance(module, _CONVOLUTIONS) else None
    if weight is None or is_lazy(weight) or weight.dim() != 4 or weight.is_contiguous():
        return False
    return weight.is_contiguous(memory_format=torch.channels_last)


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
        on_gradient(given, in_order)
    return laid_out
