"""What the script trains, handed to `accel.optimize` as soon as it is known.

    first step of an optimizer    the modules that own its parameters are marked
    the next ones                 which of them are called, and whether batches come from a loader
    then                          optimize(model, loader, optimizer), in the middle of the epoch

Everything is decided by counting steps, so the ranks of a launch do the same at the same step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from accel import entry, startup
from accel.dataio.passes.proxy import LoaderProxy
from accel.profiler import stderr
from accel.run import ranks
from accel.script.learners import Learners
from accel.script.loaders import ScriptLoaders
from accel.script.optimizer_steps import OptimizerSteps, parameters_of
from accel.script.own_batches import UpdateBoundary
from accel.session.listeners import leave
from accel.session.session import Session

_AT_ONCE = 8
"""Models that are optimized at a time."""
_REPORTS = 32
"""Models of which reports are written: a loop may copy its model for each of a hundred thousand tasks."""
_GONE_AFTER = 200
"""Updates without a step of a model after which it is taken to be trained no more, once another one is found."""


class ScriptTraining:
    """Follow the training in a script, and optimize it.

    Args:
        options: of `accel.optimize`, checked.
        thread: the one that runs the script.
        whole: how to see the whole report, where it goes to no file.
        earlier: models that were optimized before these; reports are numbered on from them.

    Attributes:
        updates: steps of optimizers in that thread.
        updates_elsewhere: those in others.
        models: how many have been optimized.
        has_failed: accel itself failed, and the script goes on without it.
    """

    def __init__(self, options: dict[str, Any], thread: int, whole: str, earlier: int = 0) -> None:
        self.updates = self.updates_elsewhere = self.models = 0
        self.has_failed = False
        self.loaders = ScriptLoaders(thread)
        self._options, self._thread, self._whole, self._earlier = options, thread, whole, earlier
        self._boundary = UpdateBoundary()
        self._learning = Learners(_AT_ONCE)
        self._due: list[OptimizerSteps] = []
        """What they train is known, and is optimized when the next batch is asked for."""
        self._inseparable = 0
        """Optimizers whose steps were seen only within hooks, where no step can end, and that no loader feeds."""
        self._own_batches: weakref.WeakSet[OptimizerSteps] = weakref.WeakSet()
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._optimized: dict[int, _Model] = {}
        self._hook: Any = None

    def start(self) -> None:
        """Follow loaders and optimizers from now on."""
        self.loaders.on_new, self.loaders.on_request = self._follow, self._optimize_due
        self.loaders.start()
        self._hook = register_optimizer_step_post_hook(self._updated)

    def stop(self) -> None:
        """Restore torch and the script's objects; what has been optimized stays so."""
        self.loaders.stop()
        if self._hook is not None:
            self._hook.remove()
        self._learning.release()
        for steps in [*self._due, *self._own_batches]:
            steps.release()
        self._due.clear()

    def end_trials(self, together: bool) -> None:
        """Switch off what is on trial, since no step will end its trial; what has been kept so far stays on.

        Args:
            together: all ranks do so after the same step.
        """
        for model in self._optimized.values():
            model.end_trial(together)

    def undo(self) -> None:
        """Restore the models that have been optimized, and let go of them."""
        for model in self._optimized.values():
            model.undo()
        self._optimized.clear()

    @property
    def modules(self) -> list[nn.Module]:
        """The models that are optimized, the first one first."""
        return [model.module for model in self._optimized.values() if model.record is not None]

    def why_nothing(self) -> str:
        """Say why no model was optimized, '' if one was or that was said."""
        if self.models or self.has_failed:
            return ""
        if self.updates_elsewhere:
            return f"{self.updates_elsewhere} updates ran in other threads; train in the thread that runs the script"
        if self._inseparable:
            return "the script puts another step in place of its optimizer's, and its batches come from no DataLoader"
        if self.updates:
            return f"the optimizer steps seen were too few ({self.updates}), or of parameters that belong to no module"
        return f"no step of a torch optimizer was seen ({self.loaders.delivered} batches from a DataLoader)"

    # -- updates -------------------------------------------------------------------------------------------------------

    def _updated(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return  # nothing of this belongs into the graph of a compiled update
        if get_ident() != self._thread:
            self.updates_elsewhere += 1
            return
        self.updates += 1
        if self.has_failed:
            return
        try:
            if optimizer not in self._known:
                self._known.add(optimizer)
                with startup.counted():
                    self._meet(optimizer)
            elif (steps := self._learning.get(optimizer)) is not None and not steps.is_under_way:
                self._stepped_past(steps)
            if self.updates % _GONE_AFTER == 0:
                self._learning.let_go_of_idle(self.updates)
        except Exception as error:
            self._fail(error)

    def _meet(self, optimizer: Optimizer) -> None:
        if self._learning.is_hopeless or self._is_optimized(optimizer):
            return
        steps = OptimizerSteps(optimizer, self.loaders.delivered, self._stepped)
        if any(entry.optimized(root) for root in steps.roots) or not steps.roots:
            steps.release()  # its model's session meets it too; parameters of no module are nobody's
            return
        steps.updates = self.updates
        self._learning.add(steps)

    def _is_optimized(self, optimizer: Optimizer) -> bool:
        """Return whether all that it trains is optimized, which is found sooner than the modules that own it."""
        optimized = (parameter for model in self.modules for parameter in model.parameters())
        return bool(self._optimized) and parameters_of(optimizer) <= set(map(id, optimized))

    def _stepped(self, steps: OptimizerSteps) -> None:
        if get_ident() != self._thread or self.has_failed:
            return
        try:
            if self._learning.get(steps.optimizer) is None:
                self._boundary.updated(steps.optimizer)
                return
            steps.updates = self.updates
            if steps.learned(self.loaders.delivered):
                self._optimize(steps)
        except Exception as error:
            steps.release()
            self._fail(error)

    def _stepped_past(self, steps: OptimizerSteps) -> None:
        """Count a step that was made without ours; it ends within hooks, where none can be added or removed."""
        steps.updates = self.updates
        if not steps.learned(self.loaders.delivered):
            return
        self._learning.take(steps)
        if steps.from_loader:
            self._due.append(steps)
        else:
            self._inseparable += 1
            steps.release()

    def _optimize_due(self) -> None:
        """A batch is asked for: the steps that were seen only within hooks have ended."""
        while self._due:
            steps = self._due.pop(0)
            if self.has_failed:
                steps.release()
                continue
            try:
                self._optimize(steps)
            except Exception as error:
                steps.release()
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.has_failed = True
        _say(f"{type(error).__name__}: {error}; the script goes on without accel")

    # -- models --------------------------------------------------------------------------------------------------------

    def _optimize(self, steps: OptimizerSteps) -> None:
        """Optimize what an optimizer trains; its loop is between two steps."""
        self._learning.take(steps)
        models = steps.trained()
        steps.release_modules()
        loader = self.loaders.latest if steps.from_loader else None
        self._undo_ended()
        for model in models:
            if entry.optimized(model) is None and len(self._optimized) < _AT_ONCE:
                self._begin(model, loader, steps.optimizer)
        if loader is not None:
            steps.release()
        else:
            self._own_batches.add(steps)

    def _begin(self, model: nn.Module, loader: LoaderProxy | None, optimizer: Optimizer) -> None:
        self.models += 1
        report, whole = self._place_of_report(self._earlier + self.models)
        options = {**self._options, "report": report}
        proxy = self._boundary.proxy if loader is None else loader  # not `or`: that asks for the loader's length
        entry.optimize(model, proxy, optimizer, **options)
        optimized = entry.optimized(model)
        if optimized is None:
            return  # ACCEL=0 was set meanwhile
        if report is None:
            optimized.journal.whole = whole
        session = optimized.session
        follow = optimized.follow if loader is not None else lambda proxy: None
        self._optimized[id(model)] = _Model(model, session, follow, self.updates)
        for proxy in self.loaders.proxies:
            follow(proxy)
        if loader is None:
            self._boundary.join(session.events)
        else:
            session.events.epoch_begins(loader)  # it has, and the session did not hear of it

    def _place_of_report(self, model: int) -> tuple[Path | None, str]:
        """Return where the report of the n-th model goes, and how to see the whole if it goes nowhere."""
        report = self._options["report"]
        if report is None or model <= _REPORTS:
            return _numbered(report, model), self._whole
        if model == _REPORTS + 1:
            _say(f"{_REPORTS} models have been optimized; no more reports are written")
        return None, f"reports are written of the first {_REPORTS} models only"

    def _follow(self, proxy: LoaderProxy) -> None:
        """Let all sessions follow a new loader: one for the next epoch, say."""
        for model in self._optimized.values():
            model.follow(proxy)

    def _undo_ended(self) -> None:
        """Let go of models that are trained no more: those of earlier folds, say."""
        for key, model in list(self._optimized.items()):
            if model.has_stepped():
                model.updates = self.updates
            elif self.updates - model.updates >= _GONE_AFTER:
                model.undo()
                del self._optimized[key]


class _Model:
    """A model that has been optimized.

    Args:
        module: the model.
        session: counts its steps.
        follow: lets the session follow a loader.
        updates: made in all when it was last seen to be trained.
    """

    def __init__(
        self, module: nn.Module, session: Session, follow: Callable[[LoaderProxy], None], updates: int
    ) -> None:
        self.module, self.follow, self.updates = module, follow, updates
        self._session, self._steps = session, 0

    def has_stepped(self) -> bool:
        """Return whether there were steps since the last call."""
        before, self._steps = self._steps, self._session.steps
        return self._steps > before

    @property
    def record(self) -> Any:
        """What `entry` holds of it; None once it was undone, or optimized anew, by the script itself."""
        record = entry.optimized(self.module)
        return record if record is not None and record.session is self._session else None

    def undo(self) -> None:
        """Restore it."""
        if self.record is not None:
            entry.undo(self.module)

    def end_trial(self, together: bool) -> None:
        """Let nothing be on that has not been kept, if the search has not ended; see `ScriptTraining.end_trials`."""
        record, session = self.record, self._session
        if record is None or not session.searching:
            return
        for proxy in record.proxies:
            leave(proxy, session.events)  # a pass that goes on would count these steps as ones of the trial
        session.events.observe(False)
        session.guard.expect(None)
        kept = record.journal.kept
        session.switchboard.switch(kept if together else {**kept, **session.switchboard.collective()})


def _numbered(report: Path | None, model: int) -> Path | None:
    """Return where the report of the n-th model goes."""
    if report is None or model == 1:
        return report
    if report.suffix in (".json", ".html"):
        return report.with_name(f"{report.stem}-{model}{report.suffix}")
    return report.with_name(f"{report.name}-{model}")  # a folder, such as lr0.001


def _say(line: str) -> None:
    if ranks.leads():
        stderr.write(f"accel: {line}")
