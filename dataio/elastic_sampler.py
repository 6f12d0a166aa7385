"""Every sample of an epoch once, while the number of ranks and the batch size change in the middle of it.

An epoch is one order π of [0, n), the same on every rank. A step takes the next G = Σ_r b_r places of it and deals them
to the ranks; what is left is a suffix of the order. So its first place is all the state there is, and any number of
ranks with any batch sizes goes on from there. State and memory don't grow with n (order "feistel"; "torch" keeps the
list). Who gets which place, and the last step: accel.dataio.sampling.round_robin. The order:
accel.dataio.sampling.permutation. What is dealt, and what the loop took of it: accel.dataio.sampling.ledger.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

from torch.utils.data import Sampler

from accel.dataio.peek import PeekedEpoch
from accel.dataio.sampling.ledger import Deals, DealtStep, Ledger, SamplerPlace
from accel.dataio.sampling.permutation import order_of
from accel.dataio.sampling.round_robin import RoundRobin, Tail, world
from accel.profiler.errors import InvalidArgument, InvalidState, check_numbers

T = TypeVar("T")
_VERSION = 1


@dataclass
class LoopTurns:
    """What a loop calls its epochs, as far as it tells them: turns, each of which may be less than the data.

    Attributes:
        over: turns that it has been through, None where that is not known; a state has it.
        present: the number of the one that it is in, None outside of them.
        is_trained: a batch is trained on in the present one.
        total, to_come: of the whole training, and in this process, where the loop declares them.
    """

    over: int | None = None
    present: int | None = None
    is_trained: bool = False
    total: int | None = None
    to_come: int | None = None

    def begin(self, number: int) -> None:
        """The loop asks for a turn: the one before is over, if anything was trained on in it."""
        if self.is_trained:
            self.over = number
        self.present, self.is_trained = number, False

    def train(self) -> None:
        """A batch is trained on."""
        self.over, self.is_trained = self.present, True

    def end_pass(self) -> None:
        """A trained pass is over, and so is the turn that it was in, unless that goes on with another one."""
        if self.present is not None and self.is_trained:
            self.over = self.present + 1


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
        epoch, position: where the loop is: samples of the epoch consumed by all ranks together.
        batch_sizes: samples per step of each rank, once all changes hold; batches that were dealt before keep theirs.
        ledger: which steps are consumed, in hand and dealt ahead.
        turns: what the loop calls its epochs.

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
        check_numbers(num_replicas=num_replicas, rank=rank)
        self.num_replicas, self.rank = world(num_replicas, rank)
        _check(self.length >= 0, f"length must be at least 0, got {self.length}")
        _check(isinstance(seed, int) and 0 <= seed < 1 << 63, f"seed must be from 0 to 2**63 - 1, got {seed!r}")
        _check(order in ("feistel", "torch"), f"order must be 'feistel' or 'torch', got {order!r}")
        self.shuffle, self.seed, self.order = shuffle, seed, order
        self.drop_last, self.tail = drop_last, tail
        self.epoch = self.position = 0
        self.batch_sizes = _sizes(batch_size, self.num_replicas)
        self.ledger, self.turns = Ledger(_deals(self)), LoopTurns()

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
        self.ledger.is_counting = True
        return _counted(self, batches)

    def end_epoch(self) -> None:
        """Go on to the next epoch if the loop has taken all of this one; for loops that call `advance`."""
        if self.ledger.steps_left == 0:
            self.set_epoch(self.epoch + 1)

    def advance(self) -> None:
        """Count one batch as consumed; for loops that cannot iterate over `consumed`.

        Raises:
            InvalidState: if no batch of this sampler's running pass is left to be counted.
        """
        if not self.ledger.under_way:
            raise InvalidState(
                "only batches that this sampler dealt can be counted, got one more; build the loader with "
                "DataLoader(batch_sampler=sampler), and neither load a state nor change the epoch while iterating it"
            )
        self.count(self.ledger.deliver(self.ledger.under_way).place)

    def count(self, place: SamplerPlace) -> None:
        """Count all batches up to a place as consumed: a pass that begins now or goes on from a state begins there."""
        self.ledger.place = place
        self.epoch, self.position = place.epoch, place.position

    @property
    def fresh(self) -> int:
        """Samples at the head of the batch in hand that are no repeats; those after them fill up the last step."""
        return self.ledger.in_hand.fresh if self.ledger.in_hand else 0

    @property
    def weight(self) -> float:
        """W · fresh / Σ_ranks fresh: what to multiply the mean loss over the `fresh` samples by.

        DistributedDataParallel averages gradients as if ranks had equally many samples; so weighted, it averages over
        the step's samples in spite of repeats and of short or uneven batches.
        """
        step = self.ledger.in_hand
        return self.num_replicas * step.fresh / step.fresh_of_all if step else 0.0

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
        self.count(self.ledger.place._replace(epoch=epoch, position=position, taken_before=self.ledger.place.taken))
        self.ledger.leave()

    def set_batch_size(self, batch_size: int | Sequence[int], *, delay: int | None = None) -> None:
        """Change the batch size; call it on all ranks after the same step.

        Args:
            batch_size: samples per rank and step, or one number for each rank.
            delay: number of batches after the one in hand that keep the old size. Default: `ledger.dealt_ahead`, those
                dealt already (with w workers and a prefetch factor f up to w·f; none after a `break`), which is the
                same on all ranks only if their loaders run ahead equally far. If not, give a number.

        Raises:
            InvalidArgument: if a size is less than 1, or batches after `delay` more are dealt already.
        """
        ledger, dealt, now = self.ledger, self.ledger.dealt_ahead, self.ledger.place.taken
        delay = dealt if delay is None else delay
        _check(delay >= dealt, f"delay must be at least the {dealt} batches dealt ahead already, got {delay}; raise it")
        ledger.deals = ledger.deals.changed(_sizes(batch_size, self.num_replicas), now=now, at=now + delay)
        self.batch_sizes = ledger.deals.since[-1][1].sizes

    def state_dict(self) -> dict[str, Any]:
        """Return what it takes to go on from here: a few numbers, whatever n is, and equal on all ranks.

        Raises:
            InvalidState: if batches have been dealt and nothing counts what the loop took of them.
        """
        if (dealt := len(self.ledger.under_way)) and not self.ledger.is_counting:
            raise InvalidState(
                f"consumed batches must be counted, got {dealt} dealt and none counted; iterate over "
                "sampler.consumed(loader), or call sampler.advance() after each batch"
            )
        turns = {} if self.turns.over is None else {"turns": self.turns.over}
        return {"version": _VERSION, **_identity(self), "epoch": self.epoch, "position": self.position, **turns}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken, on this sampler's number of ranks and with its batch sizes.

        Args:
            state: from any of the old ranks; load it on all new ones.

        Raises:
            InvalidArgument: if it is of another dataset length, seed or order, or not a state of this class.
        """
        _check(state.get("version") == _VERSION, f"a state must have version {_VERSION}, got {state.get('version')!r}")
        for name, own in _identity(self).items():
            _check(
                state.get(name) == own,
                f"a state continues only the order it was taken from: it has {name} {state.get(name)!r}, "
                f"this sampler {own!r}; make the sampler with the same {name} or start the epoch again",
            )
        turns = state.get("turns")
        _check(turns is None or (type(turns) is int and turns >= 0), f"turns must be at least 0, got {turns!r}")
        _check(type(state["position"]) is int, f"position must be a whole number, got {state['position']!r}")
        self.set_epoch(state["epoch"], state["position"])
        self.turns.over = turns

    def __len__(self) -> int:
        """Return the steps that the loop has still to take in this epoch, equal on all ranks."""
        return self.ledger.steps_left

    def __iter__(self) -> Iterator[list[int]]:
        under_way: deque[DealtStep] = deque()
        self.ledger.begin(under_way)
        start = self.ledger.next_begins_at or self.ledger.place._replace(epoch=self.epoch)  # a loop may set it
        return self.ledger.batches(partial(order_of, **_identity(self)), under_way, start)

    def peek_epoch(self, epoch: int) -> PeekedEpoch | None:
        """Return the pass over `epoch` that follows when this one is over; None if nothing counts what the loop took.

        It holds unless a state, a position or a batch size is set in between.
        """
        if not (ledger := self.ledger).is_counting:
            return None
        under_way: deque[DealtStep] = deque()
        step, deals = ledger.place.taken + ledger.steps_left, ledger.deals
        lists = ledger.batches(partial(order_of, **_identity(self)), under_way, SamplerPlace(epoch, 0, step, step))

        def holds() -> bool:
            return (ledger.next_begins_at or ledger.place)[:3] == (epoch, 0, step) and ledger.deals is deals

        return PeekedEpoch(lists, holds, partial(ledger.begin, under_way))


