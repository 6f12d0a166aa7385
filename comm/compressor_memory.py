"""What a compressor remembers from step to step: error feedback, momentum, warm starts.

A step whose mean gradient is not finite does not update the memory, as if the step had not happened: GradScaler skips
the update, so what was sent is lost, and residuals must not become NaN. Every rank sees the same mean gradient, so all
decide alike without communication. This costs a second copy of each field.

Two kinds of fields:

* own: differs by rank and adds up over the ranks of a host, (elements of the piece,). The residual is one: the sum over
  a group of ranks is what the mean gradient lacks, Σ_r e_r. New buckets, slices, ranks or hosts redistribute it and
  keep that sum.
* shared: one tensor by parameter, the same on every rank that reduces this parameter. PowerSGD's warm start is one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from accel.comm.compressor import RESIDUAL
from accel.comm.layout import Layout
from accel.profiler.errors import InvalidArgument

_VERSION = 1
_Pieces = list[tuple[int, Tensor]]  # (elements of the parameter before it, values)
_Own = dict[str, dict[str, _Pieces]]  # field → parameter → its pieces
_Shared = dict[str, dict[str, Tensor]]


class Slot:
    """The memory of one piece of one bucket; compressors get it as `piece.slot`."""

    def __init__(self, layout: Layout, shared: dict[str, dict[str, Tensor]]) -> None:
        self.layout = layout
        self.low, self.high = 0, layout.numel
        self.filled = False
        self.agreed = False
        """Whether the compressor has made sure that shared fields are the same on all ranks."""
        self._kept: dict[str, Tensor] = {}
        self._next: dict[str, Tensor] = {}
        self._spare: dict[str, Tensor] = {}
        self._shared = shared
        self._next_shared: dict[str, dict[str, Tensor]] = {}

    def has(self, field: str) -> bool:
        """Return whether there is an own field of this name; `residual` is there if error feedback is on."""
        return field in self._kept

    def read(self, field: str) -> Tensor:
        """Return an own field, (elements of the piece,) in the dtype of its values; zeros at first. Don't write."""
        return self._kept[field]

    def write(self, field: str) -> Tensor:
        """Return a tensor to be filled with the field's next value, which holds once the step is known to be finite."""
        if field not in self._next:
            old = self._kept[field]
            self._next[field] = self._spare.pop(field) if field in self._spare else torch.empty_like(old)
        return self._next[field]

    def read_shared(self, field: str, name: str) -> Tensor | None:
        """Return a shared field of a parameter, None at first."""
        return self._shared.get(field, {}).get(name)

    def write_shared(self, field: str, name: str, value: Tensor) -> None:
        """Set a shared field of a parameter, which holds once the step is known to be finite."""
        self._next_shared.setdefault(field, {})[name] = value

    def forget_shared(self, field: str, name: str) -> None:
        """Drop a shared field of a parameter at once."""
        self._shared.get(field, {}).pop(name, None)

    def fill(self, field: str, values: Tensor) -> None:
        """Set an own field at once."""
        self._kept[field] = values

    def _settle(self, finite: bool) -> None:
        for field, value in self._next.items():
            if finite:
                self._spare[field], self._kept[field] = self._kept[field], value
            else:
                self._spare[field] = value
        if finite:
            for field, values in self._next_shared.items():
                self._shared.setdefault(field, {}).update(values)
        self._next, self._next_shared = {}, {}

    def _scattered(self) -> Iterable[tuple[str, str, int, Tensor]]:
        for field, values in self._kept.items():
            for extent in self.layout.extents(self.low, self.high):
                yield field, extent.name, extent.skipped, values[extent.span]


