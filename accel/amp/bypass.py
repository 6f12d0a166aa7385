"""Find gradients that get into a model, or out of it, past the border where the loss scale is put in and taken out.

A loss that reads a layer's activation by a hook, or a loss that the model leaves in an attribute: weights would divide
such gradients by a scale that they never had. A weight that the model finds elsewhere than in its modules: it would
keep the scale.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from accel.errors import InvalidArgument
from accel.profiler.loop import backward

_FIRST, _EVERY = 2, 64
"""Calls of a model whose backward pass is looked at: so many at first, and then one of so many. It takes 2 µs for each
node of the graph."""


_OR = "or take bfloat16, or torch.amp.GradScaler and loss_scale=None."


class _Watch:
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


_WATCH = _Watch()
expect = _WATCH.expect
