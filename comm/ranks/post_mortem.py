"""Why a collective failed, as ranks tell each other.

The rank that notices a fault rarely has it: it sees a closed connection or a timeout. So each rank holds a UDP port,
whose datagrams the kernel keeps until they are read: no thread, no server, nothing that blocks. When a collective
fails, a rank sends what it was doing and why it stopped, then reads what the others sent, for a few seconds at most. A
rank that sends nothing has ended, if its port is closed, or else hangs or is cut off.

Up to nine ranks all hear each other. More speak to those at distances 1, 2, 4, … both ways round, and pass on what they
hear of the cause: on 1,000 ranks it reaches all in ten rounds, with 18 datagrams of a rank in each that brings news.
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
"""Others up to which each rank speaks to all."""
_SUSPECTED = 0.6
"""Part of the patience after which a rank that says nothing is called silent, so that those far away hear of it."""


class CommError(RuntimeError):
    """Communication failed; the message names the rank and the cause."""


class RankReport(NamedTuple):
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


def neighbours(rank: int, size: int) -> list[int]:
    """Return the ranks that one speaks to: all of few, else those at distances 1, 2, 4, … both ways round."""
    if size <= _ALL + 1:
        return [other for other in range(size) if other != rank]
    distances = [1 << k for k in range((size - 1).bit_length())]
    return sorted({(rank + way * one) % size for one in distances for way in (1, -1)} - {rank})


class Inquiry:
    """What one rank has found out so far; it sends nothing itself.

    Args:
        rank: this rank.
        size: number of ranks.
        peers: those that it speaks to.
        own: why it stopped.
    """

    def __init__(self, rank: int, size: int, peers: Sequence[int], own: RankReport) -> None:
        self._rank, self._size, self._peers, self._own = rank, size, peers, own
        self._known: dict[int, RankReport | str] = {}
        self._told: list[Any] = []
        self._untold = set(peers)

    @property
    def missing(self) -> list[int]:
        """Return those it speaks to that have said nothing and are not known to have ended."""
        return [peer for peer in self._peers if self._known.get(peer, "silent") == "silent"]

    @property
    def done(self) -> bool:
        """Tell whether more can't be found out: everyone near has spoken or ended, and the cause is known."""
        cause = self._own.primary or any(map(_is_cause, self._known.values()))
        return not self.missing and (cause or not self._peers or len(self._known) >= self._size - 1)

    def message(self) -> list[Any]:
        """Return what to tell: the own report, and what is known of the cause, a few ranks of each kind."""
        items: list[Any] = [[self._rank, *self._own._replace(cause=_short(self._own.cause))]]
        for kind, most in (("report", 2), ("ended", 4), ("silent", 2)):
            found = [r for r, said in sorted(self._known.items()) if _is_cause(said, kind)]
            items += [[r, *said] if isinstance(said := self._known[r], RankReport) else [r, said] for r in found[:most]]
        return items

    def addressees(self) -> set[int]:
        """Return whom to tell now: those that are missing, and all if there are news."""
        items = self.message()
        if items != self._told:
            self._told, self._untold = items, set(self._peers)
        whom = self._untold | set(self.missing)
        self._untold = set()
        return whom

    def take(self, items: Sequence[Sequence[Any]]) -> None:
        """Take in what another rank tells."""
        for rank, *said in items:
            word = RankReport(*said) if len(said) == len(RankReport._fields) else str(said[0])
            self._learn(int(rank), word)

    def ended(self, rank: int) -> None:
        """Take note that a port is closed."""
        self._learn(rank, "ended")

    def suspect(self) -> None:
        """Take those that are missing for silent, and say so; a later word of theirs counts for more."""
        for rank in self.missing:
            self._learn(rank, "silent")

    def _learn(self, rank: int, word: RankReport | str) -> None:
        if rank != self._rank and _weight(word) > _weight(self._known.get(rank)):
            self._known[rank] = word

    def found(self) -> dict[int, RankReport | str]:
        """Return what is known of each rank, by rank; "silent" for those near that said nothing."""
        return {**dict.fromkeys(self.missing, "silent"), **self._known}


def _weight(word: RankReport | str | None) -> int:
    return 3 if isinstance(word, RankReport) else {None: 0, "silent": 1, "ended": 2}.get(word, 0)


