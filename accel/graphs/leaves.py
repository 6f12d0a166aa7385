"""Parameters as leaves of their own while a model's call is recorded.

Autograd gives a leaf its gradient on the stream where it first met the leaf, as long as a graph of it is alive, and in
most loops the loss of the last step keeps one alive. That is the stream of the loop, which no capture can wait for. So
the call is recorded on other leaves over the same memory, which autograd meets on the stream of the capture.

A call that gives a parameter other memory, leaves one somewhere, or reads one past its module is not captured.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from accel.graphs.checks import NotCapturable

_BESIDE = (
    "it gives a parameter other memory, leaves one in a module, or reads one past its module (from a list, say), and a "
    "graph has leaves of its own in their place; let it read parameters from modules alone"
)


class Leaves:
    """The leaves of a recording.

    Args:
        modules: with all inside of them. Parameters of a class of their own stay what they are.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._of: dict[int, nn.Parameter] = {}
        self._slots: list[tuple[dict[str, Any], str, nn.Parameter]] = []
        for module in self._modules:
            for name, parameter in module._parameters.items():
                if type(parameter) is nn.Parameter and parameter.requires_grad:
                    self._slots.append((module._parameters, name, parameter))

    def of(self, parameter: Tensor) -> Tensor:
        """Return the leaf that stands for a parameter; the parameter itself where there is none."""
        return self._of.get(id(parameter), parameter)

    def check_unread(self, parameters: Iterable[Tensor], outputs: Iterable[Tensor]) -> None:
        """Check that outputs depend on no parameter for which a leaf stands.

        Raises:
            NotCapturable: if one does.
        """
        replaced = [parameter for parameter in parameters if id(parameter) in self._of]
        if any(reached(output, replaced) for output in outputs):
            raise NotCapturable(_BESIDE)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the leaves stand in the modules for a block.

        Raises:
            NotCapturable: at the end, if one has other memory than its parameter, or is left in a module.
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
        if self._has_moved() or self._is_left():
            raise NotCapturable(_BESIDE)

    def _has_moved(self) -> bool:
        return any(_lies(parameter) != _lies(self.of(parameter)) for _, _, parameter in self._slots)

    def _is_left(self) -> bool:
        """Return whether a leaf stands in an attribute of a module, or in a list or dict there."""
        known = set(map(id, self._of.values()))
        values: list[Any] = [value for each in self._modules for value in vars(each).values()]
        for value in values:
            inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
            if not known.isdisjoint(map(id, (value, *inner))):
                return True
        return False


def reached(output: Tensor, needing: list[Tensor]) -> set[int]:
    """Return the numbers of the tensors that an output's gradient comes to."""
    numbers = {id(tensor): number for number, tensor in enumerate(needing)}
    reached, waiting, seen = set[int](), [output.grad_fn], set[Any]()
    if output.grad_fn is None and id(output) in numbers:
        return {numbers[id(output)]}
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) in numbers:
            reached.add(numbers[id(variable)])
        waiting += [following for following, _ in node.next_functions]
    return reached


def _lies(parameter: Tensor) -> tuple[Any, ...]:
    return parameter.data_ptr(), parameter.shape, parameter.stride(), parameter.dtype, parameter.requires_grad


def _leaf(parameter: nn.Parameter) -> nn.Parameter:
    leaf = nn.Parameter(parameter.detach())
    leaf.__dict__.update(parameter.__dict__)
    return leaf
