"""The models that a script trains, from when each is optimized until it is trained no more."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from accel import entry
from accel.dataio.passes.proxy import LoaderProxy
from accel.profiler import stderr
from accel.profiler.loop.observers import leave
from accel.report.report import numbered
from accel.run import ranks
from accel.script.optimizer_steps import parameters_of
from accel.session.session import Session

AT_ONCE = 8
"""Models that are optimized at a time."""
_REPORTS = 32
"""Models of which reports are written: a loop may copy its model for each of a hundred thousand tasks."""
_GONE_AFTER = 200
"""Updates of other models without one of its own, after which a model is taken to be trained no more."""


class OwnBatches:
    """Stands for the batches that a loop makes itself; nobody iterates it."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class ScriptModel:
    """A model that has been optimized.

    Args:
        module: the model.
        session: counts its steps.
        follow: lets the session follow a loader; does nothing if the loop makes its own batches.
        updates: made by all optimizers of the script so far.
    """

    def __init__(
        self, module: nn.Module, session: Session, follow: Callable[[LoaderProxy], None], updates: int
    ) -> None:
        self.module, self.follow = module, follow
        self._session, self._steps = session, 0
        self._updates = updates
        """Made in all when it was last seen to be trained."""

    def has_ended(self, updates: int, turn: int, at_once: bool) -> bool:
        """Return whether it is taken to be trained no more.

        Args:
            updates: made in all.
            turn: how many may be made between two of its own.
            at_once: also if its optimizers are gone.
        """
        before, self._steps = self._steps, self._session.steps
        if self._steps > before:
            self._updates = updates
        are_gone = bool(self.optimizers) and not len(self.optimizers)
        return updates - self._updates >= max(_GONE_AFTER, 2 * turn) or (at_once and are_gone)

    @property
    def is_followed(self) -> bool:
        """Whether its session goes on."""
        return self._session.alive

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """Those that train it, as far as the script still has them; true if it ever had one."""
        return self._session.run.optimizers

    @property
    def record(self) -> Any:
        """What `entry` holds of it; None once it was undone, or optimized anew, by the script itself."""
        record = entry.optimized(self.module)
        return record if record is not None and record.session is self._session else None

    def undo(self) -> None:
        """Restore it; its report is one of a training that has ended."""
        if (record := self.record) is not None:
            record.journal.finish()
            entry.undo(self.module)

    def end_trial(self, together: bool) -> None:
        """Let nothing be on that has not been kept, if the search has not ended; see `ScriptModels.end_trials`."""
        record, session = self.record, self._session
        if record is None or not session.searching:
            return
        for proxy in record.proxies:
            leave(proxy, session.events)  # a pass that goes on would count these steps as ones of the trial
        session.events.rule.needs_requests = True  # so would a loop of another kind
        session.events.observe(False)
        session.events.calls.check.expect(None)
        kept = record.journal.kept
        session.switchboard.switch(kept if together else {**kept, **session.switchboard.collective()})


