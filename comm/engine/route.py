"""The groups and threads by which buckets of one scheme are averaged."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.distributed.distributed_c10d import PrefixStore

from accel.comm.engine.binding import Binding, check_same
from accel.comm.engine.pipeline import Pipeline, PipelineStage
from accel.comm.engine.plan import SchemeSettings
from accel.comm.engine.reduction import BucketJob, Reduction, pipeline_stages
from accel.comm.layout import Layout
from accel.comm.memory import Memory
from accel.comm.ranks.channel import Channel, GlooChannel, NcclChannel
from accel.comm.ranks.failure import PATIENCE_S
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


class Route:
    """Averages the buckets that go by one scheme; every rank makes one.

    Args:
        number: of the routes of this binding, the same on every rank.
        settings: of the scheme.
        arrangement: which ranks sum with which.
        binding: model and ranks.
        memory: of the engine.
        timeout: for each collective.

    Raises:
        ValueError: if settings differ between ranks.
        CommError: if a rank does not come in time.
    """

    def __init__(
        self,
        number: int,
        settings: SchemeSettings,
        arrangement: Arrangement,
        binding: Binding,
        memory: Memory,
        timeout: timedelta,
    ) -> None:
        self.settings, self._size = settings, binding.size
        self.notes_finite = bool(settings.fields) or not settings.compressor.lossless
        """Whether the stages note in the memory whether the mean is finite."""
        self._taken: set[Layout] = set()
        self._waiting: list[BucketJob] = []
        """Buckets of a step whose compressor must see all of them first."""
        rendezvous = binding.rendezvous(f"{number}/meeting", timeout.total_seconds())
        own = {name: repr(value) if name == "compressor" else value for name, value in settings._asdict().items()}
        binding.agree(rendezvous, own, lambda described: check_same(described, binding.kind))
        store = PrefixStore(f"{number}", binding.store)
        stages = _stages(settings, arrangement, binding, memory, timeout, store)
        # A rank that continued, and perhaps closed at once, would cut off those that are still connecting.
        binding.agree(rendezvous, None, lambda everyone: None)
        failure = binding.rendezvous(f"{number}/failure", PATIENCE_S)
        self._pipeline = Pipeline(stages, failure, binding.device)

    def has_taken(self, layout: Layout) -> bool:
        """Return whether buckets of a layout have been taken before."""
        return layout in self._taken

    def take(self, layout: Layout) -> None:
        """Take buckets of a layout from now on, or raise ValueError if the compressor can't handle them."""
        self.settings.compressor.check(layout)
        self._taken.add(layout)

    def average(self, job: BucketJob) -> torch.futures.Future[Tensor]:
        """Send a bucket through the stages during a backward pass; the future gets its mean."""
        # Raised at the end of backward, where it reaches the caller: DDP would make a cast error of it. A callback of a
        # callback comes after DDP's own, which then leaves the reducer in order.
        wait, failed, buffer = self._pipeline.wait, self._pipeline.failed, job.buffer
        engine = Variable._execution_engine
        # Within join() a rank that has no more data calls the hook for the others' backward passes, and waits itself.
        joined = torch._C._current_graph_task_id() == -1
        if not joined:
            engine.queue_callback(lambda: engine.queue_callback(wait))
        for ready in self._ready(job):
            self._pipeline.submit(ready)
        return job.future if joined else job.future.then(lambda future: buffer if failed() else future.value())

    def _ready(self, job: BucketJob) -> list[BucketJob]:
        """Return the buckets to be sent now: this one, or all after the last where the compressor asks for it."""
        compressor = self.settings.compressor
        if not compressor.needs_whole_step:
            return [job]
        self._waiting = [job] if job.layout.index == 0 else [*self._waiting, job]
        if not job.layout.is_last:
            return []
        complete, self._waiting = self._waiting, []
        compressor.whole_step([bucket.buffer for bucket in complete], self._size, job.scale)
        return complete

    def submit(self, job: BucketJob) -> None:
        """Send a bucket through the stages outside of a backward pass; its future gets the mean, or the error."""
        self._pipeline.submit(job)

    def wait(self) -> None:
        """Wait until all buckets are through; raise CommError if one failed."""
        self._pipeline.wait()

    def close(self) -> None:
        """End the threads and free the groups; what is under way breaks off."""
        self._pipeline.close()


def _stages(
    settings: SchemeSettings,
    arrangement: Arrangement,
    binding: Binding,
    memory: Memory,
    timeout: timedelta,
    store: Any,
) -> list[PipelineStage]:
    reduction = Reduction(settings.compressor, settings.fields, memory, arrangement.ranks)
    kind: type[GlooChannel] | type[NcclChannel] = NcclChannel if binding.device.type == "cuda" else GlooChannel

    def channel(name: str, ranks: tuple[int, ...]) -> Channel:
        return kind(PrefixStore(f"{name}/{ranks[0]}", store), ranks, binding.rank, timeout)

    hierarchical, within, across, _ = arrangement
    return pipeline_stages(settings.compressor, reduction, hierarchical, within, across, channel)
