"""Who is named when something fails."""

from __future__ import annotations

import math
import socket
import threading
from collections import Counter
from typing import Any

import pytest

from accel.comm.ranks.post_mortem import Inquiry, PostMortem, RankReport, neighbours, verdict

OWN = RankReport("step 3, bucket 1", "Connection closed", False)


@pytest.mark.parametrize(
    ("others", "text"),
    [
        ({1: RankReport("x", "no memory", True), 2: "ended"}, "because rank 1 failed at x: no memory"),
        ({1: "silent", 2: "ended"}, "because rank 2 has ended (its port is closed); look at its own log"),
        ({1: "ended", 2: "ended"}, "because each of rank 1, rank 2 has ended (its port is closed)"),
        ({1: "silent", 2: OWN}, "because rank 1 sends nothing: it hangs outside of communication"),
        ({1: RankReport("step 2, bucket 0", "late", False)}, "Connection closed; rank 1 was at step 2, bucket 0"),
        ({1: OWN}, "rank 0 stopped at step 3, bucket 1: Connection closed"),
        ({}, "rank 0 stopped at step 3, bucket 1: Connection closed"),
    ],
)
def test_cause_is_the_nearest_to_the_fault(others: dict[int, Any], text: str) -> None:
    assert text in verdict(0, OWN, others)


def test_own_fault_comes_first() -> None:
    found = verdict(0, RankReport("p", "bad bucket", True), {1: RankReport("q", "other", True)})
    assert found == "rank 0 stopped at p: bad bucket"


def connected(count: int, monkeypatch: pytest.MonkeyPatch) -> list[PostMortem]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    ports = [PostMortem("secret") for _ in range(count)]
    addresses = {rank: one.address for rank, one in enumerate(ports)}
    heard: list[bool] = []
    threads = [
        threading.Thread(target=lambda r=rank: heard.append(ports[r].connect(r, count, addresses, patience_s=60)))
        for rank in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert heard == [True] * count
    return ports


def test_reports_wait_in_the_port_and_a_closed_one_means_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = connected(3, monkeypatch)
    try:
        said = ports[1].ask(RankReport("here", "broke " + "é" * 2000, True), 0.2)
        assert said == {0: "silent", 2: "silent"}
        ports[2].close()
        found = ports[0].ask(OWN, 60)
    finally:
        for one in ports:
            one.close()
    assert found[2] == "ended"
    assert isinstance(found[1], RankReport)
    assert found[1].cause.startswith("broke ??")
    assert found[1].primary


def test_rank_that_spoke_and_ended_is_heard_behind_one_that_repeats_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = connected(4, monkeypatch)
    try:
        ports[3].close()
        for _ in range(5):
            ports[0].ask(OWN, 0.0)
        ports[1].ask(OWN, 0.0)
        ports[1].close()
        assert ports[2].ask(OWN, 60) == {0: OWN, 1: OWN, 3: "ended"}
    finally:
        for one in ports:
            one.close()


def test_strangers_are_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = connected(2, monkeypatch)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
            for data in (
                b"",
                b"{",
                b"[]",
                b'{"token": "guess", "rank": 1, "cause": "x", "place": "y", "primary": true}',
            ):
                stranger.sendto(data, ("127.0.0.1", ports[0].address.port))
        assert ports[0].ask(OWN, 0.2) == {1: "silent"}
    finally:
        for one in ports:
            one.close()


def test_ranks_that_can_not_hear_each_other_ask_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    one = PostMortem("secret")
    try:
        assert not one.connect(0, 2, {1: one.address._replace(port=9)}, patience_s=0.2)
        assert one.ask(OWN, 5.0) == {}
    finally:
        one.close()


# A simulated world: who speaks to whom, and how often


def inquire(
    size: int, ended: set[int], silent: set[int], primary: int | None, most: int = 40
) -> tuple[dict[int, str], Counter[int], int]:
    """Let all others inquire, round by round; return their verdicts, the datagrams of each, and the rounds."""
    cause = RankReport("step 3", "no memory", True)
    asking = {
        rank: Inquiry(rank, size, neighbours(rank, size), cause if rank == primary else OWN)
        for rank in range(size)
        if rank not in ended | silent
    }
    sent: Counter[int] = Counter()
    for rounds in range(1, most):
        post: list[tuple[int, list[Any]]] = []
        for rank, one in asking.items():
            items = one.message()
            for peer in one.addressees():
                sent[rank] += 1
                if peer in ended:
                    one.ended(peer)
                elif peer not in silent:
                    post.append((peer, items))
        for peer, items in post:
            asking[peer].take(items)
        if rounds == 3:
            for one in asking.values():
                one.suspect()
        if rounds > 3 and not post:
            break
    said = {rank: verdict(rank, cause if rank == primary else OWN, one.statuses()) for rank, one in asking.items()}
    return said, sent, rounds


SIZES = (2, 6, 9, 10, 16, 64, 250, 1000)


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_speaks_to_a_few_that_speak_to_it(size: int) -> None:
    known = {rank: set(neighbours(rank, size)) for rank in range(size)}
    for rank, peers in known.items():
        assert rank not in peers
        assert all(rank in known[peer] for peer in peers)
        assert len(peers) == size - 1 if size <= 9 else len(peers) <= 2 * math.ceil(math.log2(size))


@pytest.mark.sample(3)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("kind", "word"),
    [("ended", "has ended"), ("silent", "sends nothing"), ("primary", "failed at step 3: no memory")],
)
def test_every_rank_hears_of_the_cause_in_rounds_that_grow_with_the_logarithm(size: int, kind: str, word: str) -> None:
    culprit = size // 3
    said, sent, rounds = inquire(
        size,
        {culprit} if kind == "ended" else set(),
        {culprit} if kind == "silent" else set(),
        culprit if kind == "primary" else None,
    )
    for rank, text in said.items():
        assert f"because rank {culprit} {word}" in text or (kind == "primary" and rank == culprit)
    steps = math.ceil(math.log2(size))
    assert rounds <= steps + 4
    # Each speaks to all it knows when it begins, when it hears of the cause, and when what it heard gets better.
    assert max(sent.values()) <= 5 * len(neighbours(0, size)) + rounds


def test_a_whole_host_that_has_ended_is_named_in_part() -> None:
    said, _, _ = inquire(250, set(range(16, 24)), set(), None)
    for text in said.values():
        assert "has ended" in text
        assert len(text) < 400
