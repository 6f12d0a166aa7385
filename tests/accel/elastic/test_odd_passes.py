"""Loops that fetch ahead, look at batches, or leave their passes: what is saved of them, and what comes again."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from accel.dataio.elastic_sampler import ElasticSampler
from accel.dataio.passes.proxy import LoaderProxy
from accel.elastic.checkpoint import Checkpoints
from accel.elastic.running import request_checkpoint, save_checkpoint
from accel.elastic.sample_position import SamplePosition, remaining_epochs
from accel.profiler.loop.observers import LoopObserver, follow
from tests.accel.elastic.numbered_loop import Ended, NumberedLoop

SAMPLES, BATCH = 40, 4


# A loop that fetches ahead


def test_two_batches_for_a_step_are_none_ahead(tmp_path: Path) -> None:
    first = NumberedLoop(tmp_path)
    batches = iter(first.loader)
    for step in range(4):
        (x,), (y,) = next(batches), next(batches)
        first.take((torch.cat([x, y]),))
        if step == 2:
            request_checkpoint(first.model)
    first.end()
    second = NumberedLoop(tmp_path)
    for batch in second.loader:
        second.take(batch)
    assert sorted(first.seen[: 6 * BATCH] + second.seen) == list(range(SAMPLES))
    second.end()


# A look


def test_a_look_on_one_rank_leaves_a_change_of_the_batch_at_its_step() -> None:
    """Its steps counted, and the change came one step sooner there than on the other ranks."""
    samplers = [ElasticSampler(408, batch_size=4, num_replicas=2, rank=rank, tail="fill") for rank in range(2)]
    proxies = [LoaderProxy(DataLoader(range(408), batch_sampler=sampler)) for sampler in samplers]  # type: ignore[arg-type]
    positions = [SamplePosition(sampler) for sampler in samplers]

    def epoch(rank: int) -> list[list[int]]:
        batches = []
        for batch in proxies[rank]:
            positions[rank].backward_begins([])
            positions[rank].updated()
            batches.append(batch.tolist())
        return batches

    for rank, (proxy, sampler) in enumerate(zip(proxies, samplers, strict=True)):
        follow(proxy, positions[rank])
        assert len(epoch(rank)) == 51
        sampler.set_batch_size(8, delay=8)
    next(iter(proxies[0]))
    epochs = [epoch(0), epoch(1)]
    assert [len(batch) for batch in epochs[0]] == [len(batch) for batch in epochs[1]] == [4] * 8 + [8] * 21 + [4]
    assert sorted(itertools.chain(*epochs[0], *epochs[1])) == list(range(408))


def test_the_length_of_an_epoch_is_the_same_after_a_look_in_its_midst(tmp_path: Path) -> None:
    training = NumberedLoop(tmp_path)
    for step, batch in enumerate(training.loader, start=1):
        training.take(batch)
        if step == 3:
            break
    with torch.no_grad():
        next(iter(training.loader))
    iter(training.loader)
    assert len(training.loader) == SAMPLES // BATCH
    training.end()


def test_a_pass_that_has_ended_tells_nobody(tmp_path: Path) -> None:
    """Of a loop that fetches ahead, a batch that it held was taken for trained on."""
    told: list[str] = []

    class Hears(LoopObserver):
        def batch_requested(self) -> None:
            told.append("requested")

        def epoch_ended(self, proxy: LoaderProxy) -> None:
            told.append("ended")

    proxy = LoaderProxy(DataLoader(range(2)))  # type: ignore[arg-type]
    follow(proxy, Hears())
    batches = iter(proxy)
    assert len(list(batches)) == 2
    assert list(batches) == [] and next(batches, None) is None
    assert told == ["requested"] * 3 + ["ended"]


# A pass within another one


# A pass that is left


def turns(training: NumberedLoop, total: int, steps: int, stop_after: int | None = None) -> list[int]:
    """Go through epochs of some steps each, and return their numbers."""
    numbers, taken = [], 0
    for epoch in remaining_epochs(training.loader, total):
        numbers.append(epoch)
        for step, batch in enumerate(training.loader):
            if step == steps:
                break
            training.take(batch)
            taken += 1
            if taken == stop_after:
                request_checkpoint(training.model)
        if stop_after is not None and taken > stop_after:
            break
    return numbers


@pytest.mark.parametrize(("stop_after", "turn"), [(1, 0), (7, 2), (10, 4), (13, 4)])
def test_epochs_that_are_left_early_are_counted_by_turns(tmp_path: Path, stop_after: int, turn: int) -> None:
    """They were counted by the whole passes over the data."""
    first = NumberedLoop(tmp_path)
    turns(first, 8, 3, stop_after)
    first.end()
    second = NumberedLoop(tmp_path)
    saved = second.checkpoint.updates.step
    assert turns(second, 8, 3) == list(range(turn, 8))
    taken = first.seen[: saved * BATCH] + second.seen
    assert sorted(taken[:SAMPLES]) == list(range(SAMPLES))
    second.end()


@pytest.mark.parametrize("turn", ["a pass", "a batch of each pass", "a part of a pass"])
def test_what_is_saved_between_two_turns_goes_on_with_the_next(tmp_path: Path, turn: str) -> None:
    first = NumberedLoop(tmp_path)
    for epoch in remaining_epochs(first.loader, 5):
        if turn == "a batch of each pass":
            for _ in range(3 * SAMPLES // BATCH):
                first.take(next(iter(first.loader)))
        else:
            for step, batch in enumerate(first.loader):
                first.take(batch)
                if turn == "a part of a pass" and step == 2:
                    break
        save_checkpoint(first.model)
        if epoch == 1:
            break
    first.end()
    second = NumberedLoop(tmp_path)
    assert list(remaining_epochs(second.loader, 5)) == [2, 3, 4]
    second.end()


def saved_turns(training: NumberedLoop) -> int | None:
    turns = training.loader.batch_sampler.state_dict().get("turns")
    assert turns is None or isinstance(turns, int)
    return turns


def test_turns_that_nobody_goes_on_with_are_not_counted(tmp_path: Path) -> None:
    """They swung between two numbers in the loop that followed: a resume at epoch 25 began at the first again."""
    training = NumberedLoop(tmp_path)
    assert next(iter(remaining_epochs(training.loader, 30))) == 0
    for _ in range(3):
        for batch in training.loader:
            training.take(batch)
        assert saved_turns(training) is None
    assert remaining_epochs(training.loader, 30)[0] == 3
    for epoch in remaining_epochs(training.loader, 30):
        for batch in training.loader:
            training.take(batch)
        if epoch == 4:  # early stopping
            break
    assert saved_turns(training) == 5
    for batch in training.loader:
        training.take(batch)
    assert saved_turns(training) is None
    assert remaining_epochs(training.loader, 30)[0] == 6
    training.end()


def test_a_list_of_the_epochs_changes_no_number(tmp_path: Path) -> None:
    training = NumberedLoop(tmp_path)
    assert turns(training, 4, 3) == [0, 1, 2, 3]
    assert list(remaining_epochs(training.loader, 6)) == [4, 5]
    assert list(remaining_epochs(training.loader, 6)) == [4, 5]
    training.end()


def test_an_iterator_that_is_made_between_two_turns_takes_none_back(tmp_path: Path) -> None:
    training = NumberedLoop(tmp_path)
    for epoch in remaining_epochs(training.loader, 4):
        for step, batch in enumerate(training.loader):
            training.take(batch)
            if step == 2:
                break
        made = iter(training.loader)
        assert saved_turns(training) == epoch + 1
        del made
    training.end()


def test_a_turn_of_two_passes_is_over_after_the_second(tmp_path: Path) -> None:
    training, saved = NumberedLoop(tmp_path), []
    for _ in remaining_epochs(training.loader, 3):
        for _ in range(2):
            for step, batch in enumerate(training.loader):
                training.take(batch)
                saved.append(saved_turns(training))
                if step == 1:
                    break
    assert saved == [0] * 4 + [1] * 4 + [2] * 4
    training.end()


def test_the_epochs_are_a_sequence(tmp_path: Path) -> None:
    training = NumberedLoop(tmp_path)
    epochs = remaining_epochs(training.loader, 4)
    assert (len(epochs), list(epochs), 3 in epochs, 4 in epochs, epochs[-1]) == (4, [0, 1, 2, 3], True, False, 3)
    assert repr(epochs) == "range(0, 4)"
    training.end()


def test_a_pass_that_is_left_after_its_last_batch_was_the_epoch(tmp_path: Path) -> None:
    """The next one had no batch at all."""
    training = NumberedLoop(tmp_path)
    for _ in range(2):
        taken = 0
        for batch in training.loader:
            training.take(batch)
            taken += 1
            if taken == SAMPLES // BATCH:
                break
        assert taken == SAMPLES // BATCH
    assert sorted(training.seen) == sorted([*range(SAMPLES)] * 2)
    training.end()


# The end of an epoch


def steps_saved(folder: Path) -> list[int]:
    return sorted(int(path.name.rpartition("-")[2]) for path in folder.glob("*-step-*"))


def test_no_checkpoint_of_the_interval_is_saved_at_an_epochs_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resumed there, the loop began with a pass without a batch, in which many compute a mean."""
    training = NumberedLoop(tmp_path)
    due: list[int] = []
    monkeypatch.setattr("accel.elastic.save_policy.SavePolicy.due", lambda policy: bool(due))
    for _ in range(2):
        for step, batch in enumerate(training.loader):
            training.take(batch)
            due[:] = [1] if step == 9 else due
        assert not steps_saved(tmp_path) or steps_saved(tmp_path) == [11]
        for step, batch in enumerate(training.loader):
            training.take(batch)
            if step == 1:
                assert steps_saved(tmp_path) == [11]
                due.clear()
        break
    training.end()


