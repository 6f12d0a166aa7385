"""The update on a device: what is sent there before a step, and when its launches can be those of the step before.

The table of a step's tensors there, their addresses and which programs walk through which of them,
lives as long as tensors keep their sizes and dtypes; addresses are sent again when they change, as
those of gradients do.

Nothing waits for the device. Within the capture of a CUDA graph the addresses go into a table of
that graph's own; hyperparameters are read from the table of all steps, so that `send` before a
replay reaches it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain, repeat
from operator import and_, attrgetter, is_, or_
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from accel.kernels.optimizers.regular import Copies, copy_back, regular
from accel.kernels.optimizers.rules import COLUMNS, Batch, Hypers, Kind, Scaling, UpdateOutcome, needs_norm, work_dtype
from accel.profiler.errors import InvalidArgument, InvalidState

if TYPE_CHECKING:
    from accel.kernels.launching import LaunchPlan, PreparedLaunches

    Launch = tuple[LaunchPlan, tuple[Tensor | None, ...]]

CHUNK = 8192
"""Elements of a program: 100 M parameters are 12,000 programs, many for each core, so that the last ones are few."""
ROWS = 7
"""Of the table of addresses."""
BLOCK = 1024
"""Elements at once: 8 a thread."""
TENSORS = 128
"""Tensors of a program that computes their numbers."""
_ALIGNMENT_BYTES = 16
_NUMBERS = frozenset((float, int, bool))
_NOWHERE = nullcontext()
_DTYPE = attrgetter("dtype")
_ADDRESS = torch.Tensor.data_ptr


class Form(NamedTuple):
    """What a kernel is compiled for: tensors of one form share a launch."""

    param: torch.dtype
    grad: torch.dtype
    has_master: bool
    aligned: bool
    has_buffer: bool
    nesterov: bool
    amsgrad: bool


class TableEntry(NamedTuple):
    """What decides the table's layout, of one tensor."""

    form: Form
    numel: int
    group: int


@dataclass(frozen=True)
class AddressTable:
    """The layout of a step's tensors on the device.

    Attributes:
        entries: of all tensors, in order.
        addresses: [7, T].
        layout: [3, T].
        launches: form → [2, C]: the tensor and the chunk of each program.
        chunks: P, of all tensors.
        scalars: [T, 16], float64.
        squares: [2, P], float64: of chunks.
        infinite: [P], int32.
    """

    entries: list[TableEntry]
    addresses: Tensor
    layout: Tensor
    launches: dict[Form, Tensor]
    chunks: int
    scalars: Tensor
    squares: Tensor
    infinite: Tensor

    @classmethod
    def of(cls, entries: list[TableEntry], device: torch.device) -> AddressTable:
        """Lay tensors out."""
        numel = torch.tensor([entry.numel for entry in entries], dtype=torch.int64)
        counts = (numel + CHUNK - 1) // CHUNK
        first = counts.cumsum(0) - counts
        group = torch.tensor([entry.group for entry in entries], dtype=torch.int64)
        launches = {}
        for form in dict.fromkeys(entry.form for entry in entries):
            own = torch.tensor([i for i, entry in enumerate(entries) if entry.form == form])
            tensors = own.repeat_interleave(counts[own])
            if len(tensors):
                begin = (counts[own].cumsum(0) - counts[own]).repeat_interleave(counts[own])
                work = torch.stack((tensors, torch.arange(len(tensors)) - begin))
                launches[form] = sent(work.to(torch.int32), device)
        total = int(counts.sum())
        return cls(
            entries,
            torch.zeros(ROWS, len(entries), dtype=torch.int64, device=device),
            sent(torch.stack((numel, first, group)), device),
            launches,
            total,
            torch.empty(len(entries), COLUMNS, dtype=torch.float64, device=device),
            torch.empty(2, total, dtype=torch.float64, device=device),
            torch.empty(total, dtype=torch.int32, device=device),
        )


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a CPU tensor on a device, without waiting for it."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def fingerprint(batches: Sequence[Batch]) -> list[Any]:
    """Return what the table of a step depends on: where tensors lie and how, and the options of each group.

    It is made at every step, so each line goes through all tensors without Python for each. What is kept beside weights
    changes its dtype only with its address.
    """
    seen: list[Any] = []
    for batch in batches:
        walked = list(chain.from_iterable(batch.columns))
        seen += (
            list(map(_ADDRESS, chain(walked, batch.steps))),
            list(map(_DTYPE, chain(batch.params, batch.grads))),
            list(map(torch.Tensor.numel, batch.params)),
            None if all(map(torch.Tensor.is_contiguous, walked)) else list(map(torch.Tensor.stride, walked)),
            (len(batch.states), batch.nesterov, batch.amsgrad),
        )
    return seen


