"""The groups and threads by which buckets of one scheme are averaged."""

from __future__ import annotations

import weakref
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.distributed.distributed_c10d import PrefixStore

from accel.comm.catalogue import SchemeSettings
from accel.comm.engine.binding import Binding, check_same
from accel.comm.engine.pipeline import BucketJob, Pipeline
from accel.comm.engine.reduction import Arrangement, pipeline_stages
from accel.comm.layout import Layout
from accel.comm.memory import Memory
from accel.comm.ranks.channel import Channel, GlooChannel, NcclChannel
from accel.comm.ranks.failure import PATIENCE_S
from accel.profiler.errors import InvalidArgument


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
        InvalidArgument: if settings differ between ranks.
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
        self.settings, self._memory = settings, memory
        self._ranks = arrangement.ranks
        self._taken: set[Layout] = set()
        self._waiting: list[BucketJob] = []
        """Buckets of a step whose compressor must see all of them first."""
        rendezvous = binding.rendezvous(f"{number}/meeting", timeout.total_seconds())
        own = {name: repr(value) if name == "compressor" else value for name, value in settings._asdict().items()}
        binding.agree(rendezvous, own, lambda described: check_same(described, binding.kind))
        store = PrefixStore(f"{number}", binding.store)
        kind: type[GlooChannel] | type[NcclChannel] = NcclChannel if binding.device.type == "cuda" else GlooChannel

        def channel(name: str, ranks: tuple[int, ...]) -> Channel:
            return kind(PrefixStore(f"{name}/{ranks[0]}", store), ranks, binding.rank, timeout)

        stages = pipeline_stages(settings, arrangement, memory, channel)
        # A rank that continued, and perhaps closed at once, would cut off those that are still connecting.
        binding.agree(rendezvous, None, lambda everyone: None)
        failure = binding.rendezvous(f"{number}/failure", PATIENCE_S)
        self._pipeline = Pipeline(stages, failure, binding.device)
        # Also at the end of the interpreter, where a daemon thread inside of a library call would crash.
        self.close = weakref.finalize(self, self._pipeline.close)
        """End the threads and free the groups; what is under way breaks off."""
        self.submit = self._pipeline.submit
        """Send a bucket through the stages outside of a backward pass; its future gets the mean, or the error."""
        self.wait = self._pipeline.wait
        """Wait until all buckets are through; raise CommError if one failed."""

    def job(self, bucket: dist.GradBucket, layout: Layout, step: int) -> BucketJob:  # type: ignore[name-defined]
        """Return a bucket with the memory of its parameters and the future of its mean.

        Raises:
            InvalidArgument: if the compressor can't handle buckets of this layout.
        """
        buffer = bucket.buffer()
        if layout not in self._taken:
            if reason := unfit(bucket):
                raise InvalidArgument(reason.format(name=layout.names[0]))
            assert layout.numel == buffer.numel(), "parameters don't lie end to end"
            self.settings.compressor.check(layout)
            self._taken.add(layout)
        done: torch.futures.Future[Tensor] = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else [])
        return BucketJob(step, layout, buffer, self._memory.slot(layout), done)

    def average(self, job: BucketJob, scale: float) -> torch.futures.Future[Tensor]:
        """Send a bucket, too large by `scale`, through the stages in a backward pass; the future gets its mean."""
        # Raised at the end of backward, where it reaches the caller: DDP would make a cast error of it. A callback of a
        # callback comes after DDP's own, which then leaves the reducer in order.
        wait, failed, buffer = self._pipeline.wait, self._pipeline.failed, job.buffer
        engine = Variable._execution_engine
        # Within join() a rank that has no more data calls the hook for the others' backward passes, and waits itself.
        joined = torch._C._current_graph_task_id() == -1
        if not joined:
            engine.queue_callback(lambda: engine.queue_callback(wait))
        for ready in self._ready(job, scale):
            self._pipeline.submit(ready)
        return job.future if joined else job.future.then(lambda future: buffer if failed() else future.value())

    def _ready(self, job: BucketJob, scale: float) -> list[BucketJob]:
        """Return the buckets to be sent now: this one, or all after the last where the compressor asks for it."""
        compressor = self.settings.compressor
        if not compressor.needs_whole_step:
            return [job]
        self._waiting = [job] if job.layout.index == 0 else [*self._waiting, job]
        if not job.layout.is_last:
            return []
        complete, self._waiting = self._waiting, []
        compressor.whole_step([bucket.buffer for bucket in complete], self._ranks, scale)
        return complete


def unfit(bucket: dist.GradBucket) -> str:  # type: ignore[name-defined]
    """Return why no scheme can take a bucket, with room for the {name} of a parameter; '' if one can."""
    buffer = bucket.buffer()
    if buffer.layout != torch.strided:
        return "gradients must be dense, got a sparse one of {name!r}; use Embedding(sparse=False)"
    # Since torch 2.13 complex gradients lie in a bucket of real ones, two for each element of their parameters.
    dtypes = [buffer.dtype, *(parameter.dtype for parameter in bucket.parameters() if parameter.is_complex())]
    if not all(dtype.is_floating_point for dtype in dtypes):
        return f"gradients must be real floating point, got {dtypes[-1]} of {{name!r}}; use no hook"
    return ""