def test_one_that_is_asked_for_there_is_saved_at_once_and_after_the_next_step(tmp_path: Path) -> None:
    training = NumberedLoop(tmp_path)
    for step, batch in enumerate(training.loader, start=1):
        training.take(batch)
        if step == 10:
            request_checkpoint(training.model)
    assert steps_saved(tmp_path) == [10]
    for step, batch in enumerate(training.loader):
        training.take(batch)
        assert steps_saved(tmp_path) == ([10] if step == 0 else [10, 11])
    training.end()


def test_epochs_of_one_step_are_saved_by_the_interval_and_once_more_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is an epoch's last: by the interval nothing was saved, and what was asked for at each step for ever."""
    training = NumberedLoop(tmp_path, samples=BATCH)
    for number in range(6):
        for batch in training.loader:
            training.take(batch)
            if number == 1:
                request_checkpoint(training.model)
    assert steps_saved(tmp_path) == [2, 3]
    monkeypatch.setattr("accel.elastic.save_policy.SavePolicy.due", lambda policy: True)
    for _ in range(2):
        for batch in training.loader:
            training.take(batch)
    assert steps_saved(tmp_path) == [2, 3, 8]
    training.end()


def test_a_save_by_the_script_between_two_epochs_leaves_what_was_put_off(tmp_path: Path) -> None:
    """SIGTERM in an epoch's last step, and `save_checkpoint` at its end: the process never ended."""
    training = NumberedLoop(tmp_path)

    def loop() -> None:
        for _ in range(2):
            for step, batch in enumerate(training.loader, start=1):
                training.take(batch)
                if step == 10:
                    os.kill(os.getpid(), signal.SIGTERM)
            save_checkpoint(training.model)

    with pytest.raises(Ended):
        loop()
    assert len(training.seen) == SAMPLES + BATCH
    assert steps_saved(tmp_path)[-1] == 11
    training.end()


