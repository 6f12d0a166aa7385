"""Collectives over one group of ranks, for the use of one thread.

A channel owns its process group, made beside `torch.distributed`'s registry: no two threads share the order of a group,
no rank outside has to take part in making it, and closing it disturbs nobody.

gloo may move one direction at a time where a message is larger than about 1 MB: all-to-all of 8 MB runs at 6.4 of 12.5
MB/s. In pieces of up to 1 MB, one under way per peer, it runs at 11.9; with two under way at 9.0. So `exchange` sends
pieces in lock-step: of 1 MB, since those of 256 KB took up to twice the time of a core, and of the clock where nothing
is slower than memory (2 hosts of 2 ranks, unshaped: 53 ms in place of 111 for 36 MB). gloo's ring costs 3.6 ms for 4
KB, hence an all-reduce of few bytes uses other algorithms: see `accel.comm.ranks.small_sums`. NCCL needs neither.
"""

from __future__ import annotations

import itertools
import os
import traceback
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import wraps
from typing import Any, ParamSpec, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from accel.comm.ranks import small_sums
from accel.profiler.errors import AccelError
from accel.profiler.interruptions import ours

PIECE_BYTES = 1 << 20
_CONNECTED = 32
"""Ranks of a group that are all connected from the start. Where connections are made on demand, gloo stops the thread
that serves them before it closes them; with a message there that nobody receives any more, as after an abort, that
thread never stops, and who frees the group waits for ever (of 50 to 250 aborts of three busy ranks one)."""
P = ParamSpec("P")


_made: weakref.WeakKeyDictionary[Any, itertools.count[int]] = weakref.WeakKeyDictionary()
"""Stores of this process, by process group: not by its name, which the next one gets after an end of it."""


def own_store(group: Any, name: str) -> PrefixStore:
    """Return a store of its own at each call, for the ranks of a process group, which call alike."""
    number = next(_made.setdefault(group, itertools.count()))
    return PrefixStore(f"accel-{name}/{number}", group.get_group_store())


class ConnectionBroken(AccelError, RuntimeError):
    """The backend failed: a peer is gone, doesn't answer in time, or the own group was aborted."""


def _backend_call(call: Callable[P, None]) -> Callable[P, None]:
    """Raise the backend's errors, which are bare RuntimeErrors, as ConnectionBroken."""

    @wraps(call)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            call(*args, **kwargs)
        except ours(RuntimeError) as error:
            if isinstance(error, ConnectionBroken):
                raise
            first = str(error).partition("\n")[0].partition(" This is typically")[0]
            # Frames in the traceback would keep the group, and so its connections, alive.
            traceback.clear_frames(error.__traceback__)
            raise ConnectionBroken(first) from None

    return guarded


class Channel(Protocol):
    """What a stage may do with its group; calls must come in the same order on every rank."""

    rank: int
    size: int
    ranks: tuple[int, ...]
    """Number of each member in the group that reduces."""

    def exchange(self, sends: Sequence[Tensor], receives: Sequence[Tensor]) -> None:
        """Send `sends[r]` to each rank r and fill `receives[r]` from it; the own ones are left alone.

        Tensors are 1-D and contiguous. Sizes may differ, but what r sends to s has the size that s receives from r.
        """

    def all_gather(self, own: Tensor, out: Sequence[Tensor]) -> None:
        """Fill `out[r]` with what rank r passed as `own`, the own one included; sizes may differ by rank."""

    def all_reduce(self, values: Tensor) -> None:
        """Replace `values`, contiguous, by their sum over the ranks, the same bits on each."""

    def abort(self) -> None:
        """Break off what is under way, here and at the peers."""

    def close(self) -> None:
        """Free the group."""


def _pieces(values: Tensor) -> tuple[Tensor, ...]:
    assert values.dim() == 1 and values.is_contiguous()
    return torch.split(values.view(torch.uint8), PIECE_BYTES) if values.numel() else ()


