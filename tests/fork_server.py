"""The process that `tests/forks.py` starts: it imports what its children need, once for all of pytest's processes."""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import select
import socket
from collections.abc import Sequence
from multiprocessing.connection import Connection

from filelock import FileLock

from tests import huge_pages

FIRST_SESSION_S = 60.0
"""Nobody came after it was started: whoever started it is gone."""
LOOK_S = 0.1
"""How often it looks for sessions that have ended."""


def serve(address: str, lock: str, preload: Sequence[str]) -> None:
    """Fork a session for each connection to a socket, until the last of them has ended.

    Connections wait while it imports the modules of `preload`, which must start no threads: these don't survive a fork.

    Args:
        address: of the socket that it makes.
        lock: file that is locked by whoever connects, and by the server while it ends.
        preload: names of modules.
    """
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(16)
    os.write(1, b".")  # whoever has started it may connect
    os.dup2(2, 1)
    for name in preload:
        importlib.import_module(name)
    gc.freeze()  # or each child looks through all of torch when it ends, which took 1.1 s
    huge_pages.use()
    sessions: set[int] = set()
    timeout_s = FIRST_SESSION_S
    while True:
        if select.select([listener], [], [], timeout_s)[0]:
            timeout_s = LOOK_S
            connection = listener.accept()[0]
            child = os.fork()
            if child == 0:
                listener.close()
                # What it forks leaves through this frame, so that it ends as an interpreter does.
                return _session(Connection(connection.detach()))
            connection.close()
            sessions.add(child)
        sessions -= {child for child in sessions if os.waitpid(child, os.WNOHANG)[0]}
        if not sessions:
            with FileLock(lock):
                if not select.select([listener], [], [], 0)[0]:
                    os.unlink(address)
                    os._exit(0)  # it has nothing to take apart, which would take as long as an import


def _session(connection: Connection) -> None:
    """Answer one process of pytest in turn, until it closes its end.

    A request is a pickled function with its arguments, to be called in a child, or the number of a child to wait for.
    """
    while True:
        try:
            request = connection.recv()
        except EOFError:
            os._exit(0)
        if isinstance(request, int):
            connection.send(os.waitstatus_to_exitcode(os.waitpid(request, 0)[1]))
            continue
        function, arguments = pickle.loads(request)
        child = os.fork()
        if child == 0:
            connection.close()
            return function(**arguments)
        os.setpgid(child, child)
        connection.send(child)
