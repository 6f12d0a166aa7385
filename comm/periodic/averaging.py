"""What local SGD averages: gradients over the ranks of a host, weights over all ranks, and at the end the optimizer.

Gradients and weights go through pipelines as a hook has them. Weights go by hosts first where that saves bytes: a host
with G ranks of N hosts sends 2 (N − 1)/N of them over its uplink, in place of 2 (NG − 1)/(NG).

Of the optimizer, moments are averaged. Counts of steps have no mean that an optimizer could use: all get those of the
first rank. So it is with all of a parameter's state where that holds more than floating-point tensors and numbers:
8-bit codes mean nothing without the scales they were made with.

Where the optimizer keeps masters of 16-bit parameters, these are averaged, and the parameters that they round to
follow. Steps that 16 bits have no room for are in the masters alone: if the parameters were averaged, each rank's
masters would take the mean over only where it differs from their own rounding, and ranks would drift apart.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from accel.comm.catalogue import Scheme
from accel.comm.engine.binding import check_same
from accel.comm.engine.pipeline import BucketJob
from accel.comm.engine.reduction import Arrangement, arranged
from accel.comm.hooks import CommState
from accel.comm.layout import Layout
from accel.comm.ranks.object_group import ObjectGroup

BUCKET_BYTES = 25 << 20  # DDP's own
_UNDER_WAY = 4  # buckets in the stages at once; each is a copy of its tensors

Named = Sequence[tuple[str, Tensor]]


class HostMean(CommState):
    """State of a hook that averages gradients over the ranks of each host, as they are."""

    def arrangement(self, scheme: Scheme) -> Arrangement:
        """Return this host's ranks alone."""
        within = self.topology.within(self.binding.rank)
        return Arrangement(False, within, within, len(within))


class WeightMean(CommState):
    """Replaces tensors by their means over all ranks, the same bits on each."""

    def __init__(self, model: nn.Module, process_group: dist.ProcessGroup | None, timeout: timedelta) -> None:
        super().__init__(model, process_group=process_group, timeout=timeout)
        self.objects = self.binding.objects(timeout)

    def close(self) -> None:
        """End threads and groups."""
        if self.is_open:
            self.objects.close()
        super().close()

    def arrangement(self, scheme: Scheme) -> Arrangement:
        """Return all ranks, by hosts where that pays."""
        return arranged(self.topology, self.binding.rank, self.topology.by_hosts_pays)

    @torch.no_grad()
    def copy_first(self, tensors: Sequence[Tensor]) -> None:
        """Give all ranks the first one's values of a few small tensors."""
        for own, first in zip(tensors, self.objects.first([tensor.detach().cpu() for tensor in tensors]), strict=True):
            own.copy_(first)

    @torch.no_grad()
    def average(self, named: Named, step: int) -> None:
        """Replace tensors by their means, summed in float32 at least."""
        route = self.route()
        under_way: deque[tuple[_Bucket, BucketJob]] = deque()
        for bucket in _buckets(named):
            whole = torch.cat([tensor.reshape(-1) for tensor in bucket.tensors])
            buffer = whole.to(torch.promote_types(whole.dtype, torch.float32))
            job = BucketJob(step, bucket.layout, buffer, self.memory.slot(bucket.layout))
            route.submit(job)
            under_way.append((bucket, job))
            if len(under_way) == _UNDER_WAY:
                _finish(*under_way.popleft())
        while under_way:
            _finish(*under_way.popleft())
        route.wait()


class _Bucket(NamedTuple):
    """Tensors that go together, and where each stands."""

    layout: Layout
    tensors: list[Tensor]


def _buckets(named: Named) -> Iterator[_Bucket]:
    """Yield tensors of one dtype together, BUCKET_BYTES of them or one that is larger."""
    groups: list[list[tuple[str, Tensor]]] = []
    for dtype in dict.fromkeys(tensor.dtype for _, tensor in named):
        filled = BUCKET_BYTES
        for name, tensor in named:
            if tensor.dtype is dtype:
                if filled + tensor.nbytes > BUCKET_BYTES:
                    groups.append([])
                    filled = 0
                groups[-1].append((name, tensor))
                filled += tensor.nbytes
    for index, group in enumerate(groups):
        names, tensors = tuple(name for name, _ in group), [tensor for _, tensor in group]
        kind = torch.promote_types(tensors[0].dtype, torch.float32)
        layout = Layout(index, names, tuple(tensor.shape for tensor in tensors), kind, index == len(groups) - 1)
        yield _Bucket(layout, tensors)


