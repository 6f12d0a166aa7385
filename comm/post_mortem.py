"""Why a collective failed, told by every rank to every other.

The rank that notices a fault rarely has it: it sees a closed connection or a timeout. So each rank holds a UDP port,
whose datagrams the kernel keeps until they are read: no thread, no server, nothing that blocks. When a collective
fails, a rank sends what it was doing and why it stopped, then reads what the others sent, for a few seconds at most. A
rank that sends nothing has ended, if its port is closed, or else hangs or is cut off.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import time
from collections.abc import Sequence, Set
from typing import Any, NamedTuple

ROUND_S = 0.1


class CommError(RuntimeError):
    """Communication failed; the message names the rank and the cause."""


class Report(NamedTuple):
    """What a rank said when it stopped."""

    place: str
    """What it was doing: step, bucket, stage."""
    cause: str
    primary: bool
    """It found the fault itself; False where it only saw a connection break."""


class Address(NamedTuple):
    """Where a rank listens."""

    host: str
    port: int
    token: str


def own_host() -> str:
    """Return the address that peers reach this host at: that of GLOO_SOCKET_IFNAME, else of the host's name."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name in filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")):
            request = struct.pack("256s", name.encode()[:15])
            try:
                return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), 0x8915, request)[20:24])  # SIOCGIFADDR
            except OSError:
                continue  # no such interface here, or it has no address
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


class PostMortem:
    """One rank's port.

    Args:
        token: secret of this run; datagrams without it are dropped.
    """

    def __init__(self, token: str) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("", 0))
        self.address = Address(own_host(), self._socket.getsockname()[1], token)
        self._peers: dict[int, tuple[str, int]] = {}
        self._rank = 0

    def connect(self, rank: int, addresses: Sequence[Address], patience_s: float = 3.0) -> bool:
        """Learn the other ranks' ports; return whether all of them can be heard, and if not, ask none later."""
        self._rank = rank
        self._peers = {r: (one.host, one.port) for r, one in enumerate(addresses) if r != rank}
        heard: set[int] = set()
        deadline = time.monotonic() + patience_s
        while True:
            # Once more after the last has been heard: it may not have heard this rank yet.
            self._send({"hello": True}, ask_whether_closed=False)
            if len(heard) == len(self._peers) or time.monotonic() > deadline:
                break
            heard |= self._read("hello", self._peers.keys() - heard).keys()
        if len(heard) < len(self._peers):
            self._peers = {}
            return False
        return True

    def ask(self, own: Report, patience_s: float) -> dict[int, Report | str]:
        """Tell the others why this rank stopped and return what each of them says.

        A rank that says nothing within `patience_s` gets "ended" or "silent".
        """
        found: dict[int, Report | str] = {}
        deadline = time.monotonic() + patience_s
        while True:
            ended = self._send({"place": own.place, "cause": _short(own.cause), "primary": own.primary})
            for rank, said in self._read("cause", self._peers.keys() - found.keys()).items():
                found[rank] = Report(str(said["place"]), str(said["cause"]), bool(said["primary"]))
            missing = [rank for rank in self._peers if rank not in found]
            if ended.issuperset(missing) or time.monotonic() > deadline:
                return {**{rank: "ended" if rank in ended else "silent" for rank in missing}, **found}

    def _send(self, message: dict[str, Any], ask_whether_closed: bool = True) -> set[int]:
        """Send to every peer and return those whose port is closed, if asked for."""
        data = json.dumps({"token": self.address.token, "rank": self._rank, **message}).encode()
        closed = set()
        for rank, peer in self._peers.items():
            # A connected socket of its own hears "port unreachable"; the one that all datagrams come to wouldn't.
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
                try:
                    line.connect(peer)
                    line.send(data)
                    if ask_whether_closed:
                        line.settimeout(0.005)
                        line.recv(1)
                except ConnectionRefusedError:
                    closed.add(rank)
                except OSError:
                    pass  # no answer, as it should be, or no way there, which silence will tell
        return closed

    def _read(self, word: str, wanted: Set[int]) -> dict[int, dict[str, Any]]:
        """Return what ranks say within a round that has `word` in it, until all that are wanted have spoken.

        Not until as many datagrams came: some ranks say it every round, and one that has ended since said it once.
        """
        found: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + ROUND_S
        while not found.keys() >= wanted and (left := deadline - time.monotonic()) > 0:
            self._socket.settimeout(left)
            try:
                data = self._socket.recv(65536)
            except OSError:
                break
            try:
                said = json.loads(data)
                if said["token"] == self.address.token and word in said:
                    found[int(said["rank"])] = said
            except (ValueError, KeyError, TypeError):
                continue  # somebody else's datagram
        return found

    def close(self) -> None:
        """Free the port."""
        self._socket.close()


def _short(text: str) -> str:
    """Return what of a text fits into a datagram, escapes included."""
    return text.encode("ascii", "replace").decode()[:600]


def verdict(rank: int, own: Report, others: dict[int, Report | str]) -> str:
    """Return one sentence on who failed and why, as far as the reports tell.

    Args:
        rank: this rank.
        own: why it stopped.
        others: what `PostMortem.ask` found.
    """
    here = f"rank {rank} stopped at {own.place}"
    if own.primary:
        return f"{here}: {own.cause}"
    for other, said in sorted(others.items()):
        if isinstance(said, Report) and said.primary:
            return f"{here} because rank {other} failed at {said.place}: {said.cause}"
    for word, meaning in (
        ("ended", "has ended (its port is closed); look at its own log"),
        ("silent", "sends nothing: it hangs outside of communication, or its link is cut"),
    ):
        ranks = [f"rank {other}" for other, said in sorted(others.items()) if said == word]
        if ranks:
            who = f"each of {', '.join(ranks)}" if ranks[1:] else ranks[0]
            return f"{here} because {who} {meaning}; what this rank saw: {own.cause}"
    apart = [f"rank {other} was at {said.place}" for other, said in sorted(others.items()) if said.place != own.place]  # type: ignore[union-attr]
    return f"{here}: {own.cause}" + ("; " + ", ".join(apart) if apart else "")
