"""Stages that each take all buckets in order, one thread and one group of ranks to a stage.

A group's collectives match by the order in which ranks issue them. So one thread alone uses a group, buckets pass
through a queue in DDP's order, which is the same on every rank, and nothing is issued from the callback of a future.
Stages of different buckets overlap: while one bucket crosses the slow links, the next is summed within its host.

NCCL may deadlock where communicators are used in different orders on different ranks. DDP's own all-reduces, its map of
used parameters and SyncBatchNorm's sums are issued by the thread that runs backward. So on a GPU that thread issues the
stages of a bucket too, one after the other, in the hook itself: program order is the same on every rank. Each stage has
a stream of its own, and the device overlaps them with backward and with each other. Not run on GPUs yet.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from accel.comm.layout import Layout
from accel.comm.ranks.channel import Channel, ConnectionBroken
from accel.comm.ranks.failure import CommError, RankReport, explained
from accel.profiler.rendezvous import Rendezvous
from accel.profiler.torch_threads import compute_alone


class PipelineJob(Protocol):
    """One bucket in the pipeline."""

    step: int
    layout: Layout
    buffer: Tensor
    future: torch.futures.Future[Tensor]

    def tensors(self) -> list[Tensor]:
        """Return the tensors that the next stage will use."""


class PipelineStage(NamedTuple):
    """What to do with each bucket, and the group to do it with."""

    name: str
    run: Callable[[Any, Channel], None]
    channel: Channel


def in_line(device: torch.device) -> bool:
    """Return whether the thread that submits a job issues its stages: on a GPU."""
    return device.type == "cuda"


class Pipeline:
    """Threads that carry out jobs, or none on a GPU, where `submit` issues them.

    Args:
        stages: in order, each with a channel of its own.
        failure: where the ranks meet when a stage fails.
        device: of the buckets.
    """

    def __init__(self, stages: Sequence[PipelineStage], failure: Rendezvous, device: torch.device) -> None:
        self._line = _Line(list(stages), failure, device)
        self._in_line = in_line(device)
        self._threads = [
            threading.Thread(target=self._line.work, args=(number,), name=f"accel-comm-{number}", daemon=True)
            for number in range(0 if self._in_line else len(stages))
        ]
        for thread in self._threads:
            thread.start()
        # Also at the end of the interpreter, where a daemon thread inside of a library call would crash.
        self.close = weakref.finalize(self, _close, self._line, self._threads)
        # What callbacks of torch hold on to, in place of the pipeline, which ends when its owner drops it.
        self.wait: Callable[[], None] = self._line.wait
        """Wait until all jobs have been issued and, on the CPU, are done; raise CommError if one failed."""
        self.failed: Callable[[], bool] = self._line.failed
        """Return whether a job has failed; then all others do."""

    def submit(self, job: PipelineJob) -> None:
        """Take a job on; its future gets the buffer, or the error."""
        self._line.begin(job)
        if self._in_line:
            self._line.issue(job)
        else:
            self._line.queues[0].put(job)


class _Line:
    """What the threads share; they hold no reference to the pipeline, which ends when its owner drops it."""

    def __init__(self, stages: list[PipelineStage], failure: Rendezvous, device: torch.device) -> None:
        self.stages, self.failure = stages, failure
        self.queues: list[queue.SimpleQueue[PipelineJob | None]] = [queue.SimpleQueue() for _ in stages]
        self.error: CommError | None = None
        self.agreed: list[set[Layout]] = [set() for _ in stages]
        self.under_way: dict[int, PipelineJob] = {}
        self.idle = threading.Condition()
        self.failing = threading.Lock()
        self.closing = False
        cuda: Any = torch.cuda
        self.streams = [cuda.Stream(device) for _ in stages] if device.type == "cuda" else []

    def begin(self, job: PipelineJob) -> None:
        with self.idle:
            self.under_way[id(job)] = job
        if self.streams:
            self.streams[0].wait_stream(torch.cuda.current_stream())

    def failed(self) -> bool:
        return self.error is not None

    def wait(self) -> None:
        with self.idle:
            self.idle.wait_for(lambda: not self.under_way)
        if self.error is not None:
            raise self.error

    def work(self, number: int) -> None:
        """Carry out one stage of each job."""
        compute_alone()
        with torch.no_grad():
            while (job := self.queues[number].get()) is not None:
                self.carry_out(number, job)
                if number + 1 < len(self.stages):
                    self.queues[number + 1].put(job)
                else:
                    self.finish(job)
                del job  # while this thread waits for the next one, it must not keep the state alive

    @torch.no_grad()
    def issue(self, job: PipelineJob) -> None:
        """Carry out all stages of a job."""
        for number in range(len(self.stages)):
            self.carry_out(number, job)
        self.finish(job)

    def carry_out(self, number: int, job: PipelineJob) -> None:
        if self.error is not None:
            return
        stage = self.stages[number]
        try:
            with self.stream(number, job):
                if job.layout not in self.agreed[number]:
                    _agree(job, stage.channel)
                    self.agreed[number].add(job.layout)
                stage.run(job, stage.channel)
        except Exception as error:
            self.fail(stage, job, error)

    @contextlib.contextmanager
    def stream(self, number: int, job: PipelineJob) -> Iterator[None]:
        """Queue what follows on the stage's stream, after the stage before."""
        if not self.streams:
            yield
            return
        stream = self.streams[number]
        if number:
            stream.wait_stream(self.streams[number - 1])
        for tensor in job.tensors():
            tensor.record_stream(stream)
        with torch.cuda.stream(stream):
            yield

    def finish(self, job: PipelineJob) -> None:
        with self.idle:
            if self.under_way.pop(id(job), None) is None:
                return  # failed with all others
            self.idle.notify_all()
        if self.error is not None:
            job.future.set_exception(self.error)  # type: ignore[arg-type]
        elif self.streams:
            with torch.cuda.stream(self.streams[-1]):
                job.future.set_result(job.buffer)
        else:
            job.future.set_result(job.buffer)

    def fail_all(self, error: CommError) -> None:
        """End all jobs, also those that other threads are at: gloo lets go of these when their time is up."""
        with self.idle:
            self.error = error
            jobs = list(self.under_way.values())
            self.under_way.clear()
            self.idle.notify_all()
        for job in jobs:
            job.future.set_exception(error)  # type: ignore[arg-type]

    def fail(self, stage: PipelineStage, job: PipelineJob, error: Exception) -> None:
        with self.failing:
            if self.error is not None:
                return
            place = f"step {job.step}, {job.layout}, stage {stage.name!r}"
            kind = "" if isinstance(error, (ValueError, ConnectionBroken, CommError)) else f"{type(error).__name__}: "
            own = RankReport(place, f"{kind}{error}", primary=not isinstance(error, ConnectionBroken))
            # Peers that wait for this rank wake up, here other stages do.
            for other in self.stages:
                other.channel.abort()
            here = f"rank {self.failure.rank} stopped at {place}: {own.cause}"
            failure = CommError(here if self.closing else explained(self.failure, own))
            failure.__cause__ = error
            self.fail_all(failure)


