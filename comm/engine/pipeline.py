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
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accel.comm.compressor_memory import Slot
from accel.comm.layout import Layout, Piece
from accel.comm.ranks.channel import Channel, ConnectionBroken
from accel.comm.ranks.failure import CommError, RankReport, explained
from accel.profiler.errors import InvalidArgument
from accel.profiler.rendezvous import Rendezvous
from accel.profiler.torch_threads import compute_alone


@dataclass
class BucketJob:
    """One bucket in the pipeline."""

    step: int
    layout: Layout
    buffer: Tensor
    """(layout.numel,): each rank's gradients, at the end their mean."""
    slot: Slot
    piece: Piece | None = None
    cuts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.future = new_future(self.buffer)

    def tensors(self) -> list[Tensor]:
        """Return what later stages use."""
        values: list[Any] = [self.buffer]
        if self.piece is not None:
            values.append(self.piece.values)
            for carried in self.piece.carry.values():
                values += carried if isinstance(carried, (list, tuple)) else [carried]
        return [value for value in values if isinstance(value, Tensor)]


def new_future(buffer: Tensor) -> torch.futures.Future[Tensor]:
    """Return a future of the mean of a buffer."""
    return torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else [])


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

    The threads hold on to it, and so may callbacks of torch: its owner calls `close` when it is dropped itself.
    """

    def __init__(self, stages: Sequence[PipelineStage], failure: Rendezvous, device: torch.device) -> None:
        self.stages, self.failure = stages, failure
        self.queues: list[queue.SimpleQueue[BucketJob | None]] = [queue.SimpleQueue() for _ in stages]
        self.error: CommError | None = None
        self.agreed: list[set[Layout]] = [set() for _ in stages]
        self.under_way: dict[int, BucketJob] = {}
        self.idle = threading.Condition()
        self.failing = threading.Lock()
        self.closing = False
        cuda: Any = torch.cuda
        self.streams = [cuda.Stream(device) for _ in stages] if device.type == "cuda" else []
        self.threads = [
            threading.Thread(target=self._work, args=(number,), name=f"accel-comm-{number}", daemon=True)
            for number in range(0 if in_line(device) else len(stages))
        ]
        for thread in self.threads:
            thread.start()

    def submit(self, job: BucketJob) -> None:
        """Take a job on; its future gets the buffer, or the error."""
        with self.idle:
            self.under_way[id(job)] = job
        if self.streams:
            self.streams[0].wait_stream(torch.cuda.current_stream())
        if self.threads:
            self.queues[0].put(job)
            return
        with torch.no_grad():
            for number in range(len(self.stages)):
                self._carry_out(number, job)
            self._finish(job)

    def failed(self) -> bool:
        """Return whether a job has failed; then all others do."""
        return self.error is not None

    def wait(self) -> None:
        """Wait until all jobs have been issued and, on the CPU, are done; raise CommError if one failed."""
        with self.idle:
            self.idle.wait_for(lambda: not self.under_way)
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """End the threads, whatever they are doing."""
        if self.under_way:
            self.closing = True
            for stage in self.stages:
                stage.channel.abort()
        for jobs in self.queues:
            jobs.put(None)
        for thread in self.threads:
            if thread is not threading.current_thread():
                thread.join()
        for stage in self.stages:
            stage.channel.close()

    def _work(self, number: int) -> None:
        """Carry out one stage of each job."""
        compute_alone()
        with torch.no_grad():
            while (job := self.queues[number].get()) is not None:
                self._carry_out(number, job)
                if number + 1 < len(self.stages):
                    self.queues[number + 1].put(job)
                else:
                    self._finish(job)
                del job  # while this thread waits for the next one, it must not keep the state alive

    def _carry_out(self, number: int, job: BucketJob) -> None:
        if self.error is not None:
            return
        stage = self.stages[number]
        try:
            with self._stream(number, job):
                if job.layout not in self.agreed[number]:
                    _agree(job, stage.channel)
                    self.agreed[number].add(job.layout)
                stage.run(job, stage.channel)
        except Exception as error:
            self._fail(stage, job, error)

    @contextlib.contextmanager
    def _stream(self, number: int, job: BucketJob) -> Iterator[None]:
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

    def _finish(self, job: BucketJob) -> None:
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

    def _fail_all(self, error: CommError) -> None:
        """End all jobs, also those that other threads are at: gloo lets go of these when their time is up."""
        with self.idle:
            self.error = error
            jobs = list(self.under_way.values())
            self.under_way.clear()
            self.idle.notify_all()
        for job in jobs:
            job.future.set_exception(error)  # type: ignore[arg-type]

    def _fail(self, stage: PipelineStage, job: BucketJob, error: Exception) -> None:
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
            self._fail_all(failure)


def _agree(job: BucketJob, channel: Channel) -> None:
    """Raise InvalidArgument unless all ranks of the channel have the same bucket; done once for each layout."""
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
            raise InvalidArgument(
                f"all ranks must have the same buckets, got {layout} at step {job.step} here and bucket {index}"
                f"{' (the last)' if last else ''} of {numel:,} at step {step} on rank {rank}; "
                "give every rank the same model, bucket_cap_mb and hook, and load a state on all ranks or on none"
            )
