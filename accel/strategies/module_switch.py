"""What strategies have in common that lay other classes over modules of the model: they are switched there and back."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from torch import nn

from accel.run import Run
from accel.strategies.base import NothingHelps, Strategy

if TYPE_CHECKING:
    from accel.kernels.dropins import SwitchedModules


class ModuleSwitch(Strategy):
    """A strategy that switches modules; which ones is found the first time."""

    def __init__(self) -> None:
        self._switched: SwitchedModules | None = None

    @abstractmethod
    def switch(self, model: nn.Module, switched: SwitchedModules) -> None:
        """Switch the modules of a model, noting each in `switched`; raise if there is none."""

    def enable(self, run: Run, setting: Any) -> None:
        """Switch the modules."""
        if self._switched is not None:
            self._switched.redo()
            return
        from accel.kernels.dropins import SwitchedModules

        self._switched = SwitchedModules()  # before any is switched: what fails half way is undone by `disable`
        try:
            self.switch(run.model, self._switched)
        except NothingHelps:
            self._switched = None
            raise

    def disable(self, run: Run) -> None:
        """Let the modules compute as they did."""
        if self._switched is not None:
            self._switched.undo()
