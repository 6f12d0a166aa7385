"""The hook of a policy: it looks at steps, and changes the plan of an engine between two of them.

Off, it does what DDP does without a hook, to the bit. DDP itself keeps a hook for good.
"""

# No `from __future__ import annotations`: DDP compares the hook's annotations with the classes themselves.

import weakref
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from accel.comm.cost_model.choice import Option
from accel.comm.cost_model.prediction import BucketFacts
from accel.comm.engine.gradient_engine import Averaged, GradientEngine, HookState
from accel.comm.engine.plan import Plan
from accel.comm.hooks import hook
from accel.comm.memory import Memory
from accel.comm.ranks.object_group import ObjectGroup
from accel.comm.ranks.topology import Topology
from accel.comm.selection.recorder import StepRecorder
from accel.comm.selection.registration import Registration, why_not


class Planner(HookState):
    """Base of policies over an engine: state of a hook that calls `between_steps`, where the plan may change.

    Every rank of DDP's process group makes one for the same module, and changes plans before the same steps.

    Args:
        ddp: the module.
        timeout: for each collective of a scheme, default 5 minutes; DDP's own keep theirs.
        patience: how long to wait for ranks that make none; default: the timeout.
        scaler: the GradScaler in use, so that what was not sent yet follows its scale;
            default None.

    Raises:
        ValueError: if `ddp` is no DistributedDataParallel module, or has a hook already.
        accel.comm.ranks.failure.CommError: if a rank makes none in time.
    """

    kind = "Planner"
    """What the user makes one of, for messages."""

    def __init__(
        self,
        ddp: DistributedDataParallel,
        *,
        timeout: timedelta = timedelta(minutes=5),
        patience: timedelta | None = None,
        scaler: Any = None,
    ) -> None:
        self.engine = self._new_engine(timeout, timeout if patience is None else patience, scaler)
        self.bind(ddp)

    def _new_engine(self, timeout: timedelta, patience: timedelta, scaler: Any = None) -> GradientEngine:
        engine = GradientEngine(timeout=timeout, patience=patience, scaler=scaler, kind=self.kind)
        engine.exchanges_objects = True
        return engine

    def bind(self, ddp: DistributedDataParallel, *, scaler: Any = None) -> None:
        """Take a module, in place of the one before; every rank takes part.

        Args:
            ddp: the module.
            scaler: the GradScaler in use, if there was one before pickling; default: the one that there is.

        Raises:
            ValueError: if there was a scaler before pickling and none is given, or `ddp` can't have the hook.
        """
        if reason := why_not(ddp, self):
            raise ValueError(reason)
        self.close()
        self.registration = Registration(ddp)
        self.engine.bind(ddp, ddp.process_group, scaler=scaler)
        self.recorder = StepRecorder(self.device)
        self._cap_mb = self.registration.cap_mb

    @property
    def objects(self) -> ObjectGroup:
        """Return the group that exchanges objects with the other ranks."""
        return self.engine.objects

    @property
    def bound(self) -> bool:
        """Return whether there is a group with the other ranks: not once closed or unpickled."""
        return self.engine.is_open

    @property
    def device(self) -> torch.device:
        """Return the device of the gradients."""
        device: torch.device = self.engine.binding.device
        return device

    @property
    def topology(self) -> Topology:
        """Return hosts and ranks."""
        return self.engine.topology

    @property
    def facts(self) -> BucketFacts:
        """Return what is known of the buckets of the last recorded step."""
        module = self.registration
        views, can_resize = module.gradients_are_views, module.can_rebucket
        return BucketFacts(self.recorder.layouts, self.topology, self.device, views, module.cap_mb, can_resize)

    @property
    def plan(self) -> Plan:
        """Return the scheme of each bucket at present."""
        return self.engine.plan

    @property
    def step(self) -> int:
        """Return the number of steps so far."""
        return self.engine.step

    @property
    def memory(self) -> Memory:
        """Return what was not sent yet."""
        return self.engine.memory

    def close(self) -> None:
        """End threads and groups; the hook is DDP's own all-reduce from then on."""
        if self.bound:
            self.engine.use(())
            self.engine.close()
            self.recorder.on = False

    # -- steps -------------------------------------------------------------------------------------------------------

    def switch_to(self, option: Option) -> bool:
        """Let gradients go by an option from the next step on; return whether buckets change for it."""
        cap_mb = option.cap_mb or self._cap_mb
        changes = cap_mb != self.registration.cap_mb
        self.registration.rebucket(cap_mb)
        self.engine.use(option.plan)
        return changes

    def between_steps(self) -> None:
        """Decide what comes next; called before the first bucket of each step, on every rank."""

    def reduce(self, bucket: dist.GradBucket) -> Averaged:  # type: ignore[name-defined]
        """Average one bucket over the ranks."""
        if bucket.index() == 0:
            self.recorder.end_step()
            self.between_steps()
            self.recorder.begin_step()
        return self.recorder.average(self.engine, bucket)

    # -- the hook ----------------------------------------------------------------------------------------------------

    def put_on(self) -> None:
        """Register the hook, unless it is on; every rank before the same step."""
        self.registration.put_on(self, hook)

    def take_off(self) -> bool:
        """Leave the module as if it had never had a hook; on every rank, while no backward pass is under way.

        Returns:
            False where DDP can't do without (see `accel.comm.selection.reducer`): the hook stays on as DDP's own
            all-reduce.
        """
        self.engine.use(())
        return self.registration.take_off(self)

    def take_off_later(self) -> None:
        """Take the hook off before the next forward pass, unless a scheme is wanted by then."""
        self.engine.use(())
        own = weakref.ref(self)

        def begin() -> None:
            if (state := own()) is not None and not state.engine.wanted:
                state.take_off()

        self.registration.before_forward(begin)

    # -- saving ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's memory by parameter, and the step; save it on each rank, between steps."""
        return self.engine.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with a saved memory, on every rank; on another number of ranks `accel.comm.memory.reshard` it first."""
        self.engine.load_state_dict(state)

    def __getstate__(self) -> dict[str, Any]:
        engine = self.engine
        settings = {"timeout": engine.timeout, "_patience": engine.patience, "scaled": engine.loss_scale.in_use}
        return {**settings, "saved": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.engine = self._new_engine(state.pop("timeout"), state.pop("_patience"))
        self.engine.load_state_dict(state.pop("saved"))
        self.engine.loss_scale.in_use = state.pop("scaled", False)
        self.__dict__.update(state)
