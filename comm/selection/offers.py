"""Schemes offered for trial: those predicted to be about the fastest on a DDP module, by level.

The first level to be switched on measures the network, and lets plain steps be watched; from then on the cost model
says what is worth a trial. The caller runs the trial and decides what stays. All ranks switch and
predict together, between the same two steps; rank 0's prediction counts.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.nn.parallel import DistributedDataParallel

from accel.comm.cost_model.choice import Choice, Option, choose, costs_of
from accel.comm.cost_model.cost import Network
from accel.comm.cost_model.probe import probe
from accel.comm.engine.binding import Binding
from accel.comm.ranks.channel import channel_kind
from accel.comm.ranks.failure import CommError
from accel.comm.selection.planner import Planner, why_not
from accel.profiler.errors import AccelError

WATCH = 5
"""Plain steps that must have been recorded before anything is predicted."""
_ERROR = 1.15
"""Predictions that differ by less may come in another order on real steps."""
_PATIENCE = timedelta(seconds=30)
"""For ranks that come from one step boundary to another place in it; one that fails on the way never does."""
_MOST = 3
"""Schemes that are offered, of those about as fast as the best."""


class NoOffer(AccelError):
    """Nothing is predicted to beat DDP's own all-reduce; the message says so with numbers."""


class SchemeOffers(Planner):
    """Offers of schemes for one DDP module: one is switched on and off from outside, at step boundaries."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        # As patient as DDP itself: what one rank does alone between two steps must not end the training.
        backend = ddp.process_group._get_backend(next(ddp.module.parameters()).device)
        super().__init__(ddp, timeout=backend.options._timeout, patience=_PATIENCE)

    def bind(self, model: nn.Module, process_group: dist.ProcessGroup | None = None, *, scaler: Any = None) -> None:
        """Take a module, and predict anew."""
        super().bind(model, process_group, scaler=scaler)
        self.choices: dict[str, Choice] = {}
        """Predictions by level of `allow`."""
        self._on: dict[str, int] = {}
        """Levels that are on, and the number of the offer of each; the last one counts."""
        self._network: Network | None = None

    # -- on and off --------------------------------------------------------------------------------------------------

    def enable(self, level: str, number: int) -> None:
        """Use the `number`-th offer of a level, as soon as there is a prediction; on every rank.

        Raises:
            NoOffer: on every rank, if there is a prediction and nothing in it.
        """
        self._on.pop(level, None)
        self._on[level] = number
        if self._network is None:
            if self.binding.device.type == "cuda" and (problem := self_test(self.binding, self.timeout)):
                raise NoOffer(f"the self-test has failed: {problem}")
            self._network = probe(self.topology, self.binding.device)
        self.put_on()
        self.use_offer()

    def disable(self, level: str) -> None:
        """Go back to what was on before the level, in the end to DDP's own; then without a hook once all is known."""
        self._on.pop(level, None)
        if self._on:
            self.use_offer()
        elif self.choices:
            self.take_off()
        else:
            self.use(None)

    def use_offer(self) -> None:
        """Use the offer of the last of the levels that are on; DDP's own until there is one."""
        level, number = list(self._on.items())[-1]
        if not self._is_predicted(level):
            self.recorder.on = True
            self.use(None)
            return
        choice = self.choices[level]
        if not choice.candidates:
            raise NoOffer(
                f"gradients are left as they are: a step takes {choice.plain_s * 1e3:.1f} ms, {choice.best_predicted}"
            )
        self.use(choice.candidates[min(number, len(choice.candidates) - 1)].scheme)
        self.release()  # of schemes tried before
        self.put_on()

    def free(self) -> None:
        """Give up what is not in use; everything, with the hook, where no level is on."""
        if self._on:
            self.release()
        elif self.is_open:
            self.take_off()
            self.close()
            self.choices = {}

    # -- prediction --------------------------------------------------------------------------------------------------

    def _is_predicted(self, level: str) -> bool:
        """Predict, if enough plain steps have been watched; they are the same on every rank."""
        if level in self.choices:
            return True
        if len(self.recorder) < WATCH and not self.choices:
            return False
        assert self._network is not None
        costs = costs_of(self.schemes(level), self.facts, self.objects)
        self.choices[level] = choose(self.recorder.observed(), self.facts, self._network, costs, self.objects)
        self.recorder.on = False
        return True

    def between_steps(self) -> None:
        """Make up for a prediction that could not be made when a level was switched on."""
        if self._on and not self.choices and len(self.recorder) >= WATCH:
            try:
                self.use_offer()
            except (NoOffer, CommError):  # raised on every rank; within backward it would end the training
                self.use(None)

    def about_as_fast(self, level: str) -> list[Option]:
        """Return what the model can't distinguish from the best of a level; nothing until there is a prediction."""
        options = self.choices[level].candidates if level in self.choices else []
        return [option for option in options if option.step_s <= _ERROR * options[0].step_s][:_MOST]

    def describe(self, level: str, number: int) -> str:
        """Return an offer of a level and the step predicted for it; '' until it is known."""
        options = self.about_as_fast(level)
        if not options:
            return ""
        option = options[min(number, len(options) - 1)]
        plain_s = self.choices[level].plain_s
        return f"{option}, predicted {option.step_s * 1e3:.1f} ms in place of {plain_s * 1e3:.1f} ms"