class TensorListing:
    """The tensors of a step: their addresses, and what decides how the table is laid out.

    Gradients may lie elsewhere at every step, so each line goes through all tensors without Python for each.

    Attributes:
        addresses: of all tensors, row by row.
        signature: what decides the layout.
        copies: of tensors that lie in another order or have gaps, to be copied back after the update.
        is_copied: some are copies, which the next step has to make again.
    """

    def __init__(self, batches: Sequence[Batch]) -> None:
        self._batches: list[Batch] = []
        self._rows: list[list[int]] = [[] for _ in range(ROWS)]
        self.signature: list[Any] = []
        self.copies: Copies = []
        self.is_copied = False
        for batch in batches:
            same, back = regular(batch)
            self._add(same)
            self.copies += back
            # Copies of gradients are not copied back.
            self.is_copied = self.is_copied or bool(back) or not all(map(is_, same.grads, batch.grads))
        self.addresses = list(chain.from_iterable(self._rows))
        joined = self._rows[0]
        for row in (*self._rows[1:5], self._rows[6]):  # all but step counters, which are read one by one
            joined = list(map(or_, joined, row))
        self._odd = list(map(and_, joined, repeat(_ALIGNMENT_BYTES - 1)))
        self.signature.append(self._odd)

    def _add(self, batch: Batch) -> None:
        self._batches.append(batch)
        nothing = [0] * len(batch.params)
        states = [list(map(_ADDRESS, column)) for column in batch.states]
        masters = [0 if m is None else m.data_ptr() for m in batch.masters] or nothing
        own = (
            list(map(_ADDRESS, batch.params)),
            *states,
            *[nothing] * (3 - len(states)),
            masters,
            list(map(_ADDRESS, batch.steps)) or nothing,
            list(map(_ADDRESS, batch.grads)),
        )
        for row, column in zip(self._rows, own, strict=True):
            row += column
        self.signature += [
            list(map(_DTYPE, batch.params)),
            list(map(_DTYPE, batch.grads)),
            list(map(torch.Tensor.numel, batch.params)),
            list(map(bool, masters)),
            (bool(batch.states), batch.nesterov, batch.amsgrad),
        ]

    def entries(self) -> list[TableEntry]:
        """Return what the table is laid out from."""
        entries: list[TableEntry] = []
        for group, batch in enumerate(self._batches):
            for p, g in zip(batch.params, batch.grads, strict=True):
                has_master = self._rows[4][len(entries)] != 0
                aligned = self._odd[len(entries)] == 0
                form = Form(p.dtype, g.dtype, has_master, aligned, bool(batch.states), batch.nesterov, batch.amsgrad)
                entries.append(TableEntry(form, p.numel(), group))
        return entries


