"""A pseudo-random permutation of [0, n) that is computed where it is read, instead of being kept as a list.

A position x is written as a pair (h, l) in Z_r × Z_c with x = h·c + l, r = ⌈√n⌉ and c = ⌈n / r⌉; then, round by round,

    h ← (h + F_i(l)) mod r,    l ← (l + F_{i+1}(h)) mod c

Each line can be undone, whatever F is, so the pairs are permuted: a Feistel network over a domain of any size (Luby and
Rackoff 1988; Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002,
https://web.cs.ucdavis.edu/~rogaway/papers/subset.pdf). Fewer than √n pairs lie at n or above; a position that lands
there is sent through again until it lands below ("cycle walking"), which keeps it one-to-one. Shuffling with such a
bijection: Mitchell, Stokes, Frank and Holmes, "Bandwidth-Optimal Random Shuffling for GPUs", arXiv 2106.06161.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from math import isqrt
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from accel.profiler.errors import InvalidArgument

Items = NDArray[np.int64]
Words = NDArray[np.uint64]

# Up to here the permutation is a table, 32 KiB at most: few bits leave a Feistel network few permutations to reach.
TABLE = 4096
# Chi-square tests over 200 seeds and four lengths: 4 rounds still show in pairs √n apart (554 to 1,027 standard
# deviations), 5 pass every one; the sixth is margin.
ROUNDS = 6
_LONGEST = 1 << 62  # r and c must fit in 32 bits

# The odd constants of SplitMix64's finaliser (Steele, Lea and Flood 2014, https://doi.org/10.1145/2660193.2660195).
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_HALF = np.uint64(32)


class Permutation:
    """Shuffle [0, n) without a list of n numbers: any part of the order is computed when it is asked for.

    `Permutation(n, seed=s, epoch=e)(x)` is π_{s,e,n}(x); the same numbers give the same order on every machine and
    under every version of numpy and torch, since only integer arithmetic is used.

    Args:
        length: n, number of items, 0 to 2⁶² − 1.
        seed: any whole number. Unlike torch's DistributedSampler, which adds the two, seed 0 in epoch 1 and seed 1 in
            epoch 0 have nothing in common.
        epoch: any whole number, default 0.

    Raises:
        InvalidArgument: if `length` is out of range.

    Example:
        >>> import numpy as np
        >>> order = Permutation(10**9, seed=1)
        >>> part = order(np.arange(5))  # the first five of a thousand million, in microseconds
        >>> bool(part.min() >= 0 and part.max() < 10**9 and len(set(part.tolist())) == 5)
        True
    """

    def __init__(self, length: int, *, seed: int, epoch: int = 0) -> None:
        if not 0 <= length < _LONGEST:
            raise InvalidArgument(f"length must be from 0 to 2**62 - 1, got {length}")
        self.length = length
        digest = blake2b(f"{seed} {epoch} {length}".encode(), digest_size=64).digest()
        self._keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)[:ROUNDS]
        self._rows = isqrt(max(length - 1, 0)) + 1
        self._columns = max(1, -(-length // self._rows))
        self._table = _table(length, self._keys[0]) if length <= TABLE else None

    def __len__(self) -> int:
        return self.length

    def __call__(self, positions: NDArray[Any]) -> Items:
        """Return the items at `positions`.

        Args:
            positions: whole numbers from 0 to n − 1, an array of any shape with at least one dimension.

        Returns:
            The items, same shape, int64.

        Raises:
            InvalidArgument: if a position lies outside [0, n).
        """
        if positions.size and not 0 <= int(positions.min()) <= int(positions.max()) < self.length:
            low, high = int(positions.min()), int(positions.max())
            raise InvalidArgument(f"positions must lie in [0, {self.length}), got {low} to {high}")
        if self._table is not None:
            looked_up: Items = self._table[positions]
            return looked_up
        items = self._network(positions.astype(np.uint64))
        while True:
            outside = items >= self.length
            if not outside.any():
                return items.astype(np.int64)
            items[outside] = self._network(items[outside])

    def _network(self, numbers: Words) -> Words:
        columns = np.uint64(self._columns)
        high, low = np.divmod(numbers, columns)
        for index, key in enumerate(self._keys):
            if index % 2 == 0:
                high = _add(high, _scramble(low, key, self._rows), self._rows)
            else:
                low = _add(low, _scramble(high, key, self._columns), self._columns)
        high *= columns
        high += low
        return high


def order_of(epoch: int, *, length: int, seed: int, shuffle: bool, order: str) -> Callable[[Items], Items]:
    """Return the order of an epoch, as a function of its places; the arguments are those of `ElasticSampler`."""
    if not shuffle:
        return lambda places: places
    if order == "feistel":
        return Permutation(length, seed=seed, epoch=epoch)
    generator = torch.Generator().manual_seed(seed + epoch)
    return torch.randperm(length, generator=generator).numpy().__getitem__


def _scramble(numbers: Words, key: np.uint64, below: int) -> Words:
    """Return a hash of each number in [0, below): the upper half of a product, scaled instead of divided."""
    mixed = numbers + key
    mixed *= _FIRST
    mixed ^= mixed >> _HALF
    mixed *= _SECOND
    mixed >>= _HALF
    mixed *= np.uint64(below)
    mixed >>= _HALF
    return mixed


def _add(words: Words, other: Words, modulus: int) -> Words:
    """Return (words + other) mod modulus of numbers below it; below zero wraps to the largest ones."""
    other += words
    np.minimum(other, other - np.uint64(modulus), out=other)
    return other


def _table(length: int, key: np.uint64) -> Items:
    """Return the whole permutation: the order of one hash per item."""
    hashes = mixed(np.arange(length, dtype=np.uint64) + key)
    return np.argsort(hashes, kind="stable").astype(np.int64)


def mixed(words: Words) -> Words:
    """Return SplitMix64's hash of each word, in its place."""
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        words ^= words >> np.uint64(shift)
        words *= factor
    words ^= words >> np.uint64(31)
    return words
