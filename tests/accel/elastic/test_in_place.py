"""Ranks come and go while the processes of the others go on: no sample is lost, and all have the same weights."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from accel.elastic.in_place import ORDERS, InPlace, ResizeOrder, open_store, orders_of_job
from accel.elastic.local_job import LocalJob
from tests.accel.elastic.in_place_job import EPOCHS, SAMPLES
from tests.accel.elastic.test_local_job import wait_for


class Resized:
    """A job under torchrun, and what its ranks have written down."""

    def __init__(self, folder: Path, kind: str, **options: Any) -> None:
        self.folder = folder
        (folder / "logs").mkdir()
        arguments = ["-m", "tests.accel.elastic.in_place_job", str(folder), kind]
        self.job = LocalJob(arguments, folder / "checkpoints", in_place=True, **options)

    def steps(self) -> list[dict[str, Any]]:
        """Return all lines of all processes, those of each in order."""
        return [
            {**json.loads(line), "process": int(path.name)}
            for path in sorted((self.folder / "logs").iterdir())
            for line in path.read_text().splitlines()
        ]

    def processes(self, world: int) -> set[int]:
        """Return those that have taken steps among so many ranks."""
        return {each["process"] for each in self.steps() if each.get("world") == world}

    def living(self) -> list[int]:
        """Return the processes of the ranks that there are now, by rank, as the last steps of each say."""
        newest: dict[int, tuple[int, int]] = {}
        lines = [line for line in self.steps() if line.get("world") == self.job.ranks]
        for number, line in enumerate(sorted(lines, key=lambda line: line["at"])):
            newest[line["rank"]] = number, line["process"]
        return [newest[rank][1] for rank in sorted(newest)]

    def resize(self, ranks: int) -> None:
        """Change the ranks, and wait until all of them have taken a step."""
        self.job.resize(ranks)
        assert self.job.ranks == ranks
        since = time.time()
        wait_for(lambda: len({each["process"] for each in self.steps() if each.get("at", 0) > since}) >= ranks, 60)

    def finish(self) -> None:
        (self.folder / "hurry").touch()
        assert self.job.wait(120) == 0

    def check(self) -> None:
        """Each epoch has each sample once, and ranks that take a step together end it with the same weights."""
        taken, weights = defaultdict[int, list[int]](list), defaultdict[float, set[int]](set)
        steps = [line for line in self.steps() if "fresh" in line]
        for line in steps:
            taken[line["epoch"]] += line["fresh"]
            weights[line["weights"]].add(line["rank"])
        assert {epoch: sorted(samples) for epoch, samples in taken.items()} == {
            epoch: list(range(SAMPLES)) for epoch in range(EPOCHS)
        }
        for line in steps:  # each rank has come to the weights that the others have come to
            assert weights[line["weights"]] >= set(range(line["world"])), line
        ends = [line for line in self.steps() if "ended" in line]
        assert len(ends) == self.last and {end["ended"] for end in ends} == {EPOCHS}

    last = 2
    """Ranks that end the training."""


@pytest.fixture
def resized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Resized]]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    made: list[Resized] = []

    def make(kind: str, **options: Any) -> Resized:
        made.append(Resized(tmp_path, kind, **options))
        return made[0]

    yield make
    for each in made:
        each.job.kill()


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        pytest.param("plain", (1, 3, 2), marks=pytest.mark.integration),
        pytest.param("grows", (2, 3, 1, 2), marks=pytest.mark.integration),
        pytest.param("workers", (1, 2), marks=pytest.mark.slow),
        pytest.param("divides", (1, 2), marks=pytest.mark.slow),
        pytest.param("grows", (1, 4, 2), marks=pytest.mark.slow),
    ],
)
def test_processes_that_stay_go_on_and_no_sample_is_lost(
    resized: Callable[..., Resized], kind: str, ranks: Sequence[int]
) -> None:
    it = resized(kind)
    for number, size in enumerate(ranks):
        before = set(list(it.living())[: min(size, it.job.ranks)])
        it.resize(size)
        assert it.job.kept == (number > 0), it.job.problem
        now = it.living()
        assert len(now) == size and set(now[: len(before)]) == before
    it.last = ranks[-1]
    it.finish()
    it.check()


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        pytest.param("groups", "process groups of its own", marks=pytest.mark.integration),
        pytest.param("fails", "an added process has ended", marks=pytest.mark.slow),
    ],
)
def test_where_it_can_not_be_all_ranks_are_started_anew(
    resized: Callable[..., Resized], kind: str, problem: str
) -> None:
    it = resized(kind)
    it.resize(2)
    two = it.processes(2)
    if kind == "fails":
        it.job.resize(3)  # as does the start anew
        assert not it.job.kept and problem in it.job.problem
        return
    it.resize(1)
    assert not it.job.kept and problem in it.job.problem
    assert not two & it.processes(1)
    it.last = 1
    it.finish()
    it.check()


# The orders.


def test_an_order_is_seen_and_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 10.0
    monkeypatch.setattr("accel.elastic.in_place.time.monotonic", lambda: now)
    given = open_store()
    monkeypatch.setenv(ORDERS, str(given.port))
    theirs: Any = InPlace(orders_of_job(), *[None] * 6)  # type: ignore[arg-type]

    def order_is(words: str) -> None:
        given.set("order", words)
        given.get("order")  # a store does not answer when it is set

    assert theirs.order() == ResizeOrder()
    order_is("1 4")
    assert theirs.order() == ResizeOrder()  # it has looked just now
    now = 11.0
    assert theirs.order() == ResizeOrder(1, 4)
    order_is("1 0")
    now = 12.0
    assert theirs.order() == ResizeOrder(1, 0)


def test_a_process_that_no_job_has_started_takes_no_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ORDERS, raising=False)
    assert orders_of_job() is None
