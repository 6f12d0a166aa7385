"""Ranks that meet through a store: all of them or none, within seconds, for as many operations as there are ranks."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel.profiler.rendezvous import RankLeft, RanksDiverged, Rendezvous, named
from tests.comm.simulated import CountingStore
from tests.sampling import examples

PATIENCE_S = 10.0
MISSED = "did not come"


class World:
    """Ranks of one store, with a clock that only `sleep` moves on."""

    def __init__(self, size: int) -> None:
        self.now = 0.0
        self.world: dict[str, bytes] = {}
        self.counts: Counter[int] = Counter()
        self.stores = [CountingStore(self.world, self.counts, rank) for rank in range(size)]
        self.ranks = [
            Rendezvous(store, rank, size, PATIENCE_S, "come", clock=lambda: self.now, sleep=self._sleep)
            for rank, store in enumerate(self.stores)
        ]

    def _sleep(self, seconds: float) -> None:
        self.now += seconds

    def look(self, rank: int, answer: Any = list) -> Any:
        """Return a rank's answer in a tuple, an empty one, or the text of what it raised."""
        try:
            return self.ranks[rank].look(answer, MISSED)
        except (RanksDiverged, ValueError) as error:
            return str(error)

    def all_meet(self, answer: Any = list) -> list[Any]:
        for rank, one in enumerate(self.ranks):
            one.arrive(rank)
        return [self.look(rank, answer) for rank in range(len(self.ranks))]


@pytest.mark.parametrize("size", [1, 2, 16, 250])
def test_operations_grow_with_the_ranks_in_all_and_not_at_all_for_each(size: int) -> None:
    one, meetings = World(size), 3
    for _ in range(meetings):
        assert one.all_meet(len) == [(size,)] * size
    others = [one.counts[rank] for rank in range(1, size)]
    # Bring it, look twice, read the outcome, clean up.
    assert max(others, default=0) <= 8 * meetings
    assert sum(one.counts.values()) <= 12 * meetings * (size + 1)
    # Nothing is left behind but the last word: a run meets thousands of times.
    assert len(one.world) <= 2
    # What a rank reads doesn't depend on how many there are.
    assert max((store.bytes for store in one.stores[1:]), default=0) <= 400 * meetings


def test_an_answer_is_for_all() -> None:
    one = World(3)
    assert one.all_meet(sum) == [(3,)] * 3
    assert one.all_meet(lambda told: None) == [(None,)] * 3


def test_an_answer_may_be_made_of_those_that_came() -> None:
    one = World(3)
    for rank in (1, 2):
        one.ranks[rank].arrive(rank)
    one.now = PATIENCE_S + 0.1
    assert [one.ranks[rank].look(list, MISSED, all_must_come=False) for rank in (2, 1)] == [([None, 1, 2],)] * 2


@pytest.mark.parametrize("missing", [[0], [1], [3], [0, 2]])
def test_a_rank_that_does_not_come_is_named_on_all_others_and_hears_it_later(missing: list[int]) -> None:
    one = World(4)
    here = [rank for rank in range(4) if rank not in missing]
    for rank in here:
        one.ranks[rank].arrive(rank)
        assert one.look(rank) == ()
    one.now = PATIENCE_S + 0.1
    said = {one.look(rank) for rank in here}
    assert said == {f"rank {here[0]} waits for {named(missing)}, which did not come within 10 s; come"}
    for rank in missing:
        one.ranks[rank].arrive(rank)
        assert one.look(rank) == next(iter(said))


def beat(one: World, rank: int) -> None:
    """Do what the thread of a rank at work does."""
    one.stores[rank].add(f"0/{rank}/at work", 1)


def test_a_rank_at_work_is_waited_for_as_long_as_it_shows_that_it_is_alive() -> None:
    one = World(3)
    for rank in (0, 1):
        one.ranks[rank].arrive(rank)
    for _ in range(12):
        one.now += PATIENCE_S / 2
        beat(one, 2)
        assert [one.look(rank) for rank in (0, 1)] == [(), ()]
    one.ranks[2].arrive(2)
    assert [one.look(rank) for rank in range(3)] == [([0, 1, 2],)] * 3
    assert len(one.world) <= 2


@pytest.mark.parametrize("beats", [0, 1])
def test_one_that_dies_or_is_stopped_at_work_is_named_within_twice_the_patience(beats: int) -> None:
    one = World(3)
    for rank in (0, 1):
        one.ranks[rank].arrive(rank)
    for _ in range(beats):
        beat(one, 2)
    said: Any = ()
    while not said:
        one.now += 1.0
        said, heard = one.look(0), one.look(1)
    assert said == heard == "rank 0 waits for rank 2, which did not come within 10 s; come"
    assert one.now <= (1 + beats) * PATIENCE_S + 2


def test_nobody_works_for_ever() -> None:
    one, said = World(2), ()
    one.ranks[0].arrive(0)
    while not said:
        one.now += 1.0
        beat(one, 1)
        said = one.look(0)
    assert 600 <= one.now <= 600 + 2 * PATIENCE_S