_offers: weakref.WeakKeyDictionary[nn.Module, SchemeOffers] = weakref.WeakKeyDictionary()


def known_offers(ddp: nn.Module) -> SchemeOffers | None:
    """Return the offers of a module that have been opened, closed ones too."""
    return _offers.get(ddp)


def open_offers(ddp: DistributedDataParallel) -> SchemeOffers:
    """Return the offers of a module, ready to be switched."""
    if ddp not in _offers:
        _offers[ddp] = SchemeOffers(ddp)
    elif not _offers[ddp].is_open:
        _offers[ddp].bind(ddp)
    return _offers[ddp]


def refusal(ddp: DistributedDataParallel, above: Collection[str]) -> str:
    """Say why there are none: a hook or a process group of the user's, or a prediction for a level of `above`."""
    offers = known_offers(ddp)
    if reason := why_not(ddp, offers):
        return reason
    if ddp.process_group.size() != dist.get_world_size():
        return "the model's process group holds only some of the ranks"
    if offers is not None and any(level in offers.choices for level in above):
        return "what was tried already chooses among these schemes too"
    return ""


_ELEMENTS = 1024
_APART = 4096.0
"""Beyond all elements: whole numbers that floats hold exactly, so that sums are equal in any order."""


def self_test(binding: Binding, timeout: timedelta) -> str:
    """Return which collectives of the hooks' channel give other numbers than torch's own; the same on every rank."""
    kind = channel_kind(binding.device)
    size, rank, group = binding.size, binding.rank, binding.group
    own = torch.arange(_ELEMENTS, device=binding.device, dtype=torch.float32) + rank
    total, all_own = own.clone(), [torch.empty_like(own) for _ in range(size)]
    dist.all_reduce(total, group=group)
    dist.all_gather(all_own, own, group=group)
    channel = kind(PrefixStore("self-test", binding.store), range(size), rank, timeout)
    try:
        summed, gathered, received = own.clone(), *([torch.empty_like(own) for _ in range(size)] for _ in range(2))
        channel.all_reduce(summed)
        channel.all_gather(own, gathered)
        channel.exchange([own + _APART * to for to in range(size)], received)
        others = [each for each in range(size) if each != rank]
        is_equal = {
            "all_reduce": torch.equal(summed, total),
            "all_gather": all(map(torch.equal, gathered, all_own)),
            "exchange": all(torch.equal(received[each], all_own[each] + _APART * rank) for each in others),
        }
    finally:
        channel.close()
    wrong = torch.tensor([float(not equal) for equal in is_equal.values()], device=binding.device)
    dist.all_reduce(wrong, dist.ReduceOp.MAX, group=group)
    names = [name for name, count in zip(is_equal, wrong.tolist(), strict=True) if count]
    return f"{' and '.join(names)} of {kind.__name__} gave other numbers than torch's own" if names else ""