def _is_cause(said: RankReport | str, kind: str = "") -> bool:
    """Tell whether this may be why others stopped: a fault found, or a rank that has ended or is silent."""
    own = "report" if isinstance(said, RankReport) else said
    return (own == kind or (not kind and own != "silent")) and (not isinstance(said, RankReport) or said.primary)


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
        """Learn the ports of the ranks that this one speaks to; return whether all of them can be heard.

        If not, none is asked later.
        """
        self._rank, self._size = rank, size
        self._peers = {r: (one.host, one.port) for r, one in addresses.items() if r != rank}
        heard: set[int] = set()
        deadline = time.monotonic() + patience_s

        def all_heard() -> bool:
            return len(heard) == len(self._peers)

        while True:
            # Once more after the last has been heard: it may not have heard this rank yet.
            self._send({"hello": True}, self._peers, ask_whether_closed=False)
            if all_heard() or time.monotonic() > deadline:
                break
            for said in self._hear("hello", all_heard):
                heard.update({int(said["rank"])} & self._peers.keys())
        if not all_heard():
            self._peers = {}
            return False
        return True

    def ask(self, own: RankReport, patience_s: float) -> dict[int, RankReport | str]:
        """Tell why this rank stopped, pass on what others tell, and return what is known of each rank.

        A rank near this one that says nothing within `patience_s` gets "ended" or "silent".
        """
        inquiry = Inquiry(self._rank, self._size, list(self._peers), own)
        began = time.monotonic()
        while True:
            ended = self._tell(inquiry)
            for rank in ended:
                inquiry.ended(rank)
            for said in self._hear("items", lambda: inquiry.done):
                inquiry.take(said["items"])
            passed = time.monotonic() - began
            if inquiry.done or passed > patience_s:
                self._tell(inquiry)  # news, if there are any
                return inquiry.found()
            if passed > _SUSPECTED * patience_s:
                inquiry.suspect()

    def _tell(self, inquiry: Inquiry) -> set[int]:
        return self._send({"items": inquiry.message()}, inquiry.addressees())

    def _send(self, message: dict[str, Any], whom: Collection[int], ask_whether_closed: bool = True) -> set[int]:
        """Send to some peers and return those whose port is closed, if asked for."""
        data = json.dumps({"token": self.address.token, "rank": self._rank, **message}).encode()
        closed = set()
        for rank in whom:
            # A connected socket of its own hears "port unreachable"; the one that all datagrams come to wouldn't.
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
                    pass  # no answer, as it should be, or no way there, which silence will tell
        return closed

    def _hear(self, word: str, enough: Callable[[], bool]) -> Iterator[dict[str, Any]]:
        """Yield what comes within a round and has `word` in it; once it is enough, only what has come already."""
        deadline = time.monotonic() + ROUND_S
        while True:
            left = deadline - time.monotonic()
            self._socket.settimeout(0.0 if enough() or left <= 0 else left)
            try:
                data = self._socket.recv(65536)
            except OSError:
                return
            try:
                said = json.loads(data)
                if said["token"] == self.address.token and word in said and int(said["rank"]) != self._rank:
                    yield said
            except (ValueError, KeyError, TypeError):
                continue  # somebody else's datagram

    def close(self) -> None:
        """Free the port."""
        self._socket.close()


def _short(text: str) -> str:
    """Return what of a text fits into a datagram, escapes included."""
    return text.encode("ascii", "replace").decode()[:600]


def verdict(rank: int, own: RankReport, others: dict[int, RankReport | str]) -> str:
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
        if isinstance(said, RankReport) and said.primary:
            return f"{here} because rank {other} failed at {said.place}: {said.cause}"
    for word, meaning in (
        ("ended", "has ended (its port is closed); look at its own log"),
        ("silent", "sends nothing: it hangs outside of communication, or its link is cut"),
    ):
        ranks = [other for other, said in sorted(others.items()) if said == word]
        if ranks:
            return f"{here} because {named(ranks)} {meaning}; what this rank saw: {own.cause}"
    apart = [f"rank {other} was at {said.place}" for other, said in sorted(others.items()) if said.place != own.place]  # type: ignore[union-attr]
    return f"{here}: {own.cause}" + ("; " + ", ".join(apart) if apart else "")
