"""Who is named when something fails."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest

from accel.comm.post_mortem import PostMortem, Report, verdict

OWN = Report("step 3, bucket 1", "Connection closed", False)


@pytest.mark.parametrize(
    ("others", "text"),
    [
        ({1: Report("x", "no memory", True), 2: "ended"}, "because rank 1 failed at x: no memory"),
        ({1: "silent", 2: "ended"}, "because rank 2 has ended (its port is closed); look at its own log"),
        ({1: "ended", 2: "ended"}, "because each of rank 1, rank 2 has ended (its port is closed)"),
        ({1: "silent", 2: OWN}, "because rank 1 sends nothing: it hangs outside of communication"),
        ({1: Report("step 2, bucket 0", "late", False)}, "Connection closed; rank 1 was at step 2, bucket 0"),
        ({1: OWN}, "rank 0 stopped at step 3, bucket 1: Connection closed"),
        ({}, "rank 0 stopped at step 3, bucket 1: Connection closed"),
    ],
)
def test_cause_is_the_nearest_to_the_fault(others: dict[int, Any], text: str) -> None:
    assert text in verdict(0, OWN, others)


def test_own_fault_comes_first() -> None:
    found = verdict(0, Report("p", "bad bucket", True), {1: Report("q", "other", True)})
    assert found == "rank 0 stopped at p: bad bucket"


def connected(count: int, monkeypatch: pytest.MonkeyPatch) -> list[PostMortem]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    ports = [PostMortem("secret") for _ in range(count)]
    addresses = [one.address for one in ports]
    heard: list[bool] = []
    threads = [
        threading.Thread(target=lambda r=rank: heard.append(ports[r].connect(r, addresses))) for rank in range(count)
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
        said = ports[1].ask(Report("here", "broke " + "é" * 2000, True), 0.2)
        assert said == {0: "silent", 2: "silent"}
        ports[2].close()
        found = ports[0].ask(OWN, 0.3)
    finally:
        for one in ports:
            one.close()
    assert found[2] == "ended"
    assert isinstance(found[1], Report)
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
        assert ports[2].ask(OWN, 2.0) == {0: OWN, 1: OWN, 3: "ended"}
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
        assert not one.connect(0, [one.address, one.address._replace(port=9)], patience_s=0.2)
        assert one.ask(OWN, 5.0) == {}
    finally:
        one.close()
