"""What goes wrong comes through a continuous loader, which goes on after it; and nothing piles up."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import DataLoader

from accel.dataio.engine.engine import WorkerDied
from accel.dataio.loader import ContinuousLoader
from tests.dataio.engines import Squares, assert_nothing_gained, gained, held
from tests.dataio.faults import GARBAGE, die
from tests.dataio.numbers import Numbers, indices


class Broken(Numbers):
    def __getitem__(self, index: int) -> Any:
        if index == 13:
            raise LookupError("a bad picture")
        return super().__getitem__(index)


def test_what_the_dataset_raises_comes_out_and_the_loop_may_go_on(engine: dict[str, Any]) -> None:
    with ContinuousLoader(DataLoader(Broken(), 4), **engine) as loader:
        for _ in range(2):
            seen = []
            batches = iter(loader)
            for number in range(13):
                if number == 3:
                    with pytest.raises(LookupError, match="a bad picture") as caught:
                        next(batches)
                    told = str(caught.value.__cause__) + "".join(getattr(caught.value, "__notes__", ()))
                    assert "while fetching sample 13" in told
                else:
                    seen += indices(next(batches))
            assert next(batches, None) is None
            assert seen == [*range(12), *range(16, 50)]


@pytest.mark.parametrize("kind", GARBAGE)
def test_batches_that_can_not_be_sent(engine: dict[str, Any], kind: str) -> None:
    with ContinuousLoader(DataLoader(Numbers(), 4, collate_fn=GARBAGE[kind]), **engine) as loader:
        batches = iter(loader)
        if engine["mode"] == "fork":
            with pytest.raises(TypeError, match="can't be sent to another process"):
                next(batches)
        else:
            next(batches)


def test_a_batch_that_kills_its_workers_is_told_and_the_loop_may_go_on() -> None:
    with ContinuousLoader(DataLoader(Squares(at=13, act=die), 4), mode="fork", num_workers=1) as loader:
        batches = iter(loader)
        seen = [indices(next(batches)) for _ in range(3)]
        with pytest.raises(WorkerDied, match=r"SIGKILL while fetching samples \[12, 13, 14, 15\]"):
            next(batches)
        seen += [indices(batch) for batch in batches]

    assert sum(seen, []) == [*range(12), *range(16, 40)]  # noqa: RUF017


@pytest.mark.parametrize("mode", ["threads", "fork"])
def test_nothing_is_left_of_many_epochs_that_were_left_early(mode: Any) -> None:
    before = held()
    with ContinuousLoader(DataLoader(Numbers(), 4, shuffle=True), mode=mode, num_workers=2) as loader:
        counts = []
        for epoch in range(20):
            for number, _ in enumerate(loader):
                if number == epoch % 15:
                    break
            if epoch % 15 == 4:
                counts.append(gained(before))
    assert all(count["threads"] + count["children"] == 2 for count in counts), counts
    assert counts[-1]["files"] == counts[0]["files"]
    assert counts[-1]["slots"] <= 2 * 7
    del loader, _

    assert_nothing_gained(before, within=30)  # threads that were told to end do so
