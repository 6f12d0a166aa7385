"""What runs in a worker process: take a list of indices, make the batch, write it into shared memory, say so.

A thread of its own receives, so that a new order (give up what is stale, the loop is gone) comes
through while a sample is being fetched, and so that neither side ever waits for the other to read.
The main thread fetches and sends.

Random numbers: each batch is begun with seeds derived from the epoch's base seed and the batch's
number. Augmentation is then the same whichever worker makes the batch and however many there are.
With a `worker_init_fn`, which may seed as it likes, a worker is seeded once, as `DataLoader` does.
One that stands in for the loop's own process calls none, is no worker to `get_worker_info`, is not
seeded, and gives back a batch for which numbers are drawn.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import pickle
import queue
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from socket import AF_UNIX, SOCK_STREAM, send_fds, socket
from typing import Any, NamedTuple

import torch
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data._utils import worker as torch_worker

from accel.dataio.dataset.numbers import Numbers, set_numbers
from accel.dataio.engine import slots
from accel.dataio.fetching import wire
from accel.dataio.fetching.fetch import Fetch, blame
from accel.dataio.fetching.randomness import random_state, seed_everything
from accel.profiler.errors import AccelError, InvalidType

# How long a worker whose loop is gone may go on with the sample in hand.
_GRACE_S = 5.0


@dataclass
class Task:
    """What a worker process is for; sent once, when it starts."""

    number: int
    of: int
    fetch: Fetch
    init: Callable[[int], None] | None
    base_seed: int
    most_free: int
    as_loop: bool = False
    """It stands in for the loop's own process, of a loader without workers: see `ProcessEngine`."""


class Order(NamedTuple):
    """One batch to be made, with these numbers in the dataset; slots in `again` may be filled anew, in `spent` not."""

    serial: int
    indices: bytes
    seed: int | None
    numbers: Numbers
    again: list[int]
    spent: list[int]


class Done(NamedTuple):
    """A batch that was made; its arrays lie in a slot, or in `data` where there is none."""

    serial: int
    payload: bytes
    sizes: list[int]
    slot: int | None
    new_file: bool
    dropped: list[int]
    data: bytearray | None


class Failed(NamedTuple):
    """What went wrong: `serial` is None if it was at the start."""

    serial: int | None
    error: bytes | None
    text: str
    at: str


class Ready(NamedTuple):
    """The worker has started."""

    number: int


class Drew(AccelError, RuntimeError):
    """Fetching has drawn random numbers, which are to be drawn in the loop's own process."""


def channel_of(connection: Connection) -> socket:
    """Return the connection as a socket, for files; made once, while nothing else reads or writes.

    A new socket object takes on `socket.setdefaulttimeout` of the process: with that set, the
    connection itself would no longer wait.
    """
    channel = socket(AF_UNIX, SOCK_STREAM, fileno=os.dup(connection.fileno()))
    channel.setblocking(True)
    return channel


def run(connection: Connection, task: Task) -> None:
    """Serve orders until the loop's end of `connection` is closed; the target of the process."""
    # Ctrl-C goes to the whole group: the loop's process decides, and closes the connection. Handlers for a polite end
    # were inherited with the fork and are the loop's, not ours.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    gc.freeze()  # what was inherited is not looked at by the collector, so that its pages stay shared
    torch.set_num_threads(1)
    torch_collate.default_collate_fn_map[torch.Tensor] = functools.partial(
        _stack, torch_collate.default_collate_fn_map[torch.Tensor]
    )
    _Worker(connection, task).serve()


def _stack(stack: Callable[..., Any], batch: Any, **options: Any) -> Any:
    """Stack samples in plain memory: in a worker torch takes a new file in /dev/shm for each tensor."""
    info, torch_worker._worker_info = torch_worker._worker_info, None
    try:
        return stack(batch, **options)
    finally:
        torch_worker._worker_info = info


