"""What one bucket costs under one scheme: its real stages, run on this machine alone over channels that send nothing.

The stages are those of the hook, so that a new compressor needs no formula: what it computes is timed, what it would
send is counted. Peers are assumed to send what this rank does. Within a host bytes are copied to memory and back, as in
training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from statistics import median

import numpy as np
import torch
from torch import Tensor

from accel.comm.catalogue import CATALOGUE, Scheme, catalogue_settings
from accel.comm.compressor_memory import Memory
from accel.comm.cost_model.cost import CollectiveCall, Stages, StageSegment, scaled
from accel.comm.engine.pipeline import BucketJob
from accel.comm.engine.reduction import arranged, pipeline_stages
from accel.comm.layout import Layout
from accel.comm.ranks import small_sums
from accel.comm.ranks.channel import Channel
from accel.comm.ranks.shared_memory import HALF_BYTES, HEAD_BYTES, SharedMemoryChannel
from accel.comm.ranks.topology import Topology

_IN_TRAINING = 1.15
"""On a CPU stages take more core time during the backward pass than alone: PowerSGD 1.0 to 1.3 times as much, signs
1.25, DGC 1.27, int8 1.6 (2 hosts of 1 and 2 ranks, buckets of 25 MB)."""


class DryChannel:
    """A channel that notes each call and how long the rank computed before it."""

    def __init__(self, ranks: Sequence[int], topology: Topology, clock: Callable[[], float]) -> None:
        self.ranks, self.rank, self.size = tuple(ranks), ranks.index(0), len(ranks)
        own = set(topology.within(0))
        self._near = [rank in own for rank in ranks]
        hosts = {topology.host_of(rank) for rank in ranks}
        self.scope = "within" if len(hosts) == 1 else "world" if len(ranks) == topology.size else "across"
        self._clock, self._since = clock, clock()
        self.segments: list[StageSegment] = []

    def begin(self) -> None:
        """Begin a stage."""
        self.segments, self._since = [], self._clock()

    def end(self) -> tuple[StageSegment, ...]:
        """Return what the stage took."""
        return (*self.segments, StageSegment(self._clock() - self._since))

    def exchange(self, sends: Sequence[Tensor], receives: Sequence[Tensor]) -> None:
        """Note an exchange; what comes is what goes."""
        sizes = [0 if r == self.rank else sent.nbytes for r, sent in enumerate(sends)]
        near = sum(size for size, same in zip(sizes, self._near, strict=True) if same)
        self._note("exchange", near, sum(sizes) - near, max(sizes))
        for r, coming in enumerate(receives):
            if r != self.rank and coming.numel():
                source = sends[r].view(-1)
                if source.nbytes == coming.nbytes and source.dtype == coming.dtype:
                    coming.view(-1).copy_(source)
                else:
                    coming.zero_()
        self._since = self._clock()

    def swap(self, peer: int, send: Tensor, receive: Tensor) -> None:
        """Note what goes to one rank, or, if nothing does, wait for as much."""
        sent = (send if send.numel() else receive).nbytes
        self._note("exchange", sent * self._near[peer], sent * (not self._near[peer]), sent)
        receive.copy_(send) if send.numel() == receive.numel() else receive.zero_()
        self._since = self._clock()

    def all_gather(self, own: Tensor, out: Sequence[Tensor]) -> None:
        """Note what an all-gather sends."""
        self.exchange([own] * self.size, out)
        out[self.rank].copy_(own)
        self._since = self._clock()

    def all_reduce(self, values: Tensor) -> None:
        """Note an all-reduce, which is an exchange where it is small."""
        if self.size > 1 and values.nbytes < small_sums.TINY_BYTES:
            small_sums.all_reduce(self, values)
        elif self.size > 1:
            self._note("ring", values.nbytes, 0, values.nbytes)
        self._since = self._clock()

    def abort(self) -> None:
        """Do nothing: nothing is under way."""

    def close(self) -> None:
        """Do nothing: there is no group."""

    def _note(self, kind: str, near: float, far: float, largest: float) -> None:
        worked = self._clock() - self._since
        call = CollectiveCall(kind, self.scope, near, far, largest) if near + far else None
        self.segments.append(StageSegment(worked, call))


def dry_run(scheme: Scheme, layout: Layout, topology: Topology, device: torch.device, *, runs: int = 2) -> Stages:
    """Return what a bucket costs.

    Args:
        scheme: of the catalogue.
        layout: of the bucket.
        topology: hosts and ranks; this one counts as rank 0.
        device: of the gradients.
        runs: timed runs, of which the fastest counts, segment by segment.
    """
    clock = _clock(device)
    memory = Memory()
    channels: list[DryChannel] = []

    def channel(name: str, ranks: tuple[int, ...]) -> Channel:
        line = DryChannel(ranks, topology, clock)
        channels.append(line)
        if line.size == 1 or line.scope != "within" or device.type != "cpu":
            return line
        # NumPy's zeros become memory where they are written to; torch's are written at once, 64 MB for each bucket.
        areas = [torch.from_numpy(np.zeros(HEAD_BYTES + 2 * HALF_BYTES, dtype=np.uint8))] * line.size
        return SharedMemoryChannel(line.ranks, line.rank, areas, timedelta(seconds=1))

    stages = pipeline_stages(catalogue_settings(scheme), arranged(topology, 0, scheme.hierarchical), memory, channel)
    gradients = torch.randn(layout.numel, generator=torch.Generator().manual_seed(0)).to(device, layout.dtype)
    measured: list[Stages] = []
    with torch.no_grad():
        for step in range(1, runs + 2):
            memory.settle()
            job = BucketJob(step, layout, gradients.clone(), memory.slot(layout))
            costs = []
            for stage, own in zip(stages, channels, strict=True):
                own.begin()
                stage.run(job, stage.channel)
                costs.append(own.end())
            measured.append(tuple(costs))
    return _fastest(measured[1:], 1.0 if device.type == "cuda" else _IN_TRAINING)  # the first one allocates


def _clock(device: torch.device) -> Callable[[], float]:
    """Return a clock of what work takes with a core to itself: other processes don't count where one thread works."""
    if device.type == "cuda":

        def synchronised() -> float:
            torch.cuda.synchronize(device)
            return time.perf_counter()

        return synchronised
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def _fastest(runs: Sequence[Stages], factor: float) -> Stages:
    """Return the least of each segment, work times a factor; where runs differ in their calls, the last run."""
    last = runs[-1]
    alike = [run for run in runs if [len(stage) for stage in run] == [len(stage) for stage in last]]
    return tuple(
        tuple(
            StageSegment(factor * min(run[s][i].core_s for run in alike), segment.call)
            for i, segment in enumerate(stage)
        )
        for s, stage in enumerate(last)
    )


