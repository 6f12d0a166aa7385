"""Each sample once an epoch, in whatever way a loop fetches its batches and wherever it is stopped and resumed."""

from __future__ import annotations

import itertools
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from accel.elastic.running import request_checkpoint, save_checkpoint
from accel.elastic.sample_position import remaining_epochs
from tests.accel.elastic.numbered_loop import Ended, NumberedLoop, fetched_ahead
from tests.sampling import examples

EPOCHS, BATCH = 3, 2


class Training(NumberedLoop):
    """A loop which is stopped once a checkpoint is there that was asked for after some step.

    Args:
        folder: of the checkpoints.
        steps: of an epoch.
        ask: asks for a checkpoint.
        asked_at: after which step of this process; 0 for none.
    """

    def __init__(
        self, folder: Path, steps: int, ask: Callable[[nn.Module], None] = request_checkpoint, asked_at: int = 0
    ) -> None:
        super().__init__(folder, BATCH * steps, BATCH)
        self.steps, self._folder, self._ask, self._asked_at = steps, folder, ask, asked_at
        self.began_at = self.checkpoint.updates.step

    def take(self, batch: Any, between: Callable[[], None] = lambda: None) -> None:
        if self._asked_at and list(self._folder.glob("*-step-*")):
            raise Ended
        super().take(batch, between)
        if len(self.taken) == self._asked_at:
            self._ask(self.model)

    def run(self, loop: Callable[[Training], None]) -> None:
        """Train until the loop ends, or is stopped."""
        try:
            loop(self)
        except Ended:
            pass
        finally:
            self.end()


def terminate(model: nn.Module) -> None:
    """Ask by the signal."""
    assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL  # it would end the tests
    os.kill(os.getpid(), signal.SIGTERM)


# Loops


def plainly(training: Training) -> None:
    for _ in remaining_epochs(training.loader, EPOCHS):
        for batch in training.loader:
            training.take(batch)


def by_an_iterator_that_stays_bound(training: Training) -> None:
    """Which is never asked for the end of its pass."""
    for _ in remaining_epochs(training.loader, EPOCHS):
        batches = iter(training.loader)
        for _ in range(len(training.loader)):
            training.take(next(batches))


def until_an_iterator_stops(training: Training) -> None:
    for _ in remaining_epochs(training.loader, EPOCHS):
        batches = iter(training.loader)
        while (batch := next(batches, None)) is not None:
            training.take(batch)


def between_backward_and_step(training: Training) -> None:
    """Of a batch, the next one is fetched."""
    for _ in remaining_epochs(training.loader, EPOCHS):
        batches = iter(training.loader)
        following = [next(batches, None)]
        while (batch := following.pop()) is not None:
            training.take(batch, lambda it=batches, to=following: to.append(next(it, None)))  # type: ignore[misc]


def ahead(batches: int) -> Callable[[Training], None]:
    """By a generator that holds so many of them, as scripts do to copy the next to the GPU meanwhile."""

    def loop(training: Training) -> None:
        for _ in remaining_epochs(training.loader, EPOCHS):
            for batch in fetched_ahead(training.loader, batches):
                training.take(batch)

    return loop


def with_looks(training: Training) -> None:
    """At a batch, and at all without gradients, before and after each step."""

    def look() -> None:
        next(iter(training.loader))
        with torch.no_grad():
            assert len(list(training.loader)) == training.steps

    for _ in remaining_epochs(training.loader, EPOCHS):
        for number, batch in enumerate(training.loader):
            if training.taken:  # in the very first step it is not known yet that the loop makes backward passes
                look()
            training.take(batch)
            if number % 2:
                look()


def beside_a_picture_whose_iterator_is_kept(training: Training) -> None:
    kept = []
    if training.loader.batch_sampler.ledger.steps_left:  # resumed at an epoch's end, the first pass has no batch
        kept.append(iter(training.loader))
        next(kept[0])
    plainly(training)
    kept.clear()


