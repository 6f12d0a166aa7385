"""A channel between ranks of one host, through memory that all of them map.

Each rank has an area, a head and two halves, which it alone writes. A turn of any collective:

    write the own half │ signal: count a turn in the own head, wait for the others' │ read the others' halves

Consecutive turns write to alternating halves. A rank that signals has read what was written before the others' last
signal, so a half may be written again two turns later. Over sockets each byte is copied into the kernel and out of it,
and for a signal two threads would have to be woken beside a backward pass on the same core.

The memory belongs to no file (`memfd_create(2)`), so nothing stays behind when a rank is killed, and the size of
/dev/shm doesn't matter. A peer opens it through /proc, which it may as the same user in the same PID namespace. Where
one rank can't, all use sockets.
"""

from __future__ import annotations

import os
import platform
import secrets
import time
from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from accel.comm.layout import equal_cuts
from accel.comm.ranks.channel import Channel, ConnectionBroken

HALF_BYTES = 1 << 25
"""Only what is used of it takes memory. A bucket of DDP's usual 25 MB takes one turn: in each a thread may have to wait
until the scheduler lets it continue beside the backward pass."""
HEAD_BYTES = 4096
_TURN, _PROCESS, _ENDED, _NUMBERS = 0, 8, 16, 24
"""Indices into the head, an array of 8-byte numbers: 8 is byte 64, so the first three have cache lines of their own."""
_ORDERED = ("x86_64", "AMD64")
"""Machines on which others see a core's writes in their order, so that a signal comes after what it tells of."""
_LOOK_S = 0.1
"""After so long, and again and again, whether the process that is waited for still runs."""
_LONGEST_SLEEP_S = 2e-4
_ALIGNED = 64
_NAME = "accel"
_TOKEN_AT, _TOKEN_BYTES = 1024, 16
"""In the head of an area: process numbers mean something else in another PID namespace."""


