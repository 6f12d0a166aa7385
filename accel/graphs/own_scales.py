"""Loss scales of `accel.amp` in a recorded function: whether its gradients wait for a step that is not in it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from torch import nn

from accel.amp.border import border_of
from accel.amp.loss_scale import DynamicLossScale
from accel.graphs.module_states import LeftBehind


@contextlib.contextmanager
def with_their_step(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Record a function in the block.

    Args:
        modules: some of which may be decorated.

    Raises:
        LeftBehind: if gradients have come through a loss scale, and no step of an optimizer has taken them. It is
            Python that tells the optimizer so, which no replay runs.
    """
    scales = list({id(scale): scale for each in modules if (scale := _scale_of(each)) is not None}.values())
    passed: list[DynamicLossScale] = []
    listeners = [(scale, lambda scale=scale: passed.append(scale)) for scale in scales]
    for scale, listener in listeners:
        scale.on_backward.append(listener)
    try:
        yield
    finally:
        for scale, listener in listeners:
            scale.on_backward.remove(listener)
    if any(scale.came_through for scale in passed):
        raise LeftBehind(
            "its gradients come through a loss scale (accel.amp), and the optimizer's step outside is not told of "
            "replays; let the step be part of what is captured, or use bfloat16 without a scale"
        )


def _scale_of(module: nn.Module) -> DynamicLossScale | None:
    border = border_of(module)
    return None if border is None else border.loss_scale
