"""The engine of gradient communication: the one owner of what outlives a step.

It counts steps, keeps what was not sent yet, follows the loss scale, and opens and closes the groups and threads of the
schemes that its plan names. The plan may change between two steps; what was not sent stays with its parameters.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore

from accel.comm.catalogue import Scheme
from accel.comm.engine.binding import Binding
from accel.comm.engine.plan import Plan, SchemeSettings, catalogue_settings, scheme_of
from accel.comm.engine.reduction import BucketJob, is_finite
from accel.comm.engine.route import Arrangement, Route, arranged
from accel.comm.memory import LossScale, Memory
from accel.comm.ranks.channel import GlooChannel
from accel.comm.ranks.object_group import ObjectGroup
from accel.comm.ranks.topology import Topology

Averaged = torch.futures.Future[Tensor]


class GradientEngine:
    """Averages buckets over ranks by a plan that may change between two steps; state of `accel.comm.hooks.hook`.

    Every rank makes one and gives it the same plans before the same steps. It is DDP's own all-reduce until `use` says
    otherwise. While DDP itself reduces a bucket, its residual waits.

    DDP multiplies gradients by 1/n, and so does the engine; with `gradient_as_bucket_view` and
    `zero_grad(set_to_none=False)` DDP divides by n, which differs in the last bit where n is no power of two.

    Args:
        timeout: for each collective of a scheme; DDP's own keep theirs.
        patience: how long to wait for ranks that make none; default: the timeout.
        memory: where what was not sent is kept; default: one of its own.
        scaler: the GradScaler in use, so that what was not sent yet follows its scale; default None.
    """

    kind = "GradientEngine"
    """What the user makes one of, for messages."""
    exchanges_objects = False
    """Whether it has a group for objects of the ranks; see `objects`."""
    leaves_unfit = True
    """Buckets that no scheme can take, sparse ones and integers, are reduced by DDP itself; else they are an error."""

    def __init__(
        self,
        *,
        timeout: timedelta = timedelta(minutes=5),
        patience: timedelta | None = None,
        memory: Memory | None = None,
        scaler: Any = None,
    ) -> None:
        self.timeout, self.patience = timeout, timeout if patience is None else patience
        self.step = 0
        self.memory = Memory() if memory is None else memory
        self.plan: Plan = ()
        self.wanted: Plan = ()
        """The plan from the next step on."""
        self.divide_s = 0.0
        """Seconds, in all, in which the plain all-reduce divided gradients; without a hook DDP divides as it copies."""
        self.loss_scale = LossScale(scaler)
        self._remembers = False
        """Whether a scheme of the plan has own fields in the memory."""
        self._filled: Plan = ()
        """The plan whose buckets the memory is laid out for."""
        self._binding: Binding | None = None
        self._routes: dict[Scheme, Route] = {}
        self._numbers = itertools.count()
        self.is_open = False
        """Whether there are groups with the other ranks: not once closed or unpickled."""
        self._objects: ObjectGroup | None = None

    # -- groups and threads ------------------------------------------------------------------------------------------

    def bind(self, model: nn.Module, process_group: dist.ProcessGroup | None = None, *, scaler: Any = None) -> None:
        """Take a model, in place of the one before; every rank of the group takes part.

        Args:
            model: the DDP module or the module that it wraps.
            process_group: default that of the DDP module, or the world.
            scaler: the GradScaler in use, where it is not the one that the engine has; a pickle leaves it behind.

        Raises:
            ValueError: if there was a scaler before pickling and none is given.
        """
        self.loss_scale.take(scaler, self.kind)
        self.close()
        self.memory.load_state_dict(self.memory.state_dict())  # laid out for the ranks to come
        self.plan = self.wanted = ()
        self._binding, self._numbers = Binding(model, process_group, self.kind), itertools.count()
        self.topology: Topology = self._binding.meet(self.patience)
        self.is_open = True
        if self.exchanges_objects:
            binding, store = self._binding, PrefixStore("objects", self._binding.store)
            self._objects = ObjectGroup(GlooChannel(store, range(binding.size), binding.rank, self.timeout))

    @property
    def binding(self) -> Binding:
        """Return the model and the ranks."""
        if self._binding is None:
            raise ValueError(self.unbound())
        return self._binding

    @property
    def objects(self) -> ObjectGroup:
        """Return the group that exchanges objects with the other ranks."""
        if self._objects is None:
            raise ValueError(self.unbound())
        return self._objects

    def close(self) -> None:
        """End threads and groups; what is under way breaks off. The plan that was wanted is then the present one."""
        self.plan, self.is_open, self._remembers = self.wanted, False, False
        self._close_routes(())
        if self._objects is not None:
            self._objects.close()
            self._objects = None

    def _close_routes(self, kept: Plan) -> None:
        for scheme in [scheme for scheme in self._routes if scheme not in kept]:
            self._routes.pop(scheme).close()

    def unbound(self) -> str:
        """Return what to say where groups are missing."""
        article = "an" if self.kind[0] in "AEIOU" else "a"
        return f"{article} {self.kind} that was closed or unpickled must be bound first: state.bind(model)"

    # -- the plan ----------------------------------------------------------------------------------------------------

    def use(self, plan: Plan) -> None:
        """Let buckets go by these schemes from the next step on; the same on every rank.

        Args:
            plan: a scheme for each bucket, None for DDP's own; the last one counts for all that follow, () is DDP's own
                for all.
        """
        for scheme in filter(None, plan):
            self.settings_of(scheme)
            if not self.is_open:
                raise ValueError(self.unbound())
            if scheme.hierarchical:
                self.topology.check_even()
        self.wanted = tuple(plan) if any(plan) else ()

    def release(self, *kept: Plan) -> None:
        """Give up the threads and groups of schemes that are not in use; every rank at the same step.

        Args:
            kept: plans whose schemes stay, since they will be used again.
        """
        self._close_routes(tuple(itertools.chain(self.wanted, *kept)))

    def settings_of(self, scheme: Scheme) -> SchemeSettings:
        """Return how buckets of a scheme are averaged."""
        return catalogue_settings(scheme)

    def arrangement(self, scheme: Scheme) -> Arrangement:
        """Return which ranks sum with which."""
        return arranged(self.topology, self.binding.rank, scheme.hierarchical)

    def apply(self) -> None:
        """Make the wanted plan the present one, between two steps; every rank takes part."""
        if self.wanted == self.plan:
            return
        for scheme in filter(None, self.wanted):
            if scheme not in self._routes:
                settings, arrangement = self.settings_of(scheme), self.arrangement(scheme)
                number = next(self._numbers)
                route = Route(number, settings, arrangement, self.binding, self.memory, self.timeout)
                self._routes[scheme] = route
        if self.wanted:
            if self._filled not in ((), self.wanted):
                self.memory.load_state_dict(self.memory.state_dict())  # laid out for the new schemes
            self._filled = self.wanted
        self.plan = self.wanted
        self._remembers = any(self._routes[scheme].settings.fields for scheme in self.plan if scheme is not None)

    # -- what the hook does with a bucket ----------------------------------------------------------------------------

    def reduce(self, bucket: dist.GradBucket) -> Averaged:  # type: ignore[name-defined]
        """Average one bucket over the ranks by the plan."""
        if bucket.index() == 0:
            self.begin_step()
        route = self.route_of(bucket)
        mean = self.all_reduced(bucket) if route is None else route.average(self.job_of(bucket, route))
        return self.noted(bucket, mean)

    def begin_step(self) -> None:
        """Take over what the last step wrote, unless it was void, and go over to the plan that is wanted."""
        self.binding.check_mean()
        self.memory.settle()
        self.loss_scale.follow(self.memory)
        self.step += 1
        self.apply()

    def route_of(self, bucket: dist.GradBucket) -> Route | None:  # type: ignore[name-defined]
        """Return the groups and threads that the plan has for a bucket; None is DDP's own all-reduce."""
        scheme = scheme_of(self.plan, bucket.index())
        if scheme is None or (self.leaves_unfit and _unfit(bucket)):
            return None
        return self.route(scheme)

    def route(self, scheme: Scheme) -> Route:
        """Return the groups and threads of a scheme of the present plan."""
        if scheme not in self._routes:
            raise ValueError(self.unbound())
        return self._routes[scheme]

    def job_of(self, bucket: dist.GradBucket, route: Route) -> BucketJob:  # type: ignore[name-defined]
        """Return a bucket with its layout, the memory of its parameters, and the future of its mean."""
        buffer, layout = bucket.buffer(), self.binding.layout(bucket)
        if not route.has_taken(layout):
            if reason := _unfit(bucket):
                raise ValueError(reason.format(name=layout.names[0]))
            assert layout.numel == buffer.numel(), "parameters don't lie end to end"
            route.take(layout)
        devices = [buffer.device] if buffer.device.type == "cuda" else []
        done: Averaged = torch.futures.Future(devices=devices)
        return BucketJob(self.step, layout, buffer, self.memory.slot(layout), done, self.loss_scale.of_gradients)

    def all_reduced(self, bucket: dist.GradBucket) -> Averaged:  # type: ignore[name-defined]
        """Average a bucket as DDP does without a hook, to the bit."""
        buffer, binding = bucket.buffer(), self.binding
        began = time.perf_counter()
        buffer.mul_(1.0 / binding.size)
        self.divide_s += time.perf_counter() - began
        work = dist.all_reduce(buffer, group=binding.group, async_op=True)
        future: torch.futures.Future[Any] = work.get_future()

        def ended(done: torch.futures.Future[Any]) -> Any:
            done.value()  # raises what the exchange raised
            return buffer  # gloo's own result is a real view of complex gradients before torch 2.13

        averaged: Averaged = future.then(ended)
        return averaged

    def noted(self, bucket: dist.GradBucket, averaged: Averaged) -> Averaged:  # type: ignore[name-defined]
        """Note in the memory whether a mean is finite, where the stages of the bucket's scheme don't."""
        if not self._remembers:
            return averaged
        route = self.route_of(bucket)
        if route is not None and route.notes_finite:
            return averaged
        note = self.memory.note

        def ended(averaged: Averaged) -> Tensor:
            value = averaged.value()
            note(is_finite(value))
            return value

        return averaged.then(ended)

    # -- saving ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's memory by parameter, and the step; save it on each rank, between steps."""
        return {**self.memory.state_dict(), "step": self.step, "scale": self.loss_scale.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with a saved memory, on every rank.

        Args:
            state: what this rank saved, or this rank's part of `accel.comm.memory.reshard`.

        Raises:
            ValueError: if it is of another version; at the next step, if it is of another model.
        """
        self.memory.load_state_dict(state)
        self._filled = ()
        self.step, self.loss_scale.value = state["step"], state.get("scale", 1.0)


def _unfit(bucket: dist.GradBucket) -> str:  # type: ignore[name-defined]
    """Return why no scheme can take a bucket, with room for the {name} of a parameter; '' if one can."""
    buffer = bucket.buffer()
    if buffer.layout != torch.strided:
        return "gradients must be dense, got a sparse one of {name!r}; use Embedding(sparse=False)"
    # Since torch 2.13 complex gradients lie in a bucket of real ones, two for each element of their parameters.
    dtypes = [buffer.dtype, *(parameter.dtype for parameter in bucket.parameters() if parameter.is_complex())]
    if not all(dtype.is_floating_point for dtype in dtypes):
        return f"gradients must be real floating point, got {dtypes[-1]} of {{name!r}}; use no hook"
    return ""
