"""A communication hook on a DDP module: on, off, and the size of the buckets that it gets.

DDP has no call to take a hook off, nor one for buckets of another size; see `accel.comm.selection.reducer`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from accel.comm.engine.binding import divides_by_active, why_no_steps
from accel.comm.selection.reducer import cap_mb, is_rebucketable, rebucket, unhook


class Registration:
    """The place of one state's hook on a DDP module, which is not kept.

    Args:
        ddp: the module.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = weakref.ref(ddp)
        self._hooked: Callable[[], Any] = lambda: None
        """The reducer that the hook was taken off with."""
        self._wanted_mb: float | None = None
        """Size of buckets that the next forward pass will begin with, where it is to change."""
        self.gradients_are_views = bool(ddp.gradient_as_bucket_view)
        """Of the buckets, so that nothing is copied out of them."""

    def _module(self) -> DistributedDataParallel:
        ddp = self._ddp()
        assert ddp is not None, "its own hook outlives a module only within a step"
        return ddp

    def put_on(self, state: Any, hook: Callable[..., Any]) -> None:
        """Register a hook, unless one is on; every rank before the same step."""
        ddp = self._ddp()
        if ddp is None or ddp._comm_hooks:
            return
        if self._hooked() is ddp.reducer:
            # The guard restores module attributes, which can restore the reducer that still has the hook.
            ddp._comm_hooks.append((hook, state))
        else:
            ddp.register_comm_hook(state, hook)

    def take_off(self, state: Any) -> bool:
        """Leave the module as if it had never had a hook; on every rank, while no backward pass is under way.

        Returns:
            False where the hook that is on is not this state's, and where DDP can't do without: it then stays.
        """
        ddp = self._ddp()
        if ddp is None or not ddp._comm_hooks or ddp._comm_hooks[0][1] is not state:
            return False
        self._hooked = weakref.ref(ddp.reducer)
        return unhook(ddp)

    def before_forward(self, act: Callable[[], Any]) -> None:
        """Do something once, before the next forward pass of training: no backward pass is under way then."""

        def about_to_begin(module: Any, inputs: Any) -> None:
            if module.training and torch.is_grad_enabled():
                handle.remove()
                act()

        handle = self._module().register_forward_pre_hook(about_to_begin)

    @property
    def cap_mb(self) -> float:
        """Return the size of buckets, as `bucket_cap_mb` of DDP."""
        return cap_mb(self._module())

    @property
    def can_rebucket(self) -> bool:
        """Return whether DDP can get buckets of another size; see `accel.comm.selection.reducer`."""
        return is_rebucketable(self._module())

    def rebucket(self, bucket_cap_mb: float) -> bool:
        """Let DDP make buckets of another size from the next forward pass on; every rank before the same step.

        Returns:
            False where it can't; see `accel.comm.selection.reducer`.
        """
        ddp = self._ddp()
        if ddp is None or not is_rebucketable(ddp):
            return False
        if self._wanted_mb is not None:
            self._wanted_mb = bucket_cap_mb
        elif bucket_cap_mb != cap_mb(ddp):
            self._wanted_mb = bucket_cap_mb
            own = weakref.ref(self)

            def begin() -> None:
                if (registration := own()) is not None:
                    registration._resize()

            self.before_forward(begin)
        return True

    def _resize(self) -> None:
        ddp, wanted = self._module(), self._wanted_mb
        self._wanted_mb = None
        if wanted is not None and wanted != cap_mb(ddp):
            rebucket(ddp, wanted)


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
