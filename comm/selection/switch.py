"""A DDP hook that can be switched between two steps, which DDP itself doesn't allow: a hook stays for good.

Off, it does what DDP does without a hook, to the bit. On, each bucket goes its own way.

    switch = Switch(ddp)
    ddp.register_comm_hook(switch, hook)
    switch.use((Way("int8"),))
"""

# No `from __future__ import annotations`: DDP compares the hook's annotations with the classes themselves.

import itertools
import time
import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.nn.parallel import DistributedDataParallel

from accel.comm.catalogue import CATALOGUE, Scheme, error_feedback
from accel.comm.cost_model.choice import Plan
from accel.comm.engine.reduction import _finite
from accel.comm.hooks import CommState
from accel.comm.layout import Layout
from accel.comm.memory import LossScale, Memory
from accel.comm.ranks import topology
from accel.comm.ranks.channel import GlooChannel
from accel.comm.ranks.object_group import ObjectGroup
from accel.comm.ranks.post_mortem import CommError
from accel.comm.ranks.rendezvous import Apart, Rendezvous
from accel.comm.selection.reducer import cap_mb, is_rebucketable, rebucket, unhook
from accel.comm.selection.timing import Times, unknown, work

_made: dict[str, "itertools.count[int]"] = {}


class Switch:
    """State of a hook that is DDP's own all-reduce until `use` says otherwise.

    Every rank of DDP's process group makes one for the same module, and gives it the same plans before the same steps.
    Ways share one memory: a bucket that goes another way than before keeps what was not sent yet. While a bucket goes
    DDP's way its residual waits.

    DDP multiplies gradients by 1/n, and so does the switch; with `gradient_as_bucket_view` and
    `zero_grad(set_to_none=False)` DDP divides by n, which differs in the last bit where n is no power of two.

    Args:
        ddp: the module.
        timeout: for each collective of a way, default 5 minutes; DDP's own keep theirs.
        patience: how long to wait for ranks that make none; default: the timeout.
        scaler: the GradScaler in use, so that what was not sent yet follows its scale; default None.

    Raises:
        ValueError: if `ddp` is no DistributedDataParallel module, or has a hook already.
        accel.comm.ranks.post_mortem.CommError: if a rank makes none in time.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        *,
        timeout: timedelta = timedelta(minutes=5),
        patience: timedelta | None = None,
        scaler: Any = None,
    ) -> None:
        self.timeout, self._patience = timeout, timeout if patience is None else patience
        self._scale = LossScale(scaler)
        self.step = 0
        self.memory = Memory()
        self._talk: ObjectGroup | None = None
        self._states: dict[Scheme, CommState] = {}
        self.bind(ddp)

    # -- groups ------------------------------------------------------------------------------------------------------

    def bind(self, ddp: DistributedDataParallel) -> None:
        """Take a module, in place of the one before; every rank takes part."""
        if reason := why_not(ddp, self):
            raise ValueError(reason)
        self.close()
        self._ddp = weakref.ref(ddp)
        self._hooked: Callable[[], Any] = lambda: None
        """The reducer that the hook was taken off with."""
        self._group: Any = ddp.process_group
        self._names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
        self.device = next(ddp.module.parameters()).device
        self.gradients_are_views = bool(ddp.gradient_as_bucket_view)
        """Of the buckets, so that nothing is copied out of them."""
        self.plan: Plan = ()
        self._wanted: Plan = ()
        self._wanted_mb: float | None = None
        """Size of buckets that the next forward pass will begin with, where it is to change."""
        self._filled: Plan = ()
        """The plan whose buckets the memory is laid out for."""
        self.times = Times(time.perf_counter, work if self.device.type == "cpu" else unknown)
        self.recording = False
        self.layouts: dict[int, Layout] = {}
        """Of the buckets of recorded steps."""
        rank, size, store = self._group.rank(), self._group.size(), self._group.get_group_store()
        number = next(_made.setdefault(self._group.group_name, itertools.count()))
        store = PrefixStore(f"accel-switch/{number}", store)
        self.topology = self._met(PrefixStore("meeting", store), rank, size)
        self._talk = ObjectGroup(GlooChannel(store, range(size), rank, self.timeout))

    def _met(self, store: Any, rank: int, size: int) -> topology.Topology:
        """Meet the other ranks, before anything is begun that needs them all; return who is on which host."""
        remedy = "every rank must make as many, in the same order"
        meeting = Rendezvous(store, rank, size, self._patience.total_seconds(), remedy)
        try:
            found: topology.Topology = meeting.meet(topology.identity(), topology.from_identities, "made no Switch")
        except Apart as error:
            raise CommError(str(error)) from None
        return found

    @property
    def talk(self) -> ObjectGroup:
        """Return the line to the other ranks."""
        if self._talk is None:
            raise ValueError("a switch that was closed or unpickled must be bound first: switch.bind(ddp)")
        return self._talk

    @property
    def bound(self) -> bool:
        """Tell whether there is a line to the other ranks: not once closed or unpickled."""
        return self._talk is not None

    @property
    def by_hosts(self) -> bool:
        """Tell whether summing by hosts first is different from not doing so."""
        hosts = self.topology.hosts
        return self.topology.even and len(hosts) > 1 and len(hosts[0]) > 1

    def close(self) -> None:
        """End threads and groups; the hook goes on as DDP's own all-reduce."""
        self.plan = self._wanted = ()
        self._free(())
        if self._talk is not None:
            self._talk.close()
            self._talk = None

    def _free(self, kept: Plan) -> None:
        for way in [way for way in self._states if way not in kept]:
            self._states.pop(way).close()

    # -- switching ---------------------------------------------------------------------------------------------------

    def use(self, plan: Plan) -> None:
        """Let buckets go these ways from the next step on; the same on every rank.

        Args:
            plan: a way for each bucket, None for DDP's own; the last one counts for all that follow, () is DDP's own
                for all.
        """
        for way in filter(None, plan):
            if way.compressor not in CATALOGUE:
                raise ValueError(f"ways must be of the catalogue ({', '.join(CATALOGUE)}), got {way.compressor!r}")
            if way.hierarchical:
                self.topology.check_even()
        if any(plan):
            self.talk  # noqa: B018  (raises where it was closed)
        self._wanted = tuple(plan) if any(plan) else ()

    def put_on(self) -> None:
        """Register the hook, unless it is on; every rank before the same step."""
        ddp = self._ddp()
        if ddp is None or ddp._comm_hooks:
            return
        if self._hooked() is ddp.reducer:
            # Who puts attributes back after a look at the model may have put back the reducer that had the hook.
            ddp._comm_hooks.append((hook, self))
        else:
            ddp.register_comm_hook(self, hook)

    def take_off(self) -> bool:
        """Leave the module as if it had never had a hook; on every rank, while no backward pass is under way.

        Returns:
            False where DDP can't do without (see `accel.comm.selection.reducer`): the hook goes on as DDP's own
            all-reduce.
        """
        self.use(())
        ddp = self._ddp()
        if ddp is None or not ddp._comm_hooks or ddp._comm_hooks[0][1] is not self:
            return False
        self._hooked = weakref.ref(ddp.reducer)
        return unhook(ddp)

    def take_off_later(self) -> None:
        """Take the hook off before the next forward pass, unless a way is wanted by then."""
        self.use(())
        ddp, own = self._ddp(), weakref.ref(self)
        assert ddp is not None, "its own hook outlives a module only within a step"

        def begin(module: DistributedDataParallel) -> None:
            if (state := own()) is not None and not state._wanted:
                state.take_off()

        before_forward(ddp, begin)

    @property
    def cap_mb(self) -> float:
        """Return the size of buckets, as `bucket_cap_mb` of DDP."""
        ddp = self._ddp()
        assert ddp is not None, "its own hook outlives a module only within a step"
        return cap_mb(ddp)

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
            own, self._wanted_mb = weakref.ref(self), bucket_cap_mb

            def begin(module: DistributedDataParallel) -> None:
                if (state := own()) is not None and (wanted := state._wanted_mb) is not None:
                    state._wanted_mb = None
                    if wanted != cap_mb(module):
                        rebucket(module, wanted)

            before_forward(ddp, begin)
        return True

    def release(self, *kept: Plan) -> None:
        """Give up the threads and groups of ways that are not in use; every rank at the same step.

        Args:
            kept: plans whose ways stay, since they will be used again.
        """
        self._free(tuple(itertools.chain(self._wanted, *kept)))

    def _apply(self) -> None:
        """Make the wanted plan the present one."""
        if self._wanted == self.plan:
            return
        for way in filter(None, self._wanted):
            if way not in self._states:
                self._states[way] = self._state(way)
        if self._wanted:
            if self._filled not in ((), self._wanted):
                self.memory.load_state_dict(self.memory.state_dict())  # to wherever each bucket goes now
            self._filled = self._wanted
        self.plan = self._wanted

    def _state(self, way: Scheme) -> CommState:
        ddp = self._ddp()
        assert ddp is not None, "its own hook outlives a module only within a step"
        compressor = CATALOGUE[way.compressor].make()
        return CommState(
            ddp,
            compressor,
            hierarchical=way.hierarchical,
            error_feedback=error_feedback(compressor, CATALOGUE[way.compressor].level),
            process_group=self._group,
            timeout=self.timeout,
            memory=self.memory,
        )

    # -- buckets -----------------------------------------------------------------------------------------------------

    def between_steps(self) -> None:
        """Decide what comes next; called before the first bucket of each step, on every rank."""

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        """Average one bucket over the ranks; `hook` calls it."""
        index, buffer = bucket.index(), bucket.buffer()
        if index == 0:
            self.times.close()
            self.memory.settle()
            self._scale.follow(self.memory)
            self.step += 1
            self.between_steps()
            self._apply()
            if self.recording:
                self.times.open()
        if self.recording:
            self._note_layout(bucket, buffer)
        done = self.times.ready(buffer.numel() * buffer.element_size())
        way = self.plan[min(index, len(self.plan) - 1)] if self.plan else None
        if way is None or not _compressible(buffer):
            future = self._plain(buffer)
        else:
            state = self._states[way]
            state.step = self.step - (index == 0)  # it counts first buckets itself
            future = state.reduce(bucket)
        note = self.memory.note if self.plan and self._is_silent(way) else None
        if done is None and note is None:
            return future

        def ended(averaged: torch.futures.Future[Tensor]) -> Tensor:
            value = averaged.value()
            if note is not None:
                note(_finite(value))
            if done is not None:
                done()
            return value

        return future.then(ended)

    def _plain(self, buffer: Tensor) -> torch.futures.Future[Tensor]:
        began = time.perf_counter()
        buffer.mul_(1.0 / self._group.size())
        self.times.extra(time.perf_counter() - began)
        work = dist.all_reduce(buffer, group=self._group, async_op=True)
        future: torch.futures.Future[Any] = work.get_future()
        return future.then(lambda done: done.value()[0])

    def _is_silent(self, way: Scheme | None) -> bool:
        """Tell whether nobody tells the memory that this bucket is finite, while other buckets have a residual."""
        if way is not None and (state := self._states[way]) and (state.fields or not state.compressor.lossless):
            return False
        return any(state.fields for one, state in self._states.items() if one in self.plan)

    def _note_layout(self, bucket: dist.GradBucket, buffer: Tensor) -> None:  # type: ignore[name-defined]
        parameters = bucket.parameters()
        names = tuple(self._names[id(one)] for one in parameters)
        shapes = tuple(one.shape for one in parameters)
        self.layouts[bucket.index()] = Layout(bucket.index(), names, shapes, buffer.dtype, bucket.is_last())
        if bucket.is_last():
            self.layouts = {index: one for index, one in self.layouts.items() if index <= bucket.index()}

    # -- saving ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's memory by parameter, and the step; save it on each rank, between steps."""
        return {**self.memory.state_dict(), "step": self.step, "scale": self._scale.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with a saved memory, on every rank; on another number of ranks `accel.comm.memory.reshard` it first."""
        self.memory.load_state_dict(state)
        self._filled = ()
        self.step, self._scale.value = state["step"], state.get("scale", 1.0)

    def __getstate__(self) -> dict[str, Any]:
        return {"timeout": self.timeout, "_patience": self._patience, "saved": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        saved = state.pop("saved")
        self.__dict__.update(state, memory=Memory(), step=0, plan=(), _wanted=(), _filled=(), _states={}, _talk=None)
        self._scale = LossScale(None)
        self.load_state_dict(saved)


def hook(state: Switch, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """Average a bucket of gradients as `state` is set; for `DistributedDataParallel.register_comm_hook`."""
    if not isinstance(state, Switch):
        raise ValueError(f"the state of this hook must be a Switch or an AutoComm, got {type(state).__name__}")
    return state.reduce(bucket)


def before_forward(ddp: DistributedDataParallel, act: Callable[[DistributedDataParallel], Any]) -> None:
    """Do something once, before the next forward pass of training: no backward pass is under way then."""

    def about_to_begin(module: Any, inputs: Any) -> None:
        if module.training and torch.is_grad_enabled():
            handle.remove()
            act(module)

    handle = ddp.register_forward_pre_hook(about_to_begin)


def why_not(ddp: object, own: Switch | None = None) -> str:
    """Return why a module can't have a switch, '' if it can, or has this one."""
    if not isinstance(ddp, DistributedDataParallel):
        return f"the model must be a DistributedDataParallel module, got {type(ddp).__name__}; wrap it first"
    if ddp._comm_hooks and (own is None or ddp._comm_hooks[0][1] is not own):
        given = ddp._comm_hooks[0][0]
        name = getattr(given, "__qualname__", type(given).__name__)
        return f"the model must have no communication hook yet, got {name}; DDP keeps one for good: leave it out"
    return ""


def _compressible(buffer: Tensor) -> bool:
    return buffer.layout == torch.strided and buffer.dtype.is_floating_point
