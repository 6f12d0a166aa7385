"""`accel.optimize` on what a framework trains, between the begin and the end of its training."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from threading import get_ident

from torch import nn

from accel import entry
from accel.report import Report
from accel.script.training import ScriptTraining
from accel.settings import check_settings

_under_way: dict[int, Following] = {}
"""Thread → the callback whose training it runs."""


class Following:
    """Find the model, the optimizer and the loader that a framework trains, and optimize them.

    The arguments are those of `accel.optimize`, which raises InvalidArgument for one that is wrong.
    """

    def __init__(
        self,
        allow: str,
        budget: float | str,
        enable: Iterable[str],
        disable: Iterable[str],
        report: str | os.PathLike[str] | None,
        cache: bool,
    ) -> None:
        enable, disable = tuple(enable), tuple(disable)
        check_settings(nn.Identity(), allow, enable, disable, None, budget, report, cache)
        self._options = {
            **{"allow": allow, "budget": budget, "enable": enable, "disable": disable},
            "report": None if report is None else Path(report).absolute(),
            "cache": cache,
        }
        self._training: ScriptTraining | None = None
        self._earlier = 0
        """Models that were optimized in the trainings before."""

    def begin(self) -> None:
        """Follow the training of this thread from now on; does nothing where ACCEL=0.

        The models of the previous training are restored and released: each fold of a cross validation has another one,
        and one that is trained again starts with what is remembered of it. So are the models of another callback that
        was not told of the end of its training.
        """
        unended = _under_way.pop(get_ident(), None)
        for following in (unended, self):
            if following is not None:
                following._let_go()
        if os.environ.get("ACCEL") != "0":
            _under_way[get_ident()] = self
            self._training = ScriptTraining(
                self._options, get_ident(), whole="print(callback.report)", earlier=self._earlier
            )
            self._training.start()

    def end(self, together: bool = True) -> None:
        """Restore torch; what has been kept so far stays on until the next training begins.

        Args:
            together: all ranks end after the same step; False after an exception, which others may not have met.
        """
        self._is_over()
        if self._training is not None:
            self._training.stop()
            self._training.end_trials(together)

    def _is_over(self) -> None:
        for thread, following in list(_under_way.items()):
            if following is self:
                del _under_way[thread]

    def _let_go(self) -> None:
        """Restore torch and the models, and forget the training."""
        self._is_over()
        if self._training is not None:
            self._training.stop()
            self._training.undo()
            self._earlier += self._training.models
            self._training = None

    @property
    def report(self) -> Report | None:
        """The report of the model that was optimized first in the last training, None before that."""
        modules = [] if self._training is None else self._training.modules
        return entry.explain(modules[0]) if modules else None


class FollowingCallback:
    """What the callbacks of frameworks share: their arguments, and the report."""

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
        self._following = Following(allow, budget, enable, disable, report, cache)

    @property
    def report(self) -> Report | None:
        """The report so far, None before the first steps."""
        return self._following.report