class Launcher:
    """Updates the parameters of one optimizer, all on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._table: AddressTable | None = None
        self._fingerprint: list[Any] = []
        """Of the step that the table's addresses were sent for; [] where a step like it must be laid out again."""
        self._signature: list[Any] = []
        self._addresses: list[int] = []
        self._numbers: list[list[float | None]] = []
        """Sent last; None, which no number equals, where a tensor was copied."""
        self._plain_rows: list[Hypers] = []
        self._hypers = torch.empty(0, COLUMNS, dtype=torch.float64, device=device)
        self._norm = torch.zeros((), device=device)
        self._overflow = torch.zeros((), device=device)
        self._kept_for: tuple[Any, ...] = ()
        self._kept: PreparedLaunches | None = None
        self._spare: tuple[Tensor, Tensor] | None = None
        self._captured: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        self._read_by_graphs: list[tuple[AddressTable, Tensor]] = []
        """Tables and numbers that captured steps keep reading after newer ones have replaced them."""

    def __getstate__(self) -> dict[str, Any]:
        """Leave out launches, which hold compiled kernels, and what graphs read, which a copy has none of."""
        emptied: dict[str, Any] = {"_fingerprint": [], "_kept_for": (), "_kept": None}
        return {**self.__dict__, **emptied, "_captured": {}, "_read_by_graphs": []}

    def send(self, rows: Sequence[Hypers]) -> None:
        """Send the numbers of the parameter groups that changed; tensors among them are copied on the device.

        Raises:
            InvalidState: if a number changed within the capture of a graph, which can't send it.
        """
        plain = all(map(_NUMBERS.issuperset, (map(type, row) for row in rows)))
        if plain and rows == self._plain_rows:
            return
        numbers = [[None if _on_device(x) else float(x) for x in row] for row in rows]
        if numbers != self._numbers:
            if self._captures():
                raise InvalidState(
                    "accel.optim: hyperparameters must be on the device before a capture. Found: they changed since "
                    "the last step. Call optimizer.refresh() before the capture."
                )
            padded = torch.zeros(len(rows), COLUMNS, dtype=torch.float64)
            filled = [[0.0 if x is None else x for x in row] for row in numbers]
            padded[:, : len(Hypers._fields)] = torch.tensor(filled, dtype=torch.float64)
            if len(self._hypers) == len(rows):
                # In place: captured graphs read this memory.
                self._hypers.copy_(padded if self.device.type == "cpu" else padded.pin_memory(), non_blocking=True)
            else:
                self._hypers = sent(padded, self.device)
            self._numbers = numbers
        self._plain_rows = list(rows) if plain else []
        for group, row in enumerate(rows):
            for column, x in enumerate(row):
                if isinstance(x, Tensor) and _on_device(x):
                    self._hypers[group, column].copy_(x.reshape(()), non_blocking=True)

    def update(self, kind: Kind, batches: Sequence[Batch], scaling: Scaling) -> UpdateOutcome:
        """Update the parameters of all groups, in place.

        Returns:
            The norm where a group is clipped or nobody looked for infinity and NaN, and whether the step was skipped:
            tensors that the next step overwrites.
        """
        self.send([batch.row for batch in batches])
        normed = needs_norm(batches, scaling)
        scaling = self._on_here(scaling)
        seen = fingerprint(batches)
        copies: Copies = []
        if seen == self._fingerprint and not self._captures():
            assert self._table is not None
            table, addresses = self._table, self._table.addresses
        else:
            listing = TensorListing(batches)
            if not listing.addresses:
                return self._outcome(scaling, normed=normed)
            table, copies = self._laid_out(listing), listing.copies
            addresses = self._addressed(table, listing.addresses, batches)
            self._fingerprint = [] if listing.is_copied or addresses is not table.addresses else seen
        with torch.cuda.device(self.device) if self.device.type == "cuda" else _NOWHERE:
            self._prepared(kind, table, addresses, scaling, norm=normed)()
        copy_back(copies)
        return self._outcome(scaling, normed=normed)

    def _outcome(self, scaling: Scaling, *, normed: bool) -> UpdateOutcome:
        asked = scaling.grad_scale is not None or scaling.found_inf is not None
        return UpdateOutcome(self._norm if normed else None, self._overflow if asked else None)

    def _prepared(
        self, kind: Kind, table: AddressTable, addresses: Tensor, scaling: Scaling, *, norm: bool
    ) -> PreparedLaunches:
        """Return the launches of a step; those of a step with the same tensors of ours are kept."""
        key = (kind, norm, table, addresses, self._hypers, scaling.grad_scale, scaling.found_inf)
        if self._kept is None or len(self._kept_for) != len(key) or not all(map(is_, key, self._kept_for)):
            from accel.kernels.launching import PreparedLaunches

            step = Step(table, addresses, self._hypers, scaling, self._norm, self._overflow)
            self._kept_for, self._kept = key, PreparedLaunches(step.launches(kind, norm=norm))
        return self._kept

    def _laid_out(self, listing: TensorListing) -> AddressTable:
        if self._table is None or self._signature != listing.signature:
            if self._captures():
                raise InvalidState(
                    "accel.optim: a captured step must update the same parameters as the step before it. Found: other "
                    "parameters, sizes or dtypes of gradients. Run one step of this kind before the capture."
                )
            self._table, self._addresses = AddressTable.of(listing.entries(), self.device), []
            self._signature = listing.signature
            self._spare = None
        return self._table

    def _addressed(self, table: AddressTable, addresses: list[int], batches: Sequence[Batch]) -> Tensor:
        """Return the table of addresses as it is on the device when the kernels run."""
        if self._captures():
            return self._captured_addresses(addresses)
        if addresses != self._addresses:
            self._check_devices(addresses, batches, len(table.entries))
            values = torch.tensor(addresses, dtype=torch.int64).view(ROWS, -1)
            source = values if self.device.type == "cpu" else values.pin_memory()
            table.addresses.copy_(source, non_blocking=True)
            self._addresses = addresses
        self.make_room()
        return table.addresses

    def make_room(self) -> None:
        """Allocate the table of the next capture, if there is none: a capture can't."""
        if self._spare is None and self._table is not None and self.device.type == "cuda" and not self._captures():
            host = torch.empty(ROWS, len(self._table.entries), dtype=torch.int64, pin_memory=True)
            self._spare = host, torch.empty_like(self._table.addresses)

    def _check_devices(self, addresses: list[int], batches: Sequence[Batch], count: int) -> None:
        """Raise if a tensor other than a gradient has moved, to another device than this one."""
        if addresses[: -count or None] == self._addresses[: -count or None]:
            return
        for batch in batches:
            for tensors in (batch.params, *batch.states, batch.masters, batch.steps):
                for tensor in tensors:
                    if tensor is not None and tensor.device != self.device:
                        raise InvalidArgument(
                            f"accel.optim: the state must be on {self.device}, as the parameters. Found: "
                            f"{tensor.device}. Make the optimizer after model.to(device), or load its state again."
                        )

    def _captured_addresses(self, addresses: list[int]) -> Tensor:
        """Return a table for captured steps with these addresses, which each replay copies from memory that stays."""
        key = tuple(addresses)
        if key not in self._captured:
            if self._spare is None:
                raise InvalidState(
                    "accel.optim: a captured step with new addresses needs an ordinary one before it. Found: none, or "
                    "another capture since. Run optimizer.step() or refresh() once, then capture."
                )
            self._captured[key], self._spare = self._spare, None
            self._captured[key][0].copy_(torch.tensor(addresses, dtype=torch.int64).view(ROWS, -1))
        assert self._table is not None
        if not any(table is self._table and numbers is self._hypers for table, numbers in self._read_by_graphs):
            self._read_by_graphs.append((self._table, self._hypers))
        host, device = self._captured[key]
        device.copy_(host, non_blocking=True)
        return device

    def _on_here(self, scaling: Scaling) -> Scaling:
        if scaling.grad_scale is None and scaling.found_inf is None:
            return scaling

        def moved(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(self.device, torch.float32, non_blocking=True)

        return Scaling(moved(scaling.grad_scale), moved(scaling.found_inf))

    def _captures(self) -> bool:
        if self.device.type == "cpu":
            return False
        with torch.cuda.device(self.device):
            return torch.cuda.is_current_stream_capturing()


@dataclass(frozen=True)
class Step:
    """What the kernels of a step read and write.

    Attributes:
        table: of its tensors.
        addresses: [7, T], of the table, or those of a captured step.
        hypers: [groups, 16], float64.
        scaling: on the device.
        norm: float32 [], of all gradients.
        overflow: float32 []: 1 if the step is skipped.
    """

    table: AddressTable
    addresses: Tensor
    hypers: Tensor
    scaling: Scaling
    norm: Tensor
    overflow: Tensor

    def launches(self, kind: Kind, *, norm: bool) -> Iterator[Launch]:
        """Yield them."""
        others, weights = self.table.squares  # of gradients, then of LAMB's updates
        if norm or kind == "lars":
            yield from self._sums(weights if kind == "lars" else None)
        yield self._scalars(kind, norm=norm)
        if kind == "lars":
            yield self._ratio(weights, others, adaptive=False)
        if kind != "lamb":
            yield from self._updates("adam" if kind == "adam" else "sgd")
            return
        yield from self._updates("moments", weights, others)
        yield self._ratio(weights, others, adaptive=True)
        yield from self._updates("apply")

    def _sums(self, weight_squares: Tensor | None) -> Iterator[Launch]:
        from accel.kernels.optimizers.triton_scalars import sums_kernel

        table = self.table
        for form, work in table.launches.items():
            programs = work.shape[1]
            yield (
                sums_kernel.plan((programs,), len(table.entries), programs, **constants(form)),
                (
                    *(self.addresses, table.layout, work, self.scaling.grad_scale),
                    *(table.squares[0], weight_squares, table.infinite),
                ),
            )

    def _scalars(self, kind: Kind, *, norm: bool) -> Launch:
        from accel.kernels.optimizers.triton_scalars import scalars_kernel

        table, scaling, count = self.table, self.scaling, len(self.table.entries)
        form = {"ADAPTIVE": kind in ("adam", "lamb"), "LAYERWISE": kind in ("lamb", "lars"), "CHECKS": scaling.checks}
        squares = (table.squares[0], table.infinite) if norm else (None, None)
        return (
            scalars_kernel.plan((-(-count // TENSORS),), count, table.chunks, **form, BLOCK=TENSORS),
            (
                *(self.addresses, table.layout, self.hypers, scaling.grad_scale, scaling.found_inf),
                *(*squares, table.scalars, self.norm, self.overflow),
            ),
        )

    def _ratio(self, first: Tensor, second: Tensor, *, adaptive: bool) -> Launch:
        from accel.kernels.optimizers.triton_scalars import ratio_kernel

        table, count = self.table, len(self.table.entries)
        scale = None if adaptive else self.scaling.grad_scale
        return (
            ratio_kernel.plan((count,), count, ADAPTIVE=adaptive, CHUNK=CHUNK),
            (table.layout, self.hypers, first, second, scale, table.scalars, self.overflow),
        )

    def _updates(self, kind: str, *squares: Tensor) -> Iterator[Launch]:
        from accel.kernels.optimizers.triton import update_kernel

        table = self.table
        for form, work in table.launches.items():
            fixed = {"HAS_BUFFER": form.has_buffer, "NESTEROV": form.nesterov, "AMSGRAD": form.amsgrad}
            programs = work.shape[1]
            yield (
                update_kernel.plan((programs,), len(table.entries), programs, KIND=kind, **fixed, **constants(form)),
                (
                    *(self.addresses, table.layout, work, table.scalars, self.overflow),
                    *(squares or (None, None)),
                ),
            )


def constants(form: Form) -> dict[str, Any]:
    """Return what all kernels that read weights are compiled with."""
    import triton.language as tl

    kinds = {
        torch.float32: tl.float32,
        torch.float16: tl.float16,
        torch.bfloat16: tl.bfloat16,
        torch.float64: tl.float64,
    }
    return {
        "PARAM": kinds[form.param],
        "GRAD": kinds[form.grad],
        "WORK": kinds[work_dtype(form.param)],
        "HAS_MASTER": form.has_master,
        "ALIGNED": form.aligned,
        "CHUNK": CHUNK,
        "BLOCK": BLOCK,
    }


def _on_device(number: float | Tensor) -> bool:
    return isinstance(number, Tensor) and number.device.type != "cpu"
