"""The session: carries out the controller's actions on the user's loop, step by step.

It listens to the loader (a batch is asked for, a batch is handed over), to the optimizers (a step begins, a step is
done) and to the model's calls (through the gate). From these it knows the step boundaries, measures each step, switches
strategies between two steps, and runs the guard's replays there. All of it happens while the loop waits for its next
batch, so user code is never interrupted.

If the session itself fails, it takes everything back and the loop goes on plainly.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
import time
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from accel.dataio import batches
from accel.dataio.dataset.witness import Witness
from accel.dataio.passes.proxy import Fetching, LoaderProxy
from accel.profiler.phases import StepClock
from accel.run import backward, guard, update_guard
from accel.run import parts as parts_called
from accel.run.blame import Blame
from accel.run.context import Run
from accel.run.gate import Call
from accel.run.guard import Comparison, Recording
from accel.run.listeners import free_fetching
from accel.run.observation import Observation
from accel.run.parts import PartsCalled
from accel.run.ranks import Failure, Ranks
from accel.run.turns import TURNS
from accel.run.watch import Excuse, Watch
from accel.search.actions import Action, Result
from accel.search.controller import Decisions
from accel.search.plan import Choices
from accel.strategies.base import Exactness, NothingHelps, Strategy

log = logging.getLogger("accel")

# What a strategy must touch to make an output or a gradient wrong.
_SUSPECT = {"model", "optimizer"}
# Batches without a step of any of the model's optimizers after which the loop is taken to have none.
_NO_OPTIMIZER_AFTER = 16
# Updates, or training calls, without a batch after which the loop is taken to iterate another loader.
_UNHEARD_UPDATES, _UNHEARD_CALLS = 3, 12
# Batches without a call of the model or a step of its optimizer after which, if something else is seen to train, the
# loop is taken to train another model.
_UNTRAINED_BATCHES = 32
# Steps without a batch of the loader that strategies act on after which the loop is taken to have gone on to another.
_GONE_AFTER = 32
# Steps between two looks at whether another model's search has ended.
_PAUSE = 25


class Session:
    """Drive one run.

    Args:
        run: the user's objects and where to act on them.
        strategies: by name, in registry order.
        decisions: makes the controller's generator, given the ranks; called on the first batch, on rank 0 only.
        clock: seconds, monotonic.
        settled: called on rank 0 when the search is over.
        say: prints one line for the user.
    """

    def __init__(
        self,
        run: Run,
        strategies: dict[str, Strategy],
        decisions: Callable[[], Decisions],
        *,
        clock: Callable[[], float] = time.perf_counter,
        settled: Callable[[], None] = lambda: None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.run = run
        self.strategies = strategies
        self.steps = 0
        self.samples_per_step: float | None = None
        self.failed: str = ""
        self._make_decisions = decisions
        self._on_settled = settled
        self._say = say
        self._settled = False
        self._decisions: Decisions | None = None
        self._ranks: Ranks | None = None
        self._called_at = time.time()
        self._clock = StepClock(clock)
        self._active: Choices = {}
        self._watch = Watch(run.gate, run.device, self._trip)
        self._blame = Blame(run.model, run.device)
        self._excuse = Excuse()
        self._looked = self._leaves_out = False
        self._strangers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._parameters = {id(p) for p in run.model.parameters()}
        self._stepped = False
        self._boundary_ended = 0.0
        self._epoch_is_new = False
        self._batches_without_step = 0
        self._untrained = self._elsewhere = 0
        self._recording: Recording | None = None
        self._sizes: deque[int] = deque(maxlen=64)
        self._usual = 0
        self._resting = 0
        self._observation: Observation | None = None
        self._action: Action | None = None
        self._result = Result()
        self._suspended = False
        self._beside: str = ""
        self._heard = self._told_unheard = self._called = False
        self._parts: PartsCalled | None = None
        self._unheard_updates = self._unheard_calls = 0
        self._delivered: LoaderProxy | None = None
        self._source: LoaderProxy | None = None
        self._steps_without_loader = 0
        self._loaders_met = {id(run.loader)}
        self._moves = 0
        self._hooks = [
            register_optimizer_step_pre_hook(self._optimizer_begins),
            register_optimizer_step_post_hook(self._optimizer_ended),
        ]
        run.gate.watch(self)
        self._witness = run.fetching.witness = Witness(getattr(run.loader, "dataset", None))
        self._watching = True
        TURNS.join(self)

    # -- what the loaders tell (listeners.Follower) --------------------------------------------------------------------

    @property
    def fetching(self) -> Fetching:
        """The fetching that strategies may change."""
        return self.run.fetching

    def epoch_begins(self) -> None:
        """Begin a step: what lies between two epochs belongs to neither."""
        self._heard = True
        self._clock.restart(first=True)
        self._epoch_is_new = True

    def batch_requested(self) -> None:
        """End the step if an optimizer has stepped since the last boundary; the place where everything is switched."""
        if self._suspended or not self._watching:
            return
        if self._epoch_is_new and not self._others_go_on():
            return
        if self._resting:
            self._rest()
            return
        self._clock.request()
        if self._observation is not None:
            self._observation.asked()
        if self._is_boundary():
            self._safely(self._boundary)

    def _others_go_on(self) -> bool:
        """Stop where the other ranks have stopped during the last epoch, which was shorter here; tell if they go on."""
        self._epoch_is_new = False
        if self._ranks is not None:
            self._safely(self._ranks.check)
        return self._watching

    def batch_delivered(self, batch: Any, proxy: LoaderProxy) -> None:
        """Take note of the batch."""
        if not self._suspended and self._watching:
            self._batches_without_step += 1
            self._delivered = proxy
            self._look_whether_untrained()
            if not self._resting:
                self._clock.batch(*batches.describe(batch))
                if self._observation is not None:
                    self._observation.delivered()

    def _look_whether_untrained(self) -> None:
        """Say so if the loop goes through the batches without training this model while something else is trained.

        A loop that trains nothing at all may gather statistics; only the end of the run tells that it did no more.
        """
        # Under no_grad the loop validates; without an optimizer each batch is a step.
        if self._called or self.steps or not self.run.optimizers or not torch.is_grad_enabled():
            return
        self._untrained += 1
        if self._untrained == _UNTRAINED_BATCHES:
            backward.listen(self)
        if self._elsewhere and self._untrained - self._elsewhere == _UNTRAINED_BATCHES - 1:
            self._say(self.untrained)

    def _trained_elsewhere(self) -> None:
        """Something was trained: this model or another one, as its optimizer's next step tells."""
        self._elsewhere = self._elsewhere or self._untrained

    @property
    def untrained(self) -> str:
        """A line for the user if the loop has gone through many batches and never trained the model, else ''."""
        if self._called or self.steps or self._untrained < _UNTRAINED_BATCHES:
            return ""
        return (
            f"{self._untrained} batches were fetched without a training call of {type(self.run.model).__name__} or a "
            "step of its optimizer; pass the model that the loop trains"
        )

    def epoch_ended(self) -> None:
        """Nothing to do: the request that found the epoch's end has closed its last step."""

    def fetching_failed(self, error: Exception) -> None:
        """Take note that worker processes failed; the proxy has gone back to plain fetching and lost nothing."""
        for name in [n for n in self._active if self.strategies[n].touches == {"input"}]:
            self._off(name)
            first_line = next(iter(str(error).splitlines()), "")
            self._result.trips[name] = f"fetching failed: {type(error).__name__}: {first_line}"
        self._wake()

    @property
    def rank(self) -> int:
        """This process's rank, 0 until the ranks have met."""
        return 0 if self._ranks is None else self._ranks.rank

    @property
    def active(self) -> Choices:
        """The strategies that are on in this process now."""
        return dict(self._active)

    @property
    def searching(self) -> bool:
        """True while trials may switch something on or off; the same on all ranks."""
        return self._watching and self._action is not None and not self._action.settled

    @property
    def alive(self) -> bool:
        """False once everything has been taken back."""
        return self._watching

    def _is_boundary(self) -> bool:
        if self._stepped:
            return True
        return not self.run.optimizers and self._batches_without_step >= (
            1 if self._action is not None else _NO_OPTIMIZER_AFTER
        )

    # -- what the optimizers tell --------------------------------------------------------------------------------------

    def _owns(self, optimizer: Optimizer) -> bool:
        for known in self.run.optimizers:  # no any(): it takes 0.5 µs more, twice a step
            if optimizer is known:
                return True
        if self._strangers.get(optimizer) == len(optimizer.param_groups):
            return False  # looked through once: a cross validation leaves many sessions that each optimizer passes by
        mine = any(id(p) in self._parameters for group in optimizer.param_groups for p in group["params"])
        if mine:
            self.run.optimizers.append(optimizer)
        else:
            self._strangers[optimizer] = len(optimizer.param_groups)
        return mine

    def _optimizer_begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._suspended or not self._owns(optimizer):
            return
        if not self._resting:
            self._clock.update()
        if not self._looked:
            self._look_at_gradients(None)
        if self._leaves_out and not self._watch.gradients_are_finite(optimizer):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    def _optimizer_ended(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._suspended:
            return
        if not self._owns(optimizer):
            self._trained_elsewhere()
            return
        if not self._resting:
            self._clock.updated()
        self._stepped = True
        self._source = self._delivered  # a batch that comes before the next step may be one to validate on
        if not self._heard:
            self._unheard_updates += 1
            self._say_unheard(self._unheard_updates, _UNHEARD_UPDATES, "was updated")

    def _say_unheard(self, times: int, limit: int, what: str) -> None:
        if times == limit and not self._told_unheard:
            self._told_unheard = True
            self._say(
                f"{type(self.run.model).__name__} {what} {times} times without a batch from the loader that "
                "accel.optimize returned; iterate that one, or nothing is made faster"
            )

    # -- what the backward pass tells (backward.Listener) --------------------------------------------------------------

    def backward_begins(self) -> None:
        """Take note of what the gradients are before it."""
        self._blame.backward_begins()

    def backward_ended(self, roots: list[Tensor]) -> None:
        """See that the gradients are well."""
        if not self._suspended:
            self._looked = True
            self._trained_elsewhere()
            self._look_at_gradients(roots)

    def _look_at_gradients(self, roots: list[Tensor] | None) -> None:
        """If strategies have made a gradient that is not finite, switch them off, and leave out its update."""
        if not self._blame.calls or not self._suspects() or self._excuse.holds():
            return
        self._blame.seen()
        if all(self._watch.gradients_are_finite(optimizer) for optimizer in self.run.optimizers):
            self._excuse.clear()
            return
        try:
            why = self._blame.verdict(roots, self._repeated)
        except Exception as error:  # what can't be made again proves nothing
            log.debug("accel: a call could not be made again: %s", error)
            why = ""
        if not why:
            self._excuse.grant()
            return
        # Ranks step together: one that leaves out an update alone is no replica any more.
        self._leaves_out = self._ranks is None or not self._ranks.distributed
        self._trip(why + ("; that update was left out" if self._leaves_out else ""))

    def _repeated(self, call: Recording) -> tuple[guard.Replayed, Comparison]:
        """Make a call again, plainly and under the strategies that are on."""
        on, gate, model = dict(self._active), self.run.gate, self.run.model
        exactness = max(self.strategies[name].exactness for name in on)
        with guard.untouched(model, self.run.device), self._without_watch():
            try:
                self._switch({n: s for n, s in on.items() if "model" not in self.strategies[n].touches})
                plain = guard.replay(model, gate.plain, call)
            finally:
                self._switch(on)
            candidate = guard.replay(model, gate.call, call)
        return plain, guard.compare(plain, candidate, exactness)

    # -- what the gate tells (gate.Watcher) ----------------------------------------------------------------------------

    def around(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Measure a call, record it for the guard if asked, and see that its outputs are well."""
        if self._suspended:
            return self.run.gate.plain(*args, **kwargs)
        if not torch.is_grad_enabled():
            return self._watch.call(call, args, kwargs)
        self._called = True
        if self._resting:
            return self._kept(call, args, kwargs)
        if not self._heard:
            self._unheard_calls += 1
            self._say_unheard(self._unheard_calls, _UNHEARD_CALLS, "was called")
        self._clock.call()
        try:
            if self._wants_recording():
                return self._recorded(args, kwargs)
            outputs = self._kept(call, args, kwargs)
            if self.steps < 64 and not self._active:
                self._observe(args, kwargs, outputs)
            return outputs
        finally:
            self._clock.returned()

    def _kept(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call, and keep it until its gradients have been looked at."""
        if not self.run.gate.wrapped or self.run.device.type != "cpu":
            return self._watch.call(call, args, kwargs)
        kept = self._blame.begin(args, kwargs)
        outputs = self._watch.call(call, args, kwargs)
        self._blame.keep(kept, outputs)
        return outputs

    def _observe(self, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
        seen = self.run.observed
        seen.calls += 1
        seen.autocast = seen.autocast or torch.is_autocast_enabled(self.run.device.type)
        seen.conv_input = seen.conv_input or any(
            t.dim() == 4 and t.is_floating_point() for t in batches.tensors((args, kwargs))
        )
        self._watch.learn(outputs)

    def _wants_recording(self) -> bool:
        if self._action is None or not self._action.check or self._recording is not None:
            return False
        new = [name for name in self._action.check if name not in self._active]
        return any("model" in self.strategies[name].touches for name in new or self._action.check)

    def _recorded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a plain call and record it."""
        recording: Recording | None = None
        try:
            recording = guard.record(self.run.model, self.run.device, args, kwargs)
        except Exception as error:  # inputs that can't be copied; what can't be compared is not tried
            self._note_finding(Comparison(f"the call can't be recorded: {type(error).__name__}: {error}"))
        outputs = self.run.gate.plain(*args, **kwargs)
        if recording is not None:
            recording.listen(outputs)
        self._recording = recording  # only now: a call that raised is no reference
        return outputs

    # -- the boundary --------------------------------------------------------------------------------------------------

    def _boundary(self) -> None:
        began = self._clock.last
        other = TURNS.step(self)
        self._follow_loader()
        if self._action is not None:
            self._close_step(other is not None)
        elif other is None:
            self._begin()
        else:
            self._wait_for(other)
        self._forget_step()
        # Work done here is the search's cost, not the step's time.
        now = self._boundary_ended = self._clock.restart()
        self._result.aside_s += now - began

    def _forget_step(self) -> None:
        self._stepped = self._looked = self._leaves_out = False
        self._batches_without_step = 0
        self._blame.forget()

    def _rest(self) -> None:
        """Count a step and measure nothing: 150 of 200 steps of a finished search."""
        if not self._is_boundary():
            return
        TURNS.step(self)
        self._follow_loader()
        self._forget_step()
        self.steps += 1
        self._result.steps += 1
        self._resting -= 1
        self._boundary_ended = self._clock.now()
        if self._resting == 0:
            began = self._clock.last
            self._result.elapsed_s += self._clock.restart() - began

    def _wake(self) -> None:
        """Rest no longer: the controller should hear of something. Ranks end an action together, so they sleep on."""
        if self._resting and not (self._ranks is not None and self._ranks.distributed):
            self._resting = 1

    def _wait_for(self, other: Any) -> None:
        """Count a step of a search that has not begun, because another model's is going on in the same steps."""
        self._clock.close(self.steps)
        self.steps += 1
        if not self._beside:
            self._beside = type(other.run.model).__name__
            mine = type(self.run.model).__name__
            self._say(f"the search for {mine} begins once that for {self._beside}, in the same steps, has ended")

    def _follow_loader(self) -> None:
        """If the loop has gone on to another loader that was passed with this model, let strategies act on that one.

        A loader that is made anew for each epoch or fold is met here; one whose batches are only validated on, or serve
        every other step, is not.
        """
        source = self._source if self.run.optimizers else self._delivered
        if source is None:
            return
        loader = source._accel_loader
        self._steps_without_loader = 0 if loader is self.run.loader else self._steps_without_loader + 1
        if self._steps_without_loader < _GONE_AFTER or id(loader) in self._loaders_met:
            return
        self._loaders_met.add(id(loader))
        self._moves += 1
        for name in [n for n in self._active if self.strategies[n].touches == {"input"}]:
            self._off(name)
            self._result.trips[name] = "the loop went on to another loader"
        for strategy in self.strategies.values():
            if strategy.touches == {"input"}:
                strategy.close(self.run)
        self.run.fetching.witness = None
        self.run.loader, self.run.fetching = loader, free_fetching(source)
        self._witness = Witness(getattr(loader, "dataset", None))
        self.run.observed.fetch_finding = ""
        self._wake()

    def _begin(self) -> None:
        """Meet the other ranks and take the first action; the steps until here only warmed up."""
        backward.forget(self)  # until a strategy is on that could make a gradient wrong
        self._ranks = Ranks()
        self._ranks.join(since=self._called_at)
        self.run.world_size = self._ranks.size
        if self._ranks.leads:
            self._decisions = self._make_decisions()
        if not self._called:
            self._parts = PartsCalled(self.run.model)
        self._next_action(first=True)
        self._result.steps = self.steps  # those that went by while another model was searched for

    def _close_step(self, disturbed: bool) -> None:
        """Book a step; `disturbed` if another model's trials run in the same steps."""
        assert self._action is not None
        measured = self._clock.close(self.steps)
        self.steps += 1
        result, action = self._result, self._action
        result.steps += 1
        result.elapsed_s += measured.seconds
        self._sizes.append(measured.samples)
        if action.check is not None:
            self._check(action.check)
        if measured.first or self._is_odd(measured.samples):
            pass  # the first step of an epoch holds the start of the loader; a smaller last batch is another job
        elif len(result.settling) < action.settle:
            result.settling.append(measured.seconds)
        else:
            result.measurements.append(measured)
        if len(result.measurements) >= action.steps:
            if disturbed and action.settled and action.check is None and not result.trips:
                self._pause()
            else:
                self._finish_action()
        elif action.steps and len(result.settling) == action.settle and not result.measurements:
            self._synchronise()

    def _pause(self) -> None:
        """Leave out what was measured beside another model's trials, and try nothing while they last."""
        result = self._result
        self._result = Result(steps=result.steps, elapsed_s=result.elapsed_s, aside_s=result.aside_s)
        self._resting = _PAUSE

    def _is_odd(self, samples: int) -> bool:
        """Tell whether a step held another number of samples than most."""
        # Ranks must end an action at the same step, and they may differ in which of their batches are odd.
        alone = self._ranks is None or not self._ranks.distributed
        if samples != self._usual or len(self._sizes) < 2:  # counting costs 5 µs: only when it may have changed
            self._usual = Counter(self._sizes).most_common(1)[0][0]
        return alone and samples != self._usual

    def _synchronise(self) -> None:
        """On a device that runs ahead, let a block begin and end with an idle device."""
        if self.run.cuda:
            torch.cuda.synchronize(self.run.device)

    def _finish_action(self) -> None:
        self._synchronise()
        if self._observation is not None:
            self._result.evidence = self._observation.evidence(self._result.measurements)
        self.samples_per_step = statistics.median(self._sizes) if self._sizes else None
        self._result.regime = self._regime()
        self.run.observed.fetch_finding = self._fetch_finding()
        self._note_parts()
        self._next_action()

    def _note_parts(self) -> None:
        """If the loop has not called the model so far, find out what it calls in place of it."""
        if self._parts is not None:
            parts, self._parts = self._parts.close(), None
            if not self._called:
                self.run.observed.uncalled = parts_called.advice(self.run.model, parts)
                self._say(f"{self.run.observed.uncalled}. Until then only its loader and optimizer are looked at")
        elif self._called:
            self.run.observed.uncalled = ""

    def _regime(self) -> Hashable:
        shapes = Counter(m.shape for m in self._result.measurements)
        shape, count = shapes.most_common(1)[0] if shapes else (None, 0)
        settled = shape if count >= 0.8 * sum(shapes.values()) else "varying"
        threads = torch.get_num_threads() if "intraop_threads" not in self._active else self.run.threads
        return (settled, self.run.world_size, threads, self._moves, self._called)

    def _fetch_finding(self) -> str:
        return self.run.observed.fetch_finding or self._witness.finding

    def _next_action(self, first: bool = False) -> None:
        assert self._ranks is not None

        def decision(results: list[Result]) -> Action:
            assert self._decisions is not None
            merged = _merged(results)
            self.run.refused_elsewhere = merged.refusals
            return next(self._decisions) if first else self._decisions.send(merged)

        missed = f"did not come to the end of step {self.steps + first}"
        step_s = self._clock.now() - self._boundary_ended
        action = self._ranks.decide(self._told(), decision, missed, 0.0 if first else step_s)
        self._action, self._result, self._resting = action, Result(), action.rest
        self.run.fetching.witness = self._witness if action.anatomy else None
        self._observe_steps(action.anatomy)
        self._switch_together(action.plan)
        self._quieten(action)
        if action.settled and not self._settled:
            self._settle()

    def _told(self) -> Result:
        """Return what rank 0 wants to know of this rank: all of its own, of others what may stop a strategy."""
        assert self._ranks is not None
        if self._ranks.leads:
            return self._result
        collective = {name: one for name, one in self.strategies.items() if one.collective}
        refusals = {name: why for name, one in collective.items() if (why := _refusal(one, self.run))}
        return Result(trips=self._result.trips, finding=self._result.finding, refusals=refusals)

    def _observe_steps(self, wanted: bool) -> None:
        if self._observation is not None:
            self._observation.close()
        self._observation = Observation(self._clock, self.run) if wanted else None

    def _settle(self) -> None:
        """The search is over: give up what strategies that are off have kept, and say so."""
        self._settled = True
        for name, strategy in self.strategies.items():
            if name not in self._active:
                strategy.close(self.run)
        if self._ranks is not None and self._ranks.leads:
            self._on_settled()

    def _quieten(self, action: Action) -> None:
        """Take the gate out of the way when nothing needs it."""
        needed = action.check is not None or action.anatomy or bool(self._active) or not self._called
        self.run.gate.watch(self if needed else None)

    # -- switching -----------------------------------------------------------------------------------------------------

    def _switch(self, plan: Choices) -> None:
        """Switch strategies off and on until `plan` is what is on; one that fails is dropped and reported."""
        for name in reversed([n for n, s in self._active.items() if n not in plan or plan[n] != s]):
            self._off(name)
        for name, setting in plan.items():
            if name not in self._active and name not in self._result.trips:
                self._on(name, setting)

    def _switch_together(self, plan: Choices) -> None:
        """Switch; what all ranks must switch at the same step goes off again on all if one of them could not."""
        assert self._ranks is not None
        new = [n for n in plan if self.strategies[n].collective and self._active.get(n, self) != plan[n]]
        self._switch(plan)
        if not new:
            return
        mine = {name: self._result.trips.get(name, "") for name in new if name not in self._active}
        missed = f"did not switch {', '.join(new)} on"
        for name, why in self._ranks.decide(mine, _failed_somewhere, missed).items():
            if name in self._active:
                self._off(name)
                self._result.trips[name] = why

    def _on(self, name: str, setting: Any) -> None:
        try:
            self.strategies[name].enable(self.run, setting)
        except Exception as error:
            failed = f"it could not be switched on: {type(error).__name__}: {error}"
            self._result.trips[name] = str(error) if isinstance(error, NothingHelps) else failed
            with contextlib.suppress(Exception):
                self.strategies[name].disable(self.run)
            return
        self._active[name] = setting
        if self.strategies[name].touches & _SUSPECT:
            backward.listen(self)

    def _off(self, name: str) -> None:
        self._active.pop(name, None)
        try:
            self.strategies[name].disable(self.run)
        except Exception as error:
            self._result.trips[name] = f"it could not be switched off: {type(error).__name__}: {error}"

    def _suspects(self) -> list[str]:
        """The strategies that are on and could make an output or a gradient wrong."""
        return [n for n in self._active if self.strategies[n].touches & _SUSPECT]

    def _trip(self, why: str) -> None:
        """Switch off, now, every strategy that acts on the model or its update; the controller hears of it later."""
        suspects = self._suspects()
        newest = suspects[-1:]
        for name in reversed(suspects):
            self._off(name)
        self._wake()
        # The strategy switched on last is the likeliest cause and is named; the others come back with the next action.
        for name in newest:
            self._result.trips[name] = why
        log.warning("accel: %s was switched off: %s", ", ".join(newest), why)

    # -- the guard -----------------------------------------------------------------------------------------------------

    def _check(self, plan: Choices) -> None:
        """Replay the recorded call plainly and under `plan`, and compare; then the optimizers' update likewise."""
        recording, self._recording = self._recording, None
        # A candidate on top of a plan is new only in what it touches itself; the rest was compared when it was new.
        new = [name for name in plan if name not in self._active or self._active[name] != plan[name]] or list(plan)
        touched = set().union(*(self.strategies[name].touches for name in new))
        exactness = max((self.strategies[name].exactness for name in plan), default=Exactness.EXACT)
        before = dict(self._active)
        try:
            if "model" in touched and recording is not None:
                self._note_finding(self._check_model(plan, recording, exactness))
            elif "model" in touched:
                self._note_finding(Comparison(unsure="the model was not called in the steps it looked at"))
            if "optimizer" in touched:
                self._note_finding(self._check_update(plan, exactness))
            if touched <= {"input"}:
                self._switch(plan)  # switching it on compares a batch with a plain fetch; see the strategy
        except Exception as error:
            self._note_finding(Comparison(f"{type(error).__name__}: {error}"))
        finally:
            self._switch(before)

    def _check_model(self, plan: Choices, recording: Recording, exactness: Exactness) -> Comparison:
        gate, model = self.run.gate, self.run.model
        with guard.untouched(model, self.run.device), self._without_watch():
            self._switch({})
            recording.modules.restore()
            plain = guard.replay(model, gate.plain, recording)
            recording.modules.restore()
            self._switch(_acting_on_model(plan, self.strategies))
            candidate = guard.replay(model, gate.call, recording)
            self._switch({})  # before attributes are put back: a strategy undoes its own
        return guard.compare(plain, candidate, exactness)

    @contextlib.contextmanager
    def _without_watch(self) -> Iterator[None]:
        self._suspended = True
        try:
            yield
        finally:
            self._suspended = False

    def _check_update(self, plan: Choices, exactness: Exactness) -> Comparison:
        finding = Comparison()
        with self._without_watch():
            for optimizer in self.run.optimizers:
                self._switch({})
                start = update_guard.start_of(optimizer)
                plain = update_guard.updated(optimizer)
                self._switch(_acting_on_update(plan, self.strategies))
                candidate = update_guard.updated(optimizer)
                finding = finding.merge(update_guard.compare(plain, candidate, start, exactness))
        return finding

    def _note_finding(self, finding: Comparison) -> None:
        self._result.finding = finding if self._result.finding is None else self._result.finding.merge(finding)

    # -- life ----------------------------------------------------------------------------------------------------------

    def _safely(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            failure = self._failure(error)
            self.failed = failure.text
            self._stop(together=failure.everywhere)
            if failure.reported:
                log.info("accel stopped and left the loop as it was: %s", self.failed)
                return
            warnings.warn(f"accel stopped and left the loop as it was: {self.failed}", RuntimeWarning, stacklevel=4)

    def _failure(self, error: Exception) -> Failure:
        if self._ranks is None:
            return Failure(f"{type(error).__name__}: {error}", everywhere=True)
        failure = self._ranks.failure(error)
        return failure._replace(everywhere=False) if self._ranks.distributed and self._joins() else failure

    def _joins(self) -> bool:
        """Tell whether the model is within DDP's join(), where a rank may have ended its steps before the others."""
        config = getattr(self.run.model, "_join_config", None)
        return config is not None and bool(config.enable)

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Run the loop plainly for a while, then go on."""
        before = dict(self._active)
        self._suspended = True
        self._switch({})
        try:
            yield
        finally:
            self._switch(before)
            self._suspended = False
            self._clock.restart()

    def close(self) -> None:
        """Switch everything off, take all hooks out, and end worker processes; the loop goes on plainly.

        With several ranks all of them close at the same step.
        """
        self._stop(together=True)

    def _stop(self, together: bool) -> None:
        """Close; where other ranks don't at this step, leave on what all ranks must switch at the same one."""
        watching, self._watching = self._watching, False
        TURNS.leave(self)
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        kept = {} if together else {n: s for n, s in self._active.items() if self.strategies[n].collective}
        self._switch(kept)
        self._observe_steps(False)
        if self._parts is not None:
            self._parts.close()
        backward.forget(self)
        self._blame.forget()
        self.run.fetching.witness = None
        self.run.gate.close()
        for name, strategy in self.strategies.items():
            if name not in kept:
                with contextlib.suppress(Exception):
                    strategy.close(self.run)
        if watching and self._ranks is not None:
            self._ranks.leave(f"takes no part any more: {self.failed or 'accel was undone there'}")


def _acting_on_model(plan: Choices, strategies: dict[str, Strategy]) -> Choices:
    return {name: setting for name, setting in plan.items() if "model" in strategies[name].touches}


def _acting_on_update(plan: Choices, strategies: dict[str, Strategy]) -> Choices:
    return {name: setting for name, setting in plan.items() if "optimizer" in strategies[name].touches}


def _failed_somewhere(told: list[dict[str, str]]) -> dict[str, str]:
    """Return why, for each strategy that a rank could not switch on, as the first such rank has it."""
    return {name: why for trips in reversed(told) for name, why in trips.items()}


def _refusal(strategy: Strategy, run: Run) -> str:
    try:
        return strategy.refusal(run)
    except Exception as error:
        return f"it failed to look at the run: {type(error).__name__}: {error}"


def _merged(results: list[Result]) -> Result:
    """Merge the ranks' results: rank 0's times, everyone's trips and refusals, the worst finding."""
    merged = results[0]
    for rank, other in enumerate(results[1:], 1):
        merged.refusals.update({name: f"on rank {rank} {why}" for name, why in other.refusals.items()})
        merged.trips.update({name: why for name, why in other.trips.items() if name not in merged.trips})
        if other.finding is not None:
            merged.finding = other.finding if merged.finding is None else merged.finding.merge(other.finding)
    return merged
