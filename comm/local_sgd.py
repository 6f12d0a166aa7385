"""Post-local SGD: gradients are averaged over all ranks at first, weights now and then after that.

    step ≤ start_step:  w ← w − lr · optimizer(mean gradient over all ranks)
    step > start_step:  w_r ← w_r − lr · optimizer(mean gradient over the host of rank r, or its own gradient)
                        and every `every` steps  w_r ← mean of w over all ranks

Between hosts a step then sends nothing, and an averaging what one step sent before. Gradients of the first phase go
through any `CommState`, or as DDP sends them.

A step is a step of the optimizer, and ranks must take as many. In the dense phase all skip together what GradScaler
skips. In the local phase each finds infinities of its own: ranks that have skipped different steps are an error at the
next averaging. A model that is decorated by `accel.amp` counts its skipped steps.

Sources: Lin et al. 2020 (arxiv.org/abs/1808.07217), section 3.
"""

# No `from __future__ import annotations`: DDP compares the hook's annotations with the classes themselves.

from collections.abc import Iterable, Mapping
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from accel.comm.compression.momentum import MomentumCorrection
from accel.comm.engine.binding import check_same, ignored_names
from accel.comm.engine.pipeline import new_future
from accel.comm.hooks import CommState
from accel.comm.periodic.averaging import (
    HostMean,
    Named,
    WeightMean,
    fingerprint,
    is_master,
    masters_of,
    round_off,
    same_state,
)
from accel.comm.selection.reducer import unhook
from accel.profiler.errors import InvalidArgument, check_numbers

T = TypeVar("T")

_VERSION = 1