def left(after: int, held: bool) -> Callable[[Training], None]:
    """By passes that are left after some steps, at the batch that follows; held by a variable, as tqdm holds them."""

    def loop(training: Training) -> None:
        progress: Any = None
        for _ in remaining_epochs(training.loader, EPOCHS * -(-training.steps // after)):
            if not held:
                progress = None
            progress = enumerate(training.loader)
            for step, batch in progress:
                if step == after:
                    break
                training.take(batch)

    return loop


def one_by_one(training: Training) -> None:
    """Of each pass only the first batch."""
    for _ in remaining_epochs(training.loader, EPOCHS):
        for _ in range(training.steps):
            if (batch := next(iter(training.loader), None)) is not None:
                training.take(batch)


WHOLE = {
    "plainly": plainly,
    "bound": by_an_iterator_that_stays_bound,
    "until it stops": until_an_iterator_stops,
    "between backward and step": between_backward_and_step,
    "looks": with_looks,
    "a kept picture": beside_a_picture_whose_iterator_is_kept,
    "1 ahead": ahead(1),
    "2 ahead": ahead(2),
    "3 ahead": ahead(3),
}
IN_PARTS = {
    "left": left(3, held=False),
    "left and held": left(3, held=True),
    "left at once and held": left(1, held=True),
    "one by one": one_by_one,
}
ASKS = {"request": request_checkpoint, "save": save_checkpoint, "SIGTERM": terminate}


def stopped_and_resumed(
    loop: Callable[[Training], None], steps: int, ask: Callable[[nn.Module], None], asked_at: int
) -> list[int]:
    """Return the samples of the updates that the weights have seen at the end, in order."""
    before = signal.getsignal(signal.SIGTERM)
    with tempfile.TemporaryDirectory() as folder:
        first = Training(Path(folder), steps, ask, asked_at)
        first.run(loop)
        second = Training(Path(folder), steps)
        second.run(loop)
    assert signal.getsignal(signal.SIGTERM) == before
    assert second.began_at in range(asked_at, asked_at + 4)  # what the loop holds at an epoch's end is trained on first
    return list(itertools.chain(*first.taken[: second.began_at], *second.taken))


def check_epochs(seen: list[int], length: int) -> None:
    """Check that each sample comes once an epoch; the last one may have a part of them."""
    for at in range(0, len(seen), length):
        epoch = seen[at : at + length]
        assert len(set(epoch)) == len(epoch), f"epoch {at // length} has a sample twice: {epoch}"


@pytest.mark.sample(3)
@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("loop", [*WHOLE, *IN_PARTS])
@settings(max_examples=examples(12), deadline=None)
@given(st.integers(1, 7), st.integers(0, 19))
@example(1, 0)
@example(7, 4)
@example(7, 6)
def test_a_loop_that_is_stopped_anywhere_has_each_sample_once(loop: str, ask: str, steps: int, asked_at: int) -> None:
    least = 1
    if loop.endswith("ahead"):  # which is known by the first two steps of a pass, while it goes on fetching
        least, steps = 2, max(steps, int(loop[0]) + 2)
    if ask == "SIGTERM":  # which is noted from the end of the first step on
        least = 2
    # What is asked for in the last epoch's last steps may have no request after it.
    most = EPOCHS * steps - 1 if ask == "save" else (EPOCHS - 1) * steps
    asked_at = least + asked_at % (most - least + 1)
    seen = stopped_and_resumed({**WHOLE, **IN_PARTS}[loop], steps, ASKS[ask], asked_at)
    check_epochs(seen, BATCH * steps)
    if loop in WHOLE:
        assert len(seen) == EPOCHS * BATCH * steps


@pytest.mark.parametrize("loop", WHOLE)
def test_a_loop_that_is_not_stopped_has_each_sample_once(tmp_path: Path, loop: str) -> None:
    training = Training(tmp_path, 5)
    checkpoint = training.checkpoint
    training.run(WHOLE[loop])
    seen = list(itertools.chain(*training.taken))
    check_epochs(seen, 5 * BATCH)
    assert len(seen) == EPOCHS * 5 * BATCH
    assert checkpoint.updates.step == EPOCHS * 5


def test_a_turn_is_over_whose_batches_were_all_fetched_before_one_was_trained_on(tmp_path: Path) -> None:
    training = Training(tmp_path, steps=3)
    for turns in range(1, 3):
        for _ in remaining_epochs(training.loader, turns):
            for batch in list(training.loader):
                training.take(batch)
        assert training.loader.batch_sampler.turns.over == turns
