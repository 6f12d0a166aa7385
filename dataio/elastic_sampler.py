"""Every sample of an epoch once, while the number of ranks and the batch size change in the middle of it.

An epoch is one order π of [0, n), the same on every rank. A step takes the next G = Σ_r b_r places of it and deals them
to the ranks; what is left is a suffix of the order. So its first place is all the state there is, and any number of
ranks with any batch sizes goes on from there. State and memory don't grow with n (order "feistel"; "torch" keeps the
list). Who gets which place, and the last step: accel.dataio.sampling.round_robin. The order:
accel.dataio.sampling.permutation.

Others: torchelastic's ElasticDistributedSampler shuffles the *numbers* from start_index on, which are not what is left
of a shuffled epoch. AdaptDL's and Horovod's ElasticSampler continue the order, but keep it as a list on each rank, even
it out with repeats that they don't tell, and count equal batches only. torchdata's StatefulDataLoader holds a state per
worker, for a fixed number of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch.utils.data import Sampler

from accel.dataio.peek import PeekedEpoch
from accel.dataio.sampling.permutation import Items, Permutation
from accel.dataio.sampling.round_robin import RoundRobin, Tail, world
from accel.profiler.errors import InvalidArgument, InvalidState

T = TypeVar("T")
_VERSION = 1
_BLOCK = 4096  # indices computed at once: 109 ns each in batches of 32; one batch at a time it was 1,314 ns


class SamplerPlace(NamedTuple):
    """Epoch, samples of it, and steps since the sampler was made, with those before this epoch."""

    epoch: int
    position: int
    taken: int
    taken_before: int


class DealtStep(NamedTuple):
    """One step as dealt: where the sampler is after it, and how many of its samples are no repeats."""

    place: SamplerPlace
    fresh: int
    """Of this rank."""
    fresh_of_all: int


class ElasticSampler(Sampler[list[int]]):
    """Deal batches of indices so that each sample comes once per epoch, whatever happens to ranks and batch size.

    Step k of an epoch takes places p_k … p_k + G − 1 of the order π; p_{k+1} = p_k + G, G = Σ_r b_r; with equal batches
    b, rank r of W has π(p_k + r + W·i), i < b. Give it to `DataLoader(batch_sampler=…)` and iterate `consumed(loader)`,
    which counts what the loop took: workers run ahead, and what they have fetched is not yet trained on.

    Args:
        dataset_or_length: a dataset with a length, or its length n in samples.
        batch_size: samples per rank and step, at least 1; or one number for each rank. The same on all ranks.
        num_replicas, rank: number of ranks W, and this one; default the process group's, or 1 and 0 outside torchrun.
        shuffle: random order, anew in each epoch; else 0, 1, 2, …. Default True.
        seed: of the order, at least 0, the same on all ranks; default 0.
        drop_last: leave out the last step if a rank's batch in it were short by `batch_size`; default False.
        order: "feistel" computes the order where it is needed, in constant memory; "torch" is that of
            DistributedSampler, randperm under seed + epoch, 8 bytes a sample. With tail "pad" or "drop" and a world
            that doesn't change, batches then equal those of DataLoader with DistributedSampler, one by one.
        tail: of a last step that doesn't fill all batches. All ranks take the same number of steps under each.
            "pad" (default): fewer than W repeats from the epoch's beginning give every rank equally many; `fresh` tells
            them apart. "drop": fewer than W samples are left out instead. "uneven": exactly once; batches of the last
            two steps may differ by one, and a rank's last may be empty if n < W, batches are of 1, or fewer than W were
            left when a state was loaded. "fill": as "uneven", but a repeat in place of an empty batch.

    Raises:
        InvalidArgument: if an argument is out of range, or torchrun started several ranks and there is no group.

    Attributes:
        trained: the step that the loop trains on, or has trained on last, where that is known; default None.
        holds_batches: the loop fetches batches ahead of the one that it trains on; default False.
        next_begins_at: where a pass begins that begins now, but for where the sampler is; default None.
        turns: how often the loop has been through what it calls an epoch, which may be less than the data; a state has
            it where it is known. Default None.
        turn, is_turn_trained: the one that it is in, None outside of them; and whether a batch is trained on in it.
        total_epochs: of the whole training, where the loop declares them. Default None.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> def run(sampler, steps):
        ...     taken = sampler.consumed(DataLoader(range(100), batch_sampler=sampler))
        ...     return [index for _, batch in zip(range(steps), taken) for index in batch.tolist()]
        >>> old = [ElasticSampler(100, batch_size=8, num_replicas=3, rank=rank) for rank in range(3)]
        >>> seen = [index for sampler in old for index in run(sampler, 2)]
        >>> state = old[0].state_dict()  # equal on all ranks: 48 samples consumed
        >>> new = [ElasticSampler(100, batch_size=[20, 6], num_replicas=2, rank=rank) for rank in range(2)]
        >>> for sampler in new:
        ...     sampler.load_state_dict(state)
        ...     seen += run(sampler, 99)
        >>> sorted(seen) == list(range(100))
        True
    """

    _least = 1
    """Samples of each rank in an epoch's last step, as far as the last two have enough."""

    def __init__(
        self,
        dataset_or_length: Sized | int,
        *,
        batch_size: int | Sequence[int],
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        order: Literal["feistel", "torch"] = "feistel",
        tail: Tail = "pad",
    ) -> None:
        self.length = dataset_or_length if isinstance(dataset_or_length, int) else len(dataset_or_length)
        self.num_replicas, self.rank = world(num_replicas, rank)
        _check(self.length >= 0, f"length must be at least 0, got {self.length}")
        _check(isinstance(seed, int) and 0 <= seed < 1 << 63, f"seed must be from 0 to 2**63 - 1, got {seed!r}")
        _check(order in ("feistel", "torch"), f"order must be 'feistel' or 'torch', got {order!r}")
        self.shuffle, self.seed, self.order = shuffle, seed, order
        self.drop_last, self.tail = drop_last, tail
        self.epoch = 0
        self._position = 0
        self._taken_before = 0  # of the steps since the sampler was made: those before this epoch
        self._taken = 0  # steps since the sampler was made, over all epochs: what changes of batch size count in
        self._deals = [(0, self._own_deal(batch_size))]  # from which step on which batch sizes hold, in order
        self._under_way: deque[DealtStep] = deque()  # dealt, but not taken by the loop
        self._in_hand: DealtStep | None = None
        self._begun_last: deque[DealtStep] = self._under_way
        self._counting = False
        self.trained: DealtStep | None = None
        self.next_begins_at: SamplerPlace | None = None
        self.holds_batches = False
        self.turns: int | None = None
        self.turn: int | None = None
        self.is_turn_trained = False
        self.total_epochs: int | None = None
        self.epochs_to_come: int | None = None  # in this process, as its loop has declared

    def consumed(self, batches: Iterable[T]) -> Iterator[T]:
        """Pass the loader's batches on and count each as consumed when the loop gets it.

        A state saved in the loop's body includes the batch in hand: save after the optimizer's step. After the last
        batch the sampler goes on to the next epoch automatically; after a `break` it stays where the loop was.

        Args:
            batches: the loader built on this sampler, or what wraps it (the outermost, if one looks ahead).

        Raises:
            InvalidArgument: if the loader has in_order=False: what it passed over would be lost with the state.

        Example:
            >>> sampler = ElasticSampler(10, batch_size=4)
            >>> [len(batch) for batch in sampler.consumed(sampler)]  # then sampler.epoch is 1
            [4, 4, 2]
        """
        if getattr(batches, "in_order", True) is False:
            raise InvalidArgument(
                "batches must come in order to be counted, got a loader with in_order=False; remove that"
            )
        self._counting = True
        return self._count(batches)

    def _count(self, batches: Iterable[T]) -> Iterator[T]:
        dealt: deque[DealtStep] | None = None
        try:
            for batch in batches:
                self.advance()
                dealt = self._under_way
                yield batch
        finally:
            # A pass that was left: its batches are dealt again in the next one, unless that has begun already.
            if dealt is None or self._under_way is dealt:
                self._under_way = deque()
        self.end_epoch()

    def end_epoch(self) -> None:
        """Go on to the next epoch if the loop has taken all of this one; for loops that call `advance`."""
        if self.steps_left == 0:
            self.set_epoch(self.epoch + 1)

    def advance(self) -> None:
        """Count one batch as consumed; for loops that cannot iterate over `consumed`.

        Raises:
            InvalidState: if no batch of this sampler's running pass is left to be counted.
        """
        if not self._under_way:
            raise InvalidState(
                "only batches that this sampler dealt can be counted, got one more; build the loader with "
                "DataLoader(batch_sampler=sampler), and neither load a state nor change the epoch while iterating it"
            )
        self.count(self.deliver(self._under_way))

    @property
    def begun_last(self) -> deque[DealtStep]:
        """The pass over this sampler that was begun last, by the name that `deliver` takes."""
        return self._begun_last

    def deliver(self, one: deque[DealtStep]) -> DealtStep:
        """Note that the loop has the next batch in hand, and return its step; it is consumed once `count` is called.

        Args:
            one: the pass that it is of, perhaps begun within another one.
        """
        self._counting = True
        self._under_way, self._in_hand = one, (step := one.popleft())
        return step

    def count(self, step: DealtStep) -> None:
        """Count the batches up to a step as consumed: a pass that begins now, or goes on from a state, begins there."""
        self.epoch, self._position, self._taken, self._taken_before = step.place

    @property
    def counting(self) -> bool:
        """True once something counts what the loop takes."""
        return self._counting

    @property
    def position(self) -> int:
        """Samples of this epoch consumed by all ranks together."""
        return self._position

    @property
    def taken(self) -> int:
        """Steps of this epoch that the loop has taken since it began, or since a position or a state was set."""
        return self._taken - self._taken_before

    @property
    def dealt_ahead(self) -> int:
        """Batches that are dealt but not yet taken by the loop: they keep the batch size they were dealt with."""
        last = self._last_dealt
        return 0 if last is None else max(0, last.place.taken - self._taken)

    @property
    def _last_dealt(self) -> DealtStep | None:
        return self._under_way[-1] if self._under_way else self._in_hand

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Samples per step of each rank, as set last; batches that were dealt before keep theirs."""
        return self._deals[-1][1].sizes

    @property
    def samples_in_hand(self) -> int:
        """Samples of the step in hand on all ranks together, repeats left out."""
        return self._in_hand.fresh_of_all if self._in_hand else 0

    @property
    def fresh(self) -> int:
        """Samples at the head of the batch in hand that are no repeats; those after them fill up the last step."""
        return self._in_hand.fresh if self._in_hand else 0

    @property
    def weight(self) -> float:
        """W · fresh / Σ_ranks fresh: what to multiply the mean loss over the `fresh` samples by.

        DistributedDataParallel averages gradients as if ranks had equally many samples; so weighted, it averages over
        the step's samples in spite of repeats and of short or uneven batches.
        """
        step = self._in_hand
        return self.num_replicas * step.fresh / step.fresh_of_all if step and step.fresh_of_all else 0.0

    def set_epoch(self, epoch: int, position: int | None = None) -> None:
        """Go to an epoch.

        Args:
            epoch: at least 0.
            position: samples of it to count as consumed. Default 0, but kept in the epoch that the sampler is in, so
                that `set_epoch` at the head of a loop does not undo `load_state_dict`.

        Raises:
            InvalidArgument: if an argument is out of range.
        """
        _check(type(epoch) is int and epoch >= 0, f"epoch must be a whole number, at least 0, got {epoch!r}")
        if position is None and epoch == self.epoch:
            return
        position = position or 0
        _check(0 <= position <= self.length, f"position must be from 0 to {self.length}, got {position}")
        self.epoch, self._position, self._taken_before = epoch, position, self._taken
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._under_way, self._in_hand = deque(), None

    @property
    def place(self) -> SamplerPlace:
        """Where the sampler is: what is consumed, and nothing beyond it."""
        return SamplerPlace(self.epoch, self._position, self._taken, self._taken_before)

    def set_batch_size(self, batch_size: int | Sequence[int], *, delay: int | None = None) -> None:
        """Change the batch size; call it on all ranks after the same step.

        Args:
            batch_size: samples per rank and step, or one number for each rank.
            delay: number of batches after the one in hand that keep the old size. Default: those that are dealt
                already (with w workers and a prefetch factor f up to w·f; none after a `break`), which is the same on
                all ranks only if their loaders run ahead equally far. If not, give a number.

        Raises:
            InvalidArgument: if a size is less than 1, or batches after `delay` more are dealt already.
        """
        dealt = self.dealt_ahead
        delay = dealt if delay is None else delay
        _check(delay >= dealt, f"delay must be at least the {dealt} batches dealt ahead already, got {delay}; raise it")
        at = self._taken + delay
        now = (self._taken, self._deal_at(self._taken))
        later = [change for change in self._deals if change[0] > self._taken]
        self._deals = sorted([now, *later, (at, self._deal(batch_size, self._drops))], key=lambda change: change[0])

    def share_among(self, num_replicas: int, rank: int, batch_size: int | None = None) -> None:
        """Deal the rest of the epoch to another number of ranks, in passes that begin from now on.

        Args:
            num_replicas, rank: as of the constructor; call it on all ranks after the same step.
            batch_size: samples per rank and step; default this rank's present one, which must be that of all.
        """
        batch_size = self.batch_sizes[self.rank] if batch_size is None else batch_size
        self.num_replicas, self.rank = world(num_replicas, rank)
        self._deals = [(self._taken, self._own_deal(batch_size))]
        self._begin_anew()

    def state_dict(self) -> dict[str, Any]:
        """Return what it takes to go on from here: a few numbers, whatever n is, and equal on all ranks.

        Raises:
            InvalidState: if batches have been dealt and nothing counts what the loop took of them.
        """
        if self._under_way and not self._counting:
            raise InvalidState(
                f"consumed batches must be counted, got {len(self._under_way)} dealt and none counted; iterate over "
                "sampler.consumed(loader), or call sampler.advance() after each batch"
            )
        turns = {} if self.turns is None else {"turns": self.turns}
        here = {"epoch": self.epoch, "position": self._position}
        return {"version": _VERSION, **self._identity(), **here, **turns}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken, on this sampler's number of ranks and with its batch sizes.

        Args:
            state: from any of the old ranks; load it on all new ones.

        Raises:
            InvalidArgument: if it is of another dataset length, seed or order, or not a state of this class.
        """
        _check(state.get("version") == _VERSION, f"a state must have version {_VERSION}, got {state.get('version')!r}")
        for name, own in self._identity().items():
            _check(
                state.get(name) == own,
                f"a state continues only the order it was taken from: it has {name} {state.get(name)!r}, "
                f"this sampler {own!r}; make the sampler with the same {name} or start the epoch again",
            )
        turns = state.get("turns")
        _check(turns is None or (type(turns) is int and turns >= 0), f"turns must be at least 0, got {turns!r}")
        _check(type(state["position"]) is int, f"position must be a whole number, got {state['position']!r}")
        self.set_epoch(state["epoch"], state["position"])
        self.turns = turns

    def _identity(self) -> dict[str, Any]:
        return {"length": self.length, "seed": self.seed, "shuffle": self.shuffle, "order": self.order}

    def __len__(self) -> int:
        """Return the steps that the loop has still to take in this epoch, equal on all ranks."""
        return self.steps_left

    @property
    def steps_left(self) -> int:
        """Steps that the loop has still to take in this epoch, equal on all ranks."""
        place = self.place if self._last_dealt is None else self._last_dealt.place
        return place.taken - self._taken + self.steps_after(place)

    def steps_after(self, place: SamplerPlace) -> int:
        """Return the steps that are left in the epoch after a place in it."""
        _, position, step, _ = place
        while step < self._deals[-1][0] and (width := self._deal_at(step).width(self.length - position)):
            position, step = min(position + width, self.length), step + 1
        return step - place.taken + self._deal_at(step).steps(self.length - position)

    def samples_ahead(self, steps: int) -> list[int]:
        """Return the samples of each step that follows the one in hand, on all ranks together, repeats left out.

        Args:
            steps: how many of them, at least 0; the epoch may have fewer left.

        Example:
            >>> sampler = ElasticSampler(10, batch_size=4)
            >>> batches = sampler.consumed(sampler)
            >>> len(next(batches)), sampler.samples_ahead(5)
            (4, [4, 2])
        """
        dealt = list(self._under_way)[:steps]
        ahead = [step.fresh_of_all for step in dealt]
        last = dealt[-1] if dealt else self._in_hand
        _, position, number, _ = self.place if last is None else last.place
        while len(ahead) < steps and (width := self._deal_at(number).width(self.length - position)):
            ahead.append(min(width, self.length - position))
            position, number = position + ahead[-1], number + 1
        return ahead

    def __iter__(self) -> Iterator[list[int]]:
        under_way: deque[DealtStep] = deque()
        self._begin(under_way)
        return self._batches(under_way, self.next_begins_at or self.place)

    def _begin(self, under_way: deque[DealtStep]) -> None:
        self._begun_last = self._under_way = under_way
        self._in_hand = None

    def peek_epoch(self, epoch: int) -> PeekedEpoch | None:
        """Return the pass over `epoch` that follows when this one is over; None if nothing counts what the loop took.

        It holds unless a state, a position or a batch size is set in between.
        """
        if not self._counting:
            return None
        under_way: deque[DealtStep] = deque()
        step, deals = self._taken + self.steps_left, self._deals

        def holds() -> bool:
            return (self.next_begins_at or self.place)[:3] == (epoch, 0, step) and self._deals is deals

        def begin() -> None:
            self._begin(under_way)

        return PeekedEpoch(self._batches(under_way, SamplerPlace(epoch, 0, step, step)), holds, begin)

    def _batches(self, under_way: deque[DealtStep], start: SamplerPlace) -> Iterator[list[int]]:
        epoch, position, step, before = start
        order, dealer, fresh, mine = self._order(epoch), None, 0, 0
        ready: deque[list[int]] = deque()
        while True:
            deal = self._deal_at(step)
            if deal is not dealer or not ready:
                if not (width := deal.width(left := self.length - position)):
                    return
                places = position + deal.ahead(left, _BLOCK)  # of steps that are dealt alike
                dealer, ready = deal, deque(order(places % self.length).tolist())
                mine = deal.count(fresh := min(width, left))
            position, step = position + fresh, step + 1
            under_way.append(DealtStep(SamplerPlace(epoch, position, step, before), mine, fresh))
            yield ready.popleft()

    def _own_deal(self, batch_size: int | Sequence[int]) -> RoundRobin:
        """Return how steps are dealt in the batch size that the loop is written for, which says what is left out."""
        deal, self._drops = self._deal(batch_size, None if self.drop_last else 0), 0
        if self.drop_last:  # batches of another size are no smaller than these, where an epoch's end has enough for two
            self._drops, self._least = deal.unfilled(self.length), max(type(self)._least, min(deal.sizes))
        return deal

    def _deal(self, batch_size: int | Sequence[int], drops: int | None) -> RoundRobin:
        sizes = [batch_size] * self.num_replicas if isinstance(batch_size, int) else list(batch_size)
        _check(
            len(sizes) == self.num_replicas,
            f"batch_size must be one number or one for each of the {self.num_replicas} ranks, got {len(sizes)}",
        )
        return RoundRobin(sizes, self.rank, self.tail, drops=drops, least=self._least)

    def _deal_at(self, step: int) -> RoundRobin:
        if self._deals[-1][0] <= step:
            return self._deals[-1][1]
        # Of steps before the first that is known, as a pass that begins elsewhere may have, those sizes are as good.
        return next((deal for at, deal in reversed(self._deals) if at <= step), self._deals[0][1])

    def _order(self, epoch: int) -> Callable[[Items], Items]:
        if not self.shuffle:
            return lambda places: places
        if self.order == "feistel":
            return Permutation(self.length, seed=self.seed, epoch=epoch)
        generator = torch.Generator().manual_seed(self.seed + epoch)
        return torch.randperm(self.length, generator=generator).numpy().__getitem__


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise InvalidArgument(message)
