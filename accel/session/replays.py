"""Replays of a recorded call, plain and under a plan: what a check and a doubt about a gradient are decided by."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial, reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from accel.exactness import Exactness
from accel.guard import guard, together, update_guard
from accel.guard.draws import ReplayedDraws
from accel.guard.guard import Comparison, NotReplayable, Recording, Replayed
from accel.profiler.interruptions import ours
from accel.run.context import Run
from accel.search.plan import Choices
from accel.session.state import RunState
from accel.strategies.base import designed

if TYPE_CHECKING:
    from accel.session.switchboard import Switchboard
    from accel.strategies.trial_design import FurtherCheck


Ask = Callable[..., Any]
"""Is given what this rank brings, and a function that decides from what all of them bring; returns its answer."""


class Replays:
    """Make recorded calls again.

    Args:
        switchboard: switches between the plain path and a plan.
        state: suspended while a call is replayed.
    """

    def __init__(self, run: Run, switchboard: Switchboard, state: RunState) -> None:
        self.run, self.switchboard, self.state = run, switchboard, state

    @contextlib.contextmanager
    def untouched(self, call: Recording) -> Iterator[None]:
        """Suspend the session for a block, and restore at its end whatever replays of a call have changed."""
        as_it_was = guard.untouched(self.run.model, self.run.device, call.args, call.kwargs)
        with as_it_was, self.state.suspended():
            yield

    @property
    def are_together(self) -> bool:
        """All ranks make the same replays, as none can make a sharded model's call alone."""
        return together.is_sharded(self.run.model)

    def compared(
        self,
        plan: Choices,
        recording: Recording,
        *,
        compiles: bool,
        beside: Choices | None = None,
        evaluates: bool = False,
    ) -> tuple[Comparison, Replayed]:
        """Replay the call plainly and under the plan, and compare; return also what the plain one gave.

        Args:
            plan: what of it acts on the model is on in the second replay.
            compiles: the plan compiles the call.
            beside: what stays on in both.
            evaluates: make it as a call of evaluation.

        Raises:
            NotReplayable: if the plain call fails.
            accel.guard.together.OutOfStep: if a call fails that all ranks make together.
        """
        exactness, switchboard = self.switchboard.exactness(plan), self.switchboard
        took_s: list[float] = []
        replay = self._timed(partial(guard.replay, evaluates=evaluates), took_s)
        canonical = exactness != Exactness.EXACT and not (compiles and self.run.cuda)  # it draws as the device does
        with together.in_step() if self.are_together else contextlib.nullcontext():
            switchboard.switch(beside or {})
            recording.before.restore()
            try:
                draws = self._draws(canonical, compiles=compiles)
                plain = replay(self.run.model, self.run.gate.plain, recording, draws=draws)
            except torch.OutOfMemoryError:
                raise
            except ours() as error:
                raise NotReplayable(f"{type(error).__name__}: {error}") from error
            noting = partial(replay, draws=None if compiles else self._draws(canonical))
            candidate = self.under(switchboard.acting_on("model", plan), recording, noting, beside)
        if compiles:
            candidate.draws = plain.draws
        finding = guard.compare(plain, candidate, exactness)
        finding.replays_s = (took_s[0], took_s[-1])
        return finding, plain

    def _timed(self, replay: Callable[..., Replayed], took_s: list[float]) -> Callable[..., Replayed]:
        """Return what replays a call, and notes the seconds that it takes; a device is idle before and after."""

        def timed(*args: Any, **kwargs: Any) -> Replayed:
            self._drain()
            began = time.perf_counter()
            replayed = replay(*args, **kwargs)
            self._drain()
            took_s.append(time.perf_counter() - began)
            return replayed

        return timed

    def _drain(self) -> None:
        if self.run.cuda:
            torch.cuda.synchronize(self.run.device)

    def under(
        self,
        plan: Choices,
        recording: Recording,
        replay: Callable[..., Replayed] | None = None,
        beside: Choices | None = None,
    ) -> Replayed:
        """Replay the call under a plan; `beside` is on before and after, too."""
        beside, replay = beside or {}, replay or guard.replay
        self.switchboard.switch(beside)
        recording.before.restore()
        try:
            self.switchboard.switch({**beside, **plan})
            replayed = replay(self.run.model, self.run.gate.call, recording)
            replayed.stopped = next(filter(None, (self.switchboard.strategies[n].failure(self.run) for n in plan)), "")
            return replayed
        finally:
            self.switchboard.switch(beside)  # before attributes are restored: a strategy undoes its own changes

    def touched(self, names: Iterable[str]) -> set[str]:
        """Return what these strategies touch."""
        return set().union(*(self.switchboard.strategies[name].touches for name in names))

    def further_checks(self, names: Iterable[str]) -> dict[str, FurtherCheck]:
        """Return the checks that these strategies have beside the guard's."""
        strategies = self.switchboard.strategies
        checks = {name: designed(strategies[name], self.run).further_check for name in names}
        return {name: check for name, check in checks.items() if check is not None}

    def compilers(self, plan: Choices) -> set[str]:
        """Return the strategies of a plan that compile the model's calls; they tell the gate when they are on."""
        before = dict(self.switchboard.active)
        self.switchboard.switch(plan)
        try:
            return self.run.gate.compilers
        finally:
            self.switchboard.switch(before)

    def _draws(self, canonical: bool, *, compiles: bool = False) -> ReplayedDraws | None:
        """Return what notes the draws of a replay; None where the user has compiled: that runs under no mode.

        Args:
            canonical: draw in canonical order.
            compiles: it is compared with compiled code, which runs under no mode either.
        """
        model = self.run.model  # whose own slot the gate is in
        inner = any(module._compiled_call_impl for module in model.modules() if module is not model)
        wrapped = any(hasattr(module, "_orig_mod") for module in model.modules())
        is_compiled = inner or wrapped or self.run.gate.compiled_by_user
        return None if is_compiled else ReplayedDraws(canonical, with_attention=compiles)

    def compared_updates(self, plan: Choices, exactness: Exactness) -> Comparison:
        """Make the optimizers' update plainly and under a plan, on copies, and compare."""
        findings = []
        with self.state.suspended():
            for optimizer in self._switched_by(plan):
                self.switchboard.switch({})
                start = update_guard.start_of(optimizer)
                plain = update_guard.updated(optimizer)
                self.switchboard.switch(self.switchboard.acting_on("optimizer", plan))
                candidate = update_guard.updated(optimizer)
                coarsest = update_guard.coarsest_of(optimizer)
                findings.append(update_guard.compare(plain, candidate, start, exactness, coarsest))
        none = Comparison(unsure="no optimizer that updates by itself is known")
        return reduce(Comparison.beside, findings or [none])

    def _switched_by(self, plan: Choices) -> list[Optimizer]:
        """Return the optimizers whose options a plan switches; all, if it acts on them in another way.

        The others' update is the same, and a copy of a user's own optimizer shares what it holds beside its state.
        """
        optimizers = list(filter(update_guard.makes_updates, self.run.optimizers))
        self.switchboard.switch({})
        before = [update_guard.options_of(optimizer) for optimizer in optimizers]
        self.switchboard.switch(self.switchboard.acting_on("optimizer", plan))
        now = [update_guard.options_of(optimizer) for optimizer in optimizers]
        pairs = zip(optimizers, before, now, strict=True)
        return [optimizer for optimizer, old, new in pairs if update_guard.differ(old, new)] or optimizers


