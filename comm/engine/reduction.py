"""From a bucket of gradients to their mean: what happens around a compressor.

flat:          [all ranks] compressor
hierarchical:  [within a host] each rank sums one slice → [across hosts] compressor on the slice → [within] gather

Each stage of the pipeline has a channel of its own:

flat:          divide, first stage of the scheme │ … │ last stage of the scheme, write back
hierarchical:  divide, sum a slice within the host │ the scheme's stages on the slice │ gather, write back

With N hosts of G ranks, the hierarchical all-reduce sends 2 (N − 1)/N of the gradient over a host's uplink, all slices
together, where a flat ring sends 2 (NG − 1)/(NG) of it: (NG − 1)/(G (N − 1)) times as much.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from accel.comm.catalogue import SchemeSettings
from accel.comm.compressor import Compressor
from accel.comm.compressor_memory import Memory
from accel.comm.engine.pipeline import BucketJob, PipelineStage
from accel.comm.layout import Piece
from accel.comm.ranks.channel import Channel
from accel.comm.ranks.topology import Topology


class Arrangement(NamedTuple):
    """Which ranks sum with which."""

    hierarchical: bool
    within: tuple[int, ...]
    """Ranks of this host."""
    across: tuple[int, ...]
    """All ranks, or by hosts those with the same slice."""
    ranks: int
    """Ranks of which the mean is taken."""


def arranged(topology: Topology, rank: int, hierarchical: bool) -> Arrangement:
    """Return the arrangement of a mean over all ranks."""
    everyone = tuple(range(topology.size))
    across = topology.across(rank) if hierarchical else everyone
    return Arrangement(hierarchical, topology.within(rank), across, topology.size)


class Reduction:
    """The stages around a compressor."""

    def __init__(self, compressor: Compressor, fields: tuple[str, ...], memory: Memory, world_size: int) -> None:
        self._compressor, self._fields, self._memory, self._world_size = compressor, fields, memory, world_size

    def wide(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype a compressor works in."""
        return dtype if self._compressor.lossless else torch.promote_types(dtype, torch.float32)

    # flat

    def divide(self, job: BucketJob) -> None:
        """Divide by the number of ranks; the whole bucket is the piece to be reduced."""
        values, factor = job.buffer.to(self.wide(job.layout.dtype)), 1.0 / self._world_size
        if not self._compressor.scales:
            values.div_(self._world_size)
            factor = 1.0
        slot = job.slot
        if not slot.filled:
            for name in self._fields:
                slot.fill(name, self._memory.take(job.layout, name, values))
            slot.filled = True
        job.piece = Piece(values, job.layout, 0, job.layout.numel, slot, job.step, factor)

    def write_back(self, job: BucketJob) -> None:
        """Put the mean into the bucket."""
        assert job.piece is not None
        narrow = job.piece.values.dtype != job.buffer.dtype
        if narrow:
            job.buffer.copy_(job.piece.values)
        self.note(job, None if narrow else job.piece.carry.get("finite"))

    # hierarchical

    def sum_within(self, job: BucketJob, channel: Channel) -> None:
        """Sum one slice of the bucket over the ranks of the host."""
        job.cuts = self._compressor.boundaries(job.layout, channel.size)
        low, high = job.cuts[channel.rank], job.cuts[channel.rank + 1]
        wide = self.wide(job.layout.dtype)
        values = _sum_slices(job.buffer.div_(self._world_size), job.cuts, channel, wide)
        slot = job.slot
        if not slot.filled:
            slot.low, slot.high = low, high
            for name in self._fields:
                whole = self._memory.take(job.layout, name, values)
                slot.fill(name, _sum_slices(whole, job.cuts, channel, wide))
            slot.filled = True
        job.piece = Piece(values, job.layout, low, high, slot, job.step)

    def gather_within(self, job: BucketJob, channel: Channel) -> None:
        """Give the slices to the ranks of the host."""
        assert job.piece is not None
        slices = [job.buffer[low:high] for low, high in pairwise(job.cuts)]
        own = slices[channel.rank]
        own.copy_(job.piece.values)
        channel.all_gather(own, slices)
        self.note(job)

    def note(self, job: BucketJob, finite: Tensor | None = None) -> None:
        """Note in the memory whether the mean, the same bits on every rank, is finite, if that is not known already."""
        if self._fields or not self._compressor.lossless:
            self._memory.note(is_finite(job.buffer) if finite is None else finite)


def pipeline_stages(
    settings: SchemeSettings,
    arrangement: Arrangement,
    memory: Memory,
    channel: Callable[[str, tuple[int, ...]], Channel],
) -> list[PipelineStage]:
    """Return the stages of a scheme."""
    hierarchical, within, across, ranks = arrangement
    reduction = Reduction(settings.compressor, settings.fields, memory, ranks)
    stages: list[PipelineStage] = []
    inner = settings.compressor.stages()
    if hierarchical:
        stages.append(PipelineStage("sum within the host", reduction.sum_within, channel("sum", within)))
    for number, stage in enumerate(inner):

        def run(job: BucketJob, channel: Channel, number: int = number) -> None:
            if number == 0 and not hierarchical:
                reduction.divide(job)
            assert job.piece is not None
            inner[number].run(job.piece, channel)
            if number == len(inner) - 1 and not hierarchical:
                reduction.write_back(job)

        stages.append(PipelineStage(stage.name, run, channel(f"{number}", across)))
    if hierarchical:
        stages.append(PipelineStage("gather within the host", reduction.gather_within, channel("gather", within)))
    return stages


def _sum_slices(whole: Tensor, cuts: list[int], channel: Channel, dtype: torch.dtype) -> Tensor:
    """Return this rank's slice of `whole`, summed over the channel's ranks, at least in float32, as `dtype`."""
    slices = [whole[low:high] for low, high in pairwise(cuts)]
    own = slices[channel.rank]
    coming = [torch.empty_like(own) if r != channel.rank else own for r in range(channel.size)]
    channel.exchange(slices, coming)
    total = coming[0].to(torch.promote_types(dtype, torch.float32), copy=True)
    for part in coming[1:]:
        total += part
    return total.to(dtype)


def is_finite(values: Tensor) -> Tensor:
    """Return whether all values are finite, (1,) bool."""
    if values.device.type == "cpu":
        # One pass over memory in place of three; a sum that overflows by itself is looked at again.
        total = values.sum(dtype=torch.promote_types(values.dtype, torch.float32))
        if torch.isfinite(total):
            return torch.ones(1, dtype=torch.bool)
    return torch.isfinite(values).all().view(1)
