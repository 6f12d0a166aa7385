"""What a bucket holds, and the part of it that one rank reduces.

DDP lays the gradients of a bucket end to end in one flat buffer. Which ones may change: after the first step DDP makes
new buckets in the order in which gradients arrived. So whatever outlives a step is kept by parameter, not by bucket.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from accel.comm.compressor_memory import Slot


class Extent(NamedTuple):
    """Part of one parameter within a range of a bucket."""

    name: str
    begin: int
    """First element, counted within the range."""
    length: int
    skipped: int
    """Elements of the parameter before the range."""

    @property
    def span(self) -> slice:
        """Return the elements within the range."""
        return slice(self.begin, self.begin + self.length)


@dataclass(frozen=True)
class Layout:
    """The parameters in a bucket, end to end."""

    index: int
    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    dtype: torch.dtype
    is_last: bool

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Return where each parameter begins, and where the last one ends."""
        return tuple(accumulate((shape.numel() for shape in self.shapes), initial=0))

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return self.offsets[-1]

    def extents(self, low: int, high: int) -> Iterator[Extent]:
        """Yield what of which parameter stands in elements [low, high)."""
        for name, begin, end in zip(self.names, self.offsets, self.offsets[1:], strict=False):
            first, last = max(begin, low), min(end, high)
            if first < last:
                yield Extent(name, first - low, last - first, first - begin)

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"bucket {self.index}{' (the last)' if self.is_last else ''} of {self.numel:,} {kind}"


@dataclass
class Piece:
    """The part of a bucket that one group of ranks reduces: all of it, or one slice where hosts reduce first.

    A compressor reads `values`, each rank's own, and leaves their sum over the group there, the same bits on each rank.
    The values are divided by the number of all ranks already, so that the sum is the mean gradient. A compressor that
    `scales` gets them as they are, and multiplies them by `factor` in passing.
    """

    values: Tensor
    """(high − low,), float32 or float64, contiguous; the compressor may write into it at any time."""
    layout: Layout
    low: int
    high: int
    slot: Slot
    """What outlives the step; see `accel.comm.compressor_memory`."""
    step: int = 0
    """Number of this step, from 1, the same on all ranks; void steps count."""
    factor: float = 1.0
    """What the values are still to be multiplied by."""
    carry: dict[str, Any] = field(default_factory=dict)
    """Whatever one stage of the compressor leaves for the next. `finite`, (1,) bool: whether all of `values` is, where
    a compressor knows without another look at them."""

    def parameters(self) -> Iterator[tuple[Extent, torch.Size]]:
        """Yield what of each parameter is in the piece, and the shape of the whole parameter."""
        shapes = dict(zip(self.layout.names, self.layout.shapes, strict=True))
        for extent in self.layout.extents(self.low, self.high):
            yield extent, shapes[extent.name]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, view into `values` of the parameter's shape); the piece must hold parameters as a whole.

        Elements stand in it in the order in which the parameter lies in memory, on every rank alike.
        A compressor that calls it cuts between parameters: `boundaries` returns `accel.comm.layout.between`.
        """
        for extent, shape in self.parameters():
            assert extent.length == shape.numel(), "a slice cuts through a parameter"
            yield extent.name, self.values[extent.span].view(shape)

    def stand_still(self, spans: Sequence[slice], used: Tensor, fields: Sequence[str]) -> None:
        """Send nothing of the ranges that no rank used, and leave these own fields of them unchanged.

        DDP drops what is sent for a parameter that no rank used in a step, so neither its residual nor its momentum
        may change: SGD passes over a parameter without a gradient too.

        Args:
            spans: ranges of `values` and of the fields.
            used: (ranges,), not 0 where a rank used one.
            fields: those that are there.
        """
        own = [name for name in fields if self.slot.has(name)]
        if used.device.type == "cpu":
            for span, is_used in zip(spans, used.tolist(), strict=True):
                if not is_used:
                    self.values[span].zero_()
                    for name in own:
                        self.slot.write(name)[span] = self.slot.read(name)[span]
            return
        # The host, which issues the next bucket after this one, must not wait for the device to read the flags.
        for span, idle in zip(spans, (used == 0).unbind(), strict=True):
            self.values[span].masked_fill_(idle, 0.0)
            for name in own:
                new = self.slot.write(name)[span]
                torch.where(idle, self.slot.read(name)[span], new, out=new)


def put_back(values: Tensor, spans: Sequence[slice], parts: Tensor) -> None:
    """Write what lies end to end in `parts` to ranges of `values`."""
    for span, part in zip(spans, torch.split(parts, [span.stop - span.start for span in spans]), strict=True):
        values[span] = part


def as_laid_out(values: Tensor, parameter: Tensor) -> Tensor:
    """Return what a bucket holds of a parameter, (elements,), as a view of its shape.

    DDP lays a gradient in the bucket as the parameter lies in memory: channels_last weights with channels last. One
    with gaps, or whose elements overlap, lies there in the order of its shape.
    """
    if torch.empty_like(parameter, device="meta").stride() == parameter.stride():
        return values.as_strided(parameter.shape, parameter.stride())
    return values.view(parameter.shape)


def equal_cuts(total: int, parts: int, unit: int = 1) -> list[int]:
    """Return parts + 1 offsets that cut `total` elements into like parts, at multiples of `unit`."""
    units = -(-total // unit)
    return [min(units * part // parts * unit, total) for part in range(parts + 1)]


def between(layout: Layout, parts: int) -> list[int]:
    """Return parts + 1 offsets near those of equal parts, none within a parameter; parts may be empty."""
    cuts = [min(layout.offsets, key=lambda at: abs(at - layout.numel * part / parts)) for part in range(parts + 1)]
    return sorted(cuts)
