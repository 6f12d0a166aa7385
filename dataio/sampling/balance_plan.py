"""How samples of unequal cost are put into packs, and packs spread over steps and ranks: arrays in, arrays out."""

from __future__ import annotations

import heapq
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


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