class _OwnGroup(ABC):
    """What channels over a process group of their own have alike."""

    def __init__(self, ranks: Sequence[int], rank: int) -> None:
        self.ranks, self.rank, self.size = tuple(ranks), ranks.index(rank), len(ranks)
        self._group: Any = None

    @abstractmethod
    def exchange(self, sends: Sequence[Tensor], receives: Sequence[Tensor]) -> None:
        """Send one tensor to each rank and receive one from each."""

    def all_gather(self, own: Tensor, out: Sequence[Tensor]) -> None:
        self.exchange([own] * self.size, out)
        if out[self.rank].data_ptr() != own.data_ptr():
            out[self.rank].copy_(own)

    def abort(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()  # wakes this process; gloo's peers notice when the group is freed and its connections close

    def _open(self) -> Any:
        if self._group is None:
            raise ConnectionBroken("the group was closed")
        return self._group


def _options(size: int, timeout: timedelta) -> Any:
    """Return gloo's options; in a large group, two ranks are connected when they first speak to each other.

    Else each rank would read every other's address from the store and hold a socket to it, for each stage of a scheme.
    """
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    on_demand = size > _CONNECTED
    devices = [gloo.create_device(interface=name, lazy_init=on_demand) for name in names]
    options._devices = devices or [gloo.create_default_device(lazy_init=on_demand)]
    options._threads, options._timeout = 2 * len(options._devices), timeout
    return options


class GlooChannel(_OwnGroup):
    """A channel over gloo, for tensors in host memory."""

    def __init__(self, store: Any, ranks: Sequence[int], rank: int, timeout: timedelta) -> None:
        super().__init__(ranks, rank)
        if self.size > 1:
            self._connect(store, timeout)

    @_backend_call
    def _connect(self, store: Any, timeout: timedelta) -> None:
        self._group = dist.ProcessGroupGloo(store, self.rank, self.size, _options(self.size, timeout))
        if self.size <= _CONNECTED:  # a rank that went on and closed would cut off those that are still connecting
            self._group.barrier().wait()

    @_backend_call
    def exchange(self, sends: Sequence[Tensor], receives: Sequence[Tensor]) -> None:
        if self.size == 1:
            return
        group, rank, size = self._open(), self.rank, self.size
        turns = []
        for distance in range(1, size):
            to, source = (rank + distance) % size, (rank - distance) % size
            turns.append((to, _pieces(sends[to]), source, _pieces(receives[source])))
        for turn in range(max(max(len(going), len(coming)) for _, going, _, coming in turns)):
            works = []
            for to, going, source, coming in turns:
                if turn < len(coming):
                    works.append(group.recv([coming[turn]], source, 0))
                if turn < len(going):
                    works.append(group.send([going[turn]], to, 0))
            for work in works:
                work.wait()

    @_backend_call
    def swap(self, peer: int, send: Tensor, receive: Tensor) -> None:
        """Send to one rank and receive from it; an empty tensor is no message."""
        group = self._open()
        works = [group.recv([receive], peer, 0)] if receive.numel() else []
        works += [group.send([send], peer, 0)] if send.numel() else []
        for work in works:
            work.wait()

    @_backend_call
    def gather_equal(self, own: Tensor, out: Sequence[Tensor]) -> None:
        """Fill `out[r]` with what rank r passed as `own`, of one size on all; gloo passes it on in a ring."""
        if self.size == 1:
            out[0].copy_(own)
        else:
            self._open().allgather([list(out)], [own]).wait()

    @_backend_call
    def broadcast(self, values: Tensor) -> None:
        """Replace `values` by those of rank 0."""
        if self.size > 1:
            self._open().broadcast([values]).wait()

    @_backend_call
    def all_reduce(self, values: Tensor) -> None:
        if self.size == 1 or not values.numel():
            return
        if values.nbytes < small_sums.TINY_BYTES:
            small_sums.all_reduce(self, values)
        else:
            self._open().allreduce([values]).wait()

    def close(self) -> None:
        self._group = None


class NcclChannel(_OwnGroup):
    """A channel over NCCL, for tensors on a CUDA device; calls return once queued on the current stream.

    So a peer that has gone is no error here: PyTorch's watchdog finds a collective that does not end within the timeout
    and ends the process (TORCH_NCCL_ASYNC_ERROR_HANDLING). Not run on GPUs yet.
    """

    def __init__(self, store: Any, ranks: Sequence[int], rank: int, timeout: timedelta) -> None:
        super().__init__(ranks, rank)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        self._group = dist.ProcessGroupNCCL(store, self.rank, self.size, options)

    @_backend_call
    def exchange(self, sends: Sequence[Tensor], receives: Sequence[Tensor]) -> None:
        # One grouped launch; NCCL takes lists of uneven sizes, and empty ones would be zero-byte sends.
        others = [r for r in range(self.size) if r != self.rank]
        empty = receives[self.rank].new_empty(0)
        going = [sends[r] if r in others else empty for r in range(self.size)]
        coming = [receives[r] if r in others else empty for r in range(self.size)]
        self._open().alltoall(coming, going).wait()

    @_backend_call
    def all_reduce(self, values: Tensor) -> None:
        self._open().allreduce([values]).wait()

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.shutdown()


def channel_kind(device: torch.device) -> type[GlooChannel] | type[NcclChannel]:
    """Return the kind of channel that carries tensors of a device."""
    return NcclChannel if device.type == "cuda" else GlooChannel