class LocalSGD:
    """Run post-local SGD with a DDP module and its optimizer, until `close()`; the loop stays as it is.

    Every rank makes one, with the same arguments, before the first step. It registers a communication hook on the
    module and hooks on the optimizer; as a context manager it closes itself.

    Where the optimizer keeps float32 master weights of 16-bit parameters, these are what is averaged. Parameters and
    buffers that DDP was told to ignore stay each rank's own.

    A checkpoint of one rank is all ranks' after an averaging alone: call `average()` before saving, or save weights and
    optimizer of each rank. Resuming loads them first, then makes this with `load_state_dict`.

    Args:
        ddp: the module, without a hook.
        optimizer: over parameters of this module, any number of groups; it may gain groups later.
        start_step: steps of the optimizer with gradients averaged over all ranks, ≥ 0.
        every: steps from one averaging of weights to the next, ≥ 1.
        within: between which ranks gradients are averaged after that: those of a "host" (default; by torchrun's
            GROUP_RANK or else host names and network namespaces), or "rank": none.
        average_momentum: average the optimizer's state of the parameters' shapes (momentum; Adam's moments) as well,
            for the same bytes again each, at each averaging. Default False, as published: each rank keeps its own
            until `close()`, which always averages it.
        dense: how gradients go in the first phase, and after `close()`; default as DDP sends them. It is a state of the
            same module that was not registered.
        timeout: for each collective, default 5 minutes: the longest that ranks may be apart.

    Raises:
        InvalidArgument: if an argument is out of range, or module, optimizer and states don't go together.
        accel.CommError: from `optimizer.step()`, if communication fails.

    Example:
        >>> ddp = DistributedDataParallel(model)
        >>> optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
        >>> with LocalSGD(ddp, optimizer, start_step=1000, every=8):
        ...     train(ddp, optimizer)
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        start_step: int,
        every: int,
        *,
        within: str = "host",
        average_momentum: bool = False,
        dense: CommState | None = None,
        timeout: timedelta = timedelta(minutes=5),
    ) -> None:
        _check_arguments(start_step, every, within)
        _check_parts(ddp, optimizer, dense)
        self.start_step, self.every, self.within, self.average_momentum = start_step, every, within, average_momentum
        self.step = 0
        """Steps so far."""
        self._ddp, self._optimizer, self._dense = ddp, optimizer, dense
        self._names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
        self._ignored = ignored_names(ddp)
        self._broadcast_buffers = ddp.broadcast_buffers
        self._moved: set[str] = set()
        """Parameters that local steps have trained since the last averaging, some of which may be frozen by now."""
        self._named({})
        self._group: Any = ddp.process_group
        self._weights = WeightMean(ddp, self._group, timeout)
        settings = {name: getattr(self, name) for name in ("start_step", "every", "within", "average_momentum")}
        settings["dense"] = repr(None if dense is None else dense.compressor)
        try:
            check_same(self._weights.objects.gather(settings), "LocalSGD")
        except ValueError:
            self._weights.close()
            raise
        self._host = HostMean(ddp, process_group=self._group, timeout=timeout) if within == "host" else None
        self._backwards = 0
        self._apart = False
        self._closed = False
        self._step_hook = optimizer.register_step_post_hook(self._after_step)
        ddp.register_comm_hook(self, LocalSGD.reduce)
        self._enter_phase()

    @property
    def local(self) -> bool:
        """Return whether gradients of the next step stay within hosts, or ranks."""
        return self.step >= self.start_step and not self._closed

    def _enter_phase(self) -> None:
        # DDP would broadcast buffers from rank 0 at each forward pass; they are averaged with the weights instead.
        self._ddp.broadcast_buffers = self._broadcast_buffers and not self.local

    # -- gradients ---------------------------------------------------------------------------------------------------

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        """Average one bucket as the phase says."""
        self._backwards += bucket.index() == 0
        if not self.local:
            return allreduce_hook(self._group, bucket) if self._dense is None else self._dense.reduce(bucket)
        if self._ddp._join_config.enable:
            raise InvalidArgument("LocalSGD can't run within DDP's join(), where ranks take different numbers of steps")
        if self._host is not None:
            return self._host.reduce(bucket)
        done = new_future(bucket.buffer())
        done.set_result(bucket.buffer())
        return done

    # -- steps -------------------------------------------------------------------------------------------------------

    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.local:
            self._apart = True
            # A step may move a frozen parameter too, while it has a gradient.
            own = self._owned().items()
            self._moved |= {name for name, one in own if one.requires_grad or one.grad is not None}
        elif bool(getattr(optimizer, "found_inf", False)):
            return  # fused optimizers are called at skipped steps too
        self.step += 1
        if self._apart and (self.step - self.start_step) % self.every == 0:
            self.average()
        elif self.step == self.start_step:
            self._enter_phase()

    # -- weights -----------------------------------------------------------------------------------------------------

    def average(self) -> None:
        """Average weights, and what goes with them, over all ranks at once; every rank calls it, between steps.

        The schedule is not changed. It runs by itself every `every` steps.
        """
        masters = masters_of(self._optimizer)
        named = self._named(masters)
        own = (self.step, self._backwards, fingerprint(named))
        for rank, theirs in enumerate(self._weights.objects.gather(own)):
            if theirs != own:
                raise InvalidArgument(_difference(own, theirs, rank))
        self._weights.average(named, self.step)
        round_off(masters)
        self._apart = False
        self._moved.clear()

    def _make_same(self) -> None:
        """Leave the same weights, buffers and optimizer state on all ranks: from here all step alike."""
        self.average()
        same_state(
            self._optimizer,
            self._not_ignored(self._ddp.module.named_parameters()),
            self._weights.objects,
            lambda named: self._weights.average(named, self.step),
        )
        if self._broadcast_buffers:
            buffers = self._not_ignored(self._ddp.module.named_buffers()).values()
            self._weights.copy_first([buffer for buffer in buffers if not buffer.is_floating_point()])

    def _not_ignored(self, named: Iterable[tuple[str, T]]) -> dict[str, T]:
        return {name: tensor for name, tensor in named if name not in self._ignored}

    def _named(self, masters: Mapping[Tensor, Tensor]) -> Named:
        """Return what is averaged, in the order of the model; raise InvalidArgument if something can't be."""
        owned = self._owned()
        named: list[tuple[str, Tensor]] = []
        for name, parameter in self._not_ignored(self._ddp.module.named_parameters()).items():
            if parameter.requires_grad and name not in owned:
                raise InvalidArgument(
                    f"the optimizer must have all parameters that require gradients, got none of {name!r}; it would "
                    "drift apart unseen: give one optimizer all of them"
                )
            if parameter.requires_grad or name in self._moved:
                named.append((name, masters.get(parameter, parameter.detach())))
                if self.average_momentum:
                    named += _moments(name, parameter, self._optimizer.state.get(parameter, {}))
        if self._broadcast_buffers:
            buffers = self._not_ignored(self._ddp.module.named_buffers()).items()
            named += [(name, tensor) for name, tensor in buffers if tensor.is_floating_point()]
        for name, tensor in named:
            if not tensor.is_floating_point() or tensor.layout != torch.strided:
                raise InvalidArgument(f"LocalSGD averages dense, real floating point, got {tensor.dtype} in {name!r}")
        return named

    def _owned(self) -> dict[str, nn.Parameter]:
        """Return the optimizer's parameters by name, or raise InvalidArgument if one is not of the module."""
        owned: dict[str, nn.Parameter] = {}
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in self._names:
                    raise InvalidArgument(
                        "the optimizer's parameters must all be of the DDP module, got one of shape "
                        f"{tuple(parameter.shape)} that is not; give others an optimizer of their own"
                    )
                owned[self._names[id(parameter)]] = parameter
        return owned

    # -- saving and the end ------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return how many steps have been taken, and what local ones have moved since the last averaging."""
        return {"version": _VERSION, "step": self.step, "apart": self._apart, "moved": sorted(self._moved)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at a saved step, on every rank.

        Raises:
            InvalidArgument: if it is of another version.
        """
        if state.get("version") != _VERSION:
            raise InvalidArgument(f"the state's version must be {_VERSION}, got {state.get('version')!r}")
        self.step, self._apart, self._backwards = state["step"], state["apart"], 0
        self._moved = set(state["moved"])
        self._enter_phase()

    def close(self, *, average: bool = True) -> None:
        """Make all ranks the same, then take all hooks off; gradients go over all ranks again. Every rank calls it.

        After local steps weights, buffers and the optimizer's moments are averaged, its counts of steps and buffers of
        integers are the first rank's. Replicas then stay equal under DDP alone.

        Args:
            average: False leaves each rank what it has and sends nothing, as after an error: weights and optimizer
                are then the user's to make equal.
        """
        if self._closed:
            return
        if average and (self.local or self._apart):
            self._make_same()
        self._closed = True
        self._step_hook.remove()
        self._enter_phase()
        if self._dense is None:
            unhook(self._ddp)
        self._weights.close()
        if self._host is not None:
            self._host.close()

    def __enter__(self) -> "LocalSGD":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(average=error is None)


def _moments(name: str, parameter: Tensor, state: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """Return the tensors of a parameter's state that have its shape, but for its master weights."""
    others = [key for key in sorted(state) if key != "step" and not is_master(key, parameter)]
    tensors = [(f"{name}/{key}", state[key]) for key in others if isinstance(state[key], Tensor)]
    return [(place, tensor) for place, tensor in tensors if tensor.shape == parameter.shape]


def _check_arguments(start_step: int, every: int, within: str) -> None:
    """Raise InvalidArgument unless the numbers are in range."""
    check_numbers(start_step=start_step, every=every)
    if start_step < 0:
        raise InvalidArgument(f"start_step must be at least 0, got {start_step}")
    if every < 1:
        raise InvalidArgument(f"every must be at least 1 step, got {every}")
    if within not in ("host", "rank"):
        raise InvalidArgument(f'within must be "host" or "rank", got {within!r}')


def _check_parts(ddp: Any, optimizer: Any, dense: Any) -> None:
    """Raise InvalidArgument unless module, optimizer and dense state can go together."""
    if not isinstance(ddp, DistributedDataParallel):
        raise InvalidArgument(
            f"LocalSGD needs a DistributedDataParallel module, got {type(ddp).__name__}; sharded weights "
            "differ by rank and can't be averaged"
        )
    if ddp._comm_hooks:
        raise InvalidArgument("the module must have no communication hook yet; pass its CommState as dense= instead")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidArgument(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__):
        raise InvalidArgument(
            "ZeroRedundancyOptimizer can't take local steps: each rank steps its own part of the weights; use "
            "the plain optimizer"
        )
    if dense is not None and not isinstance(dense, CommState):
        raise InvalidArgument(
            f"dense must be a CommState, got {type(dense).__name__}; AutoComm switches hooks by itself"
        )
    if dense is not None and isinstance(dense.compressor, MomentumCorrection) and dense.compressor.momentum:
        name = type(dense.compressor).__name__
        raise InvalidArgument(
            f"{name} with momentum takes it from the optimizer, which local steps need; pass "
            f"{name}(..., momentum=False)"
        )


def _difference(own: tuple[int, int, int], theirs: tuple[int, int, int], rank: int) -> str:
    """Return what to say where ranks differ in (steps, backward passes, fingerprint)."""
    if theirs[:2] != own[:2]:
        return (
            f"ranks must come to an averaging after as many steps and backward passes, got {own[0]} and {own[1]} "
            f"here and {theirs[0]} and {theirs[1]} on rank {rank}; where a GradScaler skips steps of single ranks, "
            "train in bfloat16, or with accel.amp"
        )
    return (
        f"ranks must have the same parameters and optimizer state at an averaging, got others on rank {rank} than "
        "here; give every rank the same parameter groups, and load checkpoints on all ranks or on none"
    )
