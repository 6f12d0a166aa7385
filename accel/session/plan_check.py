"""Which plan is compared with the plain path, and when.

One call is recorded in a plain step. At the boundary after it the call is replayed plainly and under the plan, and
compared; the optimizers' update likewise.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import torch

from accel.device_memory import give_memory_back, has_room
from accel.exactness import Exactness
from accel.guard import guard, rounding
from accel.guard.faults import may_be_of_strategies
from accel.guard.guard import Comparison, NotReplayable, NotRestorable, Recording
from accel.guard.snapshot import sums_of_bits
from accel.profiler.interruptions import ours
from accel.profiler.trees import tensors
from accel.search.plan import Choices
from accel.session import replays
from accel.session.replays import Ask, Replays
from accel.session.step_watch import StepWatch

log = logging.getLogger("accel")

_BACKWARD = 3
"""Of what its outputs take, what a backward pass may need at its begin, with a copy of their gradients."""
_NOT_CALLED = "the model was not called in the recorded steps"
_WRITES = "the model's call writes to its own parameters, which a call made again to compare would write to once more"


class PlanCheck:
    """Compare plans with the plain path.

    Args:
        watch: learns from recorded calls what they change.
        clock: the session's, by which its budget is counted, too.
    """

    def __init__(self, made: Replays, watch: StepWatch, clock: Callable[[], float]) -> None:
        self._replays, self._run, self._switchboard = made, made.run, made.switchboard
        self._watch, self._clock = watch, clock
        self._plan: Choices | None = None
        self._recording: Recording | None = None
        self._finding: Comparison | None = None
        self._made_otherwise: set[str] = set()
        """Strategies that have made what they need, such as graphs, for a comparison in another precision alone."""

    def expect(self, plan: Choices | None) -> None:
        """Prepare to check this plan at the end of the coming steps; None checks nothing."""
        self._plan = plan
        if plan:
            self._watch.calls.lives_on(self._run.device)

    def take_finding(self) -> Comparison | None:
        """Return the comparison since the last call, and clear it; None if nothing was compared."""
        self._close_made_otherwise()
        finding, self._finding = self._finding, None
        return finding

    def _close_made_otherwise(self) -> None:
        names, self._made_otherwise = self._made_otherwise, set()
        self._switchboard.close(names)

    def wants_recording(self) -> bool:
        """Return whether the next call of the model is to be recorded."""
        if not self._plan or self._recording is not None:
            return False
        return replays.touch_model(self._replays, self._plan) and replays.may_be_recorded(self._run.model)

    def recorded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a plain call and record it."""
        recording, failure = None, Comparison()
        try:
            parameters = list(self._run.model.parameters())
            sums = sums_of_bits(parameters)
            recording = guard.record(self._run.model, self._run.device, args, kwargs)
        except ours() as error:  # inputs that can't be copied; a plan that can't be compared is not tried
            failure = _failure(error, "the call can't be recorded: ")
        if recording is None:
            self._note(failure)
            if failure.unsure:
                give_memory_back()
            return self._run.gate.plain(*args, **kwargs)
        before = {tensor.grad_fn for tensor in tensors((args, kwargs))} - {None}
        outputs = self._run.gate.plain(*args, **kwargs)
        self._watch.calls.learn_changes(recording.before)
        try:
            if sums_of_bits(parameters) != sums:
                self._note(Comparison(unsure=_WRITES))
            else:
                self._listen(recording, outputs, before)
        except ours() as error:  # outputs that can't be looked through
            self._note(_failure(error, "the call can't be recorded: "))
        return outputs

    def _listen(self, recording: Recording, outputs: Any, before: set[Any]) -> None:
        """Take a call that was made as the reference, if there is room for a copy of the gradients of its outputs."""
        self._run.observed.note_outputs(outputs)
        copies = sum(tensor.nbytes for tensor in tensors(outputs) if tensor.requires_grad)
        if not has_room(self._run.device, _BACKWARD * copies):
            self._note(Comparison(unsure=f"there is no room to compare: outputs take {copies / 2**30:.1f} GiB"))
            return
        recording.rounding = rounding.rounding_of(self._run.model, recording.autocast, tensors(outputs), before)
        recording.listen(outputs)
        self._recording = recording

    def check(self, plan: Choices, ask: Ask = replays.alone) -> None:
        """Compare a plan with the plain path, in the objects that it touches.

        Args:
            ask: gives all ranks what is decided from what each of them brings; default for one process.
        """
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.forget()
        before, began = dict(self._switchboard.active), self._clock()
        findings: list[Comparison] = []
        has_failed = False
        if why := replays.refused_together(self._replays, plan, _NOT_CALLED * (recording is None), ask):
            self._note(Comparison(unsure=why))
            return
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
        touched = self._replays.touched(new)
        exactness = self._switchboard.exactness(plan)
        if "model" in touched and recording is not None:
            compilers = self._replays.compilers(plan)
            is_compiled = bool(compilers) or self._run.gate.compiled_by_user
            with rounding.without_tf32(recording.rounding, self._run.device, exactness, compiles=is_compiled) as finer:
                try:
                    findings.append(self._check_model(plan, recording, exactness, compilers))
                finally:
                    if finer is not None:  # what was made for it, such as graphs, is of no use in real steps
                        self._switchboard.switch({})
                        bound = self._replays.further_checks(on.intersection(new))  # graphs are for one precision
                        self._switchboard.close(bound)
                        # The next of these steps can use it. What is compiled knows nothing of convolutions' precision.
                        self._made_otherwise.update(set(new) - on - compilers)
        elif "model" in touched:
            findings.append(Comparison(unsure=_NOT_CALLED))
        if "optimizer" in touched:
            findings.append(self._replays.compared_updates(plan, exactness))
        if touched <= {"input"}:
            self._switchboard.switch(plan)  # switching it on compares a batch with a plain fetch; see the strategy

    def _check_model(
        self, plan: Choices, recording: Recording, exactness: Exactness, compilers: set[str]
    ) -> Comparison:
        compiles = bool(compilers)
        with self._replays.untouched(recording):
            if compiles and self._run.cuda and not self._replays.are_together:
                return self._check_apart(plan, recording, exactness, compilers)
            try:
                finding, plain = self._replays.compared(plan, recording, compiles=compiles)
            except NotReplayable as error:
                return Comparison(unsure=f"the plain call can't be replayed: {error}")
            draws = bool(plain.draws)
            del plain  # both replays are freed before others are made
            if finding.unsure:  # what is compared beside this call would hide it
                return finding
            if self._replays.are_together:  # all ranks make these two, and no more
                return finding
            if not finding.problem:
                finding = self._further_checks(finding, plan, recording, exactness)
            if finding.problem or compiles or not draws or self._finding is not None:  # a plan is checked in two steps
                return finding
            return finding.merge(self._check_evaluation(plan, recording))

    def _check_apart(
        self, plan: Choices, recording: Recording, exactness: Exactness, compilers: set[str]
    ) -> Comparison:
        """Compare the plan without its compiler with the plain call, then the compiled call with that.

        On a GPU compiled code draws as the device does: by memory layout and dtype, which a plan may change.
        """
        on_model, finding = self._switchboard.acting_on("model", plan), Comparison()
        captured = self._replays.further_checks(on_model).keys()  # those compare themselves, with compiled calls
        compiled = {name: setting for name, setting in on_model.items() if name not in captured}
        eager = {name: setting for name, setting in compiled.items() if name not in compilers}
        try:
            if eager.keys() & self._switchboard.new_in(plan):  # the rest was compared when it was new
                finding = self._replays.compared(eager, recording, compiles=False)[0]
        except NotReplayable as error:
            return Comparison(unsure=f"the plain call can't be replayed: {error}")
        if finding.problem or finding.unsure:
            return finding
        try:
            expected = self._replays.under(eager, recording)
        except torch.OutOfMemoryError:
            raise
        except ours() as error:
            return Comparison(unsure=f"the call can't be replayed without the compiler: {error}")
        finding = finding.merge(guard.compare(expected, self._replays.under(compiled, recording), exactness))
        del expected
        return finding if finding.problem else self._further_checks(finding, plan, recording, exactness)

    def _further_checks(
        self, finding: Comparison, plan: Choices, recording: Recording, exactness: Exactness
    ) -> Comparison:
        """Merge into a finding what strategies of the plan compare themselves, such as graphs with eager calls."""
        on_model = self._switchboard.acting_on("model", plan)
        for name, check in self._replays.further_checks(on_model).items():
            others = {other: setting for other, setting in on_model.items() if other != name}
            without, under = (partial(self._replays.under, each) for each in (others, on_model))
            finding = finding.merge(check(without, under, recording, exactness))
        return finding

    def _check_evaluation(self, plan: Choices, recording: Recording) -> Comparison:
        """Compare the call in evaluation mode; not where it is compiled, which would take as long again."""
        try:
            finding, _ = self._replays.compared(plan, recording, compiles=False, evaluates=True)
        except torch.OutOfMemoryError:
            raise  # nobody knows then
        except ours() as error:
            log.debug("accel: the call could not be made in evaluation mode: %s", error)
            return Comparison()
        finding.problem = finding.problem and f"in evaluation mode {finding.problem}"
        return finding

    def _note(self, finding: Comparison) -> None:
        merged = finding if self._finding is None else self._finding.merge(finding)
        self._finding = replace(merged, seconds=finding.seconds)

    def close(self) -> None:
        """Release the call that was recorded."""
        if self._recording is not None:
            self._recording.forget()
            self._recording = None


def _failure(error: Exception, what: str = "") -> Comparison:
    """Return what an error in a check says; the model's own, or a lack of memory, proves nothing."""
    if isinstance(error, torch.OutOfMemoryError):
        return Comparison(unsure=f"there is no room to compare: {error}")
    if isinstance(error, NotRestorable):
        return Comparison(unsure=str(error))
    text = f"{what}{type(error).__name__}: {error}"
    return Comparison(text) if may_be_of_strategies(error) else Comparison(unsure=text)
