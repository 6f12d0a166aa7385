"""How a sampler deals the steps of an epoch, and which of them are consumed, in hand, or still to be taken."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from accel.dataio.sampling.permutation import Items
from accel.dataio.sampling.round_robin import RoundRobin

_BLOCK = 4096  # indices computed at once: 109 ns each in batches of 32; one batch at a time it was 1,314 ns


class SamplerPlace(NamedTuple):
    """Epoch, samples of it, and steps since the sampler was made, with those before this epoch."""

    epoch: int
    position: int
    taken: int
    taken_before: int


class DealtStep(NamedTuple):
    """A step as dealt: where the sampler is after it, and how many samples, of this rank and of all, are no repeats."""

    place: SamplerPlace
    fresh: int
    fresh_of_all: int


class Deals(NamedTuple):
    """How epochs of `length` samples are dealt: since which step in which batch sizes, in order, and how in others."""

    length: int
    since: list[tuple[int, RoundRobin]]
    other: Callable[[Sequence[int]], RoundRobin]

    def changed(self, sizes: Sequence[int], *, now: int, at: int) -> Deals:
        """Return them with other batch sizes from step `at` on; steps before `now` are over."""
        later = [change for change in self.since if change[0] > now]
        changes = [(now, self.at(now)), *later, (at, self.other(sizes))]
        return self._replace(since=sorted(changes, key=lambda change: change[0]))

    def at(self, step: int) -> RoundRobin:
        if self.since[-1][0] <= step:
            return self.since[-1][1]
        # Of steps before the first that is known, as a pass that begins elsewhere may have, those sizes are as good.
        return next((deal for since, deal in reversed(self.since) if since <= step), self.since[0][1])

    def samples_after(self, place: SamplerPlace) -> Iterator[int]:
        """Yield the samples of each step that the epoch has after a place, on all ranks together, repeats left out."""
        _, position, step, _ = place
        while width := self.at(step).width(left := self.length - position):
            yield min(width, left)
            position, step = position + min(width, left), step + 1

    def steps_after(self, place: SamplerPlace) -> int:
        """Return the steps that are left in the epoch after a place in it."""
        dealt = list(islice(self.samples_after(place), max(0, self.since[-1][0] - place.taken)))
        return len(dealt) + self.at(place.taken + len(dealt)).steps(self.length - place.position - sum(dealt))


class Ledger:
    """Which of a sampler's steps are dealt, which one is in hand, and what is consumed.

    Attributes:
        place: what is consumed, and nothing beyond it; `ElasticSampler.count` sets it.
        under_way: steps that are dealt and not yet taken, of the pass that was delivered or begun last.
        begun_last: those of the pass that was begun last, by which `deliver` knows it.
        in_hand: the step that was delivered last; None where a pass begins.
        trained: the step that the loop trains on, or has trained on last, where that is known.
        holds_batches: the loop fetches batches ahead of the one that it trains on.
        next_begins_at: where a pass begins that begins now, but for `place`.
    """

    def __init__(self, deals: Deals) -> None:
        self.deals, self.place = deals, SamplerPlace(0, 0, 0, 0)
        self.under_way: deque[DealtStep] = deque()
        self.begun_last = self.under_way
        self.in_hand: DealtStep | None = None
        self.is_counting = self.holds_batches = False
        self.trained: DealtStep | None = None
        self.next_begins_at: SamplerPlace | None = None

    def begin(self, steps: deque[DealtStep]) -> None:
        self.begun_last = self.under_way = steps
        self.in_hand = None

    def leave(self) -> None:
        """What was dealt will not be taken."""
        self.under_way, self.in_hand = deque(), None

    def batches(
        self, order_of: Callable[[int], Callable[[Items], Items]], steps: deque[DealtStep], start: SamplerPlace
    ) -> Iterator[list[int]]:
        """Yield the indices of this rank's steps from a place on, and enter each step as it is dealt."""
        epoch, position, step, before = start
        order, length, dealer, fresh, mine = order_of(epoch), self.deals.length, None, 0, 0
        ready: deque[list[int]] = deque()
        while True:
            deal = self.deals.at(step)
            if deal is not dealer or not ready:
                if not (width := deal.width(left := length - position)):
                    return
                places = position + deal.ahead(left, _BLOCK)  # of steps that are dealt alike
                dealer, ready = deal, deque(order(places % length).tolist())
                mine = deal.count(fresh := min(width, left))
            position, step = position + fresh, step + 1
            steps.append(DealtStep(SamplerPlace(epoch, position, step, before), mine, fresh))
            yield ready.popleft()

    def deliver(self, one: deque[DealtStep]) -> DealtStep:
        """Note that the loop has the next batch of a pass in hand, and return its step: it is still to be counted."""
        self.is_counting = True
        self.under_way, self.in_hand = one, (step := one.popleft())
        return step

    @property
    def _dealt_to(self) -> SamplerPlace:
        last = self.under_way[-1] if self.under_way else self.in_hand
        return self.place if last is None else last.place

    @property
    def dealt_ahead(self) -> int:
        """Batches that are dealt but not yet taken by the loop: they keep the batch size they were dealt with."""
        return max(0, self._dealt_to.taken - self.place.taken)

    @property
    def steps_left(self) -> int:
        dealt_to = self._dealt_to
        return dealt_to.taken - self.place.taken + self.deals.steps_after(dealt_to)

    def samples_ahead(self) -> Iterator[int]:
        """Yield the samples of each step that follows the one in hand, of all ranks together, repeats left out."""
        yield from [step.fresh_of_all for step in list(self.under_way)]
        yield from self.deals.samples_after(self._dealt_to)
