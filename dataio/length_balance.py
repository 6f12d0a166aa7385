"""Batches of samples of different lengths that cost every rank the same in the same step.

The ranks of a step wait for the slowest of them, so what counts is

    efficiency = Σ cost of the samples / (W · Σ over steps of the largest pack's cost)        W ranks

which both padding and unequal packs lower. Packs are made over the whole epoch, not within a global batch: a sample
that costs more than all others together can't be evened out within its batch, but it can stand beside its like.

| limit      | unpadded                                          | padded                                        |
|------------|---------------------------------------------------|-----------------------------------------------|
| max_tokens | best-fit decreasing packs, W of like cost a step  | cuts of the sorted lengths, W of like cost    |
| batch_size | W samples of like cost, one to each rank, repeat  | equal cuts of the sorted lengths              |

What is random and what is not: samples of one length change places freely, lengths are jittered before they are sorted
(see `jitter`), layers or packs of like cost come in random order and go to ranks at random. What stays is that samples
of one step have like lengths (padded) or that packs of one step have like costs (unpadded): a batch is not an
independent draw, as with any length grouping.

Sources: longest processing time first, at most 4/3 of the best (Graham 1969, doi.org/10.1137/0117039); chunks of equal
lengths over the ranks as in Bagua's LoadBalancingDistributedSampler; best-fit decreasing packs as in TRL.
"""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from accel.dataio.packing import best_fit, check_lengths, check_longest
from accel.dataio.peek import PeekedEpoch
from accel.dataio.sampling.round_robin import world
from accel.profiler.errors import InvalidArgument, check_numbers

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Cost = Callable[[Floats], Any]


class Balance(NamedTuple):
    """How well the packs of an epoch use the ranks, each 0 to 1."""

    efficiency: float
    """Cost of the samples over W times the largest pack of each step; the product of the two below."""
    evenness: float
    """Cost of the packs, padding included, over W times the largest of each step."""
    filling: float
    """Cost of the samples over cost of the packs: 1 without padding."""


def balance_of(pack_costs: Floats, samples_cost: float) -> Balance:
    """Return the balance of packs.

    Args:
        pack_costs: (steps, ranks), any unit.
        samples_cost: cost of all samples without padding, in that unit.
    """
    packs, slowest = float(pack_costs.sum()), float(pack_costs.max(axis=1).sum()) * pack_costs.shape[1]
    if packs == 0:
        return Balance(1.0, 1.0, 1.0)
    return Balance(samples_cost / slowest, packs / slowest, samples_cost / packs)


def attention_cost(crossover: float) -> Cost:
    """Return the cost of a transformer: length · (1 + length / crossover).

    Args:
        crossover: length at which attention costs as much as everything else, in tokens, > 0.

    Example:
        >>> sampler = LengthBalancedBatchSampler(lengths, max_tokens=8192, cost=attention_cost(2048))
    """
    if not crossover > 0:
        raise InvalidArgument(f"crossover must be larger than 0 tokens, got {crossover}")
    return lambda lengths: lengths * (1.0 + lengths / crossover)


@dataclass
class _Drawn:
    """How far a pass has drawn its epoch."""

    step: int


