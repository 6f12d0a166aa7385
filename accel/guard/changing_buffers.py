"""What a model's own call changes: statistics, counters, recurrent states. Observed, so that only this is copied."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from accel.dataio.fetching.randomness import Stream
from accel.guard import nested_state, own_state
from accel.guard.module_state import ModuleState
from accel.guard.nested_state import Contents
from accel.guard.random_states import RandomStates

# An observation copies the buffers; a few show which of them change in every call.
_OBSERVATIONS = 8
_ELEMENTS = 1_000_000
_PLAIN = (Tensor, nn.Parameter)
_SCALARS = (int, float, bool, str, type(None))
_REPLACED = (Tensor, tuple)
"""Put back by reference, where a call has put another in its place: a recurrent state, say, or a codebook."""


class ChangedState(NamedTuple):
    """What changes from call to call, as it is before one of them."""

    values: list[Any]
    """Of attributes, by reference."""
    contents: Contents
    generators: own_state.States
    streams: list[tuple[Stream, Any]]


class ChangingBuffers:
    """Buffers and plain attributes of `model` that change from call to call, and its random generators.

    Parameters too, where a call puts others in their places.

    Args:
        model: the model that is observed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._observations = 0
        self._contents: dict[int, tuple[Tensor, Tensor]] = {}
        self._values: dict[tuple[int, str], tuple[dict[str, Any], Any]] = {}
        self._buffers: dict[int, Tensor] = {}
        self._copied: _Copies | None = None
        """The latest copy."""
        self._attributes: dict[tuple[int, str], dict[str, Any]] = {}
        self._generators: list[Any] = []
        self._streams: dict[str, Stream] = {}
        """The random generators of the process that a call has drawn from, beside torch's."""

    def add(self, parameters: Iterable[Tensor]) -> None:
        """Add parameters that the model's own call writes to."""
        self._buffers |= {id(parameter): parameter for parameter in parameters}

    def add_changes(self, modules: ModuleState, random: RandomStates) -> None:
        """Add what a plain call has changed.

        Args:
            modules: as they were before it.
            random: likewise.
        """
        attributes, tensors = modules.changed()
        self._attributes |= {(id(owner), name): owner for owner, name in attributes}
        self._buffers |= {id(tensor): tensor for tensor in tensors if _is_small(tensor)}
        self._streams |= {stream.name: stream for stream in random.drawn_from() if stream.name != "torch"}

    def observe(self) -> None:
        """Record what has changed since the last observation, with a call of the model in between."""
        if self._observations >= _OBSERVATIONS:
            return
        # By value: BatchNorm's statistics keep their version when they change.
        contents = {id(b): (b, b.detach().clone()) for b in self._model.buffers() if _is_small(b)}
        values = {
            (id(module), name): (owner, _reference(value))
            for module in self._model.modules()
            for owner in (vars(module), vars(module).get("_buffers"), vars(module).get("_parameters"))
            if isinstance(owner, dict)  # a scripted module's is another mapping
            for name, value in owner.items()
            if name != "training" and isinstance(value, (*_SCALARS, *_REPLACED))
        }
        if self._observations:
            before = self._contents
            self._buffers |= {i: b for i, (b, c) in contents.items() if i in before and not c.equal(before[i][1])}
            known = {key: pair for key, pair in values.items() if key in self._values}
            self._attributes |= {k: o for k, (o, value) in known.items() if _is_other(self._values[k][1], value)}
        self._generators = own_state.generators_of(self._model)
        self._observations, self._contents, self._values = self._observations + 1, contents, values
        if self._observations == _OBSERVATIONS:
            self._contents, self._values = {}, {}

    def saved(self) -> ChangedState:
        """Copy all state that changes, and return what `restore` needs; only the latest copy is kept."""
        places = _places(self._buffers.values())
        if self._copied is None or self._copied.places != places:
            self._copied = _Copies(self._buffers.values(), places)
        else:
            self._copied.take()
        values = [owner.get(name) for (_, name), owner in self._attributes.items()]
        return ChangedState(
            values,
            [pair for value in values for pair in nested_state.entries_within(value)],
            own_state.states_of(self._generators),
            [(stream, stream.read()) for stream in self._streams.values()],
        )

    def restore(self, saved: ChangedState) -> None:
        """Restore the latest copy."""
        own_state.put_back(saved.generators)
        for stream, state in saved.streams:
            if stream.read() != state:
                stream.write(state)
        if self._copied is not None:
            self._copied.put_back(self._buffers.values())
        for ((_, name), owner), value in zip(self._attributes.items(), saved.values, strict=True):
            owner[name] = value
        nested_state.put_back(saved.contents)


def _reference(value: Any) -> Any:
    """Return what tells a value from another later, without keeping a tensor and its graph."""
    return weakref.ref(value) if isinstance(value, Tensor) else value


def _is_other(before: Any, now: Any) -> bool:
    if isinstance(before, weakref.ref) and isinstance(now, weakref.ref):
        return before() is not now()
    if isinstance(now, tuple):
        return before is not now  # equality would ask the tensors in it
    return bool(before != now)


def _is_small(buffer: Tensor) -> bool:
    return not is_lazy(buffer) and buffer.numel() <= _ELEMENTS


def _places(buffers: Iterable[Tensor]) -> list[tuple[object, torch.Size]]:
    """Return where the buffers lie, and their shapes; one that may have no address is never where it was."""
    return [(b.data_ptr() if type(b) in _PLAIN and b.layout == torch.strided else object(), b.shape) for b in buffers]


class _Copies:
    """A copy of buffers, which is taken anew in each call; what that needs is made once.

    Args:
        buffers: of any dtypes and devices.
        places: of them; another place is for another copy.
    """

    def __init__(self, buffers: Iterable[Tensor], places: list[tuple[object, torch.Size]]) -> None:
        self.places = places
        # What is made in inference mode operators refuse to write in the next training step.
        with torch.inference_mode(False):
            owns = [_memory_of(buffer) for buffer in buffers]
            self._copies = [own.clone() for own in owns]
        self._pairs = _pairs(self._copies, owns)

    def take(self) -> None:
        """Copy the buffers, which lie where they lay."""
        for copies, owns in self._pairs:
            torch._foreach_copy_(copies, owns)

    def put_back(self, buffers: Iterable[Tensor]) -> None:
        """Make the buffers what they were, wherever they lie now; one that has been resized stays as it is."""
        same = [(_memory_of(b), copy) for b, copy in zip(buffers, self._copies, strict=False) if b.shape == copy.shape]
        for owns, copies in _pairs(*map(list, zip(*same, strict=True))) if same else []:
            torch._foreach_copy_(owns, copies)


def _memory_of(buffer: Tensor) -> Tensor:
    """Return its memory: torch's no_grad is lines of Python, and Ctrl-C between two of them leaves gradients off.

    By `data`: the graphs of calls before, which may have saved the buffer, go by its version.
    """
    return buffer.data


def _pairs(some: list[Tensor], others: list[Tensor]) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Return both by dtype and device, for one call each: a hundred of BatchNorm's one by one take 0.5 ms on a GPU."""
    kinds: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for one, other in zip(some, others, strict=True):
        firsts, seconds = kinds.setdefault((one.dtype, one.device), ([], []))
        firsts.append(one)
        seconds.append(other)
    return list(kinds.values())
