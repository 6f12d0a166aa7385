"""What the strategies for gradient communication share: a hook on the DDP module, its network, and what was chosen.

Each strategy chooses among the options that its exactness permits. The first one to be switched on measures the network
and lets the plain steps around the guard be watched; from then on the model of `accel.comm.cost_model.cost` says which
ways are worth a trial. All ranks measure and choose together, at the boundary where they are switched; rank 0's choice
counts.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel.comm.catalogue import allowed
from accel.comm.cost_model.choice import WORTH, Option, worthwhile
from accel.comm.cost_model.cost import Network
from accel.comm.cost_model.prediction import Choice, choose, costs_of
from accel.comm.cost_model.probe import probe
from accel.comm.ranks.post_mortem import CommError
from accel.comm.selection.planner import Planner
from accel.comm.selection.registration import why_not
from accel.strategies.base import NothingHelps

WATCH = 5
"""Plain steps that must have been recorded before anything is chosen."""
_ERROR = 1.15
"""Predictions that differ by less may come in another order on real steps."""
_PATIENCE = timedelta(seconds=30)
"""For ranks that come from one step boundary to another place in it; one that fails on the way never does."""
_MOST = 3
"""Ways that are tried, of those about as fast as the best."""


class SchemeOption(NamedTuple):
    """A way to average gradients, perhaps in buckets of another size."""

    option: Option
    cap_mb: float | None
    """As `bucket_cap_mb` of DDP; None for the size they have."""
    step_s: float
    """Predicted."""

    def __str__(self) -> str:
        way = str(self.option)
        return way if self.cap_mb is None else f"{way} in buckets of {self.cap_mb:g} MB"


def candidates(choice: Choice) -> list[SchemeOption]:
    """Return what is predicted to beat DDP's own all-reduce in buckets as they are, best first."""
    found = [SchemeOption(one, None, one.step_s) for one in worthwhile(choice.options)]
    limit_s = (1 - WORTH) * next(one.step_s for one in choice.options if not any(one.plan))
    for option in choice.options:
        size = choice.sizes.get(option.plan[0]) if len(set(option.plan)) == 1 else None
        if size is not None and size.step_s < limit_s:
            found.append(SchemeOption(option, size.cap_mb, size.step_s))
    return sorted(found, key=lambda one: one.step_s)


