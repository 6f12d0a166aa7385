"""State that comes from a checkpoint: what is accepted, and how it is taken in without losing precision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from accel.errors import InvalidArgument
from accel.kernels.optimizers import work_dtype

if TYPE_CHECKING:
    from accel.kernels.optimizers import Kind

_MOMENTS = frozenset({"exp_avg", "exp_avg_sq"})
_BESIDE = frozenset({"step", "master"})
_ACCEPTED: dict[Kind, frozenset[str]] = {
    "adam": _BESIDE | _MOMENTS | {"max_exp_avg_sq"},
    "lamb": _BESIDE | _MOMENTS,
    "sgd": _BESIDE | {"momentum_buffer"},
    "lars": _BESIDE | {"momentum_buffer"},
}
_ADAPTIVE = frozenset({"adam", "lamb"})
_ADAPTIVE_OPTIONS = ("lr", "betas", "eps", "weight_decay")
_MOMENTUM_OPTIONS = ("lr", "momentum", "weight_decay")
_MARKS: dict[Kind, tuple[frozenset[str], frozenset[str]]] = {
    "adam": (frozenset({"amsgrad", "bias_correction"}), frozenset({"grad_averaging"})),
    "lamb": (frozenset({"grad_averaging"}), frozenset()),
    "sgd": (frozenset({"nesterov"}), frozenset({"trust_coefficient"})),
    "lars": (frozenset({"trust_coefficient"}), frozenset()),
}
"""Options of which a group has one, here, in torch or in apex, and those that it has not: RAdam's state has the names
of Adam's, and LAMB's too."""


class Sealed:
    """Holds a value that torch would round to the parameter's dtype while it loads a state."""

    def __init__(self, value: Any) -> None:
        self.value = value


def checked(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with its tensors sealed.

    Raises:
        InvalidArgument: if it is not one of this kind of optimizer, for these parameters.
    """
    owner, kind = type(optimizer).__name__, optimizer.kind  # type: ignore[attr-defined]
    if not {"state", "param_groups"} <= set(state_dict):
        raise InvalidArgument(f"{owner}: a state has `state` and `param_groups`. Found: {sorted(state_dict)}.")
    options = _ADAPTIVE_OPTIONS if kind in _ADAPTIVE else _MOMENTUM_OPTIONS
    groups, saved = optimizer.param_groups, state_dict["param_groups"]
    sizes, saved_sizes = ([len(group["params"]) for group in some] for some in (groups, saved))
    if sizes != saved_sizes:
        raise InvalidArgument(
            f"{owner}: the state must be of as many parameters in each group, {sizes}. Found: {saved_sizes}."
        )
    for group in saved:
        if missing := [name for name in options if name not in group]:
            raise InvalidArgument(f"{owner}: the state is of another optimizer: its groups have no {missing[0]!r}.")
        states = [state_dict["state"].get(key, {}) for key in group["params"]]
        counted = "step" in group or all("step" in state for state in states if _was_updated(state))
        if kind in _ADAPTIVE and not counted:
            raise InvalidArgument(f"{owner}: the state must say how many steps were done. Found: no 'step'.")
    params = [p for group in groups for p in group["params"]]
    places = dict(zip((key for group in saved for key in group["params"]), params, strict=True))
    sealed: dict[Any, Any] = {}
    for key, own in state_dict["state"].items():
        if key in places:
            _check(owner, kind, places[key], own)
            own = {name: Sealed(value) for name, value in own.items() if value is not None}
        sealed[key] = own
    one_of, none_of = _MARKS[kind]
    for group in saved:
        if one_of.isdisjoint(group) or not none_of.isdisjoint(group):
            others = ", ".join(sorted(set(group) - {"params", *options}))
            raise InvalidArgument(f"{owner}: the state is of another optimizer: its groups have {others}.")
    return {**state_dict, "state": sealed}


def _was_updated(state: Mapping[str, Any]) -> bool:
    """Return whether a state is of a parameter that was updated; master weights are there before the first update."""
    return any(name != "master" and value is not None for name, value in state.items())


def _check(owner: str, kind: Kind, param: Tensor, state: Mapping[str, Any]) -> None:
    names = {name for name, value in state.items() if value is not None}
    needed = _MOMENTS if kind in _ADAPTIVE else frozenset()
    if (foreign := names - _ACCEPTED[kind]) or (_was_updated(state) and not needed <= names):
        raise InvalidArgument(
            f"{owner}: the state is of another optimizer: a parameter has {sorted(foreign or names)}, expected were "
            f"{sorted(needed or _ACCEPTED[kind])}. Begin without it."
        )
    for name, value in state.items():
        if isinstance(value, Tensor) and name != "step" and value.shape != param.shape:
            raise InvalidArgument(
                f"{owner}: the state is of other parameters: {name} is {list(value.shape)} for a parameter of "
                f"{list(param.shape)}."
            )


def taken_in(param: Tensor, state: Mapping[str, Any], step: float | None) -> dict[str, Any]:
    """Return the state of one parameter in the dtypes of updates; the next one brings it to the layout.

    Args:
        param: the parameter.
        state: of it, sealed or not.
        step: what its counter is where the state has none: apex counts by group, torch's SGD not at all. None if no
            steps are counted.
    """
    taken: dict[str, Any] = {}
    for name, held in state.items():
        value = held.value if isinstance(held, Sealed) else held
        if name == "step":
            counter = value if isinstance(value, Tensor) else torch.tensor(float(value))
            taken[name] = counter.to(device=param.device, dtype=torch.float32).reshape(())
        elif name != "master" or work_dtype(param.dtype) != param.dtype:
            taken[name] = value.to(device=param.device, dtype=work_dtype(param.dtype))
    if step is not None and _was_updated(taken) and "step" not in taken:
        taken["step"] = torch.tensor(step, device=param.device)
    return taken
