"""Where a batch size begins: with other ranks, memory or settings than before, after undo, and at each new loader."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from torch import nn

import accel
from accel.elastic.running import progress_of
from accel.errors import InvalidArgument
from accel.goodput.efficiency import NoiseInterval
from tests.accel.elastic.batch_loops import PLAIN, Clock, batch_run_of, growing, nothing, train


def test_undo_goes_back_to_the_loops_batch_and_each_epoch_is_whole(job: Any, clock: Clock, noise: None) -> None:
    model, loader, optimizer = growing(job, 64)
    first = train(model, loader, optimizer, clock, lambda step: accel.undo(model) if step == 80 else None)
    second = train(model, loader, optimizer, clock, nothing)
    third = train(model, loader, optimizer, clock, nothing)

    assert len(first[80]) == 64
    assert {len(batch) for batch in second} == {8}
    assert [sorted(itertools.chain(*epoch)) for epoch in (first, second, third)] == [list(range(3000))] * 3
    assert second != third
    assert not optimizer._optimizer_step_pre_hooks


def test_progress_goes_on_after_undo(job: Any, clock: Clock, noise: None) -> None:
    """A schedule by it stood still for the rest of the training."""
    model, loader, optimizer = growing(job, 64)
    counts, seen = progress_of(model), list[float]()

    def each(step: int) -> None:
        seen.append(counts.progress)
        if step == 80:
            accel.undo(model)

    train(model, loader, optimizer, clock, each)
    assert seen[80] > 81
    assert [b - a for a, b in itertools.pairwise(seen[80:])] == pytest.approx([1.0] * (len(seen) - 81))


def _saved(batch: int, base: int, **changes: Any) -> dict[str, Any]:
    controller = {"base": base, "batch": batch, "times": {}, "decisions": [], "largest_local": None}
    known = [5000.0, 4000.0, math.inf, 64.0, 0.5]
    return {
        "controller": controller,
        "noise": None,
        "known_noise": known,
        "progress": 3.5,
        "loader_batch": 8,
        "micro_batches": 2,
        "fits": 32,
        **changes,
    }


@pytest.mark.parametrize(
    ("replicas", "most", "local"),
    [(4, 256, 16), (1, 256, 32), (16, 256, 4), (3, 256, 21), (64, 256, 1), (4, 64, 8)],
    ids=lambda value: str(value),
)
def test_on_another_number_of_ranks_the_users_batch_stays(replicas: int, most: int, local: int) -> None:
    """Begun on 2 ranks with 2 batches of 8 in a step, 32 samples; 128 when it was saved.

    One rank has not had the memory of two: it begins with the largest batch that it has had.
    """
    run = batch_run_of(replicas, 8, most)
    run.record.load_state_dict(_saved(128, 32))
    run.record.check()  # 64 ranks of 2 x 8 would be 1,024
    assert run._sampler.batch_sizes == (local,) * replicas
    assert (run.record.base, run.noise.known, run.rates.progress) == (
        32,
        NoiseInterval(5000.0, 4000.0, math.inf, 64.0, 0.5),
        3.5,
    )
    again = batch_run_of(replicas, 8, most)
    again.record.load_state_dict(run.record.state_dict())
    assert again.record.state_dict() == run.record.state_dict()


def test_ranks_that_the_largest_batch_leaves_without_a_sample_are_refused() -> None:
    run = batch_run_of(64, 8, 100)
    run.record.load_state_dict(_saved(64, 32))
    with pytest.raises(InvalidArgument, match="loader's batch over all ranks, 128 samples, got 100; raise it"):
        run.record.check()


@pytest.mark.parametrize(("memory", "local"), [(80, 64), (78, 64), (40, 8)])
def test_a_device_with_less_memory_begins_with_the_users_share(
    monkeypatch: pytest.MonkeyPatch, memory: int, local: int
) -> None:
    """It ran out of memory in its first step, began again from the same checkpoint, and so on."""
    monkeypatch.setattr("accel.elastic.batch_size.record.total_memory", lambda device: memory)
    run = batch_run_of(2, 8, 256)
    run.record.load_state_dict(_saved(256, 32, fits=64, memory=80, steps=700))
    assert (run.record.sampler.batch_sizes, run.record.fits) == ((local, local), local)
    assert (run.record.state_dict()["memory"], run.record.state_dict()["steps"]) == (memory, 700)


def test_another_batch_of_the_loader_is_another_batch_of_the_users() -> None:
    run = batch_run_of(2, 16, 256)
    run.record.load_state_dict(_saved(128, 32))
    assert (run.record.base, run._sampler.batch_sizes) == (None, (16, 16))
    with pytest.raises(InvalidArgument, match="loader's batch over all ranks, 256 samples, got 200; raise it"):
        batch_run_of(16, 16, 200).record.check()


def test_one_loader_has_one_batch_size(job: Any) -> None:
    loader = growing(job, 64)[1]
    again = growing(job, 64)
    assert again[1] is loader  # the plain loader once more, as in a loop over folds

    other = nn.Linear(8, 1)
    with pytest.raises(InvalidArgument, match="elastic must be given for one model"):
        accel.optimize(other, loader, elastic=accel.Elastic(max_batch_size=64))
    accel.optimize(other, loader, **PLAIN)
    accel.undo(other)


def test_a_call_with_other_settings_and_one_after_undo_count_each_sample_once(
    job: Any, clock: Clock, noise: None
) -> None:
    model, loader, optimizer = growing(job, 64)
    epochs = [train(model, loader, optimizer, clock, nothing)]
    model, loader, optimizer = accel.optimize(
        model, loader, optimizer, elastic=accel.Elastic(max_batch_size=128), **PLAIN
    )
    epochs.append(train(model, loader, optimizer, clock, nothing))
    accel.undo(model)
    model, loader, optimizer = accel.optimize(
        model, loader, optimizer, elastic=accel.Elastic(max_batch_size=32), **PLAIN
    )
    epochs.append(train(model, loader, optimizer, clock, nothing))

    assert [sorted(itertools.chain(*epoch)) for epoch in epochs] == [list(range(3000))] * 3