def costs(
    schemes: Iterable[Scheme],
    layouts: Sequence[Layout],
    topology: Topology,
    device: torch.device,
    *,
    budget_s: float = 2.0,
) -> dict[Scheme, tuple[Stages, ...]]:
    """Return what each bucket costs by each scheme; one that can't handle a bucket, say its dtype, is left out.

    Args:
        schemes: to be timed.
        layouts: of all buckets.
        topology: hosts and ranks.
        device: of the gradients.
        budget_s: seconds for everything, shared out among the schemes; each gets one bucket all the same.
    """
    fitting = [scheme for scheme in schemes if _fits(scheme, layouts)]
    return {scheme: _costs_of(scheme, layouts, topology, device, budget_s / len(fitting)) for scheme in fitting}


def _costs_of(
    scheme: Scheme, layouts: Sequence[Layout], topology: Topology, device: torch.device, budget_s: float
) -> tuple[Stages, ...]:
    """Run each bucket, the largest first, while there is time; the nearest in size stands for those left."""
    deadline = time.perf_counter() + budget_s
    measured: dict[int, Stages] = {}
    for index in sorted(range(len(layouts)), key=lambda i: -layouts[i].numel):
        if not measured or time.perf_counter() < deadline:
            measured[index] = dry_run(scheme, layouts[index], topology, device)
    return tuple(_nearest(index, measured, layouts) for index in range(len(layouts)))


def _fits(scheme: Scheme, layouts: Sequence[Layout]) -> bool:
    compressor = CATALOGUE[scheme.compressor].make()
    try:
        for layout in layouts:
            compressor.check(layout)
    except ValueError:
        return False
    return True


def copy_byte_s(layouts: Sequence[Layout], device: torch.device, *, runs: int = 3) -> float:
    """Return the seconds that copying a byte of the largest bucket takes; 0 on a GPU, where nobody waits for it."""
    if device.type == "cuda":
        return 0.0
    largest = max(layouts, key=lambda layout: layout.numel)
    source = torch.ones(largest.numel, dtype=largest.dtype)
    target, times = torch.ones_like(source), []
    for _ in range(runs):
        began = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - began)
    return median(times) / (_size(largest) * source.element_size())


def _nearest(index: int, measured: dict[int, Stages], layouts: Sequence[Layout]) -> Stages:
    nearest = min(measured, key=lambda i: (i != index, abs(layouts[i].numel - layouts[index].numel)))
    return scaled(measured[nearest], _size(layouts[index]) / _size(layouts[nearest]))


def _size(layout: Layout) -> int:
    """Return the elements of a bucket to divide by: DDP makes buckets of nothing, of parameters without elements."""
    return max(layout.numel, 1)
