"""Parameters as leaves of their own while a model's call is recorded.

Autograd gives a leaf its gradient on the stream where it first met the leaf, as long as a graph of it is alive, and in
most loops the loss of the last step keeps one alive. That is the stream of the loop, which no capture can wait for. So
the call is recorded on other leaves over the same memory, which autograd meets on the stream of the capture.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager

from torch import nn

from accel.errors import AccelError

Leaves = dict[int, nn.Parameter]
"""By the id of the parameter that each stands for."""


class HeldElsewhere(AccelError):
    """A recorded call has read parameters past their modules.

    Args:
        parameters: ids of them.
    """

    def __init__(self, parameters: AbstractSet[int]) -> None:
        super().__init__("the call reads parameters that it holds beside their modules")
        self.parameters = parameters


@contextmanager
def own_leaves(modules: Iterable[nn.Module], but: AbstractSet[int] = frozenset()) -> Iterator[Leaves]:
    """Let parameters that are trained be leaves of their own within the block.

    Args:
        modules: with all inside of them.
        but: ids of parameters that stay what they are, as do all of a class of their own.
    """
    leaves: Leaves = {}
    every = list(modules)
    slots = [(each._parameters, name, parameter) for each in every for name, parameter in each._parameters.items()]
    lists = [(each, each._flat_weights) for each in every if isinstance(each, nn.RNNBase)]  # which its call reads
    for where, name, parameter in slots:
        if type(parameter) is nn.Parameter and parameter.requires_grad and id(parameter) not in but:
            where[name] = leaves.setdefault(id(parameter), _leaf(parameter))
    for rnn, weights in lists:
        rnn._flat_weights = [leaves.get(id(weight), weight) for weight in weights]
    try:
        yield leaves
    finally:
        for where, name, parameter in slots:
            if parameter is not None and where.get(name) is leaves.get(id(parameter)):
                where[name] = parameter
        for rnn, weights in lists:
            rnn._flat_weights = weights


def _leaf(parameter: nn.Parameter) -> nn.Parameter:
    leaf = nn.Parameter(parameter.detach())
    leaf.__dict__.update(parameter.__dict__)
    return leaf
