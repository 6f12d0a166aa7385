"""The optimizer under local SGD: its float32 master weights, and one state for all ranks at the end of local steps.

Moments are averaged. Counts of steps have no mean that an optimizer could use: all get those of the first rank that has
a state of the parameter. So it is with all of a parameter's state where that holds more than floating-point tensors and
numbers: 8-bit codes mean nothing without the scales they were made with.

Where the optimizer keeps masters of 16-bit parameters, these are averaged, and the parameters that they round to
follow. Steps that 16 bits have no room for are in the masters alone: if the parameters were averaged, each rank's
masters would take the mean over only where it differs from their own rounding, and ranks would drift apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from accel.comm.periodic.local_mean import Named
from accel.comm.ranks.object_group import ObjectGroup
from accel.profiler.errors import InvalidArgument


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