class LengthBalancedBatchSampler(Sampler[list[int]]):
    """Sample batches whose costs are equal over the ranks of each step.

    Every rank gets the same number of batches, the same in every epoch, and each sample comes exactly once per epoch
    over all ranks. Where there are too few samples to give each rank of the last step one, fewer than `num_replicas`
    of the shortest are repeated. `drop_last` leaves out samples instead.

    Args:
        lengths: tokens of each sample, n whole numbers ≥ 0, the same on every rank.
        max_tokens: most tokens of a batch: the sum of its lengths, or n × the longest if `padded`.
        batch_size: most samples of a batch; give this or `max_tokens`. Sizes then differ by 1 at most. With `padded`
            and a heavy tail use `max_tokens`: one long sample makes a whole batch long.
        num_replicas, rank: number of ranks and this one; default the process group's, or 1 and 0
            outside torchrun.
        padded: batches are padded to their longest: a batch costs n × cost(longest), else the sum of cost(length).
        cost: takes lengths (n,) float64, returns their costs (n,), ≥ 0 and not decreasing; default the lengths.
        shuffle: False gives the same epoch each time, the most costly steps first.
        seed: the same on every rank, default 0.
        drop_last: leave out, at random, what does not fill a step: fewer than num_replicas × batch_size samples, or at
            most `num_replicas` − 1 packs. With `batch_size` all batches then have that size.
        jitter: lengths are sorted as if longer or shorter by at most this share, so that packs change from epoch to
            epoch even where no two lengths are equal; default 0.1, padded 0.02, since padding grows with it. Packs of
            two or three samples that fill `max_tokens` to the last token recur all the same. Not used with `batch_size`
            unpadded, where packs are random anyway.

    Raises:
        InvalidArgument: if an argument is out of range, a sample is longer than `max_tokens`, or
            torchrun started several ranks and there is no group.

    Example:
        >>> sampler = LengthBalancedBatchSampler([len(s) for s in samples], max_tokens=8192)
        >>> loader = DataLoader(samples, batch_sampler=sampler, collate_fn=PackCollate())
        >>> for epoch in range(3):
        ...     sampler.set_epoch(epoch)
        ...     for row in loader: ...

    Ranks have different token counts: weigh the loss with `accel.dataio.token_loss`.
    """

    def __init__(
        self,
        lengths: Sequence[int] | NDArray[Any],
        *,
        max_tokens: int | None = None,
        batch_size: int | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        padded: bool = False,
        cost: Cost | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        jitter: float | None = None,
    ) -> None:
        check_numbers(max_tokens=max_tokens, batch_size=batch_size, num_replicas=num_replicas, rank=rank, jitter=jitter)
        self.num_replicas, self.rank = world(num_replicas, rank)
        self._lengths = check_lengths(lengths)
        self._limits(max_tokens, batch_size, jitter)
        self.max_tokens, self.batch_size, self.padded = max_tokens, batch_size, padded
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self._jitter = (0.02 if padded else 0.1) if jitter is None else jitter
        self._costs = _costs(cost, self._lengths)
        limits = max_tokens, batch_size, padded, drop_last, self._jitter
        self._planner = _Planner(self._lengths, self._costs, self.num_replicas, *limits)
        self.epoch = self._start = 0
        self._drawn = _Drawn(0)
        self._planned: dict[int, Packs] = {}
        self._steps = self._planner.count_steps(self._rng(self.epoch))

    def _limits(self, max_tokens: int | None, batch_size: int | None, jitter: float | None) -> None:
        if (max_tokens is None) == (batch_size is None):
            raise InvalidArgument(f"give either max_tokens or batch_size, got {max_tokens} and {batch_size}")
        limit = batch_size if max_tokens is None else max_tokens
        if limit is not None and limit < 1:
            raise InvalidArgument(f"max_tokens and batch_size must be at least 1, got {limit}")
        if jitter is not None and not 0 <= jitter < 1:
            raise InvalidArgument(f"jitter must be 0 or more and less than 1, got {jitter}")
        if max_tokens is not None:
            check_longest(self._lengths, max_tokens)

    # -- one rank's batches ------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of batches in a whole epoch, on every rank and in every epoch."""
        return self._steps

    def __iter__(self) -> Iterator[list[int]]:
        """Iterate this rank's batches of the epoch, from where a loaded state left it."""
        # All of it at the first batch, not before: DataLoader with workers calls iter() twice and uses the second.
        self._drawn, self._start = _Drawn(self._start), 0
        yield from self._batches(self.epoch, self._drawn)

    def _batches(self, epoch: int, drawn: _Drawn) -> Iterator[list[int]]:
        packs = self._plan_of(epoch)
        ends = packs.sizes.cumsum()
        for step in range(drawn.step, self._steps):
            pack = step * self.num_replicas + self.rank
            drawn.step = step + 1
            yield packs.order[ends[pack] - packs.sizes[pack] : ends[pack]].tolist()

    def peek_epoch(self, epoch: int) -> PeekedEpoch:
        """Return the pass over `epoch` that comes next, from its beginning; it holds unless a state is loaded."""
        drawn = _Drawn(0)

        def begin() -> None:
            self._drawn = drawn

        return PeekedEpoch(self._batches(epoch, drawn), lambda: self.epoch == epoch and self._start == 0, begin)

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch; setting the one that a loaded state is in leaves its place alone."""
        if epoch != self.epoch:
            self.epoch, self._start, self._drawn = epoch, 0, _Drawn(0)

    def state_dict(self, step: int | None = None) -> dict[str, int]:
        """Return where this epoch stands.

        Args:
            step: batches that the loop has had; default: those drawn from the sampler, which is more where workers
                fetch ahead.
        """
        return {"epoch": self.epoch, "step": self._drawn.step if step is None else step, "plan": self._fingerprint()}

    def begin_state(self) -> dict[str, int]:
        """Return the state in which the next pass begins, whatever the one before has drawn."""
        return self.state_dict(self._start)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where `state` was taken; after the last batch of an epoch nothing is left of it.

        Raises:
            InvalidArgument: if it was taken with other lengths, costs, ranks or settings, or the step is out of range.
        """
        if state["plan"] != self._fingerprint():
            raise InvalidArgument(
                f"the state must be of the same lengths, costs, ranks and settings, got plan {state['plan']}, this is "
                f"{self._fingerprint()}; go on at the next epoch with set_epoch({state['epoch'] + 1})"
            )
        if not 0 <= state["step"] <= self._steps:
            raise InvalidArgument(
                f"step must be 0 to {self._steps}, got {state['step']}; count batches of this epoch only"
            )
        self.epoch, self._start, self._drawn = state["epoch"], state["step"], _Drawn(state["step"])

    def _fingerprint(self) -> int:
        settings = (self.max_tokens, self.batch_size, self.padded, self.shuffle, self.seed, self.drop_last)
        head = repr((*settings, self._jitter, self.num_replicas)).encode()
        return zlib.crc32(self._costs.tobytes(), zlib.crc32(self._lengths.tobytes(), zlib.crc32(head)))

    # -- all ranks' packs --------------------------------------------------------------------------------------------

    def plan(self) -> Packs:
        """Return the epoch's packs of all ranks: step 0 rank 0, step 0 rank 1, …; kept until the epoch changes."""
        return self._plan_of(self.epoch)

    def _plan_of(self, epoch: int) -> Packs:
        """Return the packs of an epoch; beside those of the present one they are kept until another one's are made."""
        if epoch not in self._planned:
            kept = {number: packs for number, packs in self._planned.items() if number == self.epoch}
            self._planned = kept | {epoch: self._planner.plan(self._rng(epoch), self._steps)}
        return self._planned[epoch]

    def balance(self) -> Balance:
        """Return how well this epoch uses the ranks."""
        packs = self.plan()
        useful = float(self._costs[packs.order].sum())
        return balance_of(self._planner.pack_costs(packs).reshape(-1, self.num_replicas), useful)

    def _rng(self, epoch: int) -> np.random.Generator | None:
        return np.random.default_rng([self.seed, epoch]) if self.shuffle else None


