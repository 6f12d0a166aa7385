"""What local SGD averages: gradients over the ranks of a host, weights over all ranks, and at the end the optimizer.

Gradients and weights go through pipelines as a hook has them. Weights go by hosts first where that saves bytes: a host
with G ranks of N hosts sends 2 (N − 1)/N of them over its uplink, in place of 2 (NG − 1)/(NG).

Of the optimizer, moments are averaged. Counts of steps have no mean that an optimizer could use: all get those of the
first rank that has a state of the parameter. So it is with all of a parameter's state where that holds more than
floating-point tensors and numbers: 8-bit codes mean nothing without the scales they were made with.

Where the optimizer keeps masters of 16-bit parameters, these are averaged, and the parameters that they round to
follow. Steps that 16 bits have no room for are in the masters alone: if the parameters were averaged, each rank's
masters would take the mean over only where it differs from their own rounding, and ranks would drift apart.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from accel.comm.catalogue import Scheme
from accel.comm.engine.pipeline import BucketJob
from accel.comm.engine.reduction import Arrangement, arranged
from accel.comm.hooks import CommState
from accel.comm.layout import Layout
from accel.comm.ranks.object_group import ObjectGroup
from accel.profiler.errors import InvalidArgument

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
        """Replace tensors by their means, summed in float32 at least.

        Args:
            named: floating-point tensors of one device, by names; the same on every rank.
            step: for messages.
        """
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


class _Mean(NamedTuple):
    """A tensor to be averaged."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class _Sent(NamedTuple):
    """A tensor on its way to ranks whose devices have other numbers."""

    values: Tensor
    on_device: bool


@torch.no_grad()
def same_state(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    objects: ObjectGroup,
    average: Callable[[Named], None],
) -> None:
    """Give all ranks one optimizer state; every rank calls it.

    Args:
        optimizer: whose state it is.
        parameters: by name, in the same order on all ranks.
        objects: exchanged between the ranks.
        average: replaces tensors by their means over the ranks.

    Raises:
        InvalidArgument: if ranks have tensors of different shapes or dtypes in one place.
    """
    state = optimizer.state
    own = {name: _contents(state.get(one, {}), one) for name, one in parameters.items()}
    by_rank = objects.gather({name: contents for name, contents in own.items() if contents})
    owners: dict[str, int] = {}
    for rank, theirs in enumerate(by_rank):
        for name, fields in theirs.items():
            _check_alike(name, by_rank[owners.setdefault(name, rank)][name], fields)
    means: list[tuple[str, Tensor]] = []
    sent: dict[str, dict[str, Any]] = {}
    for name, parameter in parameters.items():
        for field, mean in by_rank[owners[name]][name].items() if name in owners else ():
            if mean is not None:
                if field not in state[parameter]:  # no step yet
                    state[parameter][field] = torch.zeros(mean.shape, dtype=mean.dtype, device=parameter.device)
                means.append((f"{name}/{field}", state[parameter][field]))
            elif owners[name] == objects.rank:
                sent.setdefault(name, {})[field] = _packed(state[parameter][field])
    average(means)
    for rank, theirs in enumerate(objects.gather(sent)):
        for name, fields in theirs.items() if rank != objects.rank else ():
            for field, value in fields.items():
                _adopt(state[parameters[name]], field, value, parameters[name].device)
    _adopt_options(optimizer, objects)


def _contents(state: Mapping[str, Any], parameter: nn.Parameter) -> dict[str, _Mean | None]:
    """Return what a parameter's state holds but for master weights, None for what is not averaged."""
    simple = all(_is_dense(value) or value is None or isinstance(value, int | float | str) for value in state.values())
    dims = min(parameter.dim(), 1)  # of a scalar, moments are scalars too
    contents: dict[str, _Mean | None] = {}
    for field, value in state.items():
        averaged = simple and _is_dense(value) and field != "step" and value.dim() >= dims
        if not is_master(field, parameter):  # these are averaged with the weights
            contents[field] = _Mean(tuple(value.shape), value.dtype) if averaged else None
    return contents