class Memory:
    """One rank's memory of all buckets."""

    def __init__(self) -> None:
        self._slots: dict[int, Slot] = {}
        self._loose: _Own = {}
        self._shared: _Shared = {}
        self._finite: list[Tensor] = []
        self._lock = threading.Lock()

    def slot(self, layout: Layout) -> Slot:
        """Return the slot of a bucket, a new and unfilled one where the bucket holds other parameters than before."""
        slot = self._slots.get(layout.index)
        if slot is None or slot.layout != layout:
            names = set(layout.names)
            for index, other in list(self._slots.items()):
                if index == layout.index or not names.isdisjoint(other.layout.names):
                    self._loosen(self._slots.pop(index))
            slot = self._slots[layout.index] = Slot(layout, self._shared)
        return slot

    def _loosen(self, slot: Slot) -> None:
        with self._lock:
            for field, name, skipped, values in slot._scattered():
                self._loose.setdefault(field, {}).setdefault(name, []).append((skipped, values))

    def take(self, layout: Layout, field: str, like: Tensor) -> Tensor:
        """Return what is kept of a field for a bucket's parameters, zeros elsewhere, and keep it no longer."""
        whole = torch.zeros(layout.numel, dtype=like.dtype, device=like.device)
        with self._lock:
            pieces = self._loose.get(field, {})
            restored = [(extent, pieces.pop(extent.name, [])) for extent in layout.extents(0, layout.numel)]
        for extent, parts in restored:
            for skipped, values in parts:
                if skipped + values.numel() > extent.length:
                    raise InvalidArgument(
                        f"the memory of {extent.name!r} must be of its {extent.length:,} elements, got "
                        f"{skipped + values.numel():,}; load a state of the same model"
                    )
                whole[extent.begin + skipped : extent.begin + skipped + values.numel()] += values.to(whole)
        return whole

    def multiply(self, field: str, factor: float) -> None:
        """Multiply an own field by a number, between steps."""
        self.settle()
        with self._lock:
            for slot in self._slots.values():
                if slot.has(field):
                    slot.read(field).mul_(factor)
            for pieces in self._loose.get(field, {}).values():
                for _, values in pieces:
                    values.mul_(factor)

    @property
    def noted(self) -> bool:
        """Return whether a step has been noted that has not settled yet."""
        return bool(self._finite)

    def note(self, finite: Tensor) -> None:
        """Note whether the mean gradient of one bucket is finite, (1,) bool."""
        self._finite.append(finite)

    def finite(self) -> bool:
        """Return whether all that was noted since the last step settled is finite."""
        return bool(torch.stack(self._finite).all()) if self._finite else True

    def settle(self) -> None:
        """Take over what the last step wrote if all its buckets were finite, else forget it."""
        if self._finite:
            self._settle(self.finite())

    def _settle(self, finite: bool) -> None:
        self._finite = []
        for slot in self._slots.values():
            slot._settle(finite)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of this rank's fields by parameter."""
        self.settle()
        own, shared = tree_map_only(Tensor, Tensor.clone, (self._loose, self._shared))
        for slot in self._slots.values():
            for field, name, skipped, values in slot._scattered():
                own.setdefault(field, {}).setdefault(name, []).append((skipped, values.clone()))
        return {"version": _VERSION, "own": own, "shared": shared}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace all fields by those of a state; they move to the ranks that need them at the next step."""
        if state.get("version") != _VERSION:
            raise InvalidArgument(f"the state's version must be {_VERSION}, got {state.get('version')!r}")
        self._slots, self._finite = {}, []
        self._loose, self._shared = tree_map_only(Tensor, Tensor.clone, (state["own"], state["shared"]))


class LossScale:
    """The loss scale that residuals are stored at."""

    def __init__(self, scaler: Any) -> None:
        self._check(scaler)
        self._scaler = scaler
        self.awaited = False
        """Gradients have a scale, and the scaler was left behind by a pickle."""
        self.value = 1.0

    @property
    def in_use(self) -> bool:
        """Return whether gradients have a scale."""
        return self.awaited or self._scaler is not None

    def take(self, scaler: Any, kind: str) -> None:
        """Take another scaler, or keep the one there is; raise InvalidArgument if it was left behind in a `kind`."""
        if scaler is None and self.awaited:
            raise InvalidArgument(
                f"this {kind} was used with a GradScaler, which a pickle leaves behind: give it back, "
                "state.bind(model, scaler=scaler)"
            )
        if scaler is not None:
            self._check(scaler)
            self._scaler, self.awaited = scaler, False

    @staticmethod
    def _check(scaler: Any) -> None:
        if scaler is not None and not hasattr(scaler, "get_scale"):
            raise InvalidArgument(
                f"scaler must be a torch.amp.GradScaler, got {type(scaler).__name__}; gradients of a model that is "
                "decorated by accel.amp have no scale"
            )

    def follow(self, memory: Memory) -> None:
        """Multiply what was not sent yet by the change of the scale since the last call; between steps.

        A state that was saved with a scale may be loaded where there is none.
        """
        if self.awaited:
            return
        scale = 1.0 if self._scaler is None else float(self._scaler.get_scale())
        if scale != self.value:
            memory.multiply(RESIDUAL, scale / self.value)
            self.value = scale


Load = Callable[[int], Mapping[str, Any]]
"""Reads the `state_dict()` that an old rank saved."""


@overload
def reshard(states: Sequence[Mapping[str, Any]], world_size: int) -> list[dict[str, Any]]: ...


@overload
def reshard(
    states: Sequence[Mapping[str, Any]] | Load, world_size: int, *, rank: int, saved: int | None = ...
) -> dict[str, Any]: ...


def reshard(
    states: Sequence[Mapping[str, Any]] | Load, world_size: int, *, rank: int | None = None, saved: int | None = None
) -> list[dict[str, Any]] | dict[str, Any]:
    """Return the memory of `world_size` ranks, or of one of them, that holds what the ranks of a saved run remembered.

    Σ over the new ranks = Σ over the old ones, for each own field: that sum is what the mean gradient still lacks,
    since gradients are divided by the number of ranks before error feedback. New rank r gets the old ranks r,
    r + world_size, …; ranks beyond the old number start with nothing.

    Shared fields, the same on every rank that reduces a parameter, are those of all old ranks. With `rank` they are
    those of the old ranks that it reads, at least one: where hosts with other numbers of ranks share out parameters
    differently, what is not known on all that need it starts from zero.

    Args:
        states: the `state_dict()` of each old rank, in rank order; or, with `rank`, a function that reads one.
        world_size: new number of ranks, ≥ 1.
        rank: the new rank whose memory to return; it reads its own old ranks alone, each once. Default: all.
        saved: number of old ranks, where `states` is a function.

    Returns:
        The state of the new rank; without `rank` a list, by new rank.

    Raises:
        InvalidArgument: if numbers are out of range, or `rank` or `saved` is missing beside a function.

    Example:
        >>> state.load_state_dict(reshard(lambda old: torch.load(f"comm-{old}.pt"), world_size=4, rank=rank, saved=8))
        >>> own = reshard([torch.load(f"comm-{r}.pt") for r in range(8)], world_size=4)[rank]  # reads all, everywhere
    """
    load, count = (states, saved) if callable(states) else (states.__getitem__, len(states))
    if count is None or (callable(states) and rank is None):
        raise InvalidArgument("a function that reads states needs rank= and saved=, the number of states; pass both")
    if world_size < 1 or count < 1:
        raise InvalidArgument(f"there must be at least one state and one rank, got {count} and {world_size}")
    if rank is not None and not 0 <= rank < world_size:
        raise InvalidArgument(f"rank must be from 0 to {world_size - 1}, got {rank}")
    if rank is not None:
        return _dealt([load(old) for old in range(rank, count, world_size)] or [load(rank % count)], rank < count)
    resharded = [reshard(states, world_size, rank=new) for new in range(world_size)]
    everything = _dealt([load(old) for old in range(count)], keeps=False)
    return [{**state, "shared": everything["shared"]} for state in resharded]


def _dealt(states: Sequence[Mapping[str, Any]], keeps: bool) -> dict[str, Any]:
    """Return one state with the own fields of several, if it keeps them, and the shared ones."""
    own: _Own = {}
    shared: _Shared = {}
    for state in states:
        for field, values in state["shared"].items():
            shared.setdefault(field, {}).update(values)
        for field, names in state["own"].items() if keeps else ():
            for name, pieces in names.items():
                own.setdefault(field, {}).setdefault(name, []).extend(pieces)
    return {**states[0], "own": own, "shared": shared}
