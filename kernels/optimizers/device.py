"""The update on a device: the table of addresses, the numbers that kernels read there, and the launches of a step.

The table lives as long as tensors keep their sizes and dtypes; addresses are sent again when they change, as those of
gradients do. Nothing waits for the device. Within the capture of a CUDA graph the addresses go into a table of that
graph's own; hyperparameters are read from the table of all steps, so that `send` before a replay reaches it.
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

from accel.kernels.optimizers.regular import copy_back, regular
from accel.kernels.optimizers.rules import COLUMNS, Batch, Hypers, Kind, Scaling, UpdateOutcome, needs_norm, work_dtype

if TYPE_CHECKING:
    from accel.kernels.launching import PreparedLaunch

CHUNK = 8192
"""Elements of a program: 100 M parameters are 12,000 programs, many for each core, so that the last ones are few."""
BLOCK = 1024
"""Elements at once: 8 a thread."""
_TENSORS = 128
"""Tensors of a program that computes their numbers."""
_ROWS = 7
"""Of the table of addresses."""
_ALIGNMENT_BYTES = 16
_DTYPE = attrgetter("dtype")
_NUMBERS = frozenset((float, int, bool))


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
            torch.zeros(_ROWS, len(entries), dtype=torch.int64, device=device),
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


class Launcher:
    """Updates the parameters of one optimizer, all on one device.

    Args:
        device: of the parameters.

    Attributes:
        device: the same.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._table: AddressTable | None = None
        self._signature: list[Any] = []
        self._addresses: list[int] = []
        self._numbers: list[list[float]] = []
        self._plain_rows: list[Hypers] = []
        self._hypers = torch.empty(0, COLUMNS, dtype=torch.float64, device=device)
        self._norm = torch.zeros((), device=device)
        self._overflow = torch.zeros((), device=device)
        self._kept_for: tuple[Any, ...] = ()
        self._kept: list[PreparedLaunch] = []
        self._spare: tuple[Tensor, Tensor] | None = None
        self._captured: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        self._read_by_graphs: list[tuple[AddressTable, Tensor]] = []
        """Tables and numbers that captured steps go on reading, also where others have taken their place."""

    def __getstate__(self) -> dict[str, Any]:
        """Leave out launches, which hold compiled kernels, and what graphs read, which a copy has none of."""
        return {**self.__dict__, "_kept_for": (), "_kept": [], "_captured": {}, "_read_by_graphs": []}

    def send(self, rows: Sequence[Hypers]) -> None:
        """Send the numbers of the parameter groups that changed; tensors among them are copied on the device.

        Raises:
            RuntimeError: if a number changed within the capture of a graph, which can't send it.
        """
        plain = all(map(_NUMBERS.issuperset, (map(type, row) for row in rows)))
        if plain and rows == self._plain_rows:
            return
        numbers = [[0.0 if _on_device(x) else float(x) for x in row] for row in rows]
        if numbers != self._numbers:
            if self._captures():
                raise RuntimeError(
                    "accel.optim: hyperparameters must be on the device before a capture. Found: they changed since "
                    "the last step. Call optimizer.refresh() before the capture."
                )
            padded = torch.zeros(len(rows), COLUMNS, dtype=torch.float64)
            padded[:, : len(Hypers._fields)] = torch.tensor(numbers, dtype=torch.float64)
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
        straight, copies = [], []
        for batch in batches:
            same, back = regular(batch)
            straight.append(same)
            copies += back
        listing = _Listing(straight)
        normed = needs_norm(straight, scaling)
        if listing.addresses:
            table = self._laid_out(listing)
            addresses = self._addressed(table, listing.addresses, straight)
            step = _Step(self, table, addresses, self._on_here(scaling))
            with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
                for plan, tensors in self._prepared(step, kind, norm=normed):
                    plan(*tensors)
            copy_back(copies)
        asked = scaling.checks or scaling.found_inf is not None
        return UpdateOutcome(self._norm if normed else None, self._overflow if asked else None)

    def _prepared(self, step: _Step, kind: Kind, *, norm: bool) -> list[PreparedLaunch]:
        """Return the launches of a step; those of a step with the same tensors of ours are kept."""
        key = (kind, norm, step.table, step.addresses, self._hypers, step.scaling.grad_scale, step.scaling.found_inf)
        if len(self._kept_for) != len(key) or not all(map(is_, key, self._kept_for)):
            self._kept_for, self._kept = key, list(step.launches(kind, norm=norm))
        return self._kept

    def _laid_out(self, listing: _Listing) -> AddressTable:
        if self._table is None or self._signature != listing.signature:
            if self._captures():
                raise RuntimeError(
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
            values = torch.tensor(addresses, dtype=torch.int64).view(_ROWS, -1)
            source = values if self.device.type == "cpu" else values.pin_memory()
            table.addresses.copy_(source, non_blocking=True)
            self._addresses = addresses
        if self._spare is None and self.device.type == "cuda":
            host = torch.empty(_ROWS, len(table.entries), dtype=torch.int64, pin_memory=True)
            self._spare = host, torch.empty_like(table.addresses)
        return table.addresses

    def _check_devices(self, addresses: list[int], batches: Sequence[Batch], count: int) -> None:
        """Raise if a tensor other than a gradient has moved, to another device than this one."""
        if addresses[: -count or None] == self._addresses[: -count or None]:
            return
        for batch in batches:
            for tensors in (batch.params, *batch.states, batch.masters, batch.steps):
                for tensor in tensors:
                    if tensor is not None and tensor.device != self.device:
                        raise ValueError(
                            f"accel.optim: the state must be on {self.device}, as the parameters. Found: "
                            f"{tensor.device}. Make the optimizer after model.to(device), or load its state again."
                        )

    def _captured_addresses(self, addresses: list[int]) -> Tensor:
        """Return a table for captured steps with these addresses, which each replay copies from memory that stays."""
        key = tuple(addresses)
        if key not in self._captured:
            if self._spare is None:
                raise RuntimeError(
                    "accel.optim: a captured step with new addresses needs an ordinary one before it. Found: none, or "
                    "another capture since. Run optimizer.step() once, then capture."
                )
            self._captured[key], self._spare = self._spare, None
            self._captured[key][0].copy_(torch.tensor(addresses, dtype=torch.int64).view(_ROWS, -1))
        assert self._table is not None
        if not any(table is self._table and numbers is self._hypers for table, numbers in self._read_by_graphs):
            self._read_by_graphs.append((self._table, self._hypers))
        host, device = self._captured[key]
        device.copy_(host, non_blocking=True)
        return device

    def _on_here(self, scaling: Scaling) -> Scaling:
        def moved(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(self.device, torch.float32, non_blocking=True)

        return Scaling(moved(scaling.grad_scale), moved(scaling.found_inf))

    def _captures(self) -> bool:
        if self.device.type == "cpu":
            return False
        with torch.cuda.device(self.device):
            return torch.cuda.is_current_stream_capturing()


def _on_device(number: float | Tensor) -> bool:
    return isinstance(number, Tensor) and number.device.type != "cpu"


class _Listing:
    """The tensors of a step: their addresses, and what decides how the table is laid out.

    It is made at every step, so each line goes through all tensors without Python for each.
    """

    def __init__(self, batches: Sequence[Batch]) -> None:
        self._batches = batches
        self._rows: list[list[int]] = [[] for _ in range(_ROWS)]
        self.signature: list[Any] = []
        for batch in batches:
            self._add(batch)
        self.addresses = list(chain.from_iterable(self._rows))
        joined = self._rows[0]
        for row in (*self._rows[1:5], self._rows[6]):  # all but step counters, which are read one by one
            joined = list(map(or_, joined, row))
        self._odd = list(map(and_, joined, repeat(_ALIGNMENT_BYTES - 1)))
        self.signature.append(self._odd)

    def _add(self, batch: Batch) -> None:
        address = torch.Tensor.data_ptr
        nothing = [0] * len(batch.params)
        states = [list(map(address, column)) for column in batch.states]
        masters = [0 if m is None else m.data_ptr() for m in batch.masters] or nothing
        own = (
            list(map(address, batch.params)),
            *states,
            *[nothing] * (3 - len(states)),
            masters,
            list(map(address, batch.steps)) or nothing,
            list(map(address, batch.grads)),
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


@dataclass(frozen=True)
class _Step:
    """The kernels of one step, launch after launch."""

    launcher: Launcher
    table: AddressTable
    addresses: Tensor
    scaling: Scaling

    def launches(self, kind: Kind, *, norm: bool) -> Iterator[PreparedLaunch]:
        """Yield them."""
        if norm or kind == "lars":
            yield from self._sums(weights=kind == "lars")
        yield self._scalars(kind, norm=norm)
        if kind in ("sgd", "lars"):
            if kind == "lars":
                yield self._ratio(self.table.squares[1], self.table.squares[0], adaptive=False)
            for form, work in self.table.launches.items():
                yield self._sgd(form, work)
        elif kind == "adam":
            for form, work in self.table.launches.items():
                yield self._adam(form, work)
        else:
            yield from self._lamb()

    def _sums(self, *, weights: bool) -> Iterator[PreparedLaunch]:
        from accel.kernels.optimizers.triton_scalars import sums_kernel

        table = self.table
        squares = table.squares[1] if weights else None
        for form, work in table.launches.items():
            yield sums_kernel.prepared(
                (work.shape[1],), self.addresses, table.layout, work, self.scaling.grad_scale, table.squares[0],
                squares,
                table.infinite, len(table.entries), work.shape[1], **constants(form), CHUNK=CHUNK, BLOCK=BLOCK,
            )  # fmt: skip

    def _scalars(self, kind: Kind, *, norm: bool) -> PreparedLaunch:
        from accel.kernels.optimizers.triton_scalars import scalars_kernel

        table, count = self.table, len(self.table.entries)
        return scalars_kernel.prepared(
            (-(-count // _TENSORS),), self.addresses, table.layout, self.launcher._hypers, self.scaling.grad_scale,
            self.scaling.found_inf,
            table.squares[0] if norm else None, table.infinite if norm else None, table.scalars,
            self.launcher._norm, self.launcher._overflow, count, table.chunks,
            ADAPTIVE=kind in ("adam", "lamb"), LAYERWISE=kind in ("lamb", "lars"), CHECKS=self.scaling.checks,
            BLOCK=_TENSORS,
        )  # fmt: skip

    def _ratio(self, first: Tensor, second: Tensor, *, adaptive: bool) -> PreparedLaunch:
        from accel.kernels.optimizers.triton_scalars import ratio_kernel

        table, count = self.table, len(self.table.entries)
        return ratio_kernel.prepared(
            (count,), table.layout, self.launcher._hypers, first, second, None if adaptive else self.scaling.grad_scale,
            table.scalars, self.launcher._overflow, count, ADAPTIVE=adaptive, CHUNK=CHUNK,
        )  # fmt: skip

    def _sgd(self, form: Form, work: Tensor) -> PreparedLaunch:
        from accel.kernels.optimizers.triton import sgd_kernel

        return sgd_kernel.prepared(
            (work.shape[1],), *self._walk(work), **constants(form), HAS_BUFFER=form.has_buffer, NESTEROV=form.nesterov,
            CHUNK=CHUNK, BLOCK=BLOCK,
        )  # fmt: skip

    def _adam(self, form: Form, work: Tensor) -> PreparedLaunch:
        from accel.kernels.optimizers.triton import adam_kernel

        return adam_kernel.prepared(
            (work.shape[1],), *self._walk(work), **constants(form), AMSGRAD=form.amsgrad, CHUNK=CHUNK, BLOCK=BLOCK
        )

    def _lamb(self) -> Iterator[PreparedLaunch]:
        from accel.kernels.optimizers.triton import apply_kernel, moments_kernel

        table = self.table
        weights, updates = table.squares[1], table.squares[0]  # the gradients' squares are no more needed
        for form, work in table.launches.items():
            *tables, count, programs = self._walk(work)
            yield moments_kernel.prepared(
                (programs,), *tables, weights, updates, count, programs, **constants(form), CHUNK=CHUNK, BLOCK=BLOCK
            )
        yield self._ratio(weights, updates, adaptive=True)
        for form, work in table.launches.items():
            fixed = constants(form)
            del fixed["GRAD"]
            yield apply_kernel.prepared((work.shape[1],), *self._walk(work), **fixed, CHUNK=CHUNK, BLOCK=BLOCK)

    def _walk(self, work: Tensor) -> tuple[Any, ...]:
        table = self.table
        walked = (self.addresses, table.layout, work, table.scalars, self.launcher._overflow)
        return *walked, len(table.entries), work.shape[1]


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
    }