def _is_dense(value: Any) -> bool:
    # A subclass may be anything inside: codes with scales, a shard.
    return type(value) in (Tensor, nn.Parameter) and value.is_floating_point() and value.layout == torch.strided


def _check_alike(name: str, first: Mapping[str, _Mean | None], other: Mapping[str, _Mean | None]) -> None:
    for field in first.keys() | other.keys():
        if first.get(field) != other.get(field):
            got = " and ".join(sorted({_described(fields.get(field)) for fields in (first, other)}))
            raise InvalidArgument(
                f"ranks must have the same optimizer state, got {got} as {field!r} of {name!r}; make the optimizer "
                "alike on every rank, and load checkpoints on all or on none"
            )


def _described(mean: _Mean | None) -> str:
    return "nothing that has a mean" if mean is None else f"{mean.dtype} of shape {mean.shape}"


def _adopt(state: dict[str, Any], field: str, value: Any, device: torch.device) -> None:
    """Take a field over from its owner."""
    own = state.get(field)
    if isinstance(value, _Sent) and type(own) is Tensor and own.shape == value.values.shape:
        own.copy_(value.values)
    else:
        state[field] = _unpacked(value, device)


def _adopt_options(optimizer: torch.optim.Optimizer, objects: ObjectGroup) -> None:
    """Take over the first rank's numbers in groups: some optimizers find their step size there."""
    groups = [
        {name: value for name, value in group.items() if type(value) in (int, float)}
        for group in optimizer.param_groups
    ]
    for group, first in zip(optimizer.param_groups, objects.first(groups), strict=True):
        group.update({name: value for name, value in first.items() if type(group.get(name)) in (int, float)})


def _packed(value: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: _Sent(tensor.detach().cpu(), tensor.device.type != "cpu"), value)


def _unpacked(value: Any, device: torch.device) -> Any:
    def put(sent: _Sent) -> Tensor:
        return sent.values.to(device) if sent.on_device else sent.values

    return tree_map_only(_Sent, put, value, is_leaf=lambda node: isinstance(node, _Sent))


# -- master weights ---------------------------------------------------------------------------------------------------

_MASTER = "master"
"""The field of a parameter's state where `accel.optim` keeps its master weights."""
_OPTION = "master_weights"
"""The option of a group whose optimizer makes masters at the first step that a parameter has a gradient."""
_HALF = frozenset({torch.float16, torch.bfloat16})


def is_master(field: str, parameter: Tensor) -> bool:
    """Return whether a field of a parameter's state holds its master weights."""
    return field == _MASTER and parameter.dtype in _HALF


@torch.no_grad()
def masters_of(optimizer: torch.optim.Optimizer) -> dict[Tensor, Tensor]:
    """Return the master weights of 16-bit parameters, after taking over what others wrote to these."""
    masters: dict[Tensor, Tensor] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.dtype not in _HALF:
                continue
            state = optimizer.state.get(parameter, {})
            if _MASTER not in state and group.get(_OPTION):  # a parameter that this rank alone has not used yet
                state = optimizer.state[parameter]
                state[_MASTER] = torch.empty_like(parameter, dtype=torch.float32).copy_(parameter)
            if _MASTER in state:
                masters[parameter] = _following(state[_MASTER], parameter)
    return masters


def _following(master: Tensor, parameter: Tensor) -> Tensor:
    # What still rounds to the parameter is kept: it has the bits that the parameter has not.
    same = master.to(parameter.dtype) == parameter
    return master.copy_(torch.where(same, master, parameter.to(master.dtype)))


@torch.no_grad()
def round_off(masters: Mapping[Tensor, Tensor]) -> None:
    """Set parameters to what their master weights round to."""
    for parameter, master in masters.items():
        parameter.copy_(master)