def _close(line: _Line, threads: Sequence[threading.Thread]) -> None:
    """End the threads, whatever they are doing."""
    if line.under_way:
        line.closing = True
        for stage in line.stages:
            stage.channel.abort()
    for jobs in line.queues:
        jobs.put(None)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join()
    for stage in line.stages:
        stage.channel.close()


def _agree(job: PipelineJob, channel: Channel) -> None:
    """Raise ValueError unless all ranks of the channel have the same bucket; done once for each layout."""
    layout = job.layout
    content = zlib.crc32(repr((layout.names, layout.shapes, str(layout.dtype))).encode())
    own = torch.tensor([layout.index, layout.numel, int(layout.is_last), content, job.step], device=job.buffer.device)
    rows = [torch.empty_like(own) for _ in range(channel.size)]
    channel.all_gather(own, rows)
    expected = own.tolist()
    for rank, row in zip(channel.ranks, rows, strict=True):
        theirs = row.tolist()
        if theirs != expected:
            index, numel, last, _, step = theirs
            raise ValueError(
                f"all ranks must have the same buckets, got {layout} at step {job.step} here and bucket {index}"
                f"{' (the last)' if last else ''} of {numel:,} at step {step} on rank {rank}; "
                "give every rank the same model, bucket_cap_mb and hook, and load a state on all ranks or on none"
            )
