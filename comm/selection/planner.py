"""The hook of a policy: it looks at steps, and changes the scheme of an engine between two of them.

Off, it does what DDP does without a hook, to the bit. DDP itself keeps a hook for good; see
`accel.comm.selection.reducer`.
"""

# No `from __future__ import annotations`: DDP compares the hook's annotations with the classes themselves.

import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel.comm.catalogue import Scheme, allowed
from accel.comm.cost_model.choice import BucketFacts, ObservedStep
from accel.comm.engine.binding import divides_by_active, why_no_steps
from accel.comm.engine.gradient_engine import Averaged, GradientEngine
from accel.comm.hooks import hook
from accel.comm.layout import Layout
from accel.comm.selection.reducer import unhook
from accel.profiler.errors import InvalidArgument

Work = tuple[float, float]


def used_cores() -> Work:
    """Return the seconds of cores that this process has used, and those of the calling thread."""
    return time.process_time(), time.thread_time()


class _TimedStep(NamedTuple):
    began: float
    worked: Work
    bytes: list[int]
    ready: list[float]
    done: list[float]
    extra: list[float]


class StepRecorder:
    """Times and layouts of the steps of an engine, while it is on; a step lasts from its first bucket to the next's.

    Args:
        device: of the gradients.
        clock: seconds, monotonic.
        work: seconds of cores that this process has used, and those of the calling thread; default: as far as they say
            something on this device.
    """

    def __init__(
        self,
        device: torch.device,
        clock: Callable[[], float] = time.perf_counter,
        work: Callable[[], Work] | None = None,
    ) -> None:
        self._clock, self._work = clock, work or (used_cores if device.type == "cpu" else lambda: (0.0, 0.0))
        self.on = False
        self._layouts: dict[int, Layout] = {}
        self.clear()

    def __len__(self) -> int:
        """Return the number of whole steps recorded."""
        return len(self._steps)

    def clear(self) -> None:
        """Forget the times of all steps."""
        self._now: _TimedStep | None = None
        self._steps: list[tuple[_TimedStep, float, Work]] = []

    @property
    def layouts(self) -> list[Layout]:
        """Return those of the buckets of the last recorded step."""
        return [self._layouts[index] for index in sorted(self._layouts)]

    def end_step(self) -> None:
        """End the step that was begun, if there is one."""
        if self._now is not None:
            before, after = self._now.worked, self._work()
            self._steps.append((self._now, self._clock(), (after[0] - before[0], after[1] - before[1])))
            self._now = None

    def begin_step(self) -> None:
        """Begin a step, if it is on: its first bucket is ready."""
        if self.on:
            self._now = _TimedStep(self._clock(), self._work(), [], [], [], [])

    def average(
        self,
        engine: GradientEngine,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
        reduce: Callable[[Any], Averaged],
    ) -> Averaged:
        """Average a bucket by `reduce`, which is the engine's, and note it if it is on."""
        if not self.on:
            return reduce(bucket)
        layout, buffer, step, clock = engine.binding.layout(bucket), bucket.buffer(), self._now, self._clock
        self._layouts[layout.index] = layout
        if layout.is_last:
            self._layouts = {index: kept for index, kept in self._layouts.items() if index <= layout.index}
        if step is None:
            return reduce(bucket)
        step.bytes.append(buffer.numel() * buffer.element_size())
        step.ready.append(clock() - step.began)
        divided_s = engine.divide_s
        averaged = reduce(bucket)
        step.extra.append(engine.divide_s - divided_s)

        def ended(averaged: Averaged) -> torch.Tensor:
            value = averaged.value()
            step.done.append(clock() - step.began)
            return value

        return averaged.then(ended)

    def observed(self) -> ObservedStep:
        """Return the medians over the steps that had the buckets of the last one."""
        last = self._steps[-1][0]
        alike = [record for record in self._steps if record[0].bytes == last.bytes]
        ready = [median(times) for times in zip(*(step.ready for step, *_ in alike), strict=True)]
        return ObservedStep(
            tuple(last.bytes),
            tuple(seconds - ready[0] for seconds in ready),
            median(max(step.done) for step, *_ in alike) - ready[0],
            median(end - step.began for step, end, _ in alike),
            median(sum(step.extra) for step, *_ in alike),
            median(work for *_, (work, _) in alike),
            median(work for *_, (_, work) in alike),
        )


