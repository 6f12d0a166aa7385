"""What a process has sent over TCP, as the kernel counts it: by connection, whatever others send."""

from __future__ import annotations

import contextlib
import os
import socket
import struct

_BYTES_SENT = 200  # offset of tcpi_bytes_sent in struct tcp_info, Linux ≥ 4.19; tcpi_bytes_retrans follows


def sockets() -> dict[tuple[int, int], int]:
    """Return {(own port, peer's port): bytes sent} of this process's connections."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        if not _target(name).startswith("socket:"):
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as one:  # or it is not connected
            if one.family == socket.AF_INET and one.type == socket.SOCK_STREAM:
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                sent, again = struct.unpack_from("QQ", info, _BYTES_SENT)
                found[one.getsockname()[1], one.getpeername()[1]] = sent - again
    return found


def _target(name: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{name}")
    except FileNotFoundError:  # the listing's own
        return ""


def sent_to(
    rank: int, before: list[dict[tuple[int, int], int]], after: list[dict[tuple[int, int], int]]
) -> dict[int, int]:
    """Return the bytes that a rank sent to each other one, from all ranks' `sockets()` before and after."""
    owner = {own: number for number, one in enumerate(after) for own, _ in one}
    found: dict[int, int] = {}
    for (own, peer), count in after[rank].items():
        if peer in owner:
            found[owner[peer]] = found.get(owner[peer], 0) + count - before[rank].get((own, peer), 0)
    return found
