"""Ranks leave what they saw in the launcher's store, and rank 0 reads it."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from accel.profiler.gather import Exchange


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> TCPStore:
    made = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=5), wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(made.port))
    monkeypatch.setenv("WORLD_SIZE", "2")
    return made


def rank(number: int, monkeypatch: pytest.MonkeyPatch, timeout_s: float = 5.0) -> Exchange:
    monkeypatch.setenv("RANK", str(number))
    return Exchange(timeout_s)


def test_rank_0_collects_what_all_bring_however_late_it_comes(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = rank(0, monkeypatch), rank(1, monkeypatch, timeout_s=2.0)
    assert first.launched
    assert second.collect({"steps": 4}) == {}
    time.sleep(0.1)

    assert first.collect({"steps": 3}) == {0: {"steps": 3}, 1: {"steps": 4}}


@pytest.mark.parametrize(("timeout_s", "at_most_s"), [(0.3, None), (60.0, 0.3)])
def test_a_rank_that_does_not_come_is_left_out_in_time(
    timeout_s: float, at_most_s: float | None, store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = time.monotonic()

    assert rank(0, monkeypatch, timeout_s).collect(1, at_most_s) == {0: 1}
    assert time.monotonic() - began < 10


def test_all_ranks_elect_the_same(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    brought = {0: ["a", "b"], 1: ["c", "b"]}
    ranks, found = [rank(number, monkeypatch) for number in brought], {}

    def elect(one: Exchange) -> None:
        found[one.rank] = one.elect(brought[one.rank], 2)

    threads = [threading.Thread(target=elect, args=(one,)) for one in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: ["b", "a"], 1: ["b", "a"]}


def test_nothing_is_elected_without_all_ranks(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rank(1, monkeypatch, timeout_s=0.2).elect(["a"], 2) == []


def test_a_restarted_run_reads_nothing_of_the_one_before(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    rank(1, monkeypatch).collect(1)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")

    assert rank(0, monkeypatch, timeout_s=0.2).collect(2) == {0: 2}


def test_without_a_store_there_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")

    with pytest.raises(OSError, match="the launcher's store can't be reached"):
        rank(0, monkeypatch).collect(1)


def test_one_process_needs_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    assert not Exchange().launched
