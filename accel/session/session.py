"""The session: runs the controller's actions on the user's loop, step by step.

    StepEvents    the loop's events → step boundaries and the clock
    Switchboard   which strategies are on
    GuardRunner   which checks run at which step

At each boundary the session records the step that has ended; once an action has all its steps, it sends the result to
the controller and begins the next action, together with the other ranks. All of this happens while the loop waits for
its next batch, so user code is never interrupted.

If the session itself fails, it undoes everything and the loop goes on plainly.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
import time
from collections.abc import Callable, Hashable, Iterator

import torch

from accel.profiler.interruptions import Tolerated, ours
from accel.profiler.loop import backward
from accel.profiler.loop.clock import StepClock
from accel.profiler.phases import Measurement
from accel.profiler.stderr import warn
from accel.run.context import Run
from accel.run.ranks import Ranks
from accel.search.actions import Action, Result
from accel.search.experiment import Decisions
from accel.search.plan import Choices
from accel.session.among_ranks import failure_of, for_rank_0
from accel.session.events import StepEvents
from accel.session.guard_runner import GuardRunner
from accel.session.host_meter import HostMeter
from accel.session.state import Mode, RunState
from accel.session.switchboard import Switchboard
from accel.session.training_loader import TrainingLoader
from accel.session.turns import TURNS, Searcher
from accel.session.usage import Usage
from accel.session.usual import UsualBatch, UsualSteps
from accel.session.whole_epoch import WholeEpoch
from accel.strategies.base import Strategy

log = logging.getLogger("accel")

_MEASURING, _RESTING, _SUSPENDED, _CLOSED = Mode
_PAUSE = 25
"""Steps between two checks whether another model's search has ended."""


