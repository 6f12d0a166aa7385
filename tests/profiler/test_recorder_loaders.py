"""Which loader is the training's, what lies between two epochs, and what only looks like an evaluation."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accel.profiler.loop.recorder import Recorder
from accel.profiler.phases import Measurement
from tests.accel.loops import PlayedClock
from tests.profiler.test_recorder import parts, train

WORK_S = 0.3

DEFERRED = pytest.mark.parametrize("deferred", [False, True])


class OwnIter(DataLoader[Any]):
    """As torchdata's StatefulDataLoader: `DataLoader.__iter__` is never called."""

    def __iter__(self) -> Any:
        return self._get_iterator()


def anew(loader: DataLoader[Any], kind: type[DataLoader[Any]] = DataLoader, **options: Any) -> DataLoader[Any]:
    return kind(loader.dataset, batch_size=4, **options)


def spent(seen: list[Measurement], phase: str) -> float:
    return sum(measured.phases[phase] for measured in seen)


def test_a_loader_that_iterates_by_its_own_method(recorder: Recorder, seen: list[Measurement]) -> None:
    model, optimizer, loader = parts()
    own = anew(loader, OwnIter)
    for _ in range(2):
        train(model, optimizer, own)
        for x, _ in anew(loader, OwnIter):  # with gradients on, and no loader known by its `__iter__`
            x.sum()

    assert recorder.delivery.steps == 20
    assert recorder.loaders.loader is own
    assert [measured.step for measured in seen if measured.first] == [0, 10]


def test_the_start_of_a_pass_by_an_own_method_is_data(
    recorder: Recorder, seen: list[Measurement], clock: PlayedClock
) -> None:
    class Slow(OwnIter):
        def _get_iterator(self) -> Any:
            made = super()._get_iterator()
            clock.sleep(WORK_S)  # as for workers to start
            return made

    model, optimizer, loader = parts()
    own = anew(loader, Slow)
    for _ in range(2):
        train(model, optimizer, own)

    assert seen[10].first
    assert seen[10].phases["data"] > WORK_S
    assert spent(seen[1:], "outside") < WORK_S


def test_an_iterator_made_in_another_thread(recorder: Recorder) -> None:
    model, optimizer, loader = parts()
    made: list[Any] = []
    thread = threading.Thread(target=lambda: made.append(iter(loader)))
    thread.start()
    thread.join()
    train(model, optimizer, made[0])

    assert recorder.delivery.steps == 10
    assert recorder.loaders.loader is loader


def test_an_iterator_made_before_recording_began() -> None:
    model, optimizer, loader = parts()
    batches = iter(loader)
    recorder = Recorder()
    recorder.start()
    try:
        train(model, optimizer, batches)
    finally:
        recorder.stop()

    assert recorder.updates == 10


@DEFERRED
def test_work_between_two_epochs_is_outside_of_the_steps(
    recorder: Recorder, seen: list[Measurement], clock: PlayedClock, deferred: bool
) -> None:
    model, optimizer, loader = parts()
    recorder.delivery.deferred = deferred
    for _ in range(9):
        train(model, optimizer, loader)
        clock.sleep(WORK_S)
    recorder.delivery.catch_up()

    assert [m.step for m in seen if m.phases["outside"] > WORK_S] == list(range(10, 90, 10))
    assert spent(seen, "host") < WORK_S


