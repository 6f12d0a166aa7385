"""The hook of a policy: it looks at steps, and changes the scheme of an engine between two of them.

Off, it does what DDP does without a hook, to the bit. DDP itself keeps a hook for good; see
`accel.comm.selection.reducer`.
"""

# No `from __future__ import annotations`: DDP compares the hook's annotations with the classes themselves.

import time
import weakref
from collections.abc import Callable, Generator, Sequence
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel.comm.catalogue import CATALOGUE, Scheme, allowed
from accel.comm.engine.binding import divides_by_active, why_no_steps
from accel.comm.engine.gradient_engine import Averaged, GradientEngine
from accel.comm.hooks import hook
from accel.comm.layout import Layout
from accel.comm.selection.choice import Option
from accel.comm.selection.reducer import unhook
from accel.profiler.errors import InvalidArgument

WARM_UP = 3
"""First steps with the hook, which are no measure: DDP makes new buckets, memory is touched for the first time."""


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
        self.clock: Callable[[], float] = time.perf_counter
        self.step_s = self._began = 0.0
        """Seconds from the first bucket of the last step to that of this one; what DDP without a hook does not take is
        left out."""
        self._unhooked: Callable[[], Any] = lambda: None
        """The reducer that the hook was taken off with."""

    def schemes(self, level: str) -> list[Scheme]:
        """Return the schemes, beside DDP's own, that a level of `allow` permits between these ranks and that fit."""
        ddp = self.binding.ddp()
        if self.topology.size == 1 or ddp is None or not _has_dense_gradients(ddp.module):
            return []
        in_memory = len(self.topology.hosts) == 1 and self.binding.device.type == "cpu"
        trained = [(name, one) for name, one in ddp.module.named_parameters() if one.requires_grad]
        layouts = [Layout(0, (name,), (one.shape,), one.dtype, True) for name, one in trained]
        permitted = allowed(level, by_hosts=self.topology.by_hosts_pays, in_memory=in_memory)
        return [scheme for scheme in permitted if _fits(scheme, layouts)]

    def close(self) -> None:
        """End threads and groups; the hook is DDP's own all-reduce from then on."""
        self.use(None)
        if self.is_open:
            self.objects.close()
        super().close()

    # -- steps -------------------------------------------------------------------------------------------------------

    def between_steps(self) -> None:
        """Decide what comes next; called before the first bucket of each step, on every rank."""

    def reduce(self, bucket: dist.GradBucket) -> Averaged:  # type: ignore[name-defined]
        """Average one bucket over the ranks."""
        if bucket.index() == 0:
            self.step_s = self.clock() - self._began - (self.divide_s if self.scheme is None else 0.0)
            self.between_steps()
            self._began, self.divide_s = self.clock(), 0.0
        return super().reduce(bucket)

    def measured(self, option: Option, settle: int, steps: int) -> Generator[None, None, float]:
        """Return the median step of the slowest rank by an option; at each yield a step is taken."""
        self.use(option)
        for _ in range(settle):
            yield
        seconds = []
        for _ in range(steps):
            yield
            seconds.append(self.step_s)
        return self.objects.decide(median(seconds), max)

    def screened(self, schemes: Sequence[Scheme], steps: int) -> Generator[None, None, dict[Option, float]]:
        """Return the step of DDP's own all-reduce and of each scheme, measured in so many steps each."""
        took_s: dict[Option, float] = {None: (yield from self.measured(None, WARM_UP, steps))}
        for scheme in schemes:
            took_s[scheme] = yield from self.measured(scheme, 1, steps)
            self.use(None)
            self.release()
        return took_s

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


def _fits(scheme: Scheme, layouts: Sequence[Layout]) -> bool:
    compressor = CATALOGUE[scheme.compressor].make()
    try:
        for layout in layouts:
            compressor.check(layout)
    except ValueError:
        return False
    return True


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
