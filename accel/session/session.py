"""The session: one run of the user's loop, as the search, the report and `accel.optimize` see it.

    StepEvents     the loop's events → step boundaries and the clock; below it the model's calls and the updates
    ActionRunner   the search's actions, from boundary to boundary
    Switchboard    which strategies are on

All of accel's work is done while the loop waits for its next batch, so user code is never interrupted. If the session
itself fails, it undoes everything and the loop goes on plainly.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator

from accel.profiler.loop import backward
from accel.profiler.loop.clock import StepClock
from accel.profiler.stderr import warn
from accel.run.context import Run
from accel.run.ranks import Failure
from accel.search.plan import Choices
from accel.session.action_runner import INTERRUPTED, ActionRunner, MakeDecisions
from accel.session.events import StepEvents
from accel.session.state import Mode, RunState
from accel.session.switchboard import Switchboard
from accel.session.turns import TURNS
from accel.strategies.base import Strategy

log = logging.getLogger("accel")


class Session:
    """Drive one run.

    Args:
        run: the user's objects, and where strategies act on them.
        strategies: by name, in registry order.
        decisions: makes the controller's generator; called at the first step boundary, on rank 0 only.
    """

    def __init__(
        self,
        run: Run,
        strategies: dict[str, Strategy],
        decisions: MakeDecisions,
        *,
        clock: Callable[[], float] = time.perf_counter,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.run, self.strategies = run, strategies
        self.name = type(run.model).__name__
        """The class of the model."""
        self.last_turn = 0
        """See `Turns`."""
        self.rank = 0
        self.samples_per_step: float | None = None
        self.failed = ""
        self.clock, self.state = StepClock(clock), RunState()
        self.switchboard = Switchboard(
            run, strategies, suspected=lambda: backward.listen(self.events.updates), tripped=self.state.wake
        )
        self.runner = ActionRunner(self, decisions, say)
        self.runner.events = self.events = StepEvents(run, self.state, self.clock, self.switchboard, self.runner, say)

    def start(self, on_search_end: Callable[[], bool] = lambda: True) -> None:
        """Listen to the loop from now on; as a search ends rank 0 calls `on_search_end`, until that says yes."""
        self.runner.on_search_end = on_search_end
        self.events.start()
        TURNS.join(self)

    @property
    def steps(self) -> int:
        """Steps that have ended."""
        return self.events.steps

    @property
    def active(self) -> Choices:
        """The strategies that are on in this process now."""
        return dict(self.switchboard.active)

    @property
    def searching(self) -> bool:
        """True while trials may switch strategies on or off; the same on all ranks."""
        action = self.events.measured.action
        return self.alive and action is not None and not action.after_search

    @property
    def trying(self) -> bool:
        """True while a candidate is on, or steps are observed, compared or counted by the epoch; alike on all ranks."""
        action = self.events.measured.action
        if action is None or self.state.mode is Mode.RESTING or not self.searching:
            return False
        return not action.base or bool(action.check or action.anatomy or action.whole_epoch)

    @property
    def alive(self) -> bool:
        """False once everything has been undone."""
        return self.state.mode is not Mode.CLOSED

    @property
    def is_busy(self) -> bool:
        """True while `trying`, and while the loop runs plainly: in `suspended`, and once everything has been undone."""
        return self.state.mode is not Mode.RESTING and (self.state.mode is not Mode.MEASURING or self.trying)

    @property
    def was_interrupted(self) -> bool:
        """True where Ctrl-C has ended it between two actions: it may begin anew, as in the next cell of a notebook."""
        return self.failed == INTERRUPTED

    def leave_out_step(self) -> None:
        """Do not count the time of the step that begins: something else is measured in it."""
        self.events.measured.is_left_out = self.state.mode is Mode.MEASURING

    def begin_again(self, *, is_resized: bool = False) -> None:
        """Forget the times of the present action, and end an idle rest; the batch controller may have changed it."""
        measured = self.events.measured
        measured.forget(is_resized=is_resized)
        if measured.action is not None and measured.action.after_search:
            self.state.wake()

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Run the loop plainly inside the block."""
        if self.state.mode is Mode.SUSPENDED:  # it is within such a block
            yield
            return
        active, clock = self.active, self.clock
        with self.state.suspended():
            began = clock.now()
            clock.enter(clock.code)
            self.events.device.mark()
            self.switchboard.switch({})
            try:
                yield
            finally:
                if self.alive:
                    self.switchboard.switch(active)
                self.events.device.mark()
                clock.skip()  # of the step under way what came before still counts
                self.runner.counted_until += clock.now() - began

    def fail(self, failure: Failure) -> None:
        """Undo everything, and say why."""
        self.failed = failure.text
        self.close(together=failure.everywhere)
        if failure.reported:
            log.info("accel stopped and left the loop as it was: %s", failure.text)
        else:
            warn(f"accel stopped and left the loop as it was: {failure.text}", stacklevel=8)

    def close(self, together: bool = True) -> None:
        """Switch everything off, remove all hooks, and end worker processes; the loop goes on plainly.

        Args:
            together: all ranks close at this step; else what must be switched on all of them at once stays on.
        """
        was_alive = self.alive
        self.state.close()
        TURNS.leave(self)
        self.events.close()
        remaining = {} if together else self.switchboard.collective()
        self.switchboard.switch(remaining)
        self.events.observe(False)
        self.events.calls.close()
        self.events.loader.watch(False)
        self.run.gate.close()
        self.switchboard.close(name for name in self.strategies if name not in remaining)
        if was_alive:
            self.runner.leave(f"has left: {self.failed or 'accel was undone there'}")
