"""The kernels of one step, launch after launch, with what each is given."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accel.kernels.optimizers.address_table import CHUNK, AddressTable, Form
from accel.kernels.optimizers.rules import Kind, Scaling, work_dtype

if TYPE_CHECKING:
    from accel.kernels.launching import PreparedLaunch

BLOCK = 1024
"""Elements at once: 8 a thread."""
TENSORS = 128
"""Tensors of a program that computes their numbers."""


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

    def launches(self, kind: Kind, *, norm: bool) -> Iterator[PreparedLaunch]:
        """Yield them."""
        others, weights = self.table.squares  # of gradients, then of LAMB's updates
        if norm or kind == "lars":
            yield from self._sums(weights=kind == "lars")
        yield self._scalars(kind, norm=norm)
        if kind == "lars":
            yield self._ratio(weights, others, adaptive=False)
        if kind != "lamb":
            yield from self._updates("adam" if kind == "adam" else "sgd")
            return
        yield from self._updates("moments", weights, others)
        yield self._ratio(weights, others, adaptive=True)
        yield from self._updates("apply")

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
            (-(-count // TENSORS),), self.addresses, table.layout, self.hypers, self.scaling.grad_scale,
            self.scaling.found_inf,
            table.squares[0] if norm else None, table.infinite if norm else None, table.scalars,
            self.norm, self.overflow, count, table.chunks,
            ADAPTIVE=kind in ("adam", "lamb"), LAYERWISE=kind in ("lamb", "lars"), CHECKS=self.scaling.checks,
            BLOCK=TENSORS,
        )  # fmt: skip

    def _ratio(self, first: Tensor, second: Tensor, *, adaptive: bool) -> PreparedLaunch:
        from accel.kernels.optimizers.triton_scalars import ratio_kernel

        table, count = self.table, len(self.table.entries)
        return ratio_kernel.prepared(
            (count,), table.layout, self.hypers, first, second, None if adaptive else self.scaling.grad_scale,
            table.scalars, self.overflow, count, ADAPTIVE=adaptive, CHUNK=CHUNK,
        )  # fmt: skip

    def _updates(self, kind: str, *squares: Tensor) -> Iterator[PreparedLaunch]:
        from accel.kernels.optimizers.triton import update_kernel

        table = self.table
        for form, work in table.launches.items():
            yield update_kernel.prepared(
                (work.shape[1],), self.addresses, table.layout, work, table.scalars, self.overflow,
                *(squares or (None, None)), len(table.entries), work.shape[1], KIND=kind, **constants(form),
                HAS_BUFFER=form.has_buffer, NESTEROV=form.nesterov, AMSGRAD=form.amsgrad, CHUNK=CHUNK, BLOCK=BLOCK,
            )  # fmt: skip


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