class Gradients:
    """The gradient communication of one DDP module.

    Args:
        ddp: the module, on every rank.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.planner = _Watching(ddp, weakref.ref(self))
        self.choices: dict[str, Choice] = {}
        """By level of `allow`."""
        self._cap_mb = self.planner.registration.cap_mb
        self._on: dict[str, int] = {}
        """Levels that are on, and the number of the way of each; the last one counts."""
        self._network: Network | None = None

    def reopen(self, ddp: DistributedDataParallel) -> None:
        """Take the module up again after `close`."""
        if not self.planner.bound:
            self.planner.bind(ddp)
            self.choices, self._on, self._network = {}, {}, None

    def enable(self, level: str, number: int) -> None:
        """Let buckets go the `number`-th best way of a level, as soon as there is a choice; on every rank.

        Raises:
            NothingHelps: on every rank, if there is a choice and nothing in it.
        """
        self._on.pop(level, None)
        self._on[level] = number
        if self._network is None:
            self._network = probe(self.planner.topology, self.planner.device)
        self.planner.put_on()
        self.apply()

    def apply(self) -> None:
        """Use what the last of the levels that are on has chosen; DDP's own until it can."""
        level, number = list(self._on.items())[-1]
        if level not in self.choices and not self._choose(level):
            self.planner.recorder.on = True
            self.planner.engine.use(())
            return
        found = candidates(self.choices[level])
        if not found:
            raise NothingHelps(_left(self.choices[level]))
        one = found[min(number, len(found) - 1)]
        plan = one.option.plan if one.cap_mb is None else one.option.plan[:1]
        self.planner.registration.rebucket(one.cap_mb or self._cap_mb)
        self.planner.engine.release(plan)  # of ways tried before
        if any(plan):
            self.planner.put_on()
            self.planner.engine.use(plan)
        else:
            self.planner.take_off_later()

    def _choose(self, level: str) -> bool:
        """Choose, if enough plain steps have been watched; they are the same on every rank."""
        if len(self.planner.recorder.times) < WATCH and not self.choices:
            return False
        assert self._network is not None
        planner = self.planner
        costs = costs_of(allowed(level, by_hosts=planner.topology.by_hosts_pays), planner.facts, planner.talk)
        observed = planner.recorder.times.observed()
        self.choices[level] = choose(observed, planner.facts, self._network, costs, planner.talk)
        self.planner.recorder.on = False
        return True

    def watched(self) -> None:
        """Begin a step: make up for a choice that could not be made when a level was switched on."""
        if self._on and not self.choices and len(self.planner.recorder.times) >= WATCH:
            try:
                self.apply()
            except (NothingHelps, CommError):  # raised on every rank; within backward it would end the training
                self.planner.engine.use(())

    def disable(self, level: str) -> None:
        """Go back to what was on before the level, in the end to DDP's own, without a hook once there is a choice."""
        self._on.pop(level, None)
        if self._on:
            self.apply()
            return
        self.planner.registration.rebucket(self._cap_mb)
        if self.choices:
            self.planner.take_off()
        else:
            self.planner.engine.use(())

    def about_as_fast(self, level: str) -> list[SchemeOption]:
        """Return what the model can't tell from the best of a level; nothing until there is a choice."""
        options = candidates(self.choices[level]) if level in self.choices else []
        return [option for option in options if option.step_s <= _ERROR * options[0].step_s][:_MOST]

    def describe(self, level: str, number: int) -> str:
        """Return an option of a level and the step predicted for it; '' until it is known."""
        options = self.about_as_fast(level)
        if not options:
            return ""
        option = options[min(number, len(options) - 1)]
        plain_s = self.choices[level].plain_s
        return f"{option}, predicted {option.step_s * 1e3:.1f} ms in place of {plain_s * 1e3:.1f} ms"

    def close(self) -> None:
        """Give up what is not in use."""
        if self._on:
            self.planner.engine.release()
        elif self.planner.bound:
            self.planner.take_off()
            self.planner.close()
            self.choices = {}


class _Watching(Planner):
    """A planner that tells when a step begins."""

    _owner: Callable[[], Gradients | None] = staticmethod(lambda: None)  # of one that was unpickled

    def __init__(self, ddp: DistributedDataParallel, owner: weakref.ref[Gradients]) -> None:
        self._owner = owner
        # As patient as DDP itself: what one rank does alone between two steps must not end the training.
        backend = ddp.process_group._get_backend(next(ddp.module.parameters()).device)
        super().__init__(ddp, timeout=backend.options._timeout, patience=_PATIENCE)

    def between_steps(self) -> None:
        if (owner := self._owner()) is not None:
            owner.watched()


_gradients: weakref.WeakKeyDictionary[nn.Module, Gradients] = weakref.WeakKeyDictionary()


def opened(ddp: DistributedDataParallel) -> Gradients:
    """Return the gradient communication of a module, ready to be switched."""
    if ddp not in _gradients:
        _gradients[ddp] = Gradients(ddp)
    _gradients[ddp].reopen(ddp)
    return _gradients[ddp]


def refusal(ddp: DistributedDataParallel, above: Collection[str]) -> str:
    """Say why not: a hook or a process group of the user's, or a choice of one of the levels `above`."""
    gradients = _gradients.get(ddp)
    if reason := why_not(ddp, None if gradients is None else gradients.planner):
        return reason
    if ddp.process_group.size() != dist.get_world_size():
        return "the model's process group holds only some of the ranks"
    if gradients is not None and any(level in gradients.choices for level in above):
        return "what was tried already chooses among these ways too"
    return ""


def _left(choice: Choice) -> str:
    best = next((one for one in choice.options if any(one.plan)), None)
    said = "no way is allowed" if best is None else f"the best, {best}, is predicted to take {best.step_s * 1e3:.1f} ms"
    return f"gradients are left as they are: a step takes {choice.plain_s * 1e3:.1f} ms, {said}"
