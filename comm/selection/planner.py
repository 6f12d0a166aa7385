"""The hook of a policy: it looks at steps, and changes the plan of an engine between two of them.

Off, it does what DDP does without a hook, to the bit. DDP itself keeps a hook for good.
"""

# No `from __future__ import annotations`: DDP compares the hook's annotations with the classes themselves.

import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel.comm.cost_model.choice import Option
from accel.comm.cost_model.prediction import BucketFacts
from accel.comm.engine.gradient_engine import Averaged, GradientEngine
from accel.comm.hooks import hook
from accel.comm.selection.recorder import StepRecorder
from accel.comm.selection.registration import Registration, why_not


class Planner(GradientEngine):
    """Base of policies: an engine that calls `between_steps` before each step, where its plan may change.

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
    exchanges_objects = True

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
        """Take a module, in place of the one before; every rank takes part.

        Args:
            model: the DDP module.
            process_group: that of the module.
            scaler: the GradScaler in use, if there was one before pickling; default: the one that there is.

        Raises:
            ValueError: if there was a scaler before pickling and none is given, or the module can't have the hook.
        """
        if reason := why_not(model, self):
            raise ValueError(reason)
        assert isinstance(model, DistributedDataParallel)
        self.close()
        self.registration = Registration(model)
        super().bind(model, model.process_group, scaler=scaler)
        self.recorder = StepRecorder(self.device)
        self._cap_mb = self.registration.cap_mb

    @property
    def device(self) -> torch.device:
        """Return the device of the gradients."""
        return self.binding.device

    @property
    def facts(self) -> BucketFacts:
        """Return what is known of the buckets of the last recorded step."""
        module = self.registration
        views, can_resize = module.gradients_are_views, module.can_rebucket
        return BucketFacts(self.recorder.layouts, self.topology, self.device, views, module.cap_mb, can_resize)

    def close(self) -> None:
        """End threads and groups; the hook is DDP's own all-reduce from then on."""
        self.use(())
        if self.is_open:
            self.recorder.on = False
        super().close()

    # -- steps -------------------------------------------------------------------------------------------------------

    def switch_to(self, option: Option) -> bool:
        """Let gradients go by an option from the next step on; return whether buckets change for it."""
        cap_mb = option.cap_mb or self._cap_mb
        changes = cap_mb != self.registration.cap_mb
        self.registration.rebucket(cap_mb)
        self.use(option.plan)
        return changes

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
        """Register the hook, unless it is on; every rank before the same step."""
        self.registration.put_on(self, hook)

    def take_off(self) -> bool:
        """Leave the module as if it had never had a hook; on every rank, while no backward pass is under way.

        Returns:
            False where DDP can't do without (see `accel.comm.selection.reducer`): the hook stays on as DDP's own
            all-reduce.
        """
        self.use(())
        return self.registration.take_off(self)

    def take_off_later(self) -> None:
        """Take the hook off before the next forward pass, unless a scheme is wanted by then."""
        self.use(())
        own = weakref.ref(self)

        def begin() -> None:
            if (state := own()) is not None and not state.wanted:
                state.take_off()

        self.registration.before_forward(begin)

    # -- saving ------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        settings = {"timeout": self.timeout, "_patience": self.patience, "scaled": self.loss_scale.in_use}
        return {**settings, "saved": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        GradientEngine.__init__(self, timeout=state.pop("timeout"), patience=state.pop("_patience"))
        self.load_state_dict(state.pop("saved"))
        self.loss_scale.in_use = state.pop("scaled", False)
        self.__dict__.update(state)
