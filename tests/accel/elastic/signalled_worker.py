"""A worker process that takes SIGTERM, without torch: what a test starts by spawn imports nothing that lasts."""

from __future__ import annotations

import os
import threading
from multiprocessing.connection import Connection

from accel.elastic.worker_signals import OutlivingInit


def serve(connection: Connection, loop: int, library: bool) -> None:
    """Begin as torch's workers do, then answer each word with the number of this process.

    Args:
        connection: to the test.
        loop: process in which `accel.optimize` was called.
        library: whether a thread runs before, as one of a library that is imported.
    """
    if library:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    OutlivingInit(None, loop)(0)
    while True:
        connection.send(os.getpid())
        connection.recv()
