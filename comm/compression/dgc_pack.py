"""What one rank of DGC sends of a piece, and how the packs of all ranks are added up.

A pack has the same size on every rank, however few entries there are, so that one all-gather will do. Packs are added
in rank order, by position: replicas stay equal to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from accel.comm.ranks import small_sums
from accel.comm.ranks.channel import Channel


class ParameterRange(NamedTuple):
    """Elements [begin, end) of a piece that belong to one parameter."""

    name: str
    begin: int
    end: int
    sent: int
    """How many of them are sent; 0 where all are, as they are."""


class Pack:
    """What one rank sends of a piece, in bytes of a size that the piece's layout gives:

        int32: whether each parameter was used | positions, then padding to 8 bytes
        float: values of the entries | dense parameters, if all ranks' are few bytes

    Where there are fewer entries than there is room for, the rest adds 0 to the first element.
    """

    def __init__(self, raw: Tensor, like: Tensor, parts: Sequence[ParameterRange]) -> None:
        entries = sum(part.sent for part in parts)
        words = _words(entries, parts)
        self.raw = raw
        whole = raw[: 4 * words].view(torch.int32)
        self.used = whole[: len(parts)]
        self.positions = whole[len(parts) : len(parts) + entries]
        floats = raw[4 * words :].view(like.dtype)
        self.values, self.dense = floats[:entries], floats[entries:]

    @classmethod
    def empty(cls, like: Tensor, parts: Sequence[ParameterRange], ranks: int) -> Pack:
        """Return one of zeros for a piece with values `like`, of one of so many ranks."""
        entries = sum(part.sent for part in parts)
        rides = _dense_elements(parts) if _rides(like, parts, ranks) else 0
        size = 4 * _words(entries, parts) + like.element_size() * (entries + rides)
        return cls(torch.zeros(size, dtype=torch.uint8, device=like.device), like, parts)

    def put(self, filled: int, positions: Tensor, source: Tensor, begin: int) -> int:
        """Add the elements at `positions` of a part that begins at `begin`; return the number of entries."""
        end = filled + positions.numel()
        self.positions[filled:end] = positions + begin
        self.values[filled:end] = source[positions]
        return end

    def put_dense(self, values: Tensor, parts: Sequence[ParameterRange]) -> None:
        """Take dense parameters along where there is room for them."""
        if self.dense.numel():
            torch.cat([values[part.begin : part.end] for part in parts if not part.sent], out=self.dense)

    def gather(self, values: Tensor, parts: Sequence[ParameterRange], channel: Channel) -> Tensor:
        """Set `values` to the sum of all ranks' packs; return which parameters any rank used, (parts,)."""
        raws = [torch.empty_like(self.raw) for _ in range(channel.size)]
        channel.all_gather(self.raw, raws)
        packs = [Pack(raw, values, parts) for raw in raws]
        dense = self._dense_sum(values, parts, packs, channel)
        values.zero_()
        at = 0
        for part in parts:
            if not part.sent:
                length = part.end - part.begin
                values[part.begin : part.end] = dense[at : at + length]
                at += length
        for pack in packs:
            values.index_add_(0, pack.positions, pack.values)  # but for zeros, no position twice in a pack
        return torch.stack([pack.used for pack in packs]).amax(0)

    def _dense_sum(
        self, values: Tensor, parts: Sequence[ParameterRange], packs: Sequence[Pack], channel: Channel
    ) -> Tensor:
        if self.dense.numel() or not _dense_elements(parts):
            total = packs[0].dense.clone()
            for pack in packs[1:]:
                total += pack.dense
            return total
        total = torch.cat([values[part.begin : part.end] for part in parts if not part.sent])
        channel.all_reduce(total)
        return total


def _words(entries: int, parts: Sequence[ParameterRange]) -> int:
    """Return the int32 words of a pack, even: float64 begins at a multiple of 8 bytes."""
    return (len(parts) + entries + 1) // 2 * 2


def _dense_elements(parts: Sequence[ParameterRange]) -> int:
    return sum(part.end - part.begin for part in parts if not part.sent)


def _rides(like: Tensor, parts: Sequence[ParameterRange], ranks: int) -> bool:
    """Return whether dense parameters are so few that they ride in the packs; more of them are all-reduced."""
    nbytes = _dense_elements(parts) * like.element_size()
    return nbytes < small_sums.TINY_BYTES and small_sums.best_algorithm(ranks, nbytes) == "direct"
