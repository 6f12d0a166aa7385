"""Whether an optimizer keeps master weights: as the level says, whatever state is loaded.

A state of a run at O2 has master weights, and the groups of `accel.optim` say whether there are some. Loaded at another
level, neither may decide.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch.optim import Optimizer

from accel.optim import MultiTensorOptimizer

_OPTION, _STATE = "master_weights", "master"


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
        self._handle = optimizer.register_load_state_dict_post_hook(self._hold)
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
        self._handle.remove()
        for number, options in enumerate(self._options()):
            options[_OPTION] = self._before[number if number < len(self._before) else 0]  # later groups: the default
