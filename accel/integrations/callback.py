"""`accel.optimize` on what a framework trains, between the begin and the end of its training."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path
from threading import get_ident
from typing import TYPE_CHECKING, Any

from torch import nn

from accel import entry, startup
from accel.report import Report
from accel.settings import check_settings

if TYPE_CHECKING:
    from accel.script.training import ScriptTraining

_under_way: dict[int, TrainingCallback] = {}
"""Thread → the callback whose training it runs."""


class TrainingCallback:
    """Find the model, the optimizer and the loader that a framework trains, and optimize them.

    The arguments are those of `accel.optimize`, which raises InvalidArgument for one that is wrong.
    """

    def __init__(
        self,
        *,
        allow: str = "reordered",
        budget: float | str = "3%",
        enable: Iterable[str] = (),
        disable: Iterable[str] = (),
        report: str | os.PathLike[str] | None = None,
        cache: bool = True,
    ) -> None:
        options = {"allow": allow, "budget": budget, "enable": tuple(enable), "disable": tuple(disable), "cache": cache}
        check_settings(nn.Identity(), allow, options["enable"], options["disable"], None, budget, report, cache)
        self._options = {**options, "report": None if report is None else Path(report).absolute()}
        self._of_this_one: dict[str, Any] = {}
        """The options of the training that is under way."""
        self._training: ScriptTraining | None = None
        self._earlier = 0
        """Models that were optimized in the trainings before."""

    def _begin(self) -> None:
        """Follow the training of this thread from now on; does nothing where ACCEL=0.

        The models of the previous training are restored and released: each fold of a cross validation has another one,
        and one that is trained again starts with what is remembered of it. So are the models of another callback that
        was not told of the end of its training.
        """
        for callback in (_under_way.get(get_ident()), self):
            if callback is not None:
                callback._release()
        if not startup.is_off():
            from accel.script.training import ScriptTraining  # not before a training begins

            _under_way[get_ident()] = self
            whole = "print(callback.report)"
            self._of_this_one = {**self._options}
            self._training = ScriptTraining(self._of_this_one, get_ident(), whole, self._earlier)
            self._training.start()

    def _lasts(self, steps: float) -> None:
        """Note how many steps the training will have, before the first one; less than 1 if that is not known."""
        if 0 < steps < math.inf:
            self._of_this_one["steps"] = int(steps)

    def _end(self, together: bool = True) -> None:
        """Restore torch; what has been kept so far stays on until the next training begins.

        Args:
            together: all ranks end after the same step; False after an exception, which others may not have met.
        """
        for thread, callback in list(_under_way.items()):
            if callback is self:
                del _under_way[thread]
        if self._training is not None:
            self._training.stop()
            self._training.models.end_trials(together)

    def _release(self) -> None:
        """Restore torch and the models, and forget the training."""
        self._end()
        if self._training is not None:
            self._training.models.undo()
            self._earlier += self._training.models.count
            self._training = None

    @property
    def report(self) -> Report | None:
        """The report of the model that was optimized first in the last training, None before that."""
        modules = [] if self._training is None else self._training.models.modules
        return entry.explain(modules[0]) if modules else None