class Session:
    """Drive one run.

    Args:
        run: the user's objects, and where strategies act on them.
        strategies: by name, in registry order.
        decisions: makes the controller's generator; called at the first step boundary, on rank 0 only.
        clock: seconds, monotonic.
        say: prints one line for the user.
    """

    def __init__(
        self,
        run: Run,
        strategies: dict[str, Strategy],
        decisions: Callable[[], Decisions],
        *,
        clock: Callable[[], float] = time.perf_counter,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.run = run
        self.strategies = strategies
        self.samples_per_step: float | None = None
        self.failed: str = ""
        self._make_decisions = decisions
        self._say = say
        self._decisions: Decisions | None = None
        self._ranks: Ranks | None = None
        self._called_at = time.time()
        self._clock = StepClock(clock)
        self._state = RunState()
        self._usage = Usage(run, say)
        self._loader = TrainingLoader(run, lambda: self.events.aside())
        self.switchboard = Switchboard(
            run, strategies, suspected=lambda: backward.listen(self.events), tripped=self._wake
        )
        self.guard = GuardRunner(run, self.switchboard, self._state, clock)
        self.events = StepEvents(
            run,
            state=self._state,
            clock=self._clock,
            guard=self.guard,
            usage=self._usage,
            loader=self._loader,
            listener=self,
        )
        self._is_alone = True
        self._action: Action | None = None
        self._result = Result()
        self._is_deciding = False
        """The controller or the ranks are between two actions."""
        self._boundary_ended = 0.0
        # Until when the steps of a rest are counted in the time of the run.
        self._counted_until = 0.0
        self._drained_s = 0.0  # at this boundary
        self._whole_epoch = WholeEpoch()
        self._usual, self._batch = UsualSteps(), UsualBatch()
        self._host = HostMeter(run)
        self._is_left_out = False
        """The present step's time is not that of others."""
        self._waits_for = ""
        self._on_settled: Callable[[], bool] = lambda: True
        self._is_settled = False

    def start(self, settled: Callable[[], bool] = lambda: True) -> None:
        """Listen to the loop from now on; `settled` is called on rank 0 as a search ends, and until it says yes."""
        self._on_settled = settled
        self._loader.watch(True)
        self.events.start()
        TURNS.join(self)

    # -- state, for other modules --------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The class of the model."""
        return type(self.run.model).__name__

    @property
    def steps(self) -> int:
        """Steps that have ended."""
        return self.events.steps

    @property
    def rank(self) -> int:
        """This process's rank, 0 until the ranks have met."""
        return 0 if self._ranks is None else self._ranks.rank

    @property
    def active(self) -> Choices:
        """The strategies that are on in this process now."""
        return dict(self.switchboard.active)

    @property
    def searching(self) -> bool:
        """True while trials may switch strategies on or off; the same on all ranks."""
        return self.alive and self._action is not None and not self._action.settled

    @property
    def trying(self) -> bool:
        """True while a candidate is on, or steps are observed, compared or counted by the epoch; alike on all ranks."""
        return self._state.mode is not _RESTING and self.searching and not self._is_base(self._action)

    @property
    def alive(self) -> bool:
        """False once everything has been undone."""
        return self._state.mode is not _CLOSED

    @property
    def is_busy(self) -> bool:
        """True while `trying`, and while the loop runs plainly: in `suspended`, and once everything has been undone."""
        return self._state.mode is not _RESTING and (self._state.mode is not _MEASURING or self.trying)

    # -- the batch controller, in steps that are not `trying` ----------------------------------------------------------

    def leave_out_step(self) -> None:
        """Do not count the time of the step that begins: something else is measured in it."""
        self._is_left_out = self._state.mode is _MEASURING

    def begin_again(self, growth: float = 1.0) -> None:
        """Forget the times of the present action, and end an idle rest: batches are so many times as large now."""
        self._result.forget_steps()
        self._batch.resize(growth)
        if self._action is not None and self._action.settled:
            self._wake()

    @staticmethod
    def _is_base(action: Action | None) -> bool:
        return action is not None and action.base and not (action.check or action.anatomy or action.whole_epoch)

    # -- called for each step (events.StepListener) --------------------------------------------------------------------

    def epoch_begins(self) -> None:
        """Stop if the other ranks stopped during the last epoch, which was shorter on this rank."""
        if self._state.mode is _RESTING:  # the time between two epochs belongs to neither
            self._result.elapsed_s += max(0.0, self._boundary_ended - self._counted_until)
            self._counted_until = self._clock.last
        if self._ranks is not None:
            try:
                self._ranks.check()
            except ours() as error:
                self._fail(error)

    def step_ended(self) -> None:
        """Record the step, and do the work that is due at the boundary."""
        self._at_boundary(self._boundary)

    def step_passed(self) -> None:
        """Count a step without measuring it: after the search, most steps."""
        TURNS.step(self)
        if not self._loader.is_settled:
            self._follow_loader()
        self.guard.begin_step()
        self.events.steps += 1
        self._result.steps += 1
        self._boundary_ended = self._clock.now()
        if self._state.rested():
            self._result.elapsed_s += self._begin_step() - self._counted_until
            self._loader.watch(self._action is not None and self._action.anatomy)

    def spent_aside(self, seconds: float) -> None:
        """Count it as a cost of the search."""
        self._result.aside_s += seconds

    def epoch_ended(self) -> None:
        """End an action that counts a whole epoch."""
        if self._action is None or not self._action.whole_epoch:
            return
        if not self._result.measurements:
            self.events.drain()  # the next epoch is counted, and begins with an idle GPU
            return
        began, self._drained_s = self._clock.now(), 0.0
        self._at_boundary(self._finish_action)
        self._count_aside(self._clock.now() - began)

    def fetching_failed(self, error: Exception) -> None:
        """Switch off the strategies that act on fetching."""
        first_line = next(iter(str(error).splitlines()), "")
        self.switchboard.drop_fetching(f"fetching failed: {type(error).__name__}: {first_line}")

    @property
    def usual_batch(self) -> tuple[int, Hashable]:
        """Samples of most steps, 0 if unknown, and the shape of most batches."""
        return self._usual.size, self._batch.shape

    # -- the boundary --------------------------------------------------------------------------------------------------

    def _at_boundary(self, work: Callable[[], None]) -> None:
        try:
            work()
        except ours() as error:
            self._fail(error)
        except BaseException:  # Ctrl-C and its like; the loop may go on, as in the next cell of a notebook
            with Tolerated("the action could not begin again"):
                self._recover()
            raise

    def _recover(self) -> None:
        """Begin the action again after an interruption; stop if it came while the controller chose the next one."""
        if self._is_deciding:
            self.failed = "it was interrupted while it decided what to try next"
            self._stop(together=False)
            log.info("accel stopped and left the loop as it was: %s", self.failed)
        elif self._action is not None:
            self.begin_again()
            self.switchboard.switch(self._action.plan)
            self._begin_step()

    def _begin_step(self) -> float:
        """Begin a step that is measured, and return the time."""
        if self.run.cuda and self._action is not None and not self._action.whole_epoch:
            self.events.device.begin()
        return self._clock.restart()

    def _boundary(self) -> None:
        began, self._drained_s = self._clock.last, 0.0
        self.events.device.end(self.steps)
        other = TURNS.step(self)
        self._follow_loader()
        if self._action is not None:
            self._close_step(other is not None)
        elif other is None:
            self._begin()
        else:
            self._wait_for(other)
        self.guard.begin_step()
        now = self._boundary_ended = self._begin_step()
        self._count_aside(now - began)

    def _count_aside(self, seconds: float) -> None:
        """Count the work at a boundary as a cost of the search; waiting for the device's steps is none."""
        self._result.aside_s += seconds - self._drained_s

    def _drain(self) -> None:
        """Let a GPU do what is left of the step that has ended: the host runs ahead of it."""
        seconds = self.events.drain()
        self._drained_s += seconds
        self._result.elapsed_s += seconds
        self._result.lengthen(self.steps - 1, seconds)

    def _follow_loader(self) -> None:
        """Let strategies act on another loader once the loop iterates that."""
        if (successor := self._loader.successor()) is not None:
            self.switchboard.drop_fetching("the loop went on to another loader")
            self.switchboard.close_fetching()
            self._loader.move(successor)
            self._wake()

    def _wake(self) -> None:
        """End the rest early: the controller has news. With several ranks it goes on: they end it together."""
        if self._is_alone:
            self._state.wake()

    def _wait_for(self, other: Searcher) -> None:
        """Count a step while this search waits for another model's, which runs in the same steps."""
        self._clock.close(self.steps)
        self.events.steps += 1
        if not self._waits_for:
            self._waits_for = other.name
            self._say(f"the search for {self.name} begins once that for {other.name}, in the same steps, has ended")

    def _begin(self) -> None:
        """Meet the other ranks and take the first action; the steps before it were warm-up."""
        backward.forget(self.events)  # not needed until a strategy is on that could make a gradient wrong
        self._ranks = Ranks()
        self._ranks.join(since=self._called_at)
        self.run.world_size = self._ranks.size
        self._is_alone = self.guard.steps_alone = self._usual.tells_sizes = not self._ranks.distributed
        if self._ranks.leads:
            self._decisions = self._make_decisions()
        self.events.rule.begun = True
        self._next_action(first=True)
        self._result.steps = self.steps  # includes those in which another model's search came first

    # -- an action's steps ---------------------------------------------------------------------------------------------

    def _close_step(self, disturbed: bool) -> None:
        """Record a step; `disturbed` if another model's trials run in the same steps."""
        assert self._action is not None
        measured = self._clock.close(self.events.steps)
        self.events.steps += 1
        result, action = self._result, self._action
        result.steps += 1
        result.elapsed_s += measured.seconds
        is_left_out, self._is_left_out = self._is_left_out, False
        if not is_left_out:
            self._usual.add(measured)
        if action.whole_epoch:
            repeated, epochs = not self.events.rule.is_fed, self.events.epochs
            if not (repeated and is_left_out) and self._whole_epoch.book(measured, result, epochs, repeated):
                self._finish_action()
            return
        if not is_left_out:
            self._book(measured, action, result)
        if action.check is not None:
            self._drain()
            self.guard.check(action.check)
        if len(result.measurements) >= action.steps:
            if disturbed and action.settled and action.check is None and not self.switchboard.trips:
                self._pause()
            else:
                self._finish_action()

    def _book(self, measured: Measurement, action: Action, result: Result) -> None:
        if self._usual.is_odd(measured):
            return
        if len(result.settling) < action.settle:
            result.settling.append(measured.seconds)
            result.settling_steps.append(measured.step)
        else:
            result.measurements.append(measured)

    def _pause(self) -> None:
        """Discard what was measured during another model's trials, and rest while they last."""
        self._result.forget_steps()
        self.events.device.forget()
        self._rest(_PAUSE)

    def _rest(self, steps: int) -> None:
        self._state.rest(steps)
        self._counted_until = self._clock.now()

    # -- from action to action -----------------------------------------------------------------------------------------

    def _finish_action(self) -> None:
        assert self._action is not None
        if self._action.check is None:
            self._drain()  # a block begins with an idle GPU
        if self.events.observation is not None:
            self._result.evidence = self.events.observation.evidence(self._result.measurements)
        self._result.take_times(self.events.device.seconds())
        self._result.drained = self.run.cuda
        self.samples_per_step = statistics.median(self._usual.sizes) if self._usual.sizes else None
        self._result.regime, self._result.growth = self._regime(), self._batch.take_growth()
        self._result.load = self._host.look(self._action.host)
        self.run.observed.fetch_finding = self._loader.finding
        self._usage.tell_uncalled()
        self._next_action()

    def _regime(self) -> Hashable:
        if self._batch.judge(m.shape for m in self._result.measurements):
            self.run.observed.note_batch(self._batch.shape)
        threads = torch.get_num_threads() if "intraop_threads" not in self.switchboard.active else self.run.threads
        return (self._batch.shape, self.run.world_size, threads, self._loader.moves, self._usage.called)

    def _next_action(self, first: bool = False) -> None:
        assert self._ranks is not None
        self._is_deciding = True

        def decision(results: list[Result]) -> Action:
            assert self._decisions is not None
            merged = Result.merged(results)
            self.run.refused_elsewhere = merged.refusals
            return next(self._decisions) if first else self._decisions.send(merged)

        missed = f"did not come to the end of step {self.steps + first}"
        step_s = self._clock.now() - self._boundary_ended
        self._result.trips, self._result.finding = self.switchboard.take_trips(), self.guard.take_finding()
        own = self._result if self._ranks.leads else for_rank_0(self._result, self.strategies, self.run)
        action = self._ranks.decide(own, decision, missed, 0.0 if first else step_s)
        action = action.on_idle_device() if self.run.cuda else action
        search_ends = action.settled and not (self._action is not None and self._action.settled)
        self._action, self._result, self._whole_epoch = action, Result(), WholeEpoch(self.events.epochs)
        self._rest(action.rest)
        self._loader.watch(action.anatomy and not action.rest)
        self._host.begin(action.host)
        self.events.observe(action.anatomy)
        self.switchboard.switch_together(action.plan, self._ranks)
        self.guard.expect(action.check)
        self._quieten(action)
        if search_ends:
            self.switchboard.close_idle()
        self._is_deciding = False
        if action.settled:
            self._settle(search_ends)

    def _settle(self, search_ends: bool) -> None:
        """A search is over: report it, the first time; where there was nothing to tell yet, ask again."""
        if self._ranks is not None and self._ranks.leads and (search_ends or not self._is_settled):
            self._is_settled = self._on_settled()

    def _quieten(self, action: Action) -> None:
        """Remove the gate from the model's calls when nothing needs it."""
        needed = action.check is not None or action.anatomy or self.switchboard.needs_calls or not self._usage.called
        self.events.watch_calls(bool(needed))

    # -- ending --------------------------------------------------------------------------------------------------------

    def _fail(self, error: Exception) -> None:
        failure = failure_of(error, self._ranks, self.run.model)
        self.failed = failure.text
        self._stop(together=failure.everywhere)
        if failure.reported:
            log.info("accel stopped and left the loop as it was: %s", failure.text)
            return
        warn(f"accel stopped and left the loop as it was: {failure.text}", stacklevel=8)

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Run the loop plainly inside the block."""
        if self._state.mode is _SUSPENDED:  # it is within such a block
            yield
            return
        active, clock = self.active, self._clock
        with self._state.suspended():
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
                self._counted_until += clock.now() - began

    def close(self) -> None:
        """Switch everything off, remove all hooks, and end worker processes; the loop goes on plainly.

        With several ranks all of them close at the same step.
        """
        self._stop(together=True)

    def _stop(self, together: bool) -> None:
        """Close; unless all ranks do at this step, leave on what must be switched on all ranks together."""
        was_alive = self.alive
        self._state.close()
        TURNS.leave(self)
        self.events.close()
        remaining = {} if together else self.switchboard.collective()
        self.switchboard.switch(remaining)
        self.events.observe(False)
        self.guard.close()
        self._loader.watch(False)
        self.run.gate.close()
        self.switchboard.close(remaining)
        if was_alive and self._ranks is not None:
            self._ranks.leave(f"has left: {self.failed or 'accel was undone there'}")
