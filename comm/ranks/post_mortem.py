"""Why a collective failed, by reports that ranks exchange.

The rank that notices a fault rarely has it: it sees a closed connection or a timeout. So each rank holds a UDP port,
whose datagrams the kernel keeps until they are read: no thread, no server, nothing that blocks. When a collective
fails, a rank sends what it was doing and why it stopped, then reads what the others sent, for a few seconds at most. A
rank that sends nothing has ended, if its port is closed, or else hangs or is cut off.

Up to nine ranks all report to each other. More send to those at distances 1, 2, 4, … in both directions, and pass on
what they learn of the cause: on 1,000 ranks it reaches all in ten rounds, with 18 datagrams of a rank in each that
brings news.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from accel.comm.ranks.rendezvous import named

ROUND_S = 0.1
_ALL = 8
"""Others up to which each rank sends to all."""
_SUSPECTED = 0.6
"""Part of the patience after which a rank that sends nothing is called silent, so that those far away learn of it."""


class CommError(RuntimeError):
    """Communication failed; the message names the rank and the cause."""


class RankReport(NamedTuple):
    """What a rank reports when it stops."""

    place: str
    """What it was doing: step, bucket, stage."""
    cause: str
    primary: bool
    """The fault is its own; False where it only saw a connection break."""


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


def neighbours(rank: int, size: int) -> list[int]:
    """Return the ranks that one sends to: all of few, else those at distances 1, 2, 4, … in both directions."""
    if size <= _ALL + 1:
        return [other for other in range(size) if other != rank]
    distances = [1 << k for k in range((size - 1).bit_length())]
    return sorted({(rank + direction * distance) % size for distance in distances for direction in (1, -1)} - {rank})


class Inquiry:
    """What one rank has learned so far; it sends nothing itself.

    Args:
        rank: this rank.
        size: number of ranks.
        peers: those that it speaks to.
        own: why it stopped.
    """

    def __init__(self, rank: int, size: int, peers: Sequence[int], own: RankReport) -> None:
        self._rank, self._size, self._peers, self._own = rank, size, peers, own
        self._known: dict[int, RankReport | str] = {}
        self._sent: list[Any] = []
        self._unsent = set(peers)

    @property
    def missing(self) -> list[int]:
        """Return those it speaks to that have sent nothing and are not known to have ended."""
        return [peer for peer in self._peers if self._known.get(peer, "silent") == "silent"]

    @property
    def done(self) -> bool:
        """Return whether nothing more can be learned: everyone near has reported or ended, and the cause is known."""
        cause = self._own.primary or any(map(_is_cause, self._known.values()))
        return not self.missing and (cause or not self._peers or len(self._known) >= self._size - 1)

    def message(self) -> list[Any]:
        """Return what to send: the own report, and what is known of the cause, a few ranks of each kind."""
        items: list[Any] = [[self._rank, *self._own._replace(cause=_short(self._own.cause))]]
        for kind, most in (("report", 2), ("ended", 4), ("silent", 2)):
            ranks = [r for r, status in sorted(self._known.items()) if _is_cause(status, kind)]
            items += [
                [r, *status] if isinstance(status := self._known[r], RankReport) else [r, status] for r in ranks[:most]
            ]
        return items

    def addressees(self) -> set[int]:
        """Return whom to send to now: those that are missing, and all if there are news."""
        items = self.message()
        if items != self._sent:
            self._sent, self._unsent = items, set(self._peers)
        whom = self._unsent | set(self.missing)
        self._unsent = set()
        return whom

    def take(self, items: Sequence[Sequence[Any]]) -> None:
        """Take in what another rank sent."""
        for rank, *fields in items:
            status = RankReport(*fields) if len(fields) == len(RankReport._fields) else str(fields[0])
            self._learn(int(rank), status)

    def ended(self, rank: int) -> None:
        """Take note that a port is closed."""
        self._learn(rank, "ended")

    def suspect(self) -> None:
        """Take those that are missing for silent, and report it; a later message of theirs overrides it."""
        for rank in self.missing:
            self._learn(rank, "silent")

    def _learn(self, rank: int, status: RankReport | str) -> None:
        if rank != self._rank and _weight(status) > _weight(self._known.get(rank)):
            self._known[rank] = status

    def statuses(self) -> dict[int, RankReport | str]:
        """Return what is known of each rank, by rank; "silent" for those near that sent nothing."""
        return {**dict.fromkeys(self.missing, "silent"), **self._known}


def _weight(status: RankReport | str | None) -> int:
    return 3 if isinstance(status, RankReport) else {None: 0, "silent": 1, "ended": 2}.get(status, 0)


def _is_cause(status: RankReport | str, kind: str = "") -> bool:
    """Return whether this may be why others stopped: a fault of its own, or a rank that has ended or is silent."""
    own = "report" if isinstance(status, RankReport) else status
    return (own == kind or (not kind and own != "silent")) and (not isinstance(status, RankReport) or status.primary)


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
        self._rank, self._size = 0, 1

    def connect(self, rank: int, size: int, addresses: Mapping[int, Address], patience_s: float = 3.0) -> bool:
        """Learn the ports of the ranks that this one sends to; return whether all of them can be reached.

        If not, none is asked later.
        """
        self._rank, self._size = rank, size
        self._peers = {r: (address.host, address.port) for r, address in addresses.items() if r != rank}
        heard: set[int] = set()
        deadline = time.monotonic() + patience_s

        def all_heard() -> bool:
            return len(heard) == len(self._peers)

        while True:
            # Once more after the last was heard from: it may not have heard from this rank yet.
            self._send({"hello": True}, self._peers, ask_whether_closed=False)
            if all_heard() or time.monotonic() > deadline:
                break
            for message in self._hear("hello", all_heard):
                heard.update({int(message["rank"])} & self._peers.keys())
        if not all_heard():
            self._peers = {}
            return False
        return True

    def ask(self, own: RankReport, patience_s: float) -> dict[int, RankReport | str]:
        """Send why this rank stopped, pass on what others send, and return what is known of each rank.

        A rank near this one that sends nothing within `patience_s` gets "ended" or "silent".
        """
        inquiry = Inquiry(self._rank, self._size, list(self._peers), own)
        began = time.monotonic()
        while True:
            ended = self._tell(inquiry)
            for rank in ended:
                inquiry.ended(rank)
            for message in self._hear("items", lambda: inquiry.done):
                inquiry.take(message["items"])
            passed = time.monotonic() - began
            if inquiry.done or passed > patience_s:
                self._tell(inquiry)  # news, if there are any
                return inquiry.statuses()
            if passed > _SUSPECTED * patience_s:
                inquiry.suspect()

    def _tell(self, inquiry: Inquiry) -> set[int]:
        return self._send({"items": inquiry.message()}, inquiry.addressees())

    def _send(self, message: dict[str, Any], whom: Collection[int], ask_whether_closed: bool = True) -> set[int]:
        """Send to some peers and return those whose port is closed, if asked for."""
        data = json.dumps({"token": self.address.token, "rank": self._rank, **message}).encode()
        closed = set()
        for rank in whom:
            # A connected socket of its own gets "port unreachable"; the one that receives all datagrams wouldn't.
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
                try:
                    line.connect(self._peers[rank])
                    line.send(data)
                    if ask_whether_closed:
                        line.settimeout(0.005)
                        line.recv(1)
                except ConnectionRefusedError:
                    closed.add(rank)
                except OSError:
                    pass  # no answer, as it should be, or no route there, which silence will show
        return closed

    def _hear(self, key: str, enough: Callable[[], bool]) -> Iterator[dict[str, Any]]:
        """Yield what comes within a round and has `key` in it; once it is enough, only what has come already."""
        deadline = time.monotonic() + ROUND_S
        while True:
            left = deadline - time.monotonic()
            self._socket.settimeout(0.0 if enough() or left <= 0 else left)
            try:
                data = self._socket.recv(65536)
            except OSError:
                return
            try:
                message = json.loads(data)
                if message["token"] == self.address.token and key in message and int(message["rank"]) != self._rank:
                    yield message
            except (ValueError, KeyError, TypeError):
                continue  # somebody else's datagram

    def close(self) -> None:
        """Free the port."""
        self._socket.close()


def _short(text: str) -> str:
    """Return what of a text fits into a datagram, escapes included."""
    return text.encode("ascii", "replace").decode()[:600]


def verdict(rank: int, own: RankReport, others: dict[int, RankReport | str]) -> str:
    """Return one sentence on who failed and why, as far as the reports say.

    Args:
        rank: this rank.
        own: why it stopped.
        others: what `PostMortem.ask` returned.
    """
    here = f"rank {rank} stopped at {own.place}"
    if own.primary:
        return f"{here}: {own.cause}"
    for other, status in sorted(others.items()):
        if isinstance(status, RankReport) and status.primary:
            return f"{here} because rank {other} failed at {status.place}: {status.cause}"
    for word, meaning in (
        ("ended", "has ended (its port is closed); look at its own log"),
        ("silent", "sends nothing: it hangs outside of communication, or its link is cut"),
    ):
        ranks = [other for other, status in sorted(others.items()) if status == word]
        if ranks:
            return f"{here} because {named(ranks)} {meaning}; what this rank saw: {own.cause}"
    reports = sorted((other, status) for other, status in others.items() if isinstance(status, RankReport))
    apart = [f"rank {other} was at {status.place}" for other, status in reports if status.place != own.place]
    return f"{here}: {own.cause}" + ("; " + ", ".join(apart) if apart else "")