class SharedMemoryChannel:
    """A channel through areas of memory.

    Args:
        ranks: number of each member in the group that reduces.
        rank: the own place among them.
        areas: (`HEAD_BYTES` + 2 · `HALF_BYTES`,) uint8 of each rank, the own included; a dry run may give the
            same for all.
        timeout: for a rank that doesn't come.
    """

    def __init__(self, ranks: tuple[int, ...], rank: int, areas: Sequence[Tensor], timeout: timedelta) -> None:
        self.ranks, self.rank, self.size = ranks, rank, len(ranks)
        self._timeout_s = timeout.total_seconds()
        self._heads = [area[:HEAD_BYTES].view(torch.int64).numpy() for area in areas]
        self._areas = [area[HEAD_BYTES:].view(2, HALF_BYTES) for area in areas]
        self._half = self._turn = 0

    def exchange(self, sends: Sequence[Tensor], receives: Sequence[Tensor]) -> None:
        """See `Channel`."""
        room = HALF_BYTES // (self.size - 1) // _ALIGNED * _ALIGNED
        going, coming = ([_pieces(each, room) for each in tensors] for tensors in (sends, receives))
        others = [rank for rank in range(self.size) if rank != self.rank]
        most = max(len(going[rank]) for rank in others)

        def place(sender: int, receiver: int) -> int:
            return (receiver - sender - 1) % self.size * room

        turn, turns = 0, 1
        while turn < turns:
            for rank in others:
                if turn < len(going[rank]):
                    self._write(going[rank][turn], place(self.rank, rank))
            turns = max(self._signal(most))  # ranks may have less to send than others
            for rank in others:
                if turn < len(coming[rank]):
                    self._read(coming[rank][turn], rank, place(rank, self.rank))
            self._half, turn = 1 - self._half, turn + 1

    def all_gather(self, own: Tensor, out: Sequence[Tensor]) -> None:
        """See `Channel`."""
        going, coming = _pieces(own, HALF_BYTES), [_pieces(each, HALF_BYTES) for each in out]
        for turn in range(max(map(len, coming))):
            if turn < len(going):
                self._write(going[turn], 0)
            self._signal()
            for rank, pieces in enumerate(coming):
                if turn < len(pieces) and rank != self.rank:
                    self._read(pieces[turn], rank, 0)
            self._half = 1 - self._half
        if out[self.rank].data_ptr() != own.data_ptr():
            out[self.rank].copy_(own)

    def all_reduce(self, values: Tensor) -> None:
        """See `Channel`; each rank sums a share, in the order of ranks, half precision as float32."""
        for piece in torch.split(values.view(-1), HALF_BYTES // values.element_size()):
            self._sum(piece)

    def _sum(self, values: Tensor) -> None:
        """Sum what fits into a half: two turns, after which the half of the first is free again."""
        whole = [self._areas[rank][self._half][: values.nbytes].view(values.dtype) for rank in range(self.size)]
        sums = [self._areas[rank][1 - self._half][: values.nbytes].view(values.dtype) for rank in range(self.size)]
        shares = [slice(low, high) for low, high in pairwise(equal_cuts(values.numel(), self.size))]
        for rank, share in enumerate(shares):
            if rank != self.rank:
                whole[self.rank][share].copy_(values[share])
        self._signal()
        own = shares[self.rank]
        parts = [(values if rank == self.rank else whole[rank])[own] for rank in range(self.size)]
        total = sums[self.rank][own]
        if values.dtype in (torch.float16, torch.bfloat16):
            total.copy_(_added([part.float() for part in parts]))
        else:
            _added(parts, total)
        self._signal()
        for rank, share in enumerate(shares):
            values[share].copy_(sums[rank][share])

    def _write(self, piece: Tensor, place: int) -> None:
        self._areas[self.rank][self._half][place : place + piece.numel()].copy_(piece)

    def _read(self, piece: Tensor, rank: int, place: int) -> None:
        piece.copy_(self._areas[rank][self._half][place : place + piece.numel()])

    def _signal(self, number: int = 0) -> list[int]:
        """Return the numbers of all ranks, once all have come here."""
        self._turn += 1
        slot = _NUMBERS + self._turn % 2  # who signals next has read those of this turn, not yet those of the next
        own = self._heads[self.rank]
        own[slot] = number
        own[_TURN] = self._turn
        for rank, head in enumerate(self._heads):
            if head[_TURN] < self._turn:
                self._wait(rank)
        return [int(head[slot]) for head in self._heads]

    def _wait(self, rank: int) -> None:
        """Wait for the signal of a rank."""
        head, began = self._heads[rank], time.monotonic()
        look_s = _LOOK_S
        while head[_TURN] < self._turn:
            waited_s = time.monotonic() - began
            if head[_ENDED] or self._heads[self.rank][_ENDED]:
                raise ConnectionBroken(f"rank {self.ranks[rank]} has broken off")
            if waited_s > self._timeout_s:
                raise ConnectionBroken(f"rank {self.ranks[rank]} did not come within {self._timeout_s:g} s")
            if waited_s > look_s:
                look_s += _LOOK_S
                if not _is_alive(int(head[_PROCESS])):
                    raise ConnectionBroken(f"the process of rank {self.ranks[rank]} has ended")
            time.sleep(min(waited_s / 8, _LONGEST_SLEEP_S))

    def abort(self) -> None:
        """See `Channel`."""
        self._heads[self.rank][_ENDED] = 1

    def close(self) -> None:
        """Take no more part; the memory is freed with the last channel that maps it."""
        self.abort()
        self._areas.clear()


def _pieces(values: Tensor, nbytes: int) -> tuple[Tensor, ...]:
    return torch.split(values.view(torch.uint8), nbytes)


def _added(parts: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    total = torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        total += part
    return total


def through_memory(line: Channel, timeout: timedelta) -> Channel:
    """Return a channel through shared memory, or the line itself where the ranks can't map each other's.

    Args:
        line: between ranks of one host, which is closed if it is not needed; every rank calls this.
        timeout: of each collective.
    """
    if line.size == 1 or platform.machine() not in _ORDERED:
        return line
    file = _anonymous_file()
    try:
        token = list(secrets.token_bytes(_TOKEN_BYTES))
        if file >= 0:
            os.pwrite(file, bytes(token), _TOKEN_AT)
            # Before any rank can wait for this one, which would else count as ended.
            os.pwrite(file, os.getpid().to_bytes(8, "little"), 8 * _PROCESS)
        mine = torch.tensor([os.getpid(), file, *token])
        everyone = [torch.empty_like(mine) for _ in range(line.size)]
        line.all_gather(mine, everyone)
        areas = [area for row in everyone if (area := _opened(*row.tolist())) is not None]
        complete = torch.tensor([float(len(areas) == line.size)])
        line.all_reduce(complete)
    finally:
        if file >= 0:
            os.close(file)
    if int(complete) < line.size:
        return line
    line.close()
    return SharedMemoryChannel(line.ranks, line.rank, areas, timeout)


def _is_alive(process: int) -> bool:
    try:
        status = Path(f"/proc/{process}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def _anonymous_file() -> int:
    """Return the descriptor of a new area, -1 where the system has none to give."""
    try:
        file = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        os.truncate(file, HEAD_BYTES + 2 * HALF_BYTES)
    except (AttributeError, OSError):  # not Linux, or no room
        return -1
    return file


def _opened(process: int, number: int, *token: int) -> Tensor | None:
    """Return the area of a process, None if it can't be mapped, or a process of that number here has another one."""
    path = f"/proc/{process}/fd/{number}"
    try:
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
            return None
        area = torch.from_file(path, shared=True, size=HEAD_BYTES + 2 * HALF_BYTES, dtype=torch.uint8)
    except (OSError, RuntimeError):
        return None
    return area if area[_TOKEN_AT : _TOKEN_AT + _TOKEN_BYTES].tolist() == list(token) else None
