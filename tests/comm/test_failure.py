"""Who is named when something fails, and what ranks exchange for that."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from torch.distributed import HashStore

from accel.comm.ranks import failure
from accel.comm.ranks.channel import GlooChannel
from accel.comm.ranks.failure import Findings, RankReport, explained, findings, verdict
from accel.comm.ranks.object_group import ObjectGroup
from accel.profiler.rendezvous import Rendezvous
from tests.comm.threaded_ranks import together

OWN = RankReport("step 3, bucket 1", "Connection closed", False)
FAILED = RankReport("x", "no memory", True)


@pytest.mark.parametrize(
    ("others", "text"),
    [
        ([FAILED, None], "because rank 1 failed at x: no memory"),
        (
            [None, OWN],
            "because rank 1 has ended, hangs outside of communication, or is cut off: it gave no reason",
        ),
        ([None, None], "because each of rank 1, rank 2 has ended"),
        ([RankReport("step 2, bucket 0", "late", False), OWN], "Connection closed; rank 1 was at step 2, bucket 0"),
        ([OWN, OWN], "rank 0 stopped at step 3, bucket 1: Connection closed"),
    ],
)
def test_the_cause_is_the_nearest_to_the_fault(others: list[Any], text: str) -> None:
    assert text in verdict(0, OWN, findings([OWN, *others]))


def test_an_own_fault_comes_first() -> None:
    known = findings([FAILED, RankReport("q", "other", True)])
    assert verdict(0, FAILED, known) == "rank 0 stopped at x: no memory"


def test_what_is_found_does_not_grow_with_the_ranks() -> None:
    reports = [RankReport(f"step {rank}", "late", rank > 7) for rank in range(1000)]
    assert findings(reports) == Findings({8: reports[8]}, [], {rank: f"step {rank}" for rank in range(4)})


@pytest.mark.parametrize("missing", [[], [2]])
def test_all_that_fail_say_the_same(missing: list[int]) -> None:
    store, said = HashStore(), {}

    def fail(rank: int) -> None:
        own = FAILED if rank == 1 and not missing else OWN
        said[rank] = explained(Rendezvous(store, rank, 3, 0.3), own)

    threads = [threading.Thread(target=fail, args=(rank,)) for rank in range(3) if rank not in missing]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    why = "rank 2 has ended" if missing else "rank 1 failed at x: no memory"
    assert why in said[0]
    assert said[1].startswith("rank 1 stopped at")


class SilentStore:
    """A store whose host is cut off: nothing comes back."""

    def set(self, key: str, value: bytes) -> None:
        threading.Event().wait()


def test_a_store_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure, "_STORE_S", 0.1)
    began = time.monotonic()
    said = explained(Rendezvous(SilentStore(), 1, 2, 0.1), OWN)
    assert said == (
        "rank 1 stopped at step 3, bucket 1: Connection closed; the store of the process group does not answer: its "
        "host is cut off"
    )
    assert time.monotonic() - began < 10


# --- objects between steps -------------------------------------------------------------------------------------------


def exchanged(line: GlooChannel) -> dict[str, Any]:
    group = ObjectGroup(line)
    own = "x" * (line.rank + 1)
    found: dict[str, Any] = {"first": group.first(own), "decide": group.decide(line.rank, max)}
    found["gather"], found["gather more"] = group.gather(own), group.gather(own * 5000)
    found["all true"] = [group.all_true(value) for value in (True, line.rank == 0)]
    return found


@pytest.mark.parametrize("size", [1, 2, 5, 16])
def test_each_hears_what_it_should(size: int) -> None:
    everyone = ["x" * (rank + 1) for rank in range(size)]
    for one in together(size, exchanged):
        assert one == {
            "first": "x",
            "decide": size - 1,
            "gather": everyone,
            "gather more": [text * 5000 for text in everyone],
            "all true": [True, size == 1],
        }


def test_what_rank_0_raises_is_raised_everywhere() -> None:
    def decided(line: GlooChannel, error: Exception) -> str:
        def decision(told: list[int]) -> None:
            raise error

        with pytest.raises((ValueError, failure.CommError)) as caught:
            ObjectGroup(line).decide(0, decision)
        return f"{type(caught.value).__name__}: {caught.value}"

    assert together(3, lambda line: decided(line, ValueError("unlike"))) == ["InvalidArgument: unlike"] * 3
    failed = "CommError: rank 0 failed to decide for all: KeyError: 'way'"
    assert together(3, lambda line: decided(line, KeyError("way"))) == [failed] * 3