@pytest.mark.parametrize("steps", [1, 2, 10])
def test_sigterm_ends_the_process_after_a_step_or_two(tmp_path: Path, steps: int) -> None:
    """Where each step was an epoch's last, one full checkpoint a step was saved, and it ended by SIGKILL only."""
    training = NumberedLoop(tmp_path, samples=steps * BATCH)

    def loop() -> None:
        for _ in range(30):
            for batch in training.loader:
                training.take(batch)
                if len(training.seen) == 20 * BATCH:
                    os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Ended):
        loop()
    assert steps_saved(tmp_path) == [20, 21]
    training.end()


@pytest.mark.parametrize("epochs", [1, 2])
def test_sigterm_in_an_epochs_last_step_is_saved_there_and_ends_the_process_after_the_next(
    tmp_path: Path, epochs: int
) -> None:
    training = NumberedLoop(tmp_path)

    ended = False
    try:
        for _ in remaining_epochs(training.loader, epochs):
            for step, batch in enumerate(training.loader, start=1):
                training.take(batch)
                if step == 10:
                    os.kill(os.getpid(), signal.SIGTERM)
            assert steps_saved(tmp_path) == [10]
    except Ended:
        ended = True
    assert ended is (epochs == 2)  # after the last epoch the script comes to its own end
    assert steps_saved(tmp_path) == ([10, 11] if ended else [10])
    training.end()
    assert Checkpoints(tmp_path).load_latest() is not None
