"""What the script trains, handed to `accel.optimize` as soon as it is known.

    first step of an optimizer    the modules that own its parameters are marked
    the next ones                 which of them are called, and whether batches come from a loader
    then                          optimize(model, loader, optimizer), in the middle of the epoch

Everything is decided by counting steps, so the ranks of a launch do the same at the same step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from threading import get_ident
from typing import Any

from torch.optim.optimizer import Optimizer

from accel import entry, startup
from accel.optimized import MODELS
from accel.profiler.interruptions import ours
from accel.profiler.loop.steps import is_between_steps, is_described
from accel.profiler.loop.update_hooks import UPDATES
from accel.run import ranks
from accel.script.loaders import ScriptLoaders
from accel.script.models import AT_ONCE, ScriptModels, say
from accel.script.optimizer_steps import OptimizerSteps

_LOOKS, _UPDATES_EACH = 16, 1000
"""Looks at what an optimizer trains that may be taken at first, and updates after which one more may.

To find its modules, those that were built in the run are gone through, and if they are not among these all objects of
the process: 20 ms, or seconds beside a dataset of many small ones. To begin the search for a model takes as long.
Federated training and population loops copy a model for each of thousands of clients, which take a few steps each.
Counted and not timed, so that all ranks look alike."""
_CHECK_EVERY = 50
"""Updates between two looks for what is trained no more."""


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
        models: that have been optimized.
        has_failed: accel itself failed, and the script goes on without it.
    """

    def __init__(self, options: dict[str, Any], thread: int, whole: str, earlier: int = 0) -> None:
        self.updates = self.updates_elsewhere = 0
        self.has_failed = False
        self.loaders = ScriptLoaders(thread)
        self.models = ScriptModels(options, whole, earlier)
        self._thread = thread
        self._was_launched = ranks.are_launched()
        self._learning: dict[int, OptimizerSteps] = {}
        """Optimizers that have stepped, by id, until what they train is known. They are held, so they are few."""
        self._due: list[OptimizerSteps] = []
        """What they train is known, and is optimized when the next batch is asked for or the model is called."""
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """Optimizers that need not be looked at."""
        self._waiting: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """Those that are looked at once a model has ended."""
        self._looks = 0
        self._uncalled = False
        """An optimizer is fed by no loader and trains no module that is called: nothing ends its steps."""
        self._has_stepped_again = self._is_check_due = False
        self._has_stood_back = False
        """A callback in the script followed a training itself."""
        self._forget_updates: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Follow loaders and optimizers from now on."""
        self.loaders.on_new, self.loaders.on_request = self.models.follow, self._between_steps
        self.loaders.on_later = self._stand_back
        self.loaders.start()
        self._forget_updates = UPDATES.add(after=self._updated)

    def stop(self) -> None:
        """Restore torch and the script's objects; what has been optimized stays so."""
        self.loaders.stop()
        self._forget_updates()
        self._release()

    def _release(self) -> list[Optimizer]:
        """Restore the modules whose optimizers are followed, and return these."""
        followed = [*self._learning.values(), *self._due]
        for steps in followed:
            steps.release()
        self._learning.clear()
        self._due.clear()
        return [steps.optimizer for steps in followed]

    def _stand_back(self) -> None:
        """Leave all to a follower that begins later; what steps again after its end is looked at again.

        No step of a loop that another one follows would end a trial, and what is optimized here would be no longer its.
        """
        try:
            self._known.difference_update([*self._release(), *self.models.let_go_of_all()])
        except ours() as error:
            self._fail(error)

    def why_nothing(self) -> str:
        """Say why no model was optimized, '' if one was or that was said."""
        if self.models.count or self.has_failed or self._has_stood_back or MODELS:  # by the script's own call
            return ""
        if self.updates_elsewhere:
            return f"{self.updates_elsewhere} updates ran in other threads; train in the thread that runs the script"
        if self._uncalled:
            return (
                "the loop neither takes batches from a DataLoader nor calls a module, so its steps can't be told apart"
                "; let it call the module itself"
            )
        if self._looks > 2 and not self._has_stepped_again:
            return f"each of the {self._looks} optimizers looked at stepped only once; make one before the loop"
        if self.updates:
            few = f"the optimizer steps seen were too few ({self.updates}), or of parameters that belong to no module"
            return f"{few}; it takes some steps of a torch.nn.Module"
        none = f"no step of a torch optimizer was seen ({self.loaders.delivered} batches from a DataLoader)"
        return f"{none}; a loop without one calls accel.optimize(model, loader) itself"

    # -- updates -------------------------------------------------------------------------------------------------------

    def _updated(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if get_ident() != self._thread:
            self.updates_elsewhere += 1
            return
        if not self.loaders.is_latest:
            self._has_stood_back = True
            return
        self.updates += 1
        if self.has_failed:
            return
        self._is_check_due = self._is_check_due or self.updates % _CHECK_EVERY == 0
        try:
            if (steps := self._learning.get(id(optimizer))) is not None:
                self._stepped(steps)
            elif optimizer not in self._known and self._looks < _LOOKS + self.updates // _UPDATES_EACH:
                with startup.counted():
                    self._look_at(optimizer)
        except ours() as error:
            self._fail(error)

    def _look_at(self, optimizer: Optimizer) -> None:
        """Begin to learn what a new optimizer trains."""
        if ranks.are_started_by_script(self._was_launched):
            self.has_failed = True
            say(ranks.STARTED_BY_SCRIPT)
            return
        self._known.add(optimizer)
        if self.models.cover(optimizer):
            return
        if not self.models.have_room():
            self._waiting.add(optimizer)
            return
        self._looks += 1
        steps = OptimizerSteps(optimizer, self.loaders.delivered, self._called)
        if any(entry.optimized(root) for root in steps.roots) or not steps.roots:
            steps.release()  # its model's session meets it too; parameters of no module are nobody's
            return
        # A loop may make an optimizer, or copy its model, for each step: they must not all stay in memory. Two that
        # train the same parameters may: one that is made anew for each task, and that of the loop around the tasks.
        for earlier in _of_the_same(steps, self._learning.values())[:-1]:
            self._give_up(earlier)
        self._learning[id(optimizer)] = steps
        while len({frozenset(map(id, each.roots)) for each in self._learning.values()}) > AT_ONCE:
            self.models.have_room(AT_ONCE)
            self._give_up(next(iter(self._learning.values())))

    def _stepped(self, steps: OptimizerSteps) -> None:
        """Count a step of an optimizer; once what it trains is known, that is due."""
        self._has_stepped_again = True
        if not steps.learned(self.loaders.delivered):
            return
        del self._learning[id(steps.optimizer)]
        for other in _of_the_same(steps, self._learning.values()):
            self._give_up(other)
        if steps.from_loader or steps.is_called:
            self._due.append(steps)
        else:
            self._uncalled = True
            steps.release()

    def _give_up(self, steps: OptimizerSteps) -> None:
        """Follow an optimizer no more until a model has ended."""
        del self._learning[id(steps.optimizer)]
        steps.release()
        self._waiting.add(steps.optimizer)

    def _called(self) -> None:
        """A module that may be a model is called with gradients: a step has ended, if one has since the last call."""
        if (self._due or self._is_check_due) and is_between_steps() and not is_described():
            self._between_steps()

    def _between_steps(self) -> None:
        """A batch is asked for, or in a loop without a loader a model is called: do what can't be done within hooks."""
        if self.has_failed:
            self._release()
            return
        try:
            if self._is_check_due:
                self._let_go_of_ended(at_once=bool(self._waiting))
            while self._due:
                self._optimize(self._due[0])
        except ours() as error:
            self._release()
            self._fail(error)

    def _let_go_of_ended(self, at_once: bool) -> None:
        self._is_check_due = False
        if freed := self.models.let_go_of_ended(self.updates, at_once=at_once):
            self._known.difference_update([*freed, *self._waiting])
            self._waiting.clear()

    def _fail(self, error: Exception) -> None:
        self.has_failed = True
        say(f"{type(error).__name__}: {error}; the script goes on without accel")

    def _optimize(self, steps: OptimizerSteps) -> None:
        """Optimize what an optimizer trains; its loop is between two steps."""
        models = steps.trained()
        steps.release()
        self._due.remove(steps)
        self._let_go_of_ended(at_once=True)
        for model in models:
            if entry.optimized(model) is not None:
                continue
            if not self.models.have_room():
                self._waiting.add(steps.optimizer)
                break
            loader = self.loaders.latest if steps.from_loader else None
            self.models.begin(model, loader, steps.optimizer, self.loaders.proxies, self.updates, self._between_steps)


def _of_the_same(steps: OptimizerSteps, others: Iterable[OptimizerSteps]) -> list[OptimizerSteps]:
    """Return those of the others that train some of the same parameters, the latest last."""
    return [other for other in others if not other.parameters.isdisjoint(steps.parameters)]
