"""All-reduces of few bytes, where rounds count for more than bytes: three algorithms, and a model that picks one.

    n ranks, S bytes       rounds            messages of a rank   bytes of a rank
    direct                 1                 n − 1                (n − 1) S          everyone sends to everyone
    shares                 2                 2 (n − 1)            2 (n − 1)/n S      as a ring's: each sums one share
    doubling               ⌈log2 n⌉ or so    as many              ⌈log2 n⌉ S         pairs at distance 1, 2, 4, …

A round takes α, each further message of it a little, a byte β. So few ranks exchange directly, up to a size that
falls with their number, and many double; a ring, of 2 (n − 1) rounds, is for what is larger than `TINY_BYTES`.

Direct and shares add in the order of ranks, not that of arrival, and doubling the same pairs on both sides of each: the
same bits on every rank. Half precision is summed as float32.

Sources: α-β model (Hockney 1994); recursive doubling (Thakur et al. 2005).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from accel.comm.layout import equal_cuts

TINY_BYTES = 64 * 1024

_ROUND_S = 2.5e-4
"""Of 4 KB over gloo at 1 Gbit/s: 0.24 ms to send and receive one, 0.28 ms all-to-all."""
_MESSAGE_S = 3e-5
_BYTE_S = 8e-9


class SumChannel(Protocol):
    """What a small all-reduce needs of a channel."""

    rank: int
    size: int

    def exchange(self, sends: Sequence[Tensor], receives: Sequence[Tensor]) -> None:
        """See `accel.comm.ranks.channel.Channel`."""

    def swap(self, peer: int, send: Tensor, receive: Tensor) -> None:
        """Send to one rank and receive from it; an empty tensor is no message. All are 1-D and contiguous."""


def seconds(algorithm: str, size: int, nbytes: int) -> float:
    """Return the predicted time of an all-reduce of `nbytes` over `size` ranks, at least 2."""
    further_s = (size - 2) * _MESSAGE_S
    if algorithm == "direct":
        return _ROUND_S + further_s + (size - 1) * nbytes * _BYTE_S
    if algorithm == "shares":
        return 2 * (_ROUND_S + further_s + (size - 1) / size * nbytes * _BYTE_S)
    within = 1 << (size.bit_length() - 1)
    rounds = within.bit_length() - 1 + 2 * (within < size)
    return rounds * (_ROUND_S + nbytes * _BYTE_S)


def best_algorithm(size: int, nbytes: int) -> str:
    """Return the fastest algorithm; of two that are alike the one named first in the table above."""
    return min(("direct", "shares", "doubling"), key=lambda algorithm: seconds(algorithm, size, nbytes))


def all_reduce(line: SumChannel, values: Tensor) -> None:
    """Replace `values`, contiguous, by their sum over the ranks, the same bits on each."""
    flat = values.view(-1)
    {"direct": _direct, "shares": _by_shares, "doubling": _doubling}[best_algorithm(line.size, flat.nbytes)](line, flat)


def _direct(line: SumChannel, flat: Tensor) -> None:
    parts = list(flat.new_empty(line.size, flat.numel()))
    parts[line.rank].copy_(flat)
    line.exchange([flat] * line.size, parts)
    flat.copy_(_sum(parts))


def _by_shares(line: SumChannel, flat: Tensor) -> None:
    cuts = equal_cuts(flat.numel(), line.size)
    shares = [flat[low:high] for low, high in pairwise(cuts)]
    own = shares[line.rank]
    parts = list(flat.new_empty(line.size, own.numel()))
    parts[line.rank].copy_(own)
    line.exchange(shares, parts)
    own.copy_(_sum(parts))
    line.exchange([own] * line.size, shares)


def _doubling(line: SumChannel, flat: Tensor) -> None:
    """Sum over pairs of ever larger sets; ranks beyond a power of two give theirs to a partner, and get the sum."""
    within = 1 << (line.size.bit_length() - 1)
    total = flat.to(_wide(flat.dtype), copy=True)
    other, none = torch.empty_like(total), total[:0]
    extra, rank = line.size - within, line.rank
    if rank >= within:
        line.swap(rank - within, total, none)
        line.swap(rank - within, none, total)
    else:
        if rank < extra:
            line.swap(rank + within, none, other)
            total += other
        distance = 1
        while distance < within:
            line.swap(rank ^ distance, total, other)
            total += other
            distance *= 2
        if rank < extra:
            line.swap(rank + within, total, none)
    flat.copy_(total)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _sum(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0].to(_wide(parts[0].dtype))
    for part in parts[1:]:
        total = total + part
    return total
