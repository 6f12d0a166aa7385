"""Schemes offered for trial: those that prove about the fastest on a DDP module in a few steps each, by level.

The first time that a level is switched on, each of its schemes is used for a few steps; a single one needs none. The
caller runs the trial and decides what stays. All ranks switch together, between the same two steps.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.nn.parallel import DistributedDataParallel

from accel.comm.catalogue import Scheme
from accel.comm.engine.binding import Binding
from accel.comm.ranks.channel import channel_kind
from accel.comm.selection.choice import Choice
from accel.comm.selection.planner import Planner, why_not
from accel.profiler.errors import AccelError

_STEPS = 3
"""Of each scheme before one is offered."""
_ERROR = 1.15
"""Steps that differ by less may come in another order in a trial."""
_PATIENCE = timedelta(seconds=30)
"""For ranks that come from one step boundary to another place in it; one that fails on the way never does."""
_MOST = 3
"""Schemes that are offered, of those about as fast as the best."""


class NoOffer(AccelError):
    """No scheme beats DDP's own all-reduce; the message says so with numbers."""


class SchemeOffers(Planner):
    """Offers of schemes for one DDP module: one is switched on and off from outside, at step boundaries."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        # As patient as DDP itself: what one rank does alone between two steps must not end the training.
        backend = ddp.process_group._get_backend(next(ddp.module.parameters()).device)
        super().__init__(ddp, timeout=backend.options._timeout, patience=_PATIENCE)

    def bind(self, model: nn.Module, process_group: dist.ProcessGroup | None = None, *, scaler: Any = None) -> None:
        """Take a module, and measure anew."""
        super().bind(model, process_group, scaler=scaler)
        self.choices: dict[str, Choice] = {}
        """What the schemes have shown, by level of `allow`."""
        self._offered: dict[str, list[Scheme]] = {}
        self._on: dict[str, int] = {}
        """Levels that are on, and the number of the offer of each; the last one counts."""
        self._screening: Iterator[None] = iter(())
        self._is_tested = self.binding.device.type != "cuda"

    # -- on and off --------------------------------------------------------------------------------------------------

    def enable(self, level: str, number: int) -> None:
        """Use the `number`-th offer of a level, once its schemes have been measured; on every rank.

        Raises:
            NoOffer: on every rank, if they have been and none helps.
        """
        self._on.pop(level, None)
        self._on[level] = number
        if not self._is_tested and (problem := self_test(self.binding, self.timeout)):
            raise NoOffer(f"the self-test has failed: {problem}")
        self._is_tested = True
        self.put_on()
        self._use_offer()

    def disable(self, level: str) -> None:
        """Go back to what was on before the level, in the end to DDP's own; then without a hook."""
        self._on.pop(level, None)
        self._screening = iter(())
        if self._on:
            self._use_offer()
        else:
            self.take_off()

    def _use_offer(self) -> None:
        """Use the offer of the last of the levels that are on, or begin to measure its schemes."""
        level, number = list(self._on.items())[-1]
        if level not in self._offered:
            schemes = self.schemes(level)
            if len(schemes) > 1:
                self._screening = self._screen(level, schemes)
                return
            self._offered[level] = schemes
        if not self._offered[level]:
            raise NoOffer(self.why_none(level))
        self.use(self.offer(level, number))
        self.release()  # of schemes tried before

    def _screen(self, level: str, schemes: list[Scheme]) -> Iterator[None]:
        choice = Choice((yield from self.screened(schemes, _STEPS)))
        fast = choice.candidates
        self.choices[level] = choice
        self._offered[level] = [one for one in fast if choice.screened[one] <= _ERROR * choice.screened[fast[0]]][
            :_MOST
        ]
        with contextlib.suppress(NoOffer):  # raised on every rank; within backward it would end the training
            self._use_offer()

    def between_steps(self) -> None:
        """Go on measuring schemes, where that has begun."""
        next(self._screening, None)

    def free(self) -> None:
        """Give up what is not in use; everything, with the hook, where no level is on."""
        if self._on:
            self.release()
        elif self.is_open:
            self.take_off()
            self.close()
            self.choices, self._offered = {}, {}

    # -- what is offered ---------------------------------------------------------------------------------------------

    def offered(self, level: str) -> list[Scheme] | None:
        """Return what can't be distinguished from the best of a level; None before that is known."""
        return self._offered.get(level)

    def offer(self, level: str, number: int) -> Scheme:
        """Return an offer of a level that has some."""
        schemes = self._offered[level]
        return schemes[min(number, len(schemes) - 1)]

    def why_none(self, level: str) -> str:
        """Return why a level offers nothing, '' if it does."""
        if self._offered[level]:
            return ""
        if level not in self.choices:
            return "no scheme fits these gradients"
        choice = self.choices[level]
        plain = f"a step takes {choice.step_s(None) * 1e3:.1f} ms"
        return f"gradients are left as they are: {plain}, {choice.best_screened}"

    def describe(self, level: str, number: int) -> str:
        """Return an offer of a level, and the steps that have spoken for it; '' until it is known."""
        if not self._offered.get(level):
            return ""
        scheme, choice = self.offer(level, number), self.choices.get(level)
        if choice is None:
            return str(scheme)
        took, plain = choice.step_s(scheme) * 1e3, choice.step_s(None) * 1e3
        return f"{scheme}, at first {took:.1f} ms in place of {plain:.1f} ms"


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
    """Say why there are none: a hook or a process group of the user's, or offers of one of the levels `above`."""
    offers = known_offers(ddp)
    if reason := why_not(ddp, offers):
        return reason
    if ddp.process_group.size() != dist.get_world_size():
        return "the model's process group holds only some of the ranks"
    if offers is not None and any(offers.offered(level) is not None for level in above):
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