@dataclass(frozen=True, eq=False)
class _Planner:
    """Makes the packs of an epoch; its fields are arguments of the sampler."""

    lengths: Ints
    costs: Floats
    ranks: int
    max_tokens: int | None
    batch_size: int | None
    padded: bool
    drop_last: bool
    jitter: float

    def pack_costs(self, packs: Packs) -> Floats:
        """Return the cost of each pack."""
        return pack_costs(self.costs, packs, self.padded)

    def count_steps(self, rng: np.random.Generator | None) -> int:
        """Return the steps of an epoch; the jittered packs of each epoch are made to fit that number."""
        if self.batch_size is not None:
            packs = -(-len(self.lengths) // self.batch_size)
            full = len(self.lengths) // (self.batch_size * self.ranks)
            return full if self.drop_last else -(-packs // self.ranks)
        packs = max(len(self._by_tokens(rng, jitter).sizes) for jitter in {0.0, self.jitter})
        return packs // self.ranks if self.drop_last else -(-packs // self.ranks)

    def plan(self, rng: np.random.Generator | None, steps: int) -> Packs:
        """Return the packs of so many steps."""
        if steps == 0:
            return Packs(np.zeros(0, np.int64), np.zeros(0, np.int64))
        packs_wanted = steps * self.ranks
        if self.batch_size is None:
            return self._deal(self._fit(rng, packs_wanted), rng)
        chosen = self._choose(rng, packs_wanted)
        if self.padded:
            order = chosen[descending(jittered(self.lengths[chosen], self.jitter, rng), rng)]
            small, larger = divmod(len(order), packs_wanted)
            sizes = np.full(packs_wanted, small)
            sizes[packs_wanted - larger :] += 1
            return self._deal(Packs(order, sizes), rng)
        order = chosen[descending(self.costs[chosen], rng)]
        return deal_layers(order, self.costs, steps, self.ranks, rng)

    def _choose(self, rng: np.random.Generator | None, packs: int) -> Ints:
        """Return the samples of this epoch for a batch size: all, fewer, or with some of the shortest repeated."""
        everyone = np.arange(len(self.lengths))
        if self.drop_last:
            left = packs * (self.batch_size or 0)
            return everyone[:left] if rng is None else rng.permutation(everyone)[:left]
        return np.concatenate([everyone, shortest(self.lengths, packs - len(everyone))])

    def _by_tokens(self, rng: np.random.Generator | None, jitter: float) -> Packs:
        """Return packs of at most `max_tokens`, as many as come."""
        assert self.max_tokens is not None
        order = descending(jittered(self.lengths, jitter, rng), rng)
        if self.padded:
            return Packs(order, cut_padded(self.lengths[order], self.max_tokens))
        bins = best_fit(self.lengths[order], self.max_tokens)
        return Packs(order[np.argsort(bins, kind="stable")], np.bincount(bins))

    def _fit(self, rng: np.random.Generator | None, wanted: int) -> Packs:
        """Return `wanted` packs of at most `max_tokens`, the surplus dropped or packs split to get there."""
        most = wanted + self.ranks - 1 if self.drop_last else wanted
        # Without jitter the packs are those that were counted at the start, so the last attempt always fits.
        for jitter in (self.jitter, self.jitter / 2, 0.0):
            packs = self._by_tokens(rng, jitter)
            if len(packs.sizes) <= most:
                break
        if len(packs.sizes) > wanted:
            return drop(packs, wanted, rng)
        return packs if len(packs.sizes) == wanted else self._more(packs, wanted - len(packs.sizes))

    def _more(self, packs: Packs, missing: int) -> Packs:
        """Return `missing` packs more, made from the cheapest ones, which stand in the last step."""
        assert self.max_tokens is not None
        wanted = len(packs.sizes) + missing
        cheap = np.argsort(self.pack_costs(packs), kind="stable")[: -missing % self.ranks or self.ranks]
        kept = np.setdiff1d(np.arange(len(packs.sizes)), cheap)
        few, made = take(packs, cheap), len(cheap) + missing
        pieces: list[Ints] = []
        if not self.padded:
            pieces = spread(few.order, made, self.costs, self.lengths, self.max_tokens)
        pieces = pieces or split(few, made, self.costs, self.padded)
        balanced = join(take(packs, kept), pieces)
        # The cheapest alone may hold too few samples: halve any pack then, and at last repeat samples.
        if len(balanced.sizes) < wanted:
            pieces = split(balanced, wanted, self.costs, self.padded)
            repeated = shortest(self.lengths, wanted - len(pieces))
            balanced = join(Packs(repeated, np.ones_like(repeated)), pieces)
        return balanced

    def _deal(self, packs: Packs, rng: np.random.Generator | None) -> Packs:
        """Put packs of like cost into one step; shuffle steps, and ranks within a step."""
        ranked = descending(self.pack_costs(packs), rng).reshape(-1, self.ranks)
        if rng is not None:
            ranked = rng.permuted(rng.permutation(ranked), axis=1)
        return take(packs, ranked.ravel())


def _costs(cost: Cost | None, lengths: Ints) -> Floats:
    wide = lengths.astype(np.float64)
    costs = wide if cost is None else np.asarray(cost(wide.copy()), dtype=np.float64)
    if costs.shape != lengths.shape or not np.isfinite(costs).all() or (costs < 0).any():
        raise InvalidArgument(
            f"cost must return one finite number ≥ 0 per length, shape {lengths.shape}, got shape {costs.shape}, "
            f"{int((~np.isfinite(costs)).sum())} not finite; it takes the array of all lengths"
        )
    return costs


# -- packs: arrays in, arrays out --------------------------------------------------------------


class Packs(NamedTuple):
    """Packs one after the other."""

    order: Ints
    """(samples,), sample indices."""
    sizes: Ints
    """(packs,), how many of them each pack takes, ≥ 1."""


def pack_costs(costs: Floats, packs: Packs, padded: bool) -> Floats:
    """Return the cost of each pack (packs,), from those of the samples (n,)."""
    if not len(packs.sizes):
        return np.zeros(0)
    starts, each = packs.sizes.cumsum() - packs.sizes, costs[packs.order]
    return packs.sizes * np.maximum.reduceat(each, starts) if padded else np.add.reduceat(each, starts)


def cut_padded(lengths: Ints, max_tokens: int) -> Ints:
    """Return how many of the (nearly) descending lengths go into each pack: as many as size × longest allows."""
    sizes, start = [], 0
    while start < len(lengths):
        # The first is nearly the longest, so no more than this can fit; all of them, if they are empty.
        ahead = lengths[start : start + max_tokens // max(int(lengths[start]), 1)]
        fits = np.maximum.accumulate(ahead) * np.arange(1, len(ahead) + 1) <= max_tokens
        sizes.append(len(fits) if fits.all() else int(fits.argmin()))
        start += sizes[-1]
    return np.array(sizes, dtype=np.int64)


def split(packs: Packs, wanted: int, costs: Floats, padded: bool) -> list[Ints]:
    """Return at most `wanted` packs, made from fewer by halving the most costly; fewer if all hold one sample."""
    pieces = np.split(packs.order, packs.sizes.cumsum()[:-1]) if len(packs.sizes) else []
    heap = [(-float(costs[piece].sum()), i) for i, piece in enumerate(pieces) if len(piece) > 1]
    heapq.heapify(heap)
    while heap and len(pieces) < wanted:
        i = heapq.heappop(heap)[1]
        piece = pieces[i][np.argsort(-costs[pieces[i]], kind="stable")]
        half = len(piece) // 2
        pieces[i], new = (piece[:half], piece[half:]) if padded else (piece[::2], piece[1::2])
        pieces.append(new)
        for j in (i, len(pieces) - 1):
            if len(pieces[j]) > 1:
                heapq.heappush(heap, (-float(costs[pieces[j]].sum()), j))
    return pieces


def spread(samples: Ints, number: int, costs: Floats, lengths: Ints, max_tokens: int) -> list[Ints]:
    """Return the samples in `number` packs of like cost, the next always to who has least; none if they don't fit."""
    packs: list[list[int]] = [[] for _ in range(number)]
    loads, room = np.zeros(number), np.full(number, max_tokens)
    for sample in samples[np.argsort(-costs[samples], kind="stable")].tolist():
        fitting = np.where(room >= lengths[sample], loads, np.inf)
        least = int(fitting.argmin())
        if fitting[least] == np.inf:
            return []
        packs[least].append(sample)
        loads[least] += costs[sample]
        room[least] -= lengths[sample]
    return [np.array(pack) for pack in packs] if all(packs) else []


def deal_layers(order: Ints, costs: Floats, steps: int, ranks: int, rng: np.random.Generator | None) -> Packs:
    """Draw the layers of each step, then give each sample to the rank with the least cost that has room left.

    One Python round per sample of a step, for all steps at once. 100,000 samples: 0.05 s in steps of 1,024, 0.35 s in
    steps of 16,384, but 2 s in a single step.

    Args:
        order: (n ≥ steps · ranks,), samples by descending cost. A layer is `ranks` of them in a row; what is left over
            joins a step with one layer less.
        costs: of all samples.
        steps: among which the layers are dealt out, at random if there is `rng`.
        ranks: of a step.
    """
    layers, rest = divmod(len(order), ranks)
    depth, deep = -(-layers // steps), layers % steps or steps
    dealt = np.full(steps * depth, layers)
    dealt[:layers] = np.arange(layers) if rng is None else rng.permutation(layers)
    # Column by column, so that the first `deep` steps have one layer more; the costly layers first.
    table = np.sort(dealt.reshape(depth, steps).T, axis=1)
    members, counts = np.full((steps, ranks, depth + 1), -1), np.zeros((steps, ranks), dtype=np.int64)
    loads = np.zeros((steps, ranks))
    for place in range(depth * ranks):
        rows = np.arange(steps if place < (depth - 1) * ranks else deep)
        samples = order[table[rows, place // ranks] * ranks + place % ranks]
        room = np.where(rows < deep, depth, depth - 1)[:, None]
        # Among ranks with no cost at all the one with fewest samples: none stays empty.
        least = np.where(counts[rows] < room, loads[rows] + 1e-9 * counts[rows], np.inf).argmin(axis=1)
        members[rows, least, counts[rows, least]] = samples
        counts[rows, least] += 1
        loads[rows, least] += costs[samples]
    if rest:
        step = deep % steps
        members[step, np.argsort(loads[step], kind="stable")[:rest], depth] = order[layers * ranks :]
    if rng is not None:
        members = rng.permutation(members)[np.arange(steps)[:, None], np.argsort(rng.random((steps, ranks)), axis=1)]
    there = members >= 0
    return Packs(members[there], there.sum(axis=2).ravel())


def take(packs: Packs, chosen: Ints) -> Packs:
    """Return the packs `chosen`, in that order."""
    starts, sizes = (packs.sizes.cumsum() - packs.sizes)[chosen], packs.sizes[chosen]
    within = np.arange(sizes.sum()) - np.repeat(sizes.cumsum() - sizes, sizes)
    return Packs(packs.order[np.repeat(starts, sizes) + within], sizes)


def join(packs: Packs, pieces: list[Ints]) -> Packs:
    sizes = np.array([len(piece) for piece in pieces], dtype=np.int64)
    return Packs(np.concatenate([packs.order, *pieces]), np.concatenate([packs.sizes, sizes]))


def drop(packs: Packs, wanted: int, rng: np.random.Generator | None) -> Packs:
    chosen = np.arange(len(packs.sizes)) if rng is None else rng.permutation(len(packs.sizes))
    return take(packs, chosen[:wanted])


def descending(keys: NDArray[Any], rng: np.random.Generator | None) -> Ints:
    """Return the indices by descending key, equal ones at random, or in order without `rng`."""
    order = np.arange(len(keys)) if rng is None else rng.permutation(len(keys))
    return order[np.argsort(-keys[order], kind="stable")]


def jittered(lengths: Ints, jitter: float, rng: np.random.Generator | None) -> NDArray[Any]:
    return lengths if rng is None or jitter == 0 else lengths * rng.uniform(1 - jitter, 1 + jitter, len(lengths))


def shortest(lengths: Ints, number: int) -> Ints:
    """Return the `number` shortest, over and over if there are not so many."""
    return np.resize(np.argsort(lengths, kind="stable"), max(number, 0))
