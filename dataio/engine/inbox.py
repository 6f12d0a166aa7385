"""Receive from a worker process without ever waiting for the rest of a message.

`Connection.recv_bytes` waits until a message is there as a whole: if the worker is stopped or hangs while it sends one,
the loop hangs with it, past any time-out. Here what has come is kept until the rest comes.
"""

from __future__ import annotations

import array
import socket
import struct
from collections import deque

_HEADER = struct.Struct("!i")
_LONG_HEADER = struct.Struct("!Q")
_LEAST, _MOST = 1 << 16, 1 << 24
_FILES = 16


class Inbox:
    """Splits what comes through a socket into the messages that `multiprocessing.Connection.send_bytes` sent.

    Args:
        channel: Unix stream socket.
    """

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._bytes = bytearray()
        self.files: deque[int] = deque()
        """Descriptors that came, oldest first; the caller that takes one closes it."""

    def read(self) -> None:
        """Take what has come, if anything has; raises EOFError or OSError when the other side is gone."""
        wanted = min(max(_LEAST, self._missing()), _MOST)
        room = socket.CMSG_SPACE(_FILES * array.array("i").itemsize)
        flags = socket.MSG_DONTWAIT | getattr(socket, "MSG_CMSG_CLOEXEC", 0)
        try:
            data, extra, _, _ = self._channel.recvmsg(wanted, room, flags)
        except BlockingIOError:
            return
        for level, kind, content in extra:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                numbers = array.array("i")
                numbers.frombytes(content[: len(content) - len(content) % numbers.itemsize])
                self.files.extend(numbers)
        if not data:
            raise EOFError
        self._bytes += data

    def message(self) -> bytes | None:
        """Return the next message; None if it hasn't come as a whole."""
        frame = self._frame()
        if frame is None or len(self._bytes) < frame[1]:
            return None
        return self._cut(*frame)

    def byte(self) -> bytes | None:
        """Return the next byte, outside of any message; None if it hasn't come."""
        return self._cut(0, 1) if self._bytes else None

    def _frame(self) -> tuple[int, int] | None:
        """Return where the next message begins and ends; None while its length hasn't come."""
        if len(self._bytes) < _HEADER.size:
            return None
        (size,) = _HEADER.unpack_from(self._bytes)
        begin = _HEADER.size
        if size == -1:
            begin += _LONG_HEADER.size
            if len(self._bytes) < begin:
                return None
            (size,) = _LONG_HEADER.unpack_from(self._bytes, _HEADER.size)
        return begin, begin + size

    def _missing(self) -> int:
        frame = self._frame()
        return 0 if frame is None else frame[1] - len(self._bytes)

    def _cut(self, begin: int, end: int) -> bytes:
        with memoryview(self._bytes) as view:
            cut = bytes(view[begin:end])
        del self._bytes[:end]
        return cut
