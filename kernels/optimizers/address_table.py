"""The table of a step's tensors on the device: their addresses, and which programs walk through which of them.

It lives as long as tensors keep their sizes and dtypes; addresses are sent again when they change, as those of
gradients do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from operator import and_, attrgetter, is_, or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accel.kernels.optimizers.regular import Copies, regular
from accel.kernels.optimizers.rules import COLUMNS, Batch

CHUNK = 8192
"""Elements of a program: 100 M parameters are 12,000 programs, many for each core, so that the last ones are few."""
ROWS = 7
"""Of the table of addresses."""
_ALIGNMENT_BYTES = 16
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
