"""What the script trains, handed to `accel.optimize` as soon as it is known.

    first step of an optimizer    the modules that own its parameters are marked
    the next ones                 which of them are called, and whether batches come from a loader
    then                          optimize(model, loader, optimizer), in the middle of the epoch

Everything is decided by counting steps, so the ranks of a launch do the same at the same step.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from accel import entry, startup
from accel.dataio.passes.proxy import LoaderProxy
from accel.profiler import stderr
from accel.profiler.interruptions import ours
from accel.profiler.loop.called_modules import RegisteredModules
from accel.profiler.loop.steps import is_between_steps, is_described
from accel.run import ranks
from accel.script.loaders import ScriptLoaders
from accel.script.optimizer_steps import GONE_AFTER, Learners, OptimizerSteps, parameters_of
from accel.script.script_model import ScriptModel
from accel.session.journal import numbered

_AT_ONCE = 8
"""Models that are optimized at a time."""
_REPORTS = 32
"""Models of which reports are written: a loop may copy its model for each of a hundred thousand tasks."""
_LOOKS, _UPDATES_EACH = 16, 1000
"""Looks at what an optimizer trains that may be taken at first, and updates after which one more may.

To find its modules, those that were built in the run are gone through, and if they are not among these all objects of
the process: 20 ms, or seconds beside a dataset of many small ones. To begin the search for a model takes as long.
Federated training and population loops copy a model for each of thousands of clients, which take a few steps each.
Counted and not timed, so that all ranks look alike."""
_CHECK_EVERY = 50
"""Updates between two looks for what is trained no more."""


class OwnBatches:
    """Stands for the batches that a loop makes itself; nobody iterates it."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class ScriptTraining:
    """Follow the training in a script, and optimize it.

    Args:
        options: of `accel.optimize`, checked.
        thread: the one that runs the script.
        whole: how to see the whole report, where it goes to no file.
        earlier: models that were optimized before these; reports are numbered on from them.
        from_start: it begins before the script makes any module, so that all can be noted.

    Attributes:
        updates: steps of optimizers in that thread.
        updates_elsewhere: those in others.
        models: how many have been optimized.
        has_failed: accel itself failed, and the script goes on without it.
    """

    def __init__(
        self,
        options: dict[str, Any],
        thread: int,
        whole: str,
        earlier: int = 0,
        *,
        from_start: bool = False,
    ) -> None:
        self.updates = self.updates_elsewhere = self.models = 0
        self.has_failed = False
        self.loaders = ScriptLoaders(thread)
        self._options, self._thread, self._whole, self._earlier = options, thread, whole, earlier
        self._registered, self._from_start = RegisteredModules(), from_start
        self._was_launched = ranks.are_launched()
        self._looks = 0
        self._learning = Learners(_AT_ONCE, self._leave)
        self._due: list[OptimizerSteps] = []
        """What they train is known, and is optimized when the next batch is asked for or the model is called."""
        self._uncalled = 0
        """Optimizers that no loader feeds, and that train no module which is called: nothing ends their steps."""
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """Those that have been looked at, and need not be again."""
        self._left: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """Those that were followed in vain, or whose models were let go of; they may step again."""
        self._met = 0
        """Optimizers that were looked at; whether one of them stepped again."""
        self._has_stepped_again = self._has_told_limit = False
        self._is_check_due = self._wants_room = self._has_asked = False
        self._has_stood_back = False
        """A callback in the script followed a training itself."""
        self._optimized: dict[int, ScriptModel] = {}
        self._let_go: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
        """Models that were taken to be trained no more."""
        self._hook: Any = None

    def start(self) -> None:
        """Follow loaders and optimizers from now on."""
        self.loaders.on_new, self.loaders.on_request = self._follow, self._between_steps
        self.loaders.on_later = self._stand_back
        self.loaders.start()
        if self._from_start:
            self._registered.start()
        self._hook = register_optimizer_step_post_hook(self._updated)

    def stop(self) -> None:
        """Restore torch and the script's objects; what has been optimized stays so."""
        self.loaders.stop()
        self._registered.stop()
        if self._hook is not None:
            self._hook.remove()
        self._learning.release()
        for steps in self._due:
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

    def _stand_back(self) -> None:
        """Leave all to a follower that begins later; what steps again after its end is looked at again.

        No step of a loop that another one follows would end a trial, and what is optimized here would be no longer its.
        """
        try:
            for steps in [*self._learning, *self._due]:
                self._leave(steps.optimizer)
                steps.release()
            self._learning.release()
            self._due.clear()
            for key in list(self._optimized):
                self._let_go_of(self._optimized.pop(key))
        except ours() as error:
            self._fail(error)

    @property
    def modules(self) -> list[nn.Module]:
        """The models that are optimized, the first one first."""
        return [model.module for model in self._optimized.values() if model.record is not None]

    def why_nothing(self) -> str:
        """Say why no model was optimized, '' if one was or that was said."""
        if self.models or self.has_failed or self._has_stood_back:
            return ""
        if self.updates_elsewhere:
            return f"{self.updates_elsewhere} updates ran in other threads; train in the thread that runs the script"
        if self._uncalled:
            return (
                "the loop neither takes batches from a DataLoader nor calls a module, so its steps can't be told apart"
            )
        if self._met > 2 and not self._has_stepped_again:
            return f"each of the {self._met} optimizers looked at stepped only once; make one before the loop"
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
        if not self.loaders.is_latest:
            self._has_stood_back = True
            return
        self.updates += 1
        if self.has_failed:
            return
        try:
            if optimizer not in self._known:
                self._newcomer(optimizer)
            elif (steps := self._learning.get(optimizer)) is not None:
                self._stepped(steps)
            if self.updates % _CHECK_EVERY == 0:
                self._learning.let_go_of_idle(self.updates)
                self._is_check_due = True
        except ours() as error:
            self._fail(error)

    def _newcomer(self, optimizer: Optimizer) -> None:
        """Look at an optimizer that is not known, unless that must wait for one of its later steps."""
        if ranks.are_started_by_script(self._was_launched):
            self.has_failed = True
            _say(ranks.STARTED_BY_SCRIPT)
            return
        if self._learning.is_hopeless:
            return
        owners = self._learning.owners(optimizer)
        if owners is None and self._looks >= _LOOKS + self.updates // _UPDATES_EACH:
            return
        if len(self._optimized) >= _AT_ONCE:
            self._want_room(optimizer)
            # Where no loader and no optimized model shows a place between two steps, one that is followed does.
            if not (self._is_check_due and self.updates % GONE_AFTER == 0):
                return
        if optimizer in self._left and not self._learning.has_room_for(optimizer):
            return
        self._known.add(optimizer)
        with startup.counted():
            self._meet(optimizer, owners)

    def _want_room(self, optimizer: Optimizer) -> None:
        """Have models that are trained no more let go of for that of an optimizer; say so, once, if there are none."""
        if self._has_told_limit:
            return
        if self._is_optimized(optimizer):
            self._known.add(optimizer)
        elif self._has_asked and not self._is_check_due:
            self._tell_limit()
        else:
            self._has_asked = self._wants_room = self._is_check_due = True

    def _tell_limit(self) -> None:
        if not self._has_told_limit:
            self._has_told_limit = True
            _say(f"{_AT_ONCE} models are optimized at a time; others are left alone until one of these has ended")

    def _leave(self, optimizer: Optimizer) -> None:
        """Look at an optimizer again if it steps again."""
        self._known.discard(optimizer)
        self._left.add(optimizer)

    def _meet(self, optimizer: Optimizer, owners: list[nn.Module] | None) -> None:
        if self._is_optimized(optimizer):
            return
        self._met += 1
        self._looks += owners is None
        steps = OptimizerSteps(optimizer, self.loaders.delivered, self._called, owners, self._registered.seen)
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
        """Count a step of an optimizer; once what it trains is known, that is due."""
        self._has_stepped_again, steps.updates = True, self.updates
        if not steps.learned(self.loaders.delivered):
            return
        self._learning.take(steps)
        if steps.from_loader or steps.is_called:
            self._due.append(steps)
        else:
            self._uncalled += 1
            steps.release()

    def _called(self) -> None:
        """A module that may be a model is called with gradients: a step has ended, if one has since the last call."""
        if (self._due or self._is_check_due) and is_between_steps() and not is_described():
            self._between_steps()

    def _between_steps(self) -> None:
        """A batch is asked for, or in a loop without a loader a model is called: do what can't be done within hooks."""
        if self._is_check_due and not self.has_failed:
            try:
                self._let_go_of_ended()
            except ours() as error:
                self._fail(error)
        while self._due:
            steps = self._due.pop(0)
            if self.has_failed:
                steps.release()
                continue
            try:
                self._optimize(steps)
            except ours() as error:
                steps.release()
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.has_failed = True
        _say(f"{type(error).__name__}: {error}; the script goes on without accel")

    # -- models --------------------------------------------------------------------------------------------------------

    def _optimize(self, steps: OptimizerSteps) -> None:
        """Optimize what an optimizer trains; its loop is between two steps."""
        models = steps.trained()
        steps.release()
        loader = self.loaders.latest if steps.from_loader else None
        self._wants_room = True
        self._let_go_of_ended()
        for model in models:
            if entry.optimized(model) is not None:
                continue
            if len(self._optimized) >= _AT_ONCE:
                self._tell_limit()
                self._leave(steps.optimizer)
                break
            self._begin(model, loader, steps.optimizer)

    def _begin(self, model: nn.Module, loader: LoaderProxy | None, optimizer: Optimizer) -> None:
        self.models += 1
        report, whole = self._place_of_report(self._earlier + self.models)
        options = {**self._options, "report": report}
        entry.optimize(model, OwnBatches() if loader is None else loader, optimizer, **options)
        optimized = entry.optimized(model)
        if optimized is None:
            return  # ACCEL=0 was set meanwhile
        if report is None:
            optimized.journal.whole = whole
        session = optimized.session
        follow = None if loader is None else optimized.follow
        self._optimized[id(model)] = ScriptModel(model, session, follow, self.updates, id(model) in self._let_go)
        for proxy in self.loaders.proxies:
            self._optimized[id(model)].follow(proxy)
        if loader is None:
            session.events.makes_batches(self._between_steps)
        else:
            session.events.epoch_begins(loader)  # it has, and the session did not hear of it

    def _place_of_report(self, model: int) -> tuple[Path | None, str]:
        """Return where the report of the n-th model goes, and how to see the whole if it goes nowhere."""
        report = self._options["report"]
        if report is None:
            return None, self._whole
        if model <= _REPORTS:
            return numbered(report, model), self._whole
        if model == _REPORTS + 1:
            _say(f"{_REPORTS} models have been optimized; no more reports are written")
        return None, f"reports are written of the first {_REPORTS} models only"

    def _follow(self, proxy: LoaderProxy) -> None:
        """Let all sessions follow a new loader: one for the next epoch, say."""
        for model in self._optimized.values():
            model.follow(proxy)

    def _let_go_of_ended(self) -> None:
        """Let go of models that are trained no more: those of earlier folds, say."""
        # Not all ranks may have freed an optimizer at the same step; and between two epochs there may be none.
        at_once = self._wants_room and not ranks.are_several()
        self._is_check_due = self._wants_room = False
        turn = sum(len(model.optimizers) for model in self._optimized.values())
        ended = [key for key, model in self._optimized.items() if model.has_ended(self.updates, turn, at_once)]
        if not ended:
            return
        self._has_asked = False
        for key in ended:
            self._let_go_of(self._optimized.pop(key))
        gc.collect()  # a session is full of circles, and the memory of its model may be needed for the next one

    def _let_go_of(self, model: ScriptModel) -> None:
        others = [optimizer for other in self._optimized.values() for optimizer in other.optimizers]
        optimizers = [mine for mine in model.optimizers if not any(mine is optimizer for optimizer in others)]
        if model.is_followed:  # else its session has failed, and would again
            for optimizer in optimizers:
                self._leave(optimizer)
        model.undo()
        self._let_go[id(model.module)] = model.module


def _say(line: str) -> None:
    if ranks.leads():
        stderr.write(f"accel: {line}")