def test_work_between_two_epochs_is_outside_where_no_model_is_called(
    recorder: Recorder, seen: list[Measurement], clock: PlayedClock
) -> None:
    _, _, loader = parts()
    weight = nn.Parameter(torch.randn(8, 2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(3):
        for x, _ in loader:
            (x @ weight).square().mean().backward()
            optimizer.step()
        clock.sleep(WORK_S)

    assert [m.step for m in seen if m.phases["outside"] > WORK_S] == [10, 20]
    assert spent(seen[1:], "forward") < WORK_S


@DEFERRED
@pytest.mark.parametrize("batches", [10, 7], ids=["whole epochs", "epochs left by break"])
@pytest.mark.parametrize("kind", [DataLoader, OwnIter])
def test_a_loader_made_anew_in_each_epoch_is_the_training_s(
    recorder: Recorder,
    seen: list[Measurement],
    clock: PlayedClock,
    kind: type[DataLoader[Any]],
    batches: int,
    deferred: bool,
) -> None:
    model, optimizer, loader = parts()
    late: list[bool] = []

    def collate(samples: Any) -> Any:
        clock.sleep(WORK_S if late.pop() else 0.0)
        return torch.utils.data.default_collate(samples)

    recorder.delivery.deferred = deferred
    for _ in range(10):
        late[:] = [False] * 9 + [True]  # the first of an epoch waits for the workers
        for number, (x, y) in enumerate(anew(loader, kind, collate_fn=collate)):
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            if number == batches - 1:
                break
    recorder.delivery.catch_up()

    firsts = range(0, len(seen), batches)
    assert len(seen) >= 10 * batches - 1
    assert [m.step for m in seen if m.first] == [m.step for m in seen if m.phases["data"] > WORK_S] == list(firsts)
    assert spent(seen, "evaluation") == 0.0
    assert deferred or {m.samples for m in seen} == {4}


def test_two_loaders_that_deliver_by_turns_begin_an_epoch_once(recorder: Recorder, seen: list[Measurement]) -> None:
    model, optimizer, loader = parts()
    for _ in range(2):
        for (x, y), (other, _) in zip(loader, anew(loader), strict=True):
            nn.functional.cross_entropy(model(torch.cat([x, other])), torch.cat([y, y])).backward()
            optimizer.step()

    assert [m.step for m in seen if m.first] == [0, 10]
    assert {(m.batches, m.samples) for m in seen} == {(2, 8)}
    assert spent(seen, "evaluation") == 0.0


def evaluate(model: nn.Module, batches: Any, clock: PlayedClock, *, limit: int = 99) -> None:
    """Fetch with gradients on and call without, as many loops do."""
    for number, (x, _) in enumerate(batches):
        if number == limit:
            break
        clock.sleep(WORK_S)
        with torch.no_grad():
            model(x)


@pytest.mark.sample(3)
@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("limit", [99, 3], ids=["whole", "left by break"])
@DEFERRED
@pytest.mark.parametrize("every_step", [False, True])
def test_an_evaluation_that_fetches_with_gradients_on_is_one(
    recorder: Recorder,
    seen: list[Measurement],
    clock: PlayedClock,
    mode: bool,
    limit: int,
    every_step: bool,
    deferred: bool,
) -> None:
    model, optimizer, loader = parts()
    validation = anew(loader)
    recorder.delivery.deferred = deferred

    def validate() -> None:
        model.train(mode)
        evaluate(model, validation, clock, limit=limit)
        model.train()

    for _ in range(3):
        train(model, optimizer, loader, validate if every_step else lambda: None)
        validate()
    recorder.delivery.catch_up()

    count = 3 * 10 + 3 if every_step else 3
    known = count - 1 - every_step  # the last one is in no step; the first came before the model was known
    assert spent(seen, "evaluation") > known * min(limit, 10) * WORK_S
    for phase in ("data", "host", "forward", "loss"):
        assert spent(seen, phase) < WORK_S, phase
    assert len(seen) == 30
    assert recorder.loaders.loader is loader


def test_a_loop_over_another_loader_without_gradients_is_an_evaluation_before_the_step_too(
    recorder: Recorder, seen: list[Measurement], clock: PlayedClock
) -> None:
    model, optimizer, loader = parts()
    validation = anew(loader)
    for _ in range(2):
        for x, y in loader:
            with torch.no_grad():
                evaluate(model, validation, clock, limit=2)
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    assert all(m.phases["evaluation"] > 2 * WORK_S for m in seen)
    assert spent(seen, "host") + spent(seen, "forward") < WORK_S


class Waiting(nn.Linear):
    """Takes time in its calls without gradients."""

    clock: PlayedClock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.clock.sleep(0.0 if torch.is_grad_enabled() else WORK_S)
        return super().forward(x)


def waiting(clock: PlayedClock) -> tuple[Waiting, torch.optim.Optimizer, DataLoader[Any]]:
    model = Waiting(8, 2)
    model.clock = clock
    return model, torch.optim.SGD(model.parameters(), lr=0.1), parts()[2]


@pytest.mark.parametrize("made_anew", [False, True])
@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
def test_a_call_without_gradients_between_batch_and_update_is_the_step_s(
    recorder: Recorder, seen: list[Measurement], clock: PlayedClock, mode: bool, made_anew: bool
) -> None:
    """Pseudo-labels; in evaluation mode it is an evaluation, wherever it comes."""
    model, optimizer, loader = waiting(clock)
    for _ in range(2):
        for x, y in anew(loader) if made_anew and mode else loader:
            model.train(mode)
            with torch.no_grad():
                model(x)
            model.train()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    phases = ("forward", "evaluation") if mode else ("evaluation", "forward")
    assert all(m.phases[phases[0]] > WORK_S for m in seen[1:])  # in the first, the model is not known
    assert spent(seen[1:], phases[1]) < WORK_S
    assert spent(seen[1:], "host") < WORK_S


def test_a_call_without_gradients_between_two_updates_of_a_batch_is_the_step_s(
    recorder: Recorder, seen: list[Measurement], clock: PlayedClock
) -> None:
    """As in a loop that updates a generator first, and gives its samples to the discriminator."""
    generator, of_generator, loader = waiting(clock)
    critic = nn.Linear(2, 1)
    of_critic = torch.optim.SGD(critic.parameters(), lr=0.1)
    for _ in range(2):
        for x, _ in loader:
            critic(generator(x)).mean().backward()
            of_generator.step()
            with torch.no_grad():
                samples = generator(x)
            critic(samples).mean().backward()
            of_critic.step()

    assert recorder.delivery.steps == 20
    assert all(m.phases["forward"] > WORK_S for m in seen[1:])
    assert spent(seen[1:], "evaluation") == 0.0


def test_a_call_without_gradients_after_the_update_is_an_evaluation(
    recorder: Recorder, seen: list[Measurement], clock: PlayedClock
) -> None:
    model, optimizer, loader = waiting(clock)

    def validate() -> None:
        with torch.no_grad():
            model(torch.randn(4, 8))

    for _ in range(2):
        train(model, optimizer, loader, validate)
        validate()

    assert all(m.phases["evaluation"] > WORK_S for m in seen[1:])
    assert spent(seen, "forward") < WORK_S


def test_an_iterator_is_not_kept_once_its_loop_was_left(recorder: Recorder) -> None:
    """It may have workers."""
    model, optimizer, loader = parts()

    def few() -> Iterator[Any]:
        for number, batch in enumerate(loader):
            yield batch
            if number == 3:
                break

    train(model, optimizer, few())

    assert recorder.loaders.loader is loader
    assert recorder.loaders.iterator is None
