"""What the strategies for gradient communication share: a switch on the DDP module, its network, and what was chosen.

Each strategy chooses among the ways that its exactness permits. The first one to be switched on measures the network
and lets the plain steps around the guard be watched; from then on the model of `accel.comm.cost_model.cost` says which
ways are worth a trial. All ranks measure and choose together, at the boundary where they are switched; rank 0's choice
counts.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel.comm.catalogue import allowed
from accel.comm.cost_model.choice import WORTH, Option, worthwhile
from accel.comm.cost_model.cost import Network
from accel.comm.cost_model.probe import probe
from accel.comm.engine.post_mortem import CommError
from accel.comm.engine.switch import Switch, why_not
from accel.comm.selector import Choice, choose, costs_of
from accel.profiler.bottleneck import Bottleneck
from accel.run import Run
from accel.strategies.base import NothingHelps, Strategy

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
        self.switch = _Watching(ddp, weakref.ref(self))
        self.choices: dict[str, Choice] = {}
        """By level of `allow`."""
        self._cap_mb = self.switch.cap_mb
        self._on: dict[str, int] = {}
        """Levels that are on, and the number of the way of each; the last one counts."""
        self._network: Network | None = None

    def reopen(self, ddp: DistributedDataParallel) -> None:
        """Take the module up again after `close`."""
        if not self.switch.bound:
            self.switch.bind(ddp)
            self.choices, self._on, self._network = {}, {}, None

    def enable(self, level: str, number: int) -> None:
        """Let buckets go the `number`-th best way of a level, as soon as there is a choice; on every rank.

        Raises:
            NothingHelps: on every rank, if there is a choice and nothing in it.
        """
        self._on.pop(level, None)
        self._on[level] = number
        if self._network is None:
            self._network = probe(self.switch.topology, self.switch.device)
        self.switch.put_on()
        self.apply()

    def apply(self) -> None:
        """Use what the last of the levels that are on has chosen; DDP's own until it can."""
        level, number = list(self._on.items())[-1]
        if level not in self.choices and not self._choose(level):
            self.switch.recording = True
            self.switch.use(())
            return
        found = candidates(self.choices[level])
        if not found:
            raise NothingHelps(_left(self.choices[level]))
        one = found[min(number, len(found) - 1)]
        plan = one.option.plan if one.cap_mb is None else one.option.plan[:1]
        self.switch.rebucket(one.cap_mb or self._cap_mb)
        self.switch.release(plan)  # of ways tried before
        if any(plan):
            self.switch.put_on()
            self.switch.use(plan)
        else:
            self.switch.take_off_later()

    def _choose(self, level: str) -> bool:
        """Choose, if enough plain steps have been watched; they are the same on every rank."""
        if len(self.switch.times) < WATCH and not self.choices:
            return False
        assert self._network is not None
        ways = allowed(level, by_hosts=self.switch.by_hosts)
        self.choices[level] = choose(self.switch, self._network, costs_of(self.switch, ways))
        self.switch.recording = False
        return True

    def watched(self) -> None:
        """Begin a step: make up for a choice that could not be made when a level was switched on."""
        if self._on and not self.choices and len(self.switch.times) >= WATCH:
            try:
                self.apply()
            except (NothingHelps, CommError):  # raised on every rank; within backward it would end the training
                self.switch.use(())

    def disable(self, level: str) -> None:
        """Go back to what was on before the level, in the end to DDP's own, without a hook once there is a choice."""
        self._on.pop(level, None)
        if self._on:
            self.apply()
            return
        self.switch.rebucket(self._cap_mb)
        if self.choices:
            self.switch.take_off()
        else:
            self.switch.use(())

    def close(self) -> None:
        """Give up what is not in use."""
        if self._on:
            self.switch.release()
        elif self.switch.bound:
            self.switch.take_off()
            self.switch.close()
            self.choices = {}


class _Watching(Switch):
    """A switch that tells when a step begins."""

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


class GradientChoice(Strategy):
    """Base of the strategies that choose how gradients are averaged; each names a level and those above it."""

    treats = frozenset({Bottleneck.COMMUNICATION})
    touches = frozenset()
    collective = True
    one_off_s = 5.0
    settle_steps = 3  # DDP makes its buckets anew after the hook has come off or gone on
    level: str
    """Of `allow`."""
    above: tuple[str, ...] = ()
    """Levels whose choice includes the ways of this one."""

    def __init__(self) -> None:
        self._gradients: Gradients | None = None
        self._settings = [0]

    def refusal(self, run: Run) -> str:
        """Say why not: no DDP, one rank, a GPU, a hook or a process group of the user's, or a wider choice."""
        if run.world_size < 2:
            return "there is one rank"
        if not isinstance(run.model, DistributedDataParallel):
            return "the model is no DistributedDataParallel module; pass the wrapped one"
        if run.model._join_config.enable:
            return "within join() ranks take different numbers of steps, and these must switch at the same one"
        if run.cuda:
            return "its hooks have not been run on GPUs yet; accel.comm.selector.AutoComm can be tried by hand"
        known = _gradients.get(run.model)
        if reason := why_not(run.model, None if known is None else known.switch):
            return reason
        if run.model.process_group.size() != dist.get_world_size():
            return "the model's process group holds only some of the ranks"
        if known is not None and any(level in known.choices for level in self.above):
            return "what was tried already chooses among these ways too"
        return ""

    def settings(self, run: Run) -> list[Any]:
        """Return the numbers of the best ways; the list grows once they are known, while it is gone through."""
        self._settings = [0]
        return self._settings

    def enable(self, run: Run, setting: Any) -> None:
        """Measure and choose if that has not been done, and let gradients go the chosen way from the next step on."""
        assert isinstance(run.model, DistributedDataParallel)
        if run.model not in _gradients:
            _gradients[run.model] = Gradients(run.model)
        self._gradients = _gradients[run.model]
        self._gradients.reopen(run.model)
        self._gradients.enable(self.level, setting)
        self._settings += list(range(len(self._settings), len(self._about_as_fast())))

    def _about_as_fast(self) -> list[SchemeOption]:
        """Return the ways that the model can't tell from the best."""
        choice = None if self._gradients is None else self._gradients.choices.get(self.level)
        found = [] if choice is None else candidates(choice)
        return [one for one in found if one.step_s <= _ERROR * found[0].step_s][:_MOST]

    def disable(self, run: Run) -> None:
        """Let DDP average as it does by itself, or as another of these strategies has it."""
        if self._gradients is not None:
            self._gradients.disable(self.level)

    def close(self, run: Run) -> None:
        """Let go of threads, groups and the hook, unless one of these strategies is on."""
        if self._gradients is not None:
            self._gradients.close()

    def describe(self, setting: Any) -> str:
        """Return the way and the step predicted for it; '' until it is known."""
        found = self._about_as_fast()
        if self._gradients is None or not found:
            return ""
        one = found[min(setting, len(found) - 1)]
        plain_s = self._gradients.choices[self.level].plain_s
        return f"{one}, predicted {one.step_s * 1e3:.1f} ms in place of {plain_s * 1e3:.1f} ms"


def _left(choice: Choice) -> str:
    best = next((one for one in choice.options if any(one.plan)), None)
    said = "no way is allowed" if best is None else f"the best, {best}, is predicted to take {best.step_s * 1e3:.1f} ms"
    return f"gradients are left as they are: a step takes {choice.plain_s * 1e3:.1f} ms, {said}"


def ranks_per_host() -> int:
    """Return how many ranks torchrun has started on this host, 0 where it has not."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
