"""The optimizer under local SGD: its float32 master weights, and one state for all ranks at the end of local steps.

Moments are averaged. Counts of steps, which differ where GradScaler skipped, have no mean that an optimizer could use:
all get those of the first rank that has them. So it is with all of a parameter's state where that holds more than
floating-point tensors and numbers: 8-bit codes mean nothing without the scales they were made with.

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

Key = tuple[str, str]
"""Name of a parameter, and of a field of its state."""


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
        ValueError: if ranks have tensors of different shapes or dtypes in one place.
    """
    state = {name: optimizer.state[parameter] for name, parameter in parameters.items() if parameter in optimizer.state}
    by_rank = objects.gather(
        {key: content for name, fields in state.items() for key, content in _contents(name, fields, parameters)}
    )
    owners: dict[Key, int] = {}
    for rank, theirs in enumerate(by_rank):
        for key in theirs:
            owners.setdefault(key, rank)
    order = {name: number for number, name in enumerate(parameters)}
    keys = sorted(owners, key=lambda key: (order[key[0]], key[1]))
    for name, _ in keys:
        state.setdefault(name, optimizer.state[parameters[name]])
    means = {key: _agreed(key, [theirs[key] for theirs in by_rank if key in theirs]) for key in keys}
    for (name, field), mean in means.items():
        if mean is not None and field not in state[name]:  # no step yet
            state[name][field] = torch.zeros(mean.shape, dtype=mean.dtype, device=parameters[name].device)
    average([(f"{name}/{field}", state[name][field]) for (name, field), mean in means.items() if mean is not None])
    _adopt(state, {key: owners[key] for key, mean in means.items() if mean is None}, parameters, objects)
    _adopt_options(optimizer, objects)


def _contents(
    name: str, state: Mapping[str, Any], parameters: Mapping[str, nn.Parameter]
) -> list[tuple[Key, _Mean | None]]:
    """Return what a parameter's state holds, None for what is not averaged."""
    simple = all(_is_dense(value) or value is None or isinstance(value, int | float | str) for value in state.values())
    dims = min(parameters[name].dim(), 1)  # of a scalar, moments are scalars too
    contents: list[tuple[Key, _Mean | None]] = []
    for field, value in state.items():
        if is_master(field, parameters[name]):
            continue  # averaged with the weights
        averaged = simple and _is_dense(value) and field != "step" and value.dim() >= dims
        contents.append(((name, field), _Mean(tuple(value.shape), value.dtype) if averaged else None))
    return contents


def _is_dense(value: Any) -> bool:
    # A subclass may be anything inside: codes with scales, a shard.
    return type(value) in (Tensor, nn.Parameter) and value.is_floating_point() and value.layout == torch.strided


def _agreed(key: Key, contents: list[_Mean | None]) -> _Mean | None:
    if len(set(contents)) > 1:
        name, field = key
        got = " and ".join(sorted(map(_described, set(contents))))
        raise ValueError(
            f"ranks must have the same optimizer state, got {got} as {field!r} of {name!r}; make the optimizer "
            "alike on every rank, and load checkpoints on all or on none"
        )
    return contents[0]


def _described(mean: _Mean | None) -> str:
    return "something that has no mean" if mean is None else f"{mean.dtype} of shape {mean.shape}"


def _adopt(
    state: Mapping[str, dict[str, Any]],
    owners: Mapping[Key, int],
    parameters: Mapping[str, nn.Parameter],
    objects: ObjectGroup,
) -> None:
    """Take each field over from its owner."""
    by_rank = objects.gather(
        {(name, field): _packed(state[name][field]) for (name, field), rank in owners.items() if rank == objects.rank}
    )
    for (name, field), rank in owners.items():
        if rank == objects.rank:
            continue
        sent, own = by_rank[rank][name, field], state[name].get(field)
        if isinstance(sent, _Sent) and type(own) is Tensor and own.shape == sent.values.shape:
            own.copy_(sent.values)
        else:
            state[name][field] = _unpacked(sent, parameters[name].device)


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
