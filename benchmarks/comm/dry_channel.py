"""A channel that sends nothing and counts what would be sent: peers are assumed to send what this rank does."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from accel.comm.ranks import small_sums


class DryChannel:
    """The channel of rank 0 of a group."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks, self.rank, self.size = tuple(ranks), ranks.index(0), len(ranks)
        self.sent_bytes = 0

    def exchange(self, sends: Sequence[Tensor], receives: Sequence[Tensor]) -> None:
        """Count what goes to each; what comes is what goes."""
        for peer, (going, coming) in enumerate(zip(sends, receives, strict=True)):
            if peer != self.rank:
                self.swap(peer, going.view(-1), coming.view(-1))

    def swap(self, peer: int, send: Tensor, receive: Tensor) -> None:
        """Count what goes to one rank, or, if nothing does, as much as comes."""
        self.sent_bytes += (send if send.numel() else receive).nbytes
        if send.nbytes == receive.nbytes and send.dtype == receive.dtype:
            receive.copy_(send)
        else:
            receive.zero_()

    def all_gather(self, own: Tensor, out: Sequence[Tensor]) -> None:
        """Count what an all-gather sends."""
        self.exchange([own] * self.size, out)
        out[self.rank].copy_(own)

    def all_reduce(self, values: Tensor) -> None:
        """Count an all-reduce, which is an exchange where it is small, else a ring."""
        if self.size > 1 and values.nbytes < small_sums.TINY_BYTES:
            small_sums.all_reduce(self, values)
        else:
            self.sent_bytes += 2 * (self.size - 1) * values.nbytes // self.size

    def abort(self) -> None:
        """Do nothing: nothing is under way."""

    def close(self) -> None:
        """Do nothing: there is no group."""
