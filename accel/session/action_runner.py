"""The search's actions, run on the steps of the user's loop.

    the loop's step ──▶ boundary: it is recorded ──▶ was it the action's last one? ── no ──▶ the loop's next step
           ▲                                                     │ yes
           │                                                     ▼
           └── strategies switched, rest begun ◀── next action, on all ranks ◀── rank 0: the result, to the controller

At a boundary the loop is asking for its next batch. A search waits, and a finished plan rests, while another model's
search has its steps in the same loop.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from accel.profiler.interruptions import Tolerated, ours
from accel.profiler.loop import backward
from accel.run.context import Run
from accel.run.host_load import HostMeter
from accel.run.ranks import Failure, Ranks, refuse_unlike
from accel.search.actions import Action, Decisions, Result, must_be_alike
from accel.session.state import Mode
from accel.session.turns import TURNS
from accel.strategies.base import asked, designed, why_not

if TYPE_CHECKING:
    from accel.session.events import StepEvents
    from accel.session.session import Session
    from accel.session.switchboard import Switchboard

MakeDecisions = Callable[[], Decisions]

log = logging.getLogger("accel")

_PAUSE = 25
"""Steps between two checks whether another model's search has ended."""


INTERRUPTED = "it was interrupted while it decided what to try next"


class ActionRunner:
    """Run actions, and send their results.

    Args:
        decisions: makes the controller's generator; called at the first step boundary, on rank 0 only.
    """

    def __init__(self, session: Session, decisions: MakeDecisions, say: Callable[[str], None]) -> None:
        self._session, self._run, self._state = session, session.run, session.state
        self.events: StepEvents
        """The session's, which come after this."""
        self._clock, self._say = session.clock, say
        self.make_decisions = decisions
        self.on_search_end: Callable[[], bool] = lambda: True
        """Called on rank 0 as a search ends, and until it says yes."""
        self.counted_until = 0.0
        """Until when the steps of a rest are counted in the time of the run."""
        self._decisions: Decisions | None = None
        self._ranks: Ranks | None = None
        self._called_at = time.time()
        self._is_deciding = False
        """The controller or the ranks are between two actions."""
        self._boundary_ended = self._drained_s = 0.0
        """When the last boundary ended, and how long a GPU was waited for at this one."""
        self._host = HostMeter(session.run)
        self._waits_for = ""
        self._end_is_told = False

    def epoch_begins(self) -> None:
        """Stop if the other ranks stopped during the last epoch, which was shorter on this rank."""
        if self._state.mode is Mode.RESTING:  # the time between two epochs belongs to neither
            elapsed_s = max(0.0, self._boundary_ended - self.counted_until)
            self.events.measured.result.elapsed_s += elapsed_s
            self.counted_until = self._clock.last
        if self._ranks is not None:
            try:
                self._ranks.check()
            except ours() as error:
                self._session.fail(self._ranks.failure(error, self._run.model))

    def step_ended(self) -> None:
        """Record the step, and do the work that is due at the boundary."""
        self._at_boundary(self._boundary)

    def step_passed(self) -> None:
        """Count a step without measuring it: after the search, most steps."""
        events = self.events
        result = events.measured.result
        TURNS.step(self._session)
        if not events.loader.is_settled:
            events.loader.follow(self._session.switchboard)
        events.calls.watch.begin_step()
        events.steps += 1
        result.steps += 1
        self._boundary_ended = self._clock.now()
        if self._state.rested():
            result.elapsed_s += self._begin_step() - self.counted_until
            events.loader.watch(events.measured.action is not None and events.measured.action.anatomy)

    def epoch_ended(self) -> None:
        """End an action that counts a whole epoch."""
        measured = self.events.measured
        if measured.action is None or not measured.action.whole_epoch:
            return
        if not measured.result.measurements:
            self.events.drain()  # the next epoch is counted, and begins with an idle GPU
            return
        began, self._drained_s = self._clock.now(), 0.0
        self._at_boundary(self._finish_action)
        measured.result.aside_s += self._clock.now() - began - self._drained_s

    def _at_boundary(self, work: Callable[[], None]) -> None:
        try:
            work()
        except ours() as error:
            ranks = self._ranks
            alone = Failure(f"{type(error).__name__}: {error}", everywhere=True)
            self._session.fail(alone if ranks is None else ranks.failure(error, self._run.model))
        except BaseException:  # Ctrl-C and its like; the loop may go on, as in the next cell of a notebook
            with Tolerated("the action could not begin again"):
                self._recover()
            raise

    def _recover(self) -> None:
        """Begin the action again after an interruption; stop if it came while the controller chose the next one."""
        session, action = self._session, self.events.measured.action
        if self._is_deciding:
            session.failed = INTERRUPTED
            session.close(together=False)
            log.info("accel stopped and left the loop as it was: %s", session.failed)
        elif action is not None:
            session.begin_again()
            session.switchboard.switch(action.plan)
            self._begin_step()

    def _begin_step(self) -> float:
        events = self.events
        if self._run.cuda and events.measured.action is not None and not events.measured.action.whole_epoch:
            events.device.begin()
        return self._clock.restart()

    def _boundary(self) -> None:
        events = self.events
        began, self._drained_s = self._clock.last, 0.0
        events.device.end(events.steps)
        other = TURNS.step(self._session)
        events.loader.follow(self._session.switchboard)
        if events.measured.action is not None:
            self._close_step(other is not None)
        elif other is None:
            self._begin()
        else:
            self._clock.close(events.steps)
            events.steps += 1
            if not self._waits_for:
                self._waits_for, name = other.name, self._session.name
                self._say(f"the search for {name} begins once that for {other.name}, in the same steps, has ended")
        events.calls.watch.begin_step()
        now = self._boundary_ended = self._begin_step()
        # A cost of the search; waiting for the device's steps is none.
        events.measured.result.aside_s += now - began - self._drained_s

    def _begin(self) -> None:
        """Meet the other ranks and take the first action; the steps before it were warm-up."""
        session, events = self._session, self.events
        backward.forget(events.updates)  # not needed until a strategy is on that could make a gradient wrong
        self._ranks = ranks = Ranks()
        ranks.join(since=self._called_at)
        session.rank, self._run.world_size = ranks.rank, ranks.size
        self._state.is_alone = events.calls.watch.steps_alone = (
            events.measured.usual.tells_sizes
        ) = not ranks.distributed
        if ranks.leads:
            self._decisions = self.make_decisions()
        events.rule.begun = True
        self._next_action(first=True)
        events.measured.result.steps = events.steps  # includes those in which another model's search came first

    def _close_step(self, disturbed: bool) -> None:
        """Record a step; `disturbed` if another model's trials run in the same steps."""
        events, switchboard = self.events, self._session.switchboard
        action = events.measured.action
        assert action is not None
        step = self._clock.close(events.steps)
        events.steps += 1
        moves = events.loader.moves
        has_ended = events.measured.add(step, events.epochs, moves, are_repeated=not events.rule.is_fed)
        if action.check is not None:
            assert self._ranks is not None
            self._drain()
            with self._ranks.at_work():  # a candidate may compile in its replay, on one rank for longer than on others
                missed = f"did not come to the comparison after step {events.steps}"
                events.calls.check.check(action.check, partial(self._ranks.decide, missed=missed))
        if not has_ended:
            return
        if disturbed and action.after_search and action.check is None and not switchboard.trips:
            # What was measured during another model's trials says nothing; rest while they last.
            events.measured.result.forget_steps()
            events.device.forget()
            self._state.rest(_PAUSE)
            self.counted_until = self._clock.now()
        else:
            self._finish_action()

    def _drain(self) -> None:
        """Let a GPU do what is left of the step that has ended: the host runs ahead of it."""
        events = self.events
        seconds = events.drain()
        self._drained_s += seconds
        events.measured.result.elapsed_s += seconds
        events.measured.result.lengthen(events.steps - 1, seconds)

    def _finish_action(self) -> None:
        run, events, measured = self._run, self.events, self.events.measured
        action, result = measured.action, measured.result
        assert action is not None
        if action.check is None:
            self._drain()  # a block begins with an idle GPU
        if events.observation is not None:
            result.evidence = events.observation.evidence(result.measurements)
        result.take_times(events.device.seconds())
        result.drained = run.cuda
        sizes = measured.usual.sizes
        self._session.samples_per_step = statistics.median(sizes) if sizes else None
        if measured.batch.judge(step.shape for step in result.measurements):
            run.observed.note_batch(measured.batch.shape)
        threads = torch.get_num_threads() if "intraop_threads" not in self._session.active else run.threads
        result.regime = (measured.batch.shape, run.world_size, threads, events.loader.moves, events.usage.called)
        result.has_new_batch = measured.batch.has_followed()
        result.load = self._host.look(action.host)
        run.observed.fetch_finding = events.loader.finding
        events.usage.tell_uncalled()
        self._next_action()

    def _next_action(self, first: bool = False) -> None:
        """Let rank 0 choose the next action, and begin it."""
        assert self._ranks is not None
        ranks, session, events = self._ranks, self._session, self.events
        switchboard, before, result = session.switchboard, events.measured.action, events.measured.result
        self._is_deciding = True

        def decision(results: list[Result]) -> Action:
            assert self._decisions is not None
            refuse_unlike([each.alike for each in results])
            merged = Result.merged(results)
            self._run.refused_elsewhere, self._run.waits_elsewhere = merged.refusals, merged.waits
            chosen = next(self._decisions) if first else self._decisions.send(merged)
            begun = (name for name in self._run.preparing if not why_not(session.strategies[name], self._run))
            return replace(chosen, preparing=frozenset(begun))

        missed = f"did not come to the end of step {events.steps + first}"
        step_s = self._clock.now() - self._boundary_ended
        result.trips, result.finding = switchboard.take_trips(), events.calls.check.take_finding()
        result.alike = must_be_alike(self._run.model) if first and ranks.distributed else ()
        own = result if ranks.leads else _for_rank_0(result, switchboard, self._run, before)
        action = ranks.decide(own, decision, missed, 0.0 if first else step_s)
        action = action.on_idle_device() if self._run.cuda else action
        search_ends = action.after_search and not (before is not None and before.after_search)
        events.measured.begin(action, events.epochs, events.loader.moves)
        self._state.rest(action.rest)
        self.counted_until = self._clock.now()
        events.loader.watch(action.anatomy and not action.rest)
        self._host.begin(action.host)
        events.observe(action.anatomy)
        switchboard.switch_together(action.plan, ranks)
        events.calls.begin(action)
        if search_ends:
            switchboard.close(switchboard.idle())
        self._is_deciding = False
        if action.after_search and ranks.leads and (search_ends or not self._end_is_told):
            self._end_is_told = self.on_search_end()

    def leave(self, why: str) -> None:
        """Announce to the other ranks that this one has left."""
        if self._ranks is not None:
            self._ranks.leave(why)


def _for_rank_0(own: Result, switchboard: Switchboard, run: Run, before: Action | None) -> Result:
    """Return what rank 0 needs of another rank's result: what may stop a strategy, or what it waits for.

    This rank prepares what rank 0 was preparing as the last action began.
    """
    off = {name: each for name, each in switchboard.strategies.items() if name not in switchboard.active}
    refusals = {name: why for name, each in off.items() if (why := asked(partial(each.refusal, run)))}
    begun = set() if before is None else (before.preparing & off.keys()) - refusals.keys()
    waits = {name: asked(designed(off[name], run).waits) for name in begun}
    sent: dict[str, Any] = {"trips": own.trips, "finding": own.finding, "alike": own.alike, "load": own.load}
    return Result(refusals=refusals, waits=waits, **sent)
