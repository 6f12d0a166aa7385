"""Master weights in the groups of an optimizer, in the place of their parameters, while its step runs.

A parameter's own data must not be replaced by one of another dtype: torch then gives it another accumulator, of which
DistributedDataParallel knows nothing.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

NAME = "master"
"""Of master weights, in the optimizer's state of their parameter."""


class StandIns:
    """Puts masters in, and takes them out again; weights and gradients stay as they are."""

    def __init__(self) -> None:
        self._groups: list[tuple[dict[str, Any], list[Tensor]]] = []
        """Groups, and the parameters that belong there."""
        self._masters: dict[Tensor, Tensor] = {}
        self._states: dict[Tensor, dict[str, Any]] = {}
        """What is known of each parameter, as it was: others hold these very dicts, and keep their masters."""

    @property
    def are_in(self) -> bool:
        """True while a step runs, and after one that has failed: torch calls no hook then."""
        return bool(self._groups)

    def of(self, p: Tensor) -> Tensor | None:
        """Return what stands in for a parameter at this moment."""
        return self._masters.get(p)

    def put_in(self, optimizer: Optimizer) -> None:
        """Put masters, with the state of their parameters, in the place of these."""
        for group in optimizer.param_groups:
            self._groups.append((group, group["params"]))
            group["params"] = [self._stand_in(optimizer, p) for p in group["params"]]

    def _stand_in(self, optimizer: Optimizer, p: Tensor) -> Tensor:
        own = optimizer.state.get(p, {})
        if NAME not in own:
            return p
        self._states[p] = optimizer.state.pop(p)
        if others := {name: value for name, value in own.items() if name != NAME}:
            optimizer.state[own[NAME]] = others  # many optimizers take any state for one they have made
        self._masters[p] = own[NAME]
        return self._masters[p]

    def take_out(self, optimizer: Optimizer) -> dict[Tensor, Tensor]:
        """Put the parameters back, and return what stood in for them."""
        for p, master in self._masters.items():
            # A state of its own is there where a capture has failed within the step, and was undone.
            undone = optimizer.state.get(p, {})
            latest = {**undone, **optimizer.state.pop(master, {}), NAME: master}
            own = undone if p in optimizer.state else self._states[p]
            own.update(latest)
            for name in own.keys() - latest.keys():
                del own[name]
            optimizer.state[p] = own
        for group, params in self._groups:
            group["params"] = params
        masters, self._masters = self._masters, {}
        self._groups.clear()
        self._states.clear()
        return masters