class _Worker:
    def __init__(self, connection: Connection, task: Task) -> None:
        self._connection, self._task, self._fetch = connection, task, task.fetch
        self._channel = channel_of(connection)
        self._orders: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._stale_below = 0
        self._numbers: Numbers = {}
        self._slots = slots.SlotWriter(task.most_free) if slots.supported() else None

    # -- receiving ---------------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        while True:
            try:
                kind, content = pickle.loads(self._connection.recv_bytes())
            except (EOFError, OSError):
                self._orders.put(None)
                time.sleep(_GRACE_S)
                os._exit(0)
            except BaseException:  # without this thread nothing would ever be received again
                traceback.print_exc()
                os._exit(1)
            if kind == "stale":
                self._stale_below = content
            else:
                self._orders.put(content)

    # -- sending -----------------------------------------------------------------------------------------------------

    def _send(self, message: Any, file: int | None = None) -> None:
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        self._connection.send_bytes(data)
        if file is not None:
            send_fds(self._channel, [b"f"], [file])

    # -- work --------------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        try:
            # Before the user's worker_init_fn: a worker that is stuck in it must learn that the loop is gone.
            threading.Thread(target=self._receive, name="accel-loader-receive", daemon=True).start()
            if not self._start():
                return
            for order in iter(self._orders.get, None):
                self._serve(order)
        except (BrokenPipeError, ConnectionResetError):
            return  # the loop is gone

    def _start(self) -> bool:
        task = self._task
        try:
            if not task.as_loop:
                self._seed(task.base_seed)
        except BaseException as error:
            self._send(Failed(None, _pickled(error), traceback.format_exc(), "its worker_init_fn"))
            return False
        self._send(Ready(task.number))
        return True

    def _seed(self, base_seed: int) -> None:
        """Do what a worker of `DataLoader` does when it is started."""
        task = self._task
        seed = base_seed + task.number
        random.seed(seed)
        torch.manual_seed(seed)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(torch_worker._generate_state(base_seed, task.number))  # type: ignore[no-untyped-call]
        torch_worker._worker_info = torch_worker.WorkerInfo(
            id=task.number, num_workers=task.of, seed=seed, dataset=self._fetch.dataset
        )
        if task.init is not None:
            task.init(task.number)

    def _serve(self, order: Order) -> None:
        self._release(order)
        if order.serial < self._stale_below:
            return
        indices = None
        if order.numbers != self._numbers:
            self._numbers = order.numbers
            set_numbers(self._fetch.dataset, order.numbers)
        try:
            if order.seed is not None and not self._task.as_loop:
                seed_everything(order.seed)
            indices = pickle.loads(order.indices)
            batch = self._fetched_undrawn(indices) if self._task.as_loop else self._fetch(indices)
        except BaseException as error:  # sys.exit() in a dataset too: it is the loop that decides
            at = "its samples" if indices is None else blame(error, indices)
            self._send(Failed(order.serial, _pickled(error), traceback.format_exc(), at))
            return
        try:
            packed = wire.pack(batch)
        except Exception as error:
            text = f"the batch is a {type(batch).__name__} that can't be sent to another process: {error!r}"
            self._send(Failed(order.serial, _pickled(InvalidType(text)), text, blame(error, indices)))
            return
        self._deliver(order.serial, packed)

    def _fetched_undrawn(self, indices: Any) -> Any:
        """Make a batch; raises `Drew` if random numbers were drawn."""
        before = random_state()
        batch = self._fetch(indices)
        if random_state() != before:
            raise Drew("fetching a sample draws random numbers, which in the loop's own process are others")
        return batch

    def _release(self, order: Order) -> None:
        if self._slots is not None:
            for number in order.again:
                self._slots.release(number)
            for number in order.spent:
                self._slots.release(number, again=False)

    def _deliver(self, serial: int, packed: wire.WireBatch) -> None:
        slot = data = None
        if packed.size and self._slots is not None:
            # Without memory for a slot, or a file, the bytes go through the connection.
            with contextlib.suppress(OSError):
                slot = self._slots.acquire(packed.size)
        if slot is not None:
            wire.write(packed, slot.memory)
        elif packed.size:
            data = bytearray(packed.size)
            wire.write(packed, data)
        dropped = []
        if self._slots is not None:
            dropped, self._slots.dropped = self._slots.dropped, []
        number, file = (None, None) if slot is None else (slot.number, slot.file)
        self._send(Done(serial, packed.payload, packed.sizes, number, file is not None, dropped, data), file)
        if slot is not None:
            slot.close_file()


def _pickled(error: BaseException) -> bytes | None:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)  # some can be pickled but not made again
    except Exception:
        return None
    return data