def test_waiting_for_one_at_work_costs_as_many_operations_as_there_are_ranks() -> None:
    one, size, rounds = World(200), 200, 3
    for rank in range(size - 1):
        one.ranks[rank].arrive(rank)
    one.counts.clear()
    for _ in range(rounds):
        one.now += PATIENCE_S
        beat(one, size - 1)
        for rank in range(size - 1):
            assert one.look(rank) == ()
    assert sum(one.counts.values()) <= 8 * rounds * size
    assert max(one.counts[rank] for rank in range(1, size)) <= 8 * rounds


def test_a_thread_beats_while_a_rank_is_at_work() -> None:
    one = World(2)
    one.ranks[1].patience_s = 0.004
    with one.ranks[1].life.at_work():
        while "0/1/at work" not in one.world:
            time.sleep(0.001)
    assert all(each.name != "accel-at-work" for each in threading.enumerate())


def test_all_or_none_whoever_is_late() -> None:
    """Rank 1 gives up just before rank 0 sees that all have come, or just after."""
    for first in (0, 1):
        one = World(2)
        one.ranks[1].arrive("b")
        one.now = PATIENCE_S + 0.1
        one.ranks[0].arrive("a")
        found = {first: one.look(first), 1 - first: one.look(1 - first)}
        assert found[0] == found[1]
        assert (found[0] == (["a", "b"],)) == (first == 0)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["arrive", "look", "wait", "leave"])), max_size=60))
def test_in_whatever_order_ranks_hear_the_same_or_nothing(events: list[tuple[int, str]]) -> None:
    one = World(4)
    state = dict.fromkeys(range(4), "away")
    heard: dict[int, Any] = {}
    for rank, event in events:
        if event == "wait":
            one.now += 6.0
        elif state[rank] == "away" and event == "arrive":
            one.ranks[rank].arrive(rank)
            state[rank] = "here"
        elif state[rank] == "away" and event == "leave":
            one.ranks[rank].leave("rank has left")
            state[rank] = "gone"
        elif state[rank] == "here" and event == "look" and (found := one.look(rank)):
            heard[rank], state[rank] = found, "gone"
    one.now += 2 * PATIENCE_S
    for rank in [rank for rank, now in state.items() if now == "here"]:
        heard[rank] = one.look(rank) or one.look(rank)
    assert len({str(said) for said in heard.values()}) <= 1
    for said in heard.values():
        assert said == ([0, 1, 2, 3],) or "come" in said or "has left" in said


def test_one_that_leaves_is_heard_at_once() -> None:
    one = World(3)
    assert one.all_meet(len) == [(3,)] * 3
    one.ranks[2].leave("rank 2 has had enough")
    one.ranks[0].arrive(0)
    with pytest.raises(RankLeft, match="rank 2 has had enough"):
        one.ranks[0].look(list, MISSED)
    with pytest.raises(RankLeft, match="rank 2 has had enough"):
        one.ranks[1].check()


def test_leaving_while_the_others_get_their_answer_is_heard_at_the_next_meeting() -> None:
    one = World(2)
    for rank in (0, 1):
        one.ranks[rank].arrive(rank)
    assert one.look(0) == ([0, 1],)
    one.ranks[1].leave("rank 1 was interrupted")  # before it has looked
    one.ranks[0].arrive(0)
    assert one.look(0) == "rank 1 was interrupted"


def test_what_rank_0_raises_is_raised_everywhere() -> None:
    def wrong(told: list[int]) -> None:
        raise ValueError("all ranks must be alike")

    def broken(told: list[int]) -> None:
        raise OSError("no room")

    assert World(3).all_meet(wrong) == ["all ranks must be alike"] * 3
    assert World(3).all_meet(broken) == ["rank 0 failed to answer the others: OSError: no room"] * 3


def test_an_answer_that_rank_0_can_not_give_is_not_waited_for() -> None:
    one = World(2)
    for rank in (0, 1):
        one.ranks[rank].arrive(rank)
    with pytest.raises(AttributeError, match="pickle"):
        one.ranks[0].look(lambda told: lambda: None, MISSED)
    assert one.look(1).startswith("rank 0 could not answer the others: AttributeError: ")


def test_a_rank_that_closes_a_meeting_and_dies_is_not_waited_for() -> None:
    one = World(2)
    one.ranks[1].arrive(1)
    one.stores[0].add("0/closed", 1)
    one.now = PATIENCE_S + 1
    assert one.look(1) == ()
    one.now += 61
    assert "closed a meeting and then said nothing for 60 s" in one.look(1)


def test_a_store_that_is_gone_is_told_in_a_sentence() -> None:
    one = World(2)

    def gone(*given: Any) -> Any:
        raise RuntimeError("Connection reset by peer\n at frame 12")

    one.stores[1].set = gone  # type: ignore[method-assign]
    with pytest.raises(
        RanksDiverged, match=r"can't be reached: Connection reset by peer; the process that holds it has ended$"
    ):
        one.ranks[1].meet(1, list, MISSED)


def test_many_ranks_are_named_in_part() -> None:
    assert named(range(1000)).endswith("rank 7 and 992 more")
