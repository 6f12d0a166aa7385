"""A model that a script trains, from when it was optimized until it is let go of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from accel import entry
from accel.dataio.passes.proxy import LoaderProxy
from accel.profiler.loop.observers import leave
from accel.script.optimizer_steps import GONE_AFTER
from accel.session.session import Session

_PATIENCE = 10
"""How many times as many for one that was taken so before, and was trained again: some loops train models by turns."""


class ScriptModel:
    """A model that has been optimized.

    Args:
        module: the model.
        session: counts its steps.
        follow: lets the session follow a loader; None if the loop makes its own batches.
        updates: made in all by now.
        has_returned: it was taken to be trained no more before, and was trained again.
    """

    def __init__(
        self,
        module: nn.Module,
        session: Session,
        follow: Callable[[LoaderProxy], None] | None,
        updates: int,
        has_returned: bool,
    ) -> None:
        self.module, self._follow = module, follow
        self._session, self._steps = session, 0
        self._updates, self._has_returned = updates, has_returned
        """Made in all when it was last seen to be trained."""

    def follow(self, proxy: LoaderProxy) -> None:
        """Let the session follow a loader, if it follows any."""
        if self._follow is not None:
            self._follow(proxy)

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
        patience = _PATIENCE if self._has_returned else 1
        if updates - self._updates >= max(patience * GONE_AFTER, 2 * turn):
            return True
        return at_once and not self._has_returned and bool(self.optimizers) and not len(self.optimizers)

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
        """Let nothing be on that has not been kept, if the search has not ended; see `ScriptTraining.end_trials`."""
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