class Planner(GradientEngine):
    """Base of policies: an engine that calls `between_steps` before each step, where its scheme may change.

    Every rank of DDP's process group makes one for the same module, and changes schemes before the same steps.

    Args:
        ddp: the module.
        timeout: for each collective of a scheme, default 5 minutes; DDP's own keep theirs.
        patience: how long to wait for ranks that make none; default: the timeout.
        scaler: the GradScaler in use, so that what was not sent yet follows its scale;
            default None.

    Raises:
        InvalidArgument: if `ddp` is no DistributedDataParallel module, or has a hook already.
        accel.CommError: if a rank makes none in time.
    """

    kind = "Planner"

    def __init__(
        self,
        ddp: DistributedDataParallel,
        *,
        timeout: timedelta = timedelta(minutes=5),
        patience: timedelta | None = None,
        scaler: Any = None,
    ) -> None:
        super().__init__(timeout=timeout, patience=patience, scaler=scaler)
        self.bind(ddp)

    def bind(self, model: nn.Module, process_group: dist.ProcessGroup | None = None, *, scaler: Any = None) -> None:
        """Take a DDP module, unless it can't have the hook; every rank takes part. See `GradientEngine.bind`."""
        if reason := why_not(model, self):
            raise InvalidArgument(reason)
        super().bind(model, process_group, scaler=scaler)
        self.objects = self.binding.objects(self.timeout)
        self.recorder = StepRecorder(self.binding.device)
        self._unhooked: Callable[[], Any] = lambda: None
        """The reducer that the hook was taken off with."""

    @property
    def facts(self) -> BucketFacts:
        """Return what is known of the buckets of the last recorded step."""
        ddp = self.binding.ddp()
        views = ddp is not None and bool(ddp.gradient_as_bucket_view)
        return BucketFacts(self.recorder.layouts, self.topology, self.binding.device, views)

    def schemes(self, level: str) -> list[Scheme]:
        """Return the schemes beside DDP's own all-reduce that a level of `allow` permits between these ranks."""
        ddp = self.binding.ddp()
        if self.topology.size == 1 or ddp is None or not _has_dense_gradients(ddp.module):
            return []
        in_memory = len(self.topology.hosts) == 1 and self.binding.device.type == "cpu"
        return allowed(level, by_hosts=self.topology.by_hosts_pays, in_memory=in_memory)

    def close(self) -> None:
        """End threads and groups; the hook is DDP's own all-reduce from then on."""
        self.use(None)
        if self.is_open:
            self.recorder.on = False
            self.objects.close()
        super().close()

    # -- steps -------------------------------------------------------------------------------------------------------

    def between_steps(self) -> None:
        """Decide what comes next; called before the first bucket of each step, on every rank."""

    def reduce(self, bucket: dist.GradBucket) -> Averaged:  # type: ignore[name-defined]
        """Average one bucket over the ranks."""
        if bucket.index() == 0:
            self.recorder.end_step()
            self.between_steps()
            self.recorder.begin_step()
        return self.recorder.average(self, bucket, super().reduce)

    # -- the hook ----------------------------------------------------------------------------------------------------

    def put_on(self) -> None:
        """Register the hook, unless one is on; every rank before the same step."""
        ddp = self.binding.ddp()
        if ddp is None or ddp._comm_hooks:
            return
        if self._unhooked() is ddp.reducer:
            # The guard restores module attributes, which can restore the reducer that still has the hook.
            ddp._comm_hooks.append((hook, self))
        else:
            ddp.register_comm_hook(self, hook)

    def take_off(self) -> bool:
        """Leave the module as if it had never had a hook; on every rank, while no backward pass is under way.

        Returns:
            False where the hook that is on is not this one's, and where DDP can't do without (see
            `accel.comm.selection.reducer`): it then stays on as DDP's own all-reduce.
        """
        self.use(None)
        ddp = self.binding.ddp()
        if ddp is None or not ddp._comm_hooks or ddp._comm_hooks[0][1] is not self:
            return False
        self._unhooked = weakref.ref(ddp.reducer)
        return unhook(ddp)

    def take_off_later(self) -> None:
        """Take the hook off before the next forward pass of training, unless a scheme is wanted by then."""
        self.use(None)
        own, ddp = weakref.ref(self), self.binding.ddp()
        assert ddp is not None, "its own hook outlives a module only within a step"

        def about_to_begin(module: Any, inputs: Any) -> None:
            if not (module.training and torch.is_grad_enabled()):
                return
            handle.remove()
            if (state := own()) is not None and state.wanted is None:
                state.take_off()

        handle = ddp.register_forward_pre_hook(about_to_begin)


def _has_dense_gradients(module: nn.Module) -> bool:
    """Return whether gradients are dense and real, so that buckets can go by a scheme."""
    is_sparse = any(getattr(part, "sparse", False) for part in module.modules())  # as DDP recognises them
    return not is_sparse and all(one.is_floating_point() for one in module.parameters() if one.requires_grad)


def why_not(ddp: object, own: object = None) -> str:
    """Return why a module can't have a hook, '' if it can, or has that of the state `own`."""
    if not isinstance(ddp, DistributedDataParallel):
        return f"the model must be a DistributedDataParallel module, got {type(ddp).__name__}; wrap it first"
    if ddp._comm_hooks and (own is None or ddp._comm_hooks[0][1] is not own):
        given = ddp._comm_hooks[0][0]
        name = getattr(given, "__qualname__", type(given).__name__)
        return f"the model must have no communication hook yet, got {name}; DDP keeps one for good: leave it out"
    if divides_by_active(ddp):
        return "gradients must be divided by the number of all ranks, got join(divide_by_initial_world_size=False)"
    return why_no_steps(ddp)
