"""The guard runner: which checks run at which step.

before a plan runs       one call is recorded in a plain step; at the boundary it is replayed plainly and under the
                         plan, and compared (`guard`); the optimizers' update likewise (`update_guard`)
in each call under it    its outputs are checked (`watch`)
in each step under it    its gradients are checked; if one is not finite, the step's calls are replayed (`blame`)
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from accel.device_memory import give_memory_back
from accel.guard import guard, rounding, update_guard, watch
from accel.guard.blame import Blame
from accel.guard.draws import ReplayedDraws
from accel.guard.faults import may_be_of_strategies
from accel.guard.guard import Comparison, NotRestorable, Recording, Replayed
from accel.guard.snapshot import ModelSnapshot, devices_of
from accel.guard.watch import Excuse, Watch
from accel.guard.written_parameters import WrittenParameters
from accel.profiler.interruptions import Tolerated, ours
from accel.profiler.loop import backward
from accel.profiler.trees import tensors
from accel.run.context import Run
from accel.run.gate import Call
from accel.search.plan import Choices
from accel.session.state import RunState
from accel.session.switchboard import Switchboard
from accel.strategies.base import Exactness

log = logging.getLogger("accel")


class _NotReplayable(Exception):
    """The plain call can't be made again, whatever the candidate does."""


