"""Parameters as leaves of their own while a model's call is recorded.

Autograd gives a leaf its gradient on the stream where it first met the leaf, as long as a graph of it is alive, and in
most loops the loss of the last step keeps one alive. That is the stream of the loop, which no capture can wait for. So
the call is recorded on other leaves over the same memory, which autograd meets on the stream of the capture.

A parameter that the call gives other memory, or that it leaves somewhere, must be itself: it is said which these are.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from accel.errors import AccelError


class HeldElsewhere(AccelError):
    """A recorded call reads parameters past their modules, leaves them somewhere, or gives them other memory.

    Args:
        parameters: ids of them.
    """

    def __init__(self, parameters: AbstractSet[int]) -> None:
        super().__init__("the call holds parameters beside their modules, or replaces them")
        self.parameters = parameters


class Leaves:
    """The leaves of a recording.

    Args:
        modules: with all inside of them.
        but: ids of parameters that stay what they are, as do all of a class of their own.
    """

    def __init__(self, modules: Iterable[nn.Module], but: AbstractSet[int] = frozenset()) -> None:
        self._modules = list(modules)
        self._of: dict[int, nn.Parameter] = {}
        self._slots: list[tuple[dict[str, Any], str, nn.Parameter]] = []
        for module in self._modules:
            for name, parameter in module._parameters.items():
                if type(parameter) is nn.Parameter and parameter.requires_grad and id(parameter) not in but:
                    self._slots.append((module._parameters, name, parameter))

    def of(self, parameter: Tensor) -> Tensor:
        """Return the leaf that stands for a parameter; the parameter itself where there is none."""
        return self._of.get(id(parameter), parameter)

    def replaced(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Return those of some parameters for which a leaf stands."""
        return [parameter for parameter in parameters if id(parameter) in self._of]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the leaves stand in the modules for a block.

        Raises:
            HeldElsewhere: at the end, if one has other memory than its parameter, or is left in a module.
        """
        rnns = [each for each in self._modules if isinstance(each, nn.RNNBase)]  # they list their weights once more
        lists = [(each, each._flat_weights, each._flat_weight_refs) for each in rnns]
        try:
            for where, name, parameter in self._slots:
                where[name] = self._of.setdefault(id(parameter), _leaf(parameter))
            for rnn, weights, _ in lists:
                own: list[Any] = [None if weight is None else self.of(weight) for weight in weights]
                rnn._flat_weights = own
                rnn._flat_weight_refs = [None if weight is None else weakref.ref(weight) for weight in own]
            yield
        finally:
            for where, name, parameter in self._slots:
                if where.get(name) is self._of.get(id(parameter)) is not None:
                    where[name] = parameter
            for rnn, weights, refs in lists:
                rnn._flat_weights, rnn._flat_weight_refs = weights, refs
        if wrong := self._moved() | self._left():
            raise HeldElsewhere(wrong)

    def _moved(self) -> set[int]:
        """Return the ids of parameters whose leaf is no more like them."""
        kinds = {id(p): (p.data_ptr(), p.shape, p.stride(), p.dtype, p.requires_grad) for _, _, p in self._slots}
        leaves = self._of.items()
        now = {key: (p.data_ptr(), p.shape, p.stride(), p.dtype, p.requires_grad) for key, p in leaves}
        return {key for key in now if now[key] != kinds[key]}

    def _left(self) -> set[int]:
        """Return the ids of parameters whose leaf stands in an attribute of a module, or in a list or dict there."""
        known = {id(leaf): key for key, leaf in self._of.items()}
        left = set[int]()
        values: list[Any] = [value for each in self._modules for value in vars(each).values()]
        for value in values:
            inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
            left |= {known[id(each)] for each in (value, *inner) if id(each) in known}
        return left


def _leaf(parameter: nn.Parameter) -> nn.Parameter:
    leaf = nn.Parameter(parameter.detach())
    leaf.__dict__.update(parameter.__dict__)
    return leaf
