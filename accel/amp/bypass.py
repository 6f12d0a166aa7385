"""Find gradients that reach a model's weights on another way than through its output, where the loss scale is applied.

A penalty on the weights in the loss, say. The step would divide such gradients by a scale that they never had.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from accel.amp.loss_scale import DynamicLossScale
from accel.errors import InvalidArgument

_LOOKS, _MOST_LOOKS = 2, 10
"""Backward passes of the models that are looked at, the first ones, and of any. It takes 2 µs for each node."""

_watching: set[BypassCheck] = set()
_run: Callable[..., Any] | None = None
"""torch's own start of a backward pass, while it is watched."""


class BypassCheck:
    """Looks at the graph of the first backward passes, before they begin.

    Args:
        params: of the decorated models.
        scale: theirs.
    """

    def __init__(self, params: Iterable[Tensor], scale: DynamicLossScale) -> None:
        self._params = {id(p): weakref.ref(p) for p in params}
        self._scale = weakref.ref(scale)
        self._left, self._most = _LOOKS, _MOST_LOOKS
        scale.on_forward.append(self._watch)
        scale.on_create_graph.append(self._begin_anew)

    def remove(self) -> None:
        """Look no more: the models are no longer decorated."""
        _watching.discard(self)
        scale, self._left = self._scale(), 0
        if scale is not None:
            scale.on_forward.remove(self._watch)
            scale.on_create_graph.remove(self._begin_anew)

    def _begin_anew(self) -> None:
        """Look at the next passes: gradients that are differentiated again are part of a penalty, perhaps late."""
        self._left, self._most = _LOOKS, _MOST_LOOKS
        self._watch()

    def _watch(self) -> None:
        if self._left and self._most:
            _watching.add(self)
            _replace()

    def look(self, outputs: Iterable[Any]) -> None:
        """Raise InvalidArgument if a weight gets a gradient that is not scaled.

        Args:
            outputs: tensors at which a backward pass begins.
        """
        ours = False
        for node, is_scaled, following in self._edges(outputs):
            ours = ours or is_scaled
            weight = self._weight_of(following)
            if weight is not None and not is_scaled:
                raise InvalidArgument(
                    "weights of a decorated model must get their gradients through its output, where the loss scale is "
                    f"applied. Found: {node.name()} outside of it, on a weight of shape {tuple(weight.shape)}: a "
                    "penalty on weights in the loss, say. Scale the loss by torch.amp.GradScaler and pass "
                    "loss_scale=None, or use weight decay."
                )
        self._left, self._most = self._left - ours, self._most - 1
        if not self._left or not self._most:
            _watching.discard(self)

    def _weight_of(self, node: Any) -> Tensor | None:
        """Return the weight whose gradient a node accumulates; None if it is none of these models'."""
        variable: Any = getattr(node, "variable", None)
        known = self._params.get(id(variable))
        return variable if known is not None and known() is variable else None

    def _edges(self, outputs: Iterable[Any]) -> Iterator[tuple[Any, bool, Any]]:
        """Yield (node, whether the gradient is scaled there, node that it goes on to), each once."""
        scale = self._scale()
        waiting = [(node, False) for output in outputs if (node := getattr(output, "grad_fn", None)) is not None]
        seen = set(waiting)
        while waiting:
            node, is_scaled = waiting.pop()
            if scale is not None and getattr(node, "scale", None) is scale:
                is_scaled = node.name() == "_MultipliedBackward"
            for following, _ in node.next_functions:
                if following is None:
                    continue
                yield node, is_scaled, following
                if (following, is_scaled) not in seen:
                    seen.add((following, is_scaled))
                    waiting.append((following, is_scaled))


def _replace() -> None:
    global _run
    module: Any = torch.autograd
    if _run is None and hasattr(module, "_engine_run_backward"):
        _run = module._engine_run_backward
        module._engine_run_backward = _watched


def _watched(outputs: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
    """Begin a backward pass, looked at."""
    global _run
    run = _run
    assert run is not None
    if torch._C._current_graph_task_id() == -1:  # within a pass, checkpointing runs one over a part of the model
        for check in list(_watching):
            check.look(outputs)
    if not _watching:
        module: Any = torch.autograd
        module._engine_run_backward, _run = run, None
    return run(outputs, *args, **kwargs)
