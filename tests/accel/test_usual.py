"""Steps that are measured: all where none is usual, else those that are."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch.utils.data import DataLoader

import accel
from accel.profiler.phases import Measurement
from accel.session.measured_steps import UsualSteps
from tests.accel.loops import Net, Quick, Samples, loss_of, make


def measured(steps: Iterable[tuple[int, bool]]) -> list[int]:
    """Return the numbers of the steps, of so many samples and perhaps an epoch's first, that are not left out."""
    usual, taken = UsualSteps(), []
    for number, (samples, first) in enumerate(steps):
        step = Measurement(step=number, seconds=1.0, samples=samples, first=first)
        usual.add(step)
        if not usual.is_odd(step):
            taken.append(number)
    return taken


def test_an_epoch_s_first_and_its_short_last_step_are_left_out() -> None:
    epoch = [(8, True), (8, False), (8, False), (4, False)]
    assert measured(epoch * 5) == [n for n in range(20) if n % 4 in (1, 2)]


def test_where_every_size_is_another_all_count() -> None:
    """Token budgets, packed graphs, sequence-first text: hardly a step was ever measured."""
    assert measured((100 + 7 * n % 31, n == 0) for n in range(60)) == list(range(2, 60))


def test_where_every_epoch_has_one_batch_all_count_but_the_first_few() -> None:
    assert measured([(8, True)] * 40) == list(range(7, 40))


def test_ranks_tell_no_sizes_apart() -> None:
    usual = UsualSteps()
    usual.tells_sizes = False
    for samples in (8, 8, 8, 4):
        step = Measurement(step=0, seconds=1.0, samples=samples)
        usual.add(step)
        assert not usual.is_odd(step)


@pytest.mark.parametrize("kind", ["one batch an epoch", "a list of one", "another size in each step"])
def test_the_search_ends_in_such_loops(only_quick: None, kind: str) -> None:
    model, loader, optimizer = make()
    if kind == "one batch an epoch":
        loader = DataLoader(Samples(8), batch_size=8)
    elif kind == "a list of one":
        loader = [(torch.randn(8, 6), torch.zeros(8, dtype=torch.long))]  # type: ignore[assignment]
    else:
        sizes = [3 + n * 5 % 13 for n in range(40)]
        ends = [sum(sizes[: n + 1]) for n in range(40)]
        batches = [list(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]
        loader = DataLoader(Samples(ends[-1]), batch_sampler=batches)
    model, loader, optimizer = accel.optimize(model, loader, optimizer, budget=60)
    for _ in range(40 if "size" in kind else 1500):
        for x, target in loader:
            optimizer.zero_grad()
            loss_of(model(x), target).backward()
            optimizer.step()
        if accel.explain(model).state == "done":
            break
    assert accel.explain(model).plan == {"quick": None}


def test_a_disabled_block_within_each_step_leaves_its_time_to_the_rest(only_quick: None) -> None:
    """An accuracy in each step, say: what the step had taken before it was thrown away, and trials compared nothing."""
    model, loader, optimizer = make()
    model, loader, optimizer = accel.optimize(model, loader, optimizer, budget=60)
    assert isinstance(model, Net)
    for _ in range(60):
        for x, target in loader:
            optimizer.zero_grad()
            loss_of(model(x), target).backward()
            optimizer.step()
            with accel.disabled(), accel.disabled(), torch.no_grad():
                for _ in range(3):
                    model(x)
        if accel.explain(model).state == "done":
            break
    report = accel.explain(model)
    assert report.plan == {"quick": None}
    assert report.plain_ms is not None
    assert 1.5 < report.plain_ms < 2.5  # one waiting call, of which a block has three
    assert report.speedup is not None
    assert report.speedup > 2
    assert Quick.on