class GuardRunner:
    """Run the checks.

    Args:
        run: the user's objects.
        switchboard: switches between the plain path and a plan, and switches off what proves wrong.
        state: suspended while a call is replayed.
        clock: the session's, by which its budget is counted, too.
    """

    def __init__(
        self, run: Run, switchboard: Switchboard, state: RunState, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._run, self._switchboard, self._state, self._clock = run, switchboard, state, clock
        self._watch = Watch(run.gate, run.device, switchboard.trip)
        self._blame = Blame(run.model, run.observed.note_backward)
        self._excuse = Excuse()
        self._plan: Choices | None = None
        self._recording: Recording | None = None
        self._finding: Comparison | None = None
        self._made_otherwise: set[str] = set()
        """Strategies that have made what they need, such as graphs, for a comparison in another precision alone."""
        self._written: list[Tensor] = []
        """Parameters that the model's own call writes to."""
        self._gradients_checked = False
        self._leaves_out_update = False
        self.steps_alone = True
        """No other rank takes the same steps, so an update may be left out."""

    # -- before a plan runs --------------------------------------------------------------------------------------------

    def expect(self, plan: Choices | None) -> None:
        """Prepare to check this plan at the end of the coming steps; None checks nothing."""
        self._plan = plan
        if plan:
            self._watch.lives_on(self._run.device)

    def take_finding(self) -> Comparison | None:
        """Return the comparison since the last call, and clear it; None if nothing was compared."""
        self._close_made_otherwise()
        finding, self._finding = self._finding, None
        return finding

    def _close_made_otherwise(self) -> None:
        names, self._made_otherwise = self._made_otherwise, set()
        try:
            self._switchboard.close_strategies(names)
        except ours() as error:
            self._note(_failure(error))

    def wants_recording(self) -> bool:
        """Return whether the next call of the model is to be recorded."""
        if not self._plan or self._recording is not None:
            return False
        return "model" in self._switchboard.touched_by(self._switchboard.new_in(self._plan))

    def recorded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a plain call and record it."""
        recording, failure = None, Comparison()
        try:
            written = WrittenParameters(self._run.model)
            recording = guard.record(self._run.model, self._run.device, args, kwargs, self._written)
        except ours() as error:  # inputs that can't be copied; a plan that can't be compared is not tried
            failure = _failure(error, "the call can't be recorded: ")
        if recording is None:
            self._note(failure)
            if failure.unsure:
                give_memory_back()
            return self._run.gate.plain(*args, **kwargs)
        given = tensors((args, kwargs))
        versions, before = watch.versions(given), {tensor.grad_fn for tensor in given} - {None}
        outputs = self._run.gate.plain(*args, **kwargs)
        if watch.versions(given) != versions:
            self._watch.keep_inputs()
        self._watch.learn_changes(recording.before)
        if self._learn_written(written):
            return outputs  # what was in the parameters before is gone: the next call is recorded
        self._listen(recording, outputs, before)
        return outputs

    def _listen(self, recording: Recording, outputs: Any, before: set[Any]) -> None:
        """Take a call that was made as the reference; one that has raised can't be."""
        try:
            self._run.observed.note_outputs(outputs)
            recording.rounding = rounding.rounding_of(self._run.model, recording.autocast, tensors(outputs), before)
            recording.listen(outputs)
        except ours() as error:  # outputs that can't be looked through
            self._note(_failure(error, "the call can't be recorded: "))
        else:
            self._recording = recording

    def _learn_written(self, written: WrittenParameters) -> bool:
        """Learn which parameters a plain call has written to; return whether some were not known."""
        known, new = set(map(id, self._written)), []
        with Tolerated("the parameters could not be looked at"):  # some are gathered for a call, and lie elsewhere now
            new = [parameter for parameter in written.found() if id(parameter) not in known]
        self._written += new
        self._watch.writes_to(new)
        return bool(new)

    def check(self, plan: Choices) -> None:
        """Compare a plan with the plain path, in the objects that it touches."""
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.forget()
        before, began = dict(self._switchboard.active), self._clock()
        findings: list[Comparison] = []
        has_failed = False
        try:
            self._check_touched(plan, recording, findings)
        except ours() as error:
            has_failed = True
            findings.append(_failure(error))
        finally:
            self._switchboard.switch(before)
        recording = None
        if findings:
            finding = reduce(Comparison.beside, findings)
            finding.seconds = self._clock() - began
            self._note(finding)
        if has_failed:
            self._close_made_otherwise()
            if findings[-1].unsure:
                give_memory_back()  # only now: the exception held the frames, and they the tensors

    def _check_touched(self, plan: Choices, recording: Recording | None, findings: list[Comparison]) -> None:
        # A candidate on top of a plan is new only in what it touches itself; the rest was compared when it was new.
        on, new = set(self._switchboard.active), self._switchboard.new_in(plan)
        touched = self._switchboard.touched_by(new)
        exactness = self._switchboard.exactness(plan)
        if "model" in touched and recording is not None:
            compiles = self._compiles(plan)
            is_compiled = compiles or self._run.gate.compiled_by_user
            with rounding.without_tf32(recording.rounding, self._run.device, exactness, compiles=is_compiled) as finer:
                try:
                    findings.append(self._check_model(plan, recording, exactness, compiles=compiles))
                finally:
                    if finer is not None:  # what was made for it, such as graphs, is of no use in real steps
                        self._switchboard.switch({})
                        bound = self._switchboard.further_checks(on.intersection(new))  # graphs are for one precision
                        self._switchboard.close_strategies(bound)
                        self._made_otherwise.update(set(new) - on)  # the next of these steps can use it
        elif "model" in touched:
            findings.append(Comparison(unsure="the model was not called in the recorded steps"))
        if "optimizer" in touched:
            findings.append(self._check_update(plan, exactness))
        if touched <= {"input"}:
            self._switchboard.switch(plan)  # switching it on compares a batch with a plain fetch; see the strategy

    def _check_model(self, plan: Choices, recording: Recording, exactness: Exactness, *, compiles: bool) -> Comparison:
        with self._untouched(recording), self._state.suspended():
            replay = partial(guard.replay, self._run.model)
            try:
                finding, draws = self._compared(plan, recording, replay, exactness, compiles=compiles)
            except _NotReplayable as error:
                return Comparison(unsure=f"the plain call can't be replayed: {error}")
            if finding.unsure:  # what is compared beside this call would hide it
                return finding
            if not finding.problem:
                finding = self._further_checks(finding, plan, recording, exactness)
            if finding.problem or not draws or self._finding is not None:  # once: a plan is checked in two steps
                return finding
            return finding if compiles else finding.merge(self._check_evaluation(plan, recording, exactness))

    def _untouched(self, call: Recording) -> contextlib.AbstractContextManager[None]:
        """Restore, at the end, whatever replays of a call have changed."""
        return guard.untouched(self._run.model, self._run.device, call.args, call.kwargs, written=self._written)

    def _further_checks(
        self, finding: Comparison, plan: Choices, recording: Recording, exactness: Exactness
    ) -> Comparison:
        """Merge into a finding what strategies of the plan compare themselves, such as graphs with eager calls."""
        on_model = self._switchboard.acting_on("model", plan)
        replay = partial(guard.replay, self._run.model)
        for name, check in self._switchboard.further_checks(on_model).items():
            others = {other: setting for other, setting in on_model.items() if other != name}
            without, under = (partial(self._replayed, each, replay=replay) for each in (others, on_model))
            finding = finding.merge(check(without, under, recording, exactness))
        return finding

    def _compiles(self, plan: Choices) -> bool:
        """Tell whether strategies of a plan compile the model's calls; they tell the gate when they are on."""
        before = dict(self._switchboard.active)
        self._switchboard.switch(plan)
        try:
            return self._run.gate.compiles
        finally:
            self._switchboard.switch(before)

    def _replayed(self, plan: Choices, recording: Recording, replay: Callable[..., Replayed]) -> Replayed:
        """Replay the call under a plan."""
        self._switchboard.switch({})
        recording.before.restore()
        try:
            self._switchboard.switch(plan)
            return replay(self._run.gate.call, recording)
        finally:
            self._switchboard.switch({})  # before attributes are restored: a strategy undoes its own changes

    def _check_evaluation(self, plan: Choices, recording: Recording, exactness: Exactness) -> Comparison:
        """Compare the call in evaluation mode; not where it is compiled, which would take as long again."""
        replay = partial(guard.replay_evaluation, self._run.model)
        try:
            finding, _ = self._compared(plan, recording, replay, exactness, compiles=False)
        except torch.OutOfMemoryError:
            raise  # nobody knows then
        except ours() as error:
            log.debug("accel: the call could not be made in evaluation mode: %s", error)
            return Comparison()
        finding.problem = finding.problem and f"in evaluation mode {finding.problem}"
        return finding

    def _compared(
        self,
        plan: Choices,
        recording: Recording,
        replay: Callable[..., Replayed],
        exactness: Exactness,
        *,
        compiles: bool,
    ) -> tuple[Comparison, bool]:
        """Replay the call plainly and under the plan, and compare; return also whether it draws.

        Both replays are freed before others are made.
        """
        canonical = exactness != Exactness.EXACT
        self._switchboard.switch({})
        recording.before.restore()
        try:
            plain = replay(self._run.gate.plain, recording, draws=self._draws(canonical, compiles=compiles))
        except torch.OutOfMemoryError:
            raise
        except ours() as error:
            raise _NotReplayable(f"{type(error).__name__}: {error}") from error
        noting = partial(replay, draws=None if compiles else self._draws(canonical))
        candidate = self._replayed(self._switchboard.acting_on("model", plan), recording, noting)
        if compiles:
            candidate.draws = plain.draws
        return guard.compare(plain, candidate, exactness), bool(plain.draws)

    def _draws(self, canonical: bool, *, compiles: bool = False) -> ReplayedDraws | None:
        """Return what notes the draws of a replay; None where the user has compiled: that runs under no mode.

        Args:
            canonical: draw in canonical order.
            compiles: it is compared with compiled code, which runs under no mode either.
        """
        model = self._run.model  # whose own slot the gate is in
        inner = any(module._compiled_call_impl for module in model.modules() if module is not model)
        wrapped = any(hasattr(module, "_orig_mod") for module in model.modules())
        is_compiled = inner or wrapped or self._run.gate.compiled_by_user
        return None if is_compiled else ReplayedDraws(canonical, with_attention=compiles)

    def _check_update(self, plan: Choices, exactness: Exactness) -> Comparison:
        findings = []
        with self._state.suspended():
            for optimizer in self._switched_by(plan):
                self._switchboard.switch({})
                start = update_guard.start_of(optimizer)
                plain = update_guard.updated(optimizer)
                self._switchboard.switch(self._switchboard.acting_on("optimizer", plan))
                candidate = update_guard.updated(optimizer)
                findings.append(update_guard.compare(plain, candidate, start, exactness))
        none = Comparison(unsure="no optimizer that updates by itself is known")
        return reduce(Comparison.beside, findings or [none])

    def _switched_by(self, plan: Choices) -> list[Optimizer]:
        """Return the optimizers whose options a plan switches; all, if it acts on them in another way.

        The others' update is the same, and a copy of a user's own optimizer shares what it holds beside its state.
        """
        optimizers = list(filter(update_guard.makes_updates, self._run.optimizers))
        self._switchboard.switch({})
        before = [update_guard.options_of(optimizer) for optimizer in optimizers]
        self._switchboard.switch(self._switchboard.acting_on("optimizer", plan))
        now = [update_guard.options_of(optimizer) for optimizer in optimizers]
        pairs = zip(optimizers, before, now, strict=True)
        return [optimizer for optimizer, old, new in pairs if update_guard.differ(old, new)] or optimizers

    def _note(self, finding: Comparison) -> None:
        merged = finding if self._finding is None else self._finding.merge(finding)
        self._finding = replace(merged, seconds=finding.seconds)

    # -- in each call --------------------------------------------------------------------------------------------------

    def evaluate(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call without gradients, and check its outputs."""
        return self._watch.call(call, args, kwargs)

    def call(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call, check its outputs, and keep it until its gradients have been checked."""
        if not self._run.gate.wrapped or self._run.device.type != "cpu" or backward.is_running():
            return self._watch.call(call, args, kwargs)
        kept_call = self._blame.begin(args, kwargs)
        outputs = self._watch.call(call, args, kwargs)
        self._blame.keep(kept_call, outputs)
        return outputs

    def learn(self, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> bool:
        """Learn the usual inputs and outputs of a plain call; return whether it was one, since nothing is on."""
        if self._switchboard.active:
            return False
        with Tolerated("nothing could be noted of a call"):  # arguments that can't be looked through
            self._run.observed.note_call(args, kwargs, self._run.device)
            self._run.observed.note_outputs(outputs)
        self._watch.learn(outputs)
        return True

    # -- in each step --------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Forget what belongs to the step that has ended."""
        self._gradients_checked = self._leaves_out_update = False
        if self._blame.calls:
            self._blame.forget()

    def backward_begins(self) -> None:
        """Record whether gradients are there already."""
        self._blame.backward_begins()

    def backward_ended(self, roots: list[Tensor]) -> None:
        """Check the gradients."""
        self._gradients_checked = True
        if self._blame.calls:
            self._check_gradients(roots)

    def before_update(self, optimizer: Optimizer) -> None:
        """Check the gradients, if no backward pass was seen; leave out an update that strategies have spoiled.

        One within a backward pass changes the weights that the calls were made with: they can't be made again.
        """
        if self._blame.calls and backward.is_running():
            self._blame.forget()
        if not self._gradients_checked and self._blame.calls:
            self._check_gradients(None)
        if self._leaves_out_update and not self._watch.gradients_are_finite(optimizer):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    def _check_gradients(self, roots: list[Tensor] | None) -> None:
        """If strategies have made a gradient that is not finite, switch them off, and leave out its update."""
        if not self._switchboard.suspects() or self._excuse.holds():
            return
        self._blame.gradients_checked()
        if all(self._watch.gradients_are_finite(optimizer) for optimizer in self._run.optimizers):
            self._excuse.clear()
            return
        why = ""
        with Tolerated("a call could not be made again"):  # which proves nothing
            why = self._blame.verdict(roots, self._repeated)
        if not why:
            self._excuse.grant()
            return
        # Ranks step together: a rank that left out an update alone would no longer be a replica.
        self._leaves_out_update = self.steps_alone
        self._switchboard.trip(why + ("; that update was left out" if self._leaves_out_update else ""))

    def _repeated(self, call: Recording) -> tuple[Replayed, Comparison]:
        """Replay a call plainly and under the strategies that are on, and compare."""
        gate, model, switch = self._run.gate, self._run.model, self._switchboard.switch
        active = dict(self._switchboard.active)
        on_model = self._switchboard.acting_on("model", active)
        exactness, compiles = self._switchboard.exactness(active), self._run.gate.compiles
        canonical, given = exactness != Exactness.EXACT, (call.args, call.kwargs)
        with self._untouched(call), self._state.suspended():
            try:
                switch({name: setting for name, setting in active.items() if name not in on_model})
                # The kept call has the random state of the CPU only: the rest is as now in both replays.
                before = ModelSnapshot(model, devices_of(model, self._run.device, *given), given, self._written)
                plain = guard.replay(model, gate.plain, call, draws=self._draws(canonical, compiles=compiles))
                before.restore()
            finally:
                switch(active)
            candidate = guard.replay(model, gate.call, call, draws=None if compiles else self._draws(canonical))
        if compiles:
            candidate.draws = plain.draws
        return plain, guard.compare(plain, candidate, exactness)

    def close(self) -> None:
        """Release the calls that were kept or recorded."""
        self._blame.forget()
        if self._recording is not None:
            self._recording.forget()
            self._recording = None


def _failure(error: Exception, what: str = "") -> Comparison:
    """Return what an error in a check says: of the model's own, or where memory has run out, nothing of the candidate.

    Args:
        error: that was raised.
        what: failed by it.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return Comparison(unsure=f"there is no room to compare: {error}")
    if isinstance(error, NotRestorable):
        return Comparison(unsure=str(error))
    text = f"{what}{type(error).__name__}: {error}"
    return Comparison(text) if may_be_of_strategies(error) else Comparison(unsure=text)