def share_among(sampler: ElasticSampler, num_replicas: int, rank: int, batch_size: int | Sequence[int]) -> None:
    """Deal the rest of the epoch to other ranks, in passes that begin from now on; on all ranks after the same step."""
    sampler.num_replicas, sampler.rank = world(num_replicas, rank)
    sampler.batch_sizes = _sizes(batch_size, num_replicas)
    sampler.ledger.deals = _deals(sampler, sampler.ledger.place.taken)
    sampler.ledger.leave()


def _deals(sampler: ElasticSampler, since: int = 0) -> Deals:
    """Return how steps are dealt in the batch size that the loop is written for, which says what is left out."""
    deal, drops, least = partial(RoundRobin, rank=sampler.rank, tail=sampler.tail), 0, sampler._least
    own = deal(sampler.batch_sizes, drops=None if sampler.drop_last else 0, least=least)
    if sampler.drop_last:  # batches of another size are no smaller than these, where an epoch's end has enough for two
        drops, least = own.unfilled(sampler.length), max(least, min(own.sizes))
    return Deals(sampler.length, [(since, own)], partial(deal, drops=drops, least=least))


def _sizes(batch_size: int | Sequence[int], ranks: int) -> tuple[int, ...]:
    sizes = (batch_size,) * ranks if isinstance(batch_size, int) else tuple(batch_size)
    for size in sizes:
        check_numbers(batch_size=size)
    _check(len(sizes) == ranks, f"batch_size must be one number or one for each of the {ranks} ranks, got {len(sizes)}")
    return sizes


def _counted(sampler: ElasticSampler, batches: Iterable[T]) -> Iterator[T]:
    ledger, dealt = sampler.ledger, None
    try:
        for batch in batches:
            sampler.advance()
            dealt = ledger.under_way
            yield batch
    finally:
        # A pass that was left: its batches are dealt again in the next one, unless that has begun already.
        if dealt is None or ledger.under_way is dealt:
            ledger.under_way = deque()
    sampler.end_epoch()


def _identity(sampler: ElasticSampler) -> dict[str, Any]:
    return {"length": sampler.length, "seed": sampler.seed, "shuffle": sampler.shuffle, "order": sampler.order}


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise InvalidArgument(message)