def _finish(bucket: _Bucket, job: BucketJob) -> None:
    """Wait for a bucket and give its means to the tensors."""
    mean = job.future.wait()
    parts = torch.split(mean, [tensor.numel() for tensor in bucket.tensors])
    for tensor, part in zip(bucket.tensors, parts, strict=True):
        tensor.copy_(part.view(tensor.shape))


def fingerprint(named: Named) -> int:
    """Return a number that is the same where names, shapes and dtypes are."""
    return zlib.crc32(repr([(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in named]).encode())


# -- the optimizer's state --------------------------------------------------------------------------------------------


@torch.no_grad()
def same_state(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    objects: ObjectGroup,
    average: Callable[[Named], None],
) -> None:
    """Give all ranks one optimizer state; every rank calls it.

    Raises:
        InvalidArgument: if ranks have a state of different parameters, fields, shapes or dtypes.
    """
    means: list[tuple[str, Tensor]] = []
    others: dict[str, dict[str, Any]] = {}
    described: dict[str, object] = {}
    for name, parameter in parameters.items():
        state = optimizer.state.get(parameter, {})
        averaged = _with_a_mean(state, parameter)
        means += [(f"{name}/{field}", state[field]) for field in averaged]
        rest = {field for field in state if field not in averaged and not is_master(field, parameter)}
        others[name] = {field: state[field] for field in rest}
        shapes = {field: f"{state[field].dtype} of shape {tuple(state[field].shape)}" for field in averaged}
        described[f"optimizer state of {name!r}"] = shapes | dict.fromkeys(sorted(rest), "without a mean")
    check_same(objects.gather(described), "LocalSGD")
    average(means)
    first = objects.first(tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), others))
    for name, fields in first.items():
        state, device = optimizer.state.get(parameters[name], {}), parameters[name].device
        for field, value in fields.items():
            own = state[field]
            if isinstance(own, Tensor) and own.shape == value.shape:
                own.copy_(value)
            else:
                state[field] = tree_map_only(Tensor, partial(Tensor.to, device=device), value)
    _adopt_options(optimizer, objects)


def _with_a_mean(state: Mapping[str, Any], parameter: nn.Parameter) -> list[str]:
    """Return the fields of a parameter's state that are averaged; master weights are, but with the weights."""

    def is_dense(value: Any) -> bool:  # a subclass may be anything inside: codes with scales, a shard
        return type(value) in (Tensor, nn.Parameter) and value.is_floating_point() and value.layout == torch.strided

    if not all(is_dense(value) or value is None or isinstance(value, int | float | str) for value in state.values()):
        return []
    dims = min(parameter.dim(), 1)  # of a scalar, moments are scalars too
    dense = [field for field, value in state.items() if is_dense(value) and field != "step" and value.dim() >= dims]
    return [field for field in dense if not is_master(field, parameter)]


def _adopt_options(optimizer: torch.optim.Optimizer, objects: ObjectGroup) -> None:
    """Take over the first rank's numbers in groups: some optimizers find their step size there."""
    groups = [
        {name: value for name, value in group.items() if type(value) in (int, float)}
        for group in optimizer.param_groups
    ]
    for group, first in zip(optimizer.param_groups, objects.first(groups), strict=True):
        group.update({name: value for name, value in first.items() if type(group.get(name)) in (int, float)})


# -- master weights ---------------------------------------------------------------------------------------------------

_MASTER = "master"
"""The field of a parameter's state where `accel.optim` keeps its master weights."""
_HALF = frozenset({torch.float16, torch.bfloat16})


def is_master(field: str, parameter: Tensor) -> bool:
    """Return whether a field of a parameter's state holds its master weights."""
    return field == _MASTER and parameter.dtype in _HALF


@torch.no_grad()
def masters_of(optimizer: torch.optim.Optimizer) -> dict[Tensor, Tensor]:
    """Return the master weights of 16-bit parameters, after taking over what others wrote to these."""
    every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    masters: dict[Tensor, Tensor] = {}
    for parameter in every:
        master = optimizer.state.get(parameter, {}).get(_MASTER)
        if master is not None and is_master(_MASTER, parameter):
            # What still rounds to the parameter is kept: it has the bits that the parameter has not.
            same = master.to(parameter.dtype) == parameter
            masters[parameter] = master.copy_(torch.where(same, master, parameter.to(master.dtype)))
    return masters


@torch.no_grad()
def round_off(masters: Mapping[Tensor, Tensor]) -> None:
    """Set parameters to what their master weights round to."""
    for parameter, master in masters.items():
        parameter.copy_(master)
