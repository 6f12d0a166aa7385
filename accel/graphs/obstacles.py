"""What can't be captured, found while a function is recorded, or named operator by operator by `why_not_capturable`.

A replay runs no Python. So what the function has put into an attribute stays what it was at the
recording, what the host has drawn or counted is drawn and counted no more, and what it writes to
its inputs goes into the graph's copies.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from accel.dataio.fetching.randomness import streams
from accel.errors import AccelError

_SCALARS = (bool, int, float, str)
PLAIN = frozenset({type(None), bool, int, float, complex, str})
_NAMES = {"python": "random", "numpy": "numpy.random", "torch": "torch, on the CPU"}
_MISSING = object()


class NotCapturable(AccelError):
    """A recorded function does what no replay would do; its message says what, and the remedy."""


class StateMade(NotCapturable):
    """An optimizer has made state, as it does in its first step; later ones may be captured."""


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
    kept = [(name, value) for own, _ in before for name, value in own.items()]
    on_host = [name for name, value in kept if isinstance(value, Tensor) and value.device.type == "cpu"]
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


def _is_replaced(now: Any, before: Any) -> bool:
    return now is not before and not (type(now) in _SCALARS and type(now) is type(before) and now == before)


# -- operators that wait for the device --------------------------------------------------------------------------------


_READS = "it reads a value from the device; keep it there as a tensor (torch.where in place of if)"
_SHAPE = "the shape of its result depends on values; use a mask, or accel.kernels.compact with a fixed size"
_MASKED = "an index of bool is turned into positions, whose number depends on values; use torch.where or a fixed size"
_REPEATS = "repeats lie on the device; give output_size"
_COPIES = "it copies between host and device and waits; copy before the captured step, from pinned memory"
_HERE, _TORCH = str(Path(__file__).resolve().parents[1]), str(Path(torch.__file__).resolve().parent)


@dataclass(frozen=True)
class Obstacle:
    """One operator that keeps a function from being captured."""

    operator: str
    """As torch names it: `aten._local_scalar_dense`."""
    line: str
    """File and line of the user's code that led to it."""
    remedy: str
    """Why it waits, and what to do."""

    def __str__(self) -> str:
        return f"{self.line}: {self.operator}: {self.remedy}"


def why_not_capturable(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Obstacle]:
    """Run a function once, eagerly, and name the operators that a CUDA graph can't hold.

    It runs as any call does: a training step trains. It works on a CPU too, where only what depends on the device
    (copies between host and device) can't be seen.

    Args:
        function: what is to be captured.
        *args: its arguments.
        **kwargs: the same.

    Returns:
        One obstacle for each operator and line, in order; [] if none was seen.

    Example:
        >>> [obstacle.operator for obstacle in why_not_capturable(lambda x: x[x > 0].sum(), torch.ones(3))]
        ['aten.index']
    """
    seen = _Seen()
    with seen:
        function(*args, **kwargs)
    return list(dict.fromkeys(seen.obstacles))


class _Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.obstacles: list[Obstacle] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if remedy := _remedy(func, args, kwargs):
            name = f"{func.namespace}.{func._schema.name.split('::')[1]}"
            self.obstacles.append(Obstacle(name, _line(), remedy))
        return func(*args, **kwargs)


def _remedy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    name, tags = func._schema.name.split("::")[1], func.tags
    if torch.Tag.data_dependent_output in tags:
        return _READS
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        indices = [index for index in args[1] if isinstance(index, Tensor)]
        return _MASKED if any(index.dtype in (torch.bool, torch.uint8) for index in indices) else ""
    if torch.Tag.dynamic_output_shape in tags and name != "_ctc_loss":  # of that only the size of a buffer varies
        if name != "repeat_interleave":
            return _SHAPE
        return _REPEATS if kwargs.get("output_size") is None else ""
    if name in ("_to_copy", "copy_") and not kwargs.get("non_blocking", len(args) > 2 and args[2]):
        return _COPIES if _crosses(name, args, kwargs) else ""
    return ""


def _crosses(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    target = args[0].device if name == "copy_" else torch.device(kwargs.get("device") or args[0].device)
    source = args[1].device if name == "copy_" else args[0].device
    return bool((target.type == "cpu") != (source.type == "cpu"))


def _line() -> str:
    """Return the innermost line that is neither torch's nor ours."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        # An environment may be reached through a link.
        if not path.startswith("<frozen") and not os.path.realpath(path).startswith((_HERE, _TORCH)):
            return f"{path}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return "unknown"
