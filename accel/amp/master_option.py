"""Whether an optimizer keeps master weights: as the level says, whatever state is loaded.

A state of a run at O2 has master weights, and the groups of `accel.optim` say whether there are some. Loaded at another
level, neither may decide.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from accel.optim import MultiTensorOptimizer

_OPTION, _STATE = "master_weights", "master"


def leave_no_masters(optimizer: Optimizer) -> None:
    """Drop the master weights that a loaded state has for float32 weights: nobody would update them there.

    The state of a run at O2, loaded at O0 and saved, would bring the old weights back at O2.
    """

    def drop(optimizer: Optimizer) -> None:
        for p, state in optimizer.state.items():
            if isinstance(p, Tensor) and p.dtype == torch.float32:
                state.pop(_STATE, None)

    optimizer.register_load_state_dict_pre_hook(_without_bare)
    optimizer.register_load_state_dict_post_hook(drop)
    drop(optimizer)


def without_bare_masters(
    optimizer: Optimizer, state_dict: dict[str, Any]
) -> tuple[dict[str, Any], dict[Tensor, Tensor]]:
    """Return a state without the entries that are nothing but master weights, and these by parameter.

    Args:
        optimizer: that loads the state.
        state_dict: perhaps of another optimizer, which will be refused.
    """
    if not {"state", "param_groups"} <= set(state_dict):
        return state_dict, {}
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    places, state = dict(zip(keys, params, strict=False)), state_dict["state"]
    bare = {key: own[_STATE] for key, own in state.items() if key in places and list(own) == [_STATE]}
    left = {key: own for key, own in state.items() if key not in bare}
    return {**state_dict, "state": left}, {places[key]: master for key, master in bare.items()}


def _without_bare(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    return without_bare_masters(optimizer, state_dict)[0]


class MasterOption:
    """Hold an optimizer to its level.

    Args:
        optimizer: of a decorated model.
        keeps: whether the level has master weights.
    """

    def __init__(self, optimizer: Optimizer, keeps: bool) -> None:
        # Weakly: a model that is kept for evaluation must not keep the moments of its optimizer.
        self._optimizer, self._keeps = weakref.ref(optimizer), keeps
        self._before = [options[_OPTION] for options in self._options()]
        self._handles = [optimizer.register_load_state_dict_post_hook(self._hold)]
        if not keeps:
            self._handles.append(optimizer.register_load_state_dict_pre_hook(_without_bare))
        self._hold(optimizer)

    def _options(self) -> list[dict[str, Any]]:
        """Return the defaults and the groups, of an optimizer that has the option."""
        optimizer = self._optimizer()
        return [optimizer.defaults, *optimizer.param_groups] if isinstance(optimizer, MultiTensorOptimizer) else []

    def _hold(self, optimizer: Optimizer) -> None:
        for options in self._options():
            options[_OPTION] = self._keeps
        if not self._keeps:
            for state in optimizer.state.values():
                state.pop(_STATE, None)

    def remove(self) -> None:
        """Leave the optimizer's own option to it again."""
        for handle in self._handles:
            handle.remove()
        for number, options in enumerate(self._options()):
            options[_OPTION] = self._before[number if number < len(self._before) else 0]  # later groups: the default
