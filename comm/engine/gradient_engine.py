"""The engine of gradient communication: the one owner of what outlives a step.

It counts steps, keeps what was not sent yet, follows the loss scale, and opens and closes the groups and threads of its
scheme. The scheme may change between two steps; what was not sent stays with its parameters.

             bind                    use(scheme)          next step: apply
    new ────────────▶ DDP's own ──────────────▶ wanted ────────────────────▶ by the scheme
                       ▲      ▲                                               │         │
                       │      └─────────── use(None), next step ──────────────┘         │ a rank fails
                  bind │                                                                ▼
                    closed ◀──────────────────── close ───────────────────────────── failed

A wanted scheme waits for the first bucket of the next step, so that all ranks change at the same one. Groups and
threads (a `Route`) are made then, and kept for schemes that were used before until `release`. What a step writes into
the memory counts once the next step begins and all of its means were finite. A failed route raises its `CommError` at
each backward pass; a closed engine says that it must be bound, unless it was at DDP's own all-reduce, where it stays.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.distributed_c10d import PrefixStore

from accel.comm.catalogue import Scheme, SchemeSettings, catalogue_settings
from accel.comm.compressor_memory import LossScale, Memory
from accel.comm.engine.binding import Binding, check_same
from accel.comm.engine.pipeline import BucketJob, Pipeline
from accel.comm.engine.reduction import Arrangement, arranged, pipeline_stages
from accel.comm.layout import Layout
from accel.comm.ranks.channel import Channel, channel_kind
from accel.comm.ranks.failure import PATIENCE_S
from accel.comm.ranks.shared_memory import through_memory
from accel.comm.ranks.topology import Topology
from accel.profiler.errors import InvalidArgument

Averaged = torch.futures.Future[Tensor]


class GradientEngine:
    """Averages buckets over ranks by a scheme that may change between two steps; state of `accel.hook`.

    Every rank makes one and gives it the same schemes before the same steps. It is DDP's own all-reduce until `use`
    says otherwise. While DDP itself reduces a bucket, its residual waits.

    DDP multiplies gradients by 1/n, and so does the engine; with `gradient_as_bucket_view` and
    `zero_grad(set_to_none=False)` DDP divides by n, which differs in the last bit where n is no power of two.

    Args:
        timeout: for each collective of a scheme; DDP's own keep theirs.
        patience: how long to wait for ranks that make none; default: the timeout.
        scaler: the GradScaler in use, so that what was not sent yet follows its scale; default None.
    """

    kind = "GradientEngine"
    """What the user makes one of, for messages."""
    pickled: tuple[str, ...] = ("timeout", "patience")
    """Settings that a pickle keeps, beside the memory; groups, threads and the scaler stay behind."""

    def __init__(
        self, *, timeout: timedelta = timedelta(minutes=5), patience: timedelta | None = None, scaler: Any = None
    ) -> None:
        self.timeout, self.patience = timeout, timeout if patience is None else patience
        self.step = 0
        self.memory = Memory()
        self.scheme: Scheme | None = None
        """None is DDP's own all-reduce."""
        self.wanted: Scheme | None = None
        """The scheme from the next step on."""
        self.divide_s = 0.0
        """Seconds, in all, in which the plain all-reduce divided gradients; without a hook DDP divides as it copies."""
        self.loss_scale = LossScale(scaler)
        self._filled: Scheme | None = None
        """The scheme that the memory is laid out for."""
        self._binding: Binding | None = None
        self._routes: dict[Scheme, Route] = {}
        self._numbers = itertools.count()
        self.is_open = False
        """Whether there are groups with the other ranks: not once closed or unpickled."""

    # -- groups and threads ------------------------------------------------------------------------------------------

    def bind(self, model: nn.Module, process_group: dist.ProcessGroup | None = None, *, scaler: Any = None) -> None:
        """Take a model, in place of the one before; every rank of the group takes part.

        Args:
            model: the DDP module or the module that it wraps.
            process_group: default that of the DDP module, or the world.
            scaler: the GradScaler in use, where it is not the one that the engine has; a pickle leaves it behind.

        Raises:
            InvalidArgument: if there was a scaler before pickling and none is given, or model or scaler don't fit.
            CommError: if a rank makes none in time.
        """
        self.loss_scale.take(scaler, self.kind)
        self.close()
        self.memory.load_state_dict(self.memory.state_dict())  # laid out for the ranks to come
        self.scheme = self.wanted = None
        self._binding, self._numbers = Binding(model, process_group, self.kind), itertools.count()
        self.topology: Topology = self._binding.meet(self.patience)
        self.is_open = True

    @property
    def binding(self) -> Binding:
        """Return the model and the ranks."""
        if self._binding is None:
            raise _unbound(self.kind)
        return self._binding

    def close(self) -> None:
        """End threads and groups; what is under way breaks off. The scheme that was wanted is then the present one."""
        self.scheme, self.is_open = self.wanted, False
        while self._routes:
            self._routes.popitem()[1].close()

    # -- the scheme --------------------------------------------------------------------------------------------------

    def use(self, scheme: Scheme | None) -> None:
        """Let buckets go by a scheme, or by DDP's own all-reduce, from the next step on; the same on every rank."""
        if scheme is not None:
            self.settings_of(scheme)
            if not self.is_open:
                raise _unbound(self.kind)
            if scheme.hierarchical:
                self.topology.check_even()
        self.wanted = scheme

    def release(self) -> None:
        """Give up the threads and groups of schemes that are not in use; every rank at the same step."""
        for scheme in self._routes.keys() - {self.wanted}:
            self._routes.pop(scheme).close()

    def settings_of(self, scheme: Scheme) -> SchemeSettings:
        """Return how buckets of a scheme are averaged."""
        return catalogue_settings(scheme)

    def arrangement(self, scheme: Scheme) -> Arrangement:
        """Return which ranks sum with which."""
        return arranged(self.topology, self.binding.rank, scheme.hierarchical)

    def apply(self) -> None:
        """Make the wanted scheme the present one, between two steps; every rank takes part."""
        scheme = self.wanted
        if scheme is not None and scheme not in self._routes and self.is_open:
            settings, arrangement = self.settings_of(scheme), self.arrangement(scheme)
            number = next(self._numbers)
            self._routes[scheme] = Route(number, settings, arrangement, self.binding, self.memory, self.timeout)
        if scheme is not None and scheme != self._filled:
            self.memory.load_state_dict(self.memory.state_dict())  # laid out for the new scheme
            self._filled = scheme
        self.scheme = scheme

    # -- what the hook does with a bucket ----------------------------------------------------------------------------

    def reduce(self, bucket: dist.GradBucket) -> Averaged:  # type: ignore[name-defined]
        """Average one bucket over the ranks by the scheme."""
        if bucket.index() == 0:
            self.begin_step()
        if self.scheme is not None:
            route = self.route()
            return route.average(route.job(bucket, self.binding.layout(bucket), self.step), self.loss_scale.value)
        began = time.perf_counter()
        bucket.buffer().mul_(1.0 / self.binding.size)
        self.divide_s += time.perf_counter() - began
        return _all_reduced(bucket.buffer(), self.binding.group)

    def begin_step(self) -> None:
        """Take over what the last step wrote, unless it was void, and go over to the scheme that is wanted."""
        self.binding.check_mean()
        self.memory.settle()
        self.loss_scale.follow(self.memory)
        self.step += 1
        if self.wanted != self.scheme:
            self.apply()

    def route(self) -> Route:
        """Return the groups and threads of the present scheme."""
        if self.scheme not in self._routes:
            raise _unbound(self.kind)
        return self._routes[self.scheme]

    # -- saving ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's memory by parameter, and the step; save it on each rank, between steps."""
        return {**self.memory.state_dict(), "step": self.step, "scale": self.loss_scale.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with a saved memory, on every rank.

        Args:
            state: what this rank saved, or this rank's part of `accel.reshard`.

        Raises:
            ValueError: if it is of another version; at the next step, if it is of another model.
        """
        self.memory.load_state_dict(state)
        self.step, self.loss_scale.value = state["step"], state.get("scale", 1.0)

    def __reduce__(self) -> tuple[Any, ...]:
        settings = {name: getattr(self, name) for name in self.pickled}
        return _unpickled, (type(self), settings, self.state_dict(), self.loss_scale.in_use)


def _unpickled(
    kind: type[GradientEngine], settings: Mapping[str, Any], state: Mapping[str, Any], scaled: bool
) -> GradientEngine:
    """Return an engine that must be bound, without groups, threads and scaler."""
    engine = kind.__new__(kind)
    GradientEngine.__init__(engine)
    vars(engine).update(settings)
    engine.load_state_dict(state)
    engine.loss_scale.awaited = scaled
    return engine


def _all_reduced(buffer: Tensor, group: dist.ProcessGroup) -> Averaged:
    """Sum a buffer over the ranks as DDP does without a hook, to the bit."""
    work = dist.all_reduce(buffer, group=group, async_op=True)
    future: torch.futures.Future[Any] = work.get_future()

    def ended(done: torch.futures.Future[Any]) -> Any:
        done.value()  # raises what the exchange raised
        return buffer  # gloo's own result is a real view of complex gradients before torch 2.13

    averaged: Averaged = future.then(ended)
    return averaged


def _unbound(kind: str) -> InvalidArgument:
    """Return the error of an engine whose groups are missing."""
    article = "an" if kind[0] in "AEIOU" else "a"
    return InvalidArgument(f"{article} {kind} that was closed or unpickled must be bound first: state.bind(model)")


class Route:
    """Averages the buckets that go by one scheme; every rank makes one.

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
        kind = channel_kind(binding.device)

        def channel(name: str, ranks: tuple[int, ...]) -> Channel:
            line = kind(PrefixStore(f"{name}/{ranks[0]}", store), ranks, binding.rank, timeout)
            one_host = set(ranks) <= set(arrangement.within) and binding.device.type == "cpu"
            return through_memory(line, timeout) if one_host else line

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
        return BucketJob(step, layout, buffer, self._memory.slot(layout))

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