def alone(mine: Any, decision: Callable[[list[Any]], Any]) -> Any:
    """Decide from what one process brings."""
    return decision([mine])


def touch_model(replays: Replays, plan: Choices) -> bool:
    """Return whether a plan is to be compared by calls of the model."""
    return "model" in replays.touched(replays.switchboard.new_in(plan))


def may_be_recorded(model: nn.Module) -> bool:
    """Return whether a call made now can be made again: none of a sharded model that has gathered weights."""
    return not together.is_sharded(model) or together.is_resharded(model)


def refused_together(replays: Replays, plan: Choices, why: str, ask: Ask) -> str:
    """Return why the ranks don't make a sharded model's call again, the same on all of them; '' if they do.

    Args:
        why: what speaks against it on this rank.
    """
    if not replays.are_together:
        return ""
    model, touches = replays.run.model, touch_model(replays, plan)
    refused: str = ask((touches, (together.why_not_together(model) or why) * touches), _agreed)
    if not refused:
        together.reshard(model)
    return refused


def _agreed(by_rank: list[tuple[bool, str]]) -> str:
    """Return what speaks against replays on any rank; '' if nothing does, or none makes any."""
    if why := next((why for _, why in by_rank if why), ""):
        return why
    return "" if len({touches for touches, _ in by_rank}) == 1 else "other strategies are on, on another rank"
