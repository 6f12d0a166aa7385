"""Threads that make batches: daemons, so that a hung one doesn't keep the interpreter; at rest while a fork is made.

`concurrent.futures` joins its threads when the interpreter ends, for ever if a fetch hangs. Here
they are given five seconds: torn down in native code a thread would take the process along. A
process that is forked while a thread holds a lock, of the dataset say, inherits the lock and nobody
who releases it. So before a fork the threads of all pools finish what they have in hand, and take
no more meanwhile.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import math
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch

from accel.profiler.torch_threads import compute_alone

# What threads are given when the interpreter ends.
_GRACE_S = 5.0
# What a fork waits for threads that are within a batch.
_FORK_WAITS_S = 2.0
# How long threads rest after it, and how long the next forks don't wait after one that waited in vain.
_FORKS_APART_S, _WAITS_AGAIN_S = 0.05, 10.0

_DEVICES = ("cpu", "cuda")

_Task = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]
_Queue = queue.SimpleQueue["_Task | None"]


class _PoolRest:
    """Counts the tasks that run in all pools, and can keep further ones from beginning."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.running = 0
        self.asked = 0
        self.until = self.gave_up_at = -math.inf
        """No task begins before; when a fork has waited in vain last. By `time.monotonic`."""

    def ask(self, timeout_s: float) -> bool:
        """Let no task begin; return whether all that had begun have ended, False after so many seconds."""
        with self.changed:
            self.asked += 1
            return self.changed.wait_for(lambda: not self.running, timeout_s)

    def release(self) -> None:
        with self.changed:
            self.asked = max(0, self.asked - 1)  # an interrupt may come before it was raised
            self.changed.notify_all()

    def begin(self) -> None:
        with self.changed:
            while self.asked or (left := self.until - time.monotonic()) > 0:
                self.changed.wait(None if self.asked else left)
            self.running += 1

    def end(self) -> None:
        with self.changed:
            self.running -= 1
            self.changed.notify_all()


_rest = _PoolRest()
_pools: weakref.WeakSet[ThreadPool] = weakref.WeakSet()
# Beside the pools: a thread may still be at work when its pool is gone.
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_is_ending = threading.Event()


def _before_fork() -> None:
    _forking.rest = None
    if threading.current_thread() not in _threads and time.monotonic() - _rest.gave_up_at > _WAITS_AGAIN_S:
        _forking.rest = _rest
        if not _rest.ask(_FORK_WAITS_S):
            _rest.gave_up_at = time.monotonic()


def _after_fork() -> None:
    if _forking.rest is not None:
        _forking.rest.until = time.monotonic() + _FORKS_APART_S  # a loader forks its workers one after the other
        _forking.rest.release()


def _begin_in_child() -> None:
    global _rest
    _rest = _PoolRest()


_forking = threading.local()
os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_begin_in_child)


class ThreadModes(NamedTuple):
    """The modes of torch that hold in one thread alone: one that makes the loop's batches takes them on.

    Example:
        >>> with torch.no_grad():
        ...     modes = ThreadModes.now()
        >>> with modes.entered():
        ...     torch.is_grad_enabled()
        False
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    """Devices with it, and the dtype."""
    device: torch.device
    """On which tensors are made."""

    @classmethod
    def now(cls) -> ThreadModes:
        """Return those of this thread."""
        cast = tuple((each, torch.get_autocast_dtype(each)) for each in _DEVICES if torch.is_autocast_enabled(each))
        # torch.get_default_device() raises in torch 2.9 after set_default_device(None).
        device = torch.empty(0).device
        return cls(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), cast, device)

    def entered(self) -> contextlib.ExitStack:
        """Return a context in which they hold in a thread that has none."""
        stack = contextlib.ExitStack()
        if not self.grad:
            stack.enter_context(torch.no_grad())
        if self.inference:
            stack.enter_context(torch.inference_mode())
        for device, dtype in self.autocast:
            stack.enter_context(torch.autocast(device, dtype))
        if self.device.type != "cpu":
            stack.enter_context(self.device)
        return stack


class ThreadPool:
    """Run functions in at most `workers` daemon threads, which are started as they are needed.

    Example:
        >>> pool = ThreadPool(2, "squares")
        >>> pool.submit(pow, 3, 2).result()
        9
        >>> pool.shutdown()
    """

    def __init__(self, workers: int, name: str) -> None:
        self._workers, self._name = workers, name
        self._tasks: _Queue = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        # The threads know the queue alone: the pool goes with its last user, and its threads with it.
        self._end = weakref.finalize(self, _end, self._tasks, workers)
        self._end.atexit = False
        _pools.add(self)

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Have a function called by a thread, in the context of the caller: numpy's errstate, decimals."""
        future: Future[Any] = Future()
        self._tasks.put((future, contextvars.copy_context().run, (function, *arguments)))
        if len(self._threads) < self._workers:
            name = f"{self._name}_{len(self._threads)}"
            thread = threading.Thread(target=_work, args=(self._tasks,), name=name, daemon=True)
            self._threads.append(thread)
            _threads.add(thread)
            thread.start()
        return future

    def shutdown(self) -> None:
        """End each thread once it is done with what it has in hand; what is queued and not cancelled is still done."""
        self._end()


def _end(tasks: _Queue, workers: int) -> None:
    for _ in range(workers):
        tasks.put(None)


def _work(tasks: _Queue) -> None:
    compute_alone()
    rest = _rest
    while (task := tasks.get()) is not None and not _is_ending.is_set():
        future, function, arguments = task
        del task
        rest.begin()
        try:
            _run(future, function, arguments)
        finally:
            rest.end()
        del future, function, arguments  # or they would live until the next task


def _run(future: Future[Any], function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function(*arguments)
    except BaseException as error:
        future.set_exception(error)
        return
    future.set_result(result)


@atexit.register
def _end_all() -> None:
    """Let threads end on their own once they are done with what they have in hand."""
    _is_ending.set()
    for pool in list(_pools):
        pool.shutdown()
    until = time.monotonic() + _GRACE_S
    for thread in list(_threads):
        thread.join(max(0.0, until - time.monotonic()))
