"""What a function that is recorded must not do, because no replay would do it: found out while it is recorded.

A replay runs no Python. So what the function has put into an attribute stays what it was at the
recording, what the host has drawn or counted is drawn and counted no more, and what it writes to
its inputs goes into the graph's copies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from accel.dataio.fetching.randomness import streams
from accel.errors import AccelError

_SCALARS = (bool, int, float, str)
PLAIN = frozenset({type(None), bool, int, float, complex, str})
_NAMES = {"python": "random", "numpy": "numpy.random", "torch": "torch, on the CPU"}
_MISSING = object()


class NotCapturable(AccelError):
    """A recorded function does what no replay would do; its message says what, and the remedy."""


class StateMade(NotCapturable):
    """An optimizer has made state, as it does in its first step: later ones may be captured."""


@contextlib.contextmanager
def without_draws(device: torch.device) -> Iterator[None]:
    """Record in the block. Where it fails the host's generators are put back: an eager call draws the same.

    Args:
        device: that is recorded for; torch's generator of another one is the host's.

    Raises:
        NotCapturable: if random numbers were drawn on the host. Generators that the function has made are not seen.
    """
    of_the_host = [stream for stream in streams() if stream.name != "torch" or device.type != "cpu"]
    before = [(stream, stream.read()) for stream in of_the_host]
    try:
        yield
        for stream, state in before:
            if stream.read() != state:
                raise NotCapturable(
                    f"it draws random numbers on the host ({_NAMES[stream.name]}), and each replay would go on with "
                    "the same ones; draw them on the device, or pass them as arguments"
                )
    except BaseException:
        for stream, state in before:
            stream.write(state)
        raise


@contextlib.contextmanager
def unwritten(inputs: Iterable[Tensor]) -> Iterator[None]:
    """Record in the block a function whose inputs these are.

    Raises:
        NotCapturable: if it has written to one of them.
    """
    counted = [tensor for tensor in inputs if not tensor.is_inference()]
    before = [tensor._version for tensor in counted]
    yield
    if [tensor._version for tensor in counted] != before:
        raise NotCapturable("it writes to its inputs, and a graph has copies of them; let it write to its own tensors")


@contextlib.contextmanager
def nothing_left(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Record in the block; where it fails, modules are as they were, but for what was written in place.

    Raises:
        NotCapturable: if a module holds another number, word or tensor than before.
    """
    contents = Contents(modules)
    try:
        yield
        if name := contents.changed():
            raise NotCapturable(left_in(name))
    except BaseException:
        contents.put_back()
        raise


def left_in(name: str) -> str:
    """Say why a function that leaves something in an attribute of a module is not captured."""
    return (
        f"each call puts something else into {name!r} of a module, which no replay would do; let it return that, or "
        "write to a buffer in place (copy_)"
    )


class Contents:
    """The attributes, parameters and buffers of modules as they were when this was made."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        dicts: list[dict[str, Any]] = [d for each in modules for d in (vars(each), each._parameters, each._buffers)]
        self._before = [(d, dict(d)) for d in dicts]

    def changed(self) -> str:
        """Return the name of a number, word or tensor that has come, gone, or taken another's place; '' if none has."""
        names = (
            name
            for d, before in self._before
            for name in {**before, **d}
            if _is_other(d.get(name, _MISSING), before.get(name, _MISSING))
        )
        return next(names, "")

    def put_back(self) -> None:
        """Make the modules what they were."""
        for d, before in self._before:
            if d.keys() != before.keys() or any(d[name] is not before[name] for name in d):
                d.clear()
                d.update(before)


def _is_other(now: Any, before: Any) -> bool:
    if now is before or (type(now) in _SCALARS and type(now) is type(before) and now == before):
        return False
    return is_looked_at(now) or is_looked_at(before)


def is_looked_at(value: object) -> bool:
    """Return whether a value of a module's is one that a graph would freeze: a number, a word, a tensor, or tuples."""
    return type(value) in PLAIN or holds_tensors(value)


def holds_tensors(value: object) -> bool:
    """Return whether a value is a tensor, or a tuple with one in it: the state of an LSTM is a pair."""
    return isinstance(value, Tensor) or (isinstance(value, tuple) and any(map(holds_tensors, value)))


@contextlib.contextmanager
def state_in_place(optimizers: Sequence[Optimizer], device: torch.device) -> Iterator[None]:
    """Record in the block steps of optimizers; where it fails, they have the state that they had.

    Raises:
        NotCapturable: if state lies on the host, or was replaced: each replay would begin with the old one.
        StateMade: if there was none of a parameter.
    """
    entries = [(each.state, key, own) for each in optimizers for key, own in each.state.items()]
    before = [(own, dict(own)) for _, _, own in entries if isinstance(own, dict)]
    keys = [set(each.state) for each in optimizers]
    on_host = [name for own, _ in before for name, value in own.items() if _is_on_host(value)]
    if on_host and device.type != "cpu":
        raise NotCapturable(
            f"its optimizer keeps a tensor on the CPU ({on_host[0]!r} in its state), to which no replay writes; take "
            "one that keeps it on the device (capturable=True or fused=True)"
        )
    try:
        yield
        if [set(each.state) for each in optimizers] != keys or any(own.keys() - known.keys() for own, known in before):
            raise StateMade("an optimizer has made state in a step that was captured")
        wrong = [name for own, known in before for name in known if _is_replaced(own.get(name), known[name])]
        wrong += [str(key) for state, key, own in entries if state.get(key) is not own]
        if wrong:
            raise NotCapturable(f"an optimizer's state must be written to in place. Found: {wrong[0]!r} was replaced")
    except BaseException:
        for optimizer in optimizers:
            optimizer.state.clear()
        for state, key, own in entries:
            state[key] = own  # the same dict, by which graphs know the state
        for own, known in before:
            own.clear()
            own.update(known)
        raise


def _is_on_host(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cpu"


def _is_replaced(now: Any, before: Any) -> bool:
    return now is not before and not (type(now) in _SCALARS and type(now) is type(before) and now == before)