class ScriptModels:
    """Optimize the models of a script, and let go of those that it trains no more: of earlier folds, say.

    A model that was let go of and is trained again stays: some loops train models by turns.

    Args:
        options: of `accel.optimize`, checked.
        whole: how to see the whole report, where it goes to no file.
        earlier: models that were optimized before these; reports are numbered on from them.

    Attributes:
        count: how many have been optimized.
    """

    def __init__(self, options: dict[str, Any], whole: str, earlier: int) -> None:
        self.count = 0
        self._options, self._whole, self._earlier = options, whole, earlier
        self._models: dict[int, ScriptModel] = {}
        self._returned: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """Those that were let go of, and may be trained again."""
        self._has_told_limit = False

    @property
    def modules(self) -> list[nn.Module]:
        """The models that are optimized, the first one first."""
        return [model.module for model in self._models.values() if model.record is not None]

    def have_room(self, beside: int = 0) -> bool:
        """Return whether one more may be optimized, beside so many that are about to be; say so, once, if not."""
        if len(self._models) + beside < AT_ONCE:
            return True
        if not self._has_told_limit:
            self._has_told_limit = True
            say(f"{AT_ONCE} models are optimized at a time; others are left alone until one of these has ended")
        return False

    def cover(self, optimizer: Optimizer) -> bool:
        """Return whether all that an optimizer trains is optimized, which is found sooner than its modules."""
        optimized = (parameter for model in self.modules for parameter in model.parameters())
        return bool(self._models) and parameters_of(optimizer) <= set(map(id, optimized))

    def begin(
        self,
        model: nn.Module,
        loader: LoaderProxy | None,
        optimizer: Optimizer,
        proxies: Sequence[LoaderProxy],
        updates: int,
        called: Callable[[], None],
    ) -> None:
        """Optimize a model, unless accel was switched off meanwhile.

        Args:
            model: the model.
            loader: feeds it; None if the loop makes its own batches.
            optimizer: trains it.
            proxies: of all loaders of the script.
            updates: made by all optimizers so far.
            called: is called between two steps of a loop that makes its own batches.
        """
        self.count += 1
        report, whole = self._place_of_report(self._earlier + self.count)
        batches = OwnBatches() if loader is None else loader
        entry.optimize(model, batches, optimizer, **{**self._options, "report": report})
        record = entry.optimized(model)
        if record is None:
            return
        if report is None:
            record.journal.place.whole = whole
        follow = (lambda proxy: None) if loader is None else record.follow
        self._models[id(model)] = ScriptModel(model, record.session, follow, updates)
        for proxy in proxies:
            follow(proxy)
        if loader is None:
            record.session.events.makes_batches(called)
        else:
            record.session.events.epoch_begins(loader)  # it has, and the session did not hear of it

    def _place_of_report(self, model: int) -> tuple[Path | None, str]:
        """Return where the report of the n-th model goes, and how to see the whole if it goes nowhere."""
        report = self._options["report"]
        if report is None:
            return None, self._whole
        if model <= _REPORTS:
            return numbered(report, model), self._whole
        if model == _REPORTS + 1:
            say(f"{_REPORTS} models have been optimized; no more reports are written")
        return None, f"reports are written of the first {_REPORTS} models only"

    def follow(self, proxy: LoaderProxy) -> None:
        """Let all sessions follow a new loader: one for the next epoch, say."""
        for model in self._models.values():
            model.follow(proxy)

    def let_go_of_ended(self, updates: int, *, at_once: bool) -> list[Optimizer]:
        """Let go of models that are trained no more.

        Args:
            updates: made by all optimizers so far.
            at_once: also of those whose optimizers are gone, which between two epochs may be so for a while.

        Returns:
            Their optimizers, which may step again.
        """
        # Not all ranks may have freed an optimizer at the same step.
        at_once = at_once and not ranks.are_several()
        turn = sum(len(model.optimizers) for model in self._models.values())
        ended = [
            key
            for key, model in self._models.items()
            if model.module not in self._returned and model.has_ended(updates, turn, at_once)
        ]
        freed = [optimizer for key in ended for optimizer in self._let_go_of(self._models.pop(key))]
        if ended:
            gc.collect()  # a session is full of circles, and the memory of its model may be needed for the next one
        return freed

    def let_go_of_all(self) -> list[Optimizer]:
        """Let go of all models, and return their optimizers."""
        return [optimizer for key in list(self._models) for optimizer in self._let_go_of(self._models.pop(key))]

    def _let_go_of(self, model: ScriptModel) -> list[Optimizer]:
        others = [optimizer for other in self._models.values() for optimizer in other.optimizers]
        # A model whose session has failed would fail again.
        own = list(model.optimizers) if model.is_followed else []
        model.undo()
        self._returned.add(model.module)
        return [mine for mine in own if not any(mine is optimizer for optimizer in others)]

    def end_trials(self, together: bool) -> None:
        """Switch off what is on trial, since no step will end its trial; what has been kept so far stays on.

        Args:
            together: all ranks do so after the same step.
        """
        for model in self._models.values():
            model.end_trial(together)

    def undo(self) -> None:
        """Restore the models, and let go of them."""
        for model in self._models.values():
            model.undo()
        self._models.clear()


def say(line: str) -> None:
    """Print a line to stderr, on the first rank."""
    if ranks.leads():
        stderr.write(f"accel: {line}")
