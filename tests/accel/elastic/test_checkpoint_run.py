"""`optimize(checkpoint=...)`: a loop that is stopped anywhere goes on as if it had not been."""

from __future__ import annotations

import os
import queue
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import accel
from accel import entry
from accel.dataio.elastic_sampler import ElasticSampler
from accel.elastic.checkpoint import Checkpoints
from accel.elastic.options import Checkpointing
from accel.elastic.running import save_checkpoint
from accel.elastic.sample_position import remaining_epochs
from accel.elastic.saving.run import CheckpointRun
from accel.elastic.saving.training import TrainingCheckpoints
from accel.errors import CheckpointError, InvalidArgument

PLAIN = {"cache": False, "allow": "exact"}
EPOCHS, SAMPLES, BATCH = 3, 40, 6


class Stopped(Exception):
    """In place of a kill."""


class Training:
    """A loop as a script would have it, made anew for each run."""

    def __init__(self, folder: Path, **arguments: Any) -> None:
        torch.manual_seed(3)
        self.model: nn.Module = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.3), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.01)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 4, 0.7)
        x = torch.randn(SAMPLES, 5)
        data = TensorDataset(x, x.sum(1, keepdim=True), torch.arange(SAMPLES))
        loader = DataLoader(data, batch_size=BATCH, shuffle=True)
        checkpoint = Checkpointing(folder=folder, schedulers=[self.schedule], interval_s=1e6)
        self.model, self.loader, self.optimizer = accel.optimize(
            self.model, loader, self.optimizer, elastic=accel.Elastic(checkpoint=checkpoint, **arguments), **PLAIN
        )
        self.seen: list[int] = []

    @property
    def checkpoint(self) -> CheckpointRun:
        optimized = entry.optimized(self.model)
        assert optimized is not None
        assert optimized.elastic is not None
        assert optimized.elastic.checkpoint is not None
        return optimized.elastic.checkpoint

    def run(self, save_at: int = -1, stop_at: int = -1) -> dict[str, Any]:
        steps = 0
        try:
            for _ in remaining_epochs(self.loader, EPOCHS):
                for x, y, index in self.loader:
                    if steps == stop_at:
                        raise Stopped
                    self.optimizer.zero_grad()
                    nn.functional.mse_loss(self.model(x), y).backward()
                    self.optimizer.step()
                    self.schedule.step()
                    self.seen += index.tolist()
                    steps += 1
                    if steps == save_at:
                        self.checkpoint.request()
        finally:
            state = {"model": self.model.state_dict(), "rate": self.schedule.get_last_lr(), "draw": torch.rand(3)}
            accel.undo(self.model)
        return state


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return bool(a == b)


def signal_in_steps(training: Training, *steps: int) -> None:
    """Have SIGTERM sent within the forward passes of steps, from 0."""
    plain = training.model.forward

    def interrupted(x: Tensor) -> Tensor:
        if training.model.training and len(training.seen) in [step * BATCH for step in steps]:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(x)

    training.model.forward = interrupted


def stop() -> None:
    raise Stopped


@pytest.fixture
def uninterrupted(tmp_path: Path) -> tuple[dict[str, Any], list[int]]:
    training = Training(tmp_path / "whole")
    return training.run(), training.seen


@pytest.mark.parametrize("save_at", [1, 6, 7, 8, 19])  # first, in an epoch, at its end and beginning
def test_a_loop_stopped_after_a_save_goes_on_bit_for_bit(
    save_at: int, uninterrupted: tuple[dict[str, Any], list[int]], tmp_path: Path
) -> None:
    first = Training(tmp_path)
    with pytest.raises(Stopped):
        first.run(save_at, stop_at=save_at + 1)  # one step more, which is lost and made again
    second = Training(tmp_path)
    torch.rand(7)  # a script draws on its way to the loop
    second.checkpoint.restore()
    end = second.run()

    assert same(end, uninterrupted[0])
    saved = save_at + (save_at == 7)  # what was asked for at an epoch's end is saved again after the next step
    kept = sum(min(BATCH, SAMPLES - BATCH * (step % 7)) for step in range(saved))
    assert first.seen[:kept] + second.seen == uninterrupted[1]


def test_sigterm_saves_the_step_under_way_and_then_ends_the_process(tmp_path: Path) -> None:
    training, ended = Training(tmp_path), []

    def terminate() -> None:
        ended.append(signal.getsignal(signal.SIGTERM))
        raise Stopped

    before = signal.getsignal(signal.SIGTERM)
    training.checkpoint._terminate = terminate
    signal_in_steps(training, 3)
    with pytest.raises(Stopped):
        training.run()

    assert len(training.seen) == 4 * BATCH
    assert ended == [before]  # the handler is that of before when the signal is sent on
    assert Training(tmp_path).checkpoint.updates.step == 4
    accel.undo(training.model)


def test_sigterm_ends_the_process_also_where_nothing_can_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(tmp_path)
    monkeypatch.setattr(training.checkpoint.training.checkpoints, "save", lambda state: 1 / 0)

    training.checkpoint._terminate = stop
    signal_in_steps(training, 3)
    with pytest.raises(Stopped), pytest.warns(RuntimeWarning, match="no checkpoints are saved from step 4 on: ZeroDiv"):
        training.run()
    assert len(training.seen) == 4 * BATCH


def test_it_goes_on_with_the_batch_size_and_what_was_learnt_of_it(tmp_path: Path) -> None:
    first = Training(tmp_path, max_batch_size=24)
    first.run(save_at=12)
    second = Training(tmp_path, max_batch_size=24)
    optimized = entry.optimized(second.model)
    assert optimized is not None
    assert optimized.elastic is not None
    batch = optimized.elastic.batch
    assert batch is not None
    state = batch.record.state_dict()
    assert state["controller"]["times"]["configurations"]
    second.run()
    assert batch.record.policy is not None
    assert batch.rates.progress > state["progress"]


def test_ranks_go_on_by_the_memory_of_the_one_that_has_least(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by its own, they would begin with batches of different sizes."""

    class TwoRanks:
        distributed = leads = True

        def join(self, since: float) -> None:
            pass

        def decide(self, mine: int, decision: Any, missed: str, step_s: float) -> Any:
            return decision([mine, min(mine, 40)])

    class Batch:
        memory = 80

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: Any) -> None:
            pass

    monkeypatch.setattr("accel.elastic.saving.training.Ranks", TwoRanks)
    model, batch = nn.Linear(2, 1), Batch()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sampler, folder = ElasticSampler(8, batch_size=2), Checkpointing(folder=tmp_path)
    run = CheckpointRun(TrainingCheckpoints(model, optimizer, sampler, folder, batch, print))
    run.restore()
    run.close()
    assert batch.memory == 40


def test_another_model_is_refused_and_nothing_is_left_on(tmp_path: Path) -> None:
    Training(tmp_path).run(save_at=2)
    model = nn.Linear(5, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match="not one of this training"):
        accel.optimize(
            model, DataLoader(TensorDataset(torch.randn(9, 5))), optimizer, elastic=accel.Elastic(checkpoint=tmp_path)
        )

    assert entry.optimized(model) is None
    assert same(dict(model.state_dict()), before)
    assert model._compiled_call_impl is None


def test_a_disk_that_is_full_ends_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(tmp_path)

    def full(state: Any) -> None:
        raise CheckpointError("no space left on device")

    monkeypatch.setattr(training.checkpoint.training.checkpoints, "save", full)
    with pytest.warns(RuntimeWarning, match="no checkpoint was saved at step 2: no space left"):
        training.run(save_at=2)
    assert len(training.seen) == EPOCHS * SAMPLES


def test_checkpoints_need_the_optimizer() -> None:
    with pytest.raises(InvalidArgument, match=r"elastic\.checkpoint needs the optimizer"):
        accel.optimize(nn.Linear(1, 1), DataLoader(range(3)), elastic=accel.Elastic(checkpoint="x"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"interval_s": 0}, "interval_s must be above 0"),
        ({"keep": 0}, "keep must be a whole number"),
        ({"more": {"sampler": object()}}, "must differ from accel's own, got sampler"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        Checkpointing(folder="x", **settings)


def test_a_training_is_saved_also_where_the_search_has_failed(tmp_path: Path) -> None:
    training = Training(tmp_path)
    optimized = entry.optimized(training.model)
    assert optimized is not None
    optimized.session.close()
    training.run(save_at=3)
    assert Training(tmp_path).checkpoint.updates.step == 3


def test_a_rate_out_of_numpy_is_saved(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.optimizer.param_groups[0]["lr"] = np.logspace(-4, -2, 5)[2]
    training.run(save_at=3)
    state = Checkpoints(tmp_path).load_latest()
    assert state is not None
    assert type(state["parts"]["optimizer 0"]["param_groups"][0]["lr"]) is float


def test_a_state_that_no_checkpoint_can_hold_is_refused_at_once(tmp_path: Path) -> None:
    class Odd:
        def state_dict(self) -> Any:
            return {"seen": {1, 2}}

        def load_state_dict(self, state: Any) -> None:
            """Nothing."""

    model = nn.Linear(1, 1)
    loader = DataLoader(TensorDataset(torch.ones(4, 1)))
    checkpoint = Checkpointing(folder=tmp_path, more={"odd": Odd()})
    with pytest.raises(InvalidArgument, match=r"got a set at state\['parts'\]"):
        accel.optimize(
            model,
            loader,
            torch.optim.SGD(model.parameters(), 0.1),
            elastic=accel.Elastic(checkpoint=checkpoint),
            **PLAIN,
        )


def test_a_baseline_without_accel_leaves_no_trace(tmp_path: Path) -> None:
    """A script that compares both in one process: the second call was answered as the first."""
    model = nn.Linear(5, 1)
    loader = DataLoader(TensorDataset(torch.randn(8, 5), torch.randn(8, 1)), batch_size=2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with accel.disabled():
        accel.optimize(model, loader, optimizer, elastic=accel.Elastic(checkpoint=tmp_path), **PLAIN)
    model, loader, optimizer = accel.optimize(
        model, loader, optimizer, elastic=accel.Elastic(checkpoint=tmp_path), **PLAIN
    )
    save_checkpoint(model)
    assert len(list(tmp_path.glob("*-step-*"))) == 1


def test_batches_that_another_thread_takes_end_no_step(tmp_path: Path) -> None:
    """A checkpoint would be saved in the midst of the training's step."""
    training = Training(tmp_path)
    queued: queue.Queue[Any] = queue.Queue(2)

    def fetch() -> None:
        for _ in range(16):
            for batch in training.loader:
                queued.put(batch)
        queued.put(None)

    def train() -> None:
        while (batch := queued.get()) is not None:
            training.optimizer.zero_grad()
            nn.functional.mse_loss(training.model(batch[0]), batch[1]).backward()
            training.optimizer.step()
            training.checkpoint.request()

    fetching = threading.Thread(target=fetch)
    fetching.start()
    with pytest.warns(RuntimeWarning, match="or another thread does; call .*save_checkpoint") as caught:
        train()
    fetching.join()
    assert len(caught) == 1
    assert not list(tmp_path.glob("*-step-*"))
    steps = training.checkpoint.updates.step
    assert steps == len(training.loader) * 16
    save_checkpoint(training.model)
    accel.undo(training.model)
    assert Training(tmp_path).checkpoint.updates.step == steps


class Augmented(Dataset[Tensor]):
    """Draws for each sample, as random augmentation does."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        return torch.rand(5)


def passes(folder: Path, epochs: int, more: int = 0) -> list[float]:
    """Train for some epochs and some batches more, and save; return the sum of each epoch's samples."""
    model = nn.Linear(5, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(Augmented(), batch_size=3, num_workers=1)
    model, loader, optimizer = accel.optimize(
        model, loader, optimizer, elastic=accel.Elastic(checkpoint=folder), **PLAIN
    )
    sums = []
    for epoch in range(epochs + (more > 0)):
        total = 0.0
        for step, x in enumerate(loader):
            model(x).sum().backward()
            optimizer.step()
            total += float(x.double().sum())
            if epoch == epochs and step + 1 == more:
                break
        sums.append(total)
    save_checkpoint(model)
    accel.undo(model)
    return sums


@pytest.mark.parametrize("more", [0, 2])
def test_what_workers_draw_for_goes_on_with_the_next_epoch(tmp_path: Path, more: int) -> None:
    torch.manual_seed(5)
    whole = passes(tmp_path / "whole", 4)
    torch.manual_seed(5)
    first = passes(tmp_path / "parts", 1 if more else 2, more)
    torch.manual_seed(6)  # the loader's seed is of the first process
    second = passes(tmp_path / "parts", 3 if more else 2)
    assert first[0] == whole[0]
    assert second[-2:] == whole[2:]
    assert len(set(whole)) == 4


@pytest.mark.parametrize("seed", [3, 4])
def test_a_script_of_another_seed_goes_on_in_the_order_begun(tmp_path: Path, seed: int) -> None:
    """`torch.manual_seed(int(time.time()))`: the sampler's seed was refused, though accel had chosen it."""

    def taken(steps: int) -> list[int]:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loader = DataLoader(TensorDataset(torch.arange(20.0)[:, None]), batch_size=2, shuffle=True)
        model, loader, optimizer = accel.optimize(
            model, loader, optimizer, elastic=accel.Elastic(checkpoint=tmp_path), **PLAIN
        )
        seen = []
        for step, (x,) in enumerate(loader, 1):
            model(x).sum().backward()
            optimizer.step()
            seen += x.flatten().int().tolist()
            if step == steps:
                break
        save_checkpoint(model)
        accel.undo(model)
        return seen

    torch.manual_seed(3)
    first = taken(4)
    torch.manual_seed(seed)
    assert sorted(first + taken(6)) == list(range(20))


def test_a_loader_for_validation_leaves_the_training_and_its_checkpoints_as_they_are(tmp_path: Path) -> None:
    """A call for it, without the settings of the first, ended the checkpoints without a word."""
    training = Training(tmp_path)
    checkpoint = training.checkpoint
    validation = DataLoader(TensorDataset(torch.randn(8, 5), torch.randn(8, 1)), batch_size=4)
    model, loader, *_ = accel.optimize(training.model, validation, **PLAIN)
    assert len(list(loader)) == 2
    accel.optimize(model, validation, cache=False)  # it names other settings, too
    assert training.checkpoint is checkpoint
    training.run(save_at=3)
    assert Training(tmp_path).checkpoint.updates.step == 3


def test_a_call_with_other_settings_goes_on_in_the_process(tmp_path: Path) -> None:
    """The newest checkpoint was loaded, and what was trained since then lost."""
    training = Training(tmp_path)
    seen: list[int] = []

    def steps(loader: Any, until: int) -> None:
        for x, y, index in loader:
            training.optimizer.zero_grad()
            nn.functional.mse_loss(training.model(x), y).backward()
            training.optimizer.step()
            seen.extend(index.tolist())
            if len(seen) == 2 * BATCH:
                save_checkpoint(training.model)
            if len(seen) >= until:
                break

    steps(training.loader, 5 * BATCH)
    weights = {name: value.clone() for name, value in training.model.state_dict().items()}
    settings = Checkpointing(folder=tmp_path, schedulers=[training.schedule], interval_s=1e6)
    training.model, training.loader, training.optimizer = accel.optimize(
        training.model,
        training.loader,
        training.optimizer,
        elastic=accel.Elastic(checkpoint=settings),
        cache=False,
        allow="reordered",
    )
    assert same(dict(training.model.state_dict()), weights)
    assert training.checkpoint.updates.step == 5
    steps(training.loader, SAMPLES)
    assert sorted(seen) == list(range(SAMPLES))
    save_checkpoint(training.model)
    accel.undo(training.model)
    assert Training(tmp_path).checkpoint.updates.step == 7


@pytest.mark.parametrize("handler", ["the script's", "ignored"])
def test_where_the_script_decides_on_its_end_each_signal_is_answered_by_a_checkpoint(
    tmp_path: Path, handler: str
) -> None:
    """The signal was sent on to a handler that notes it, and after that nothing was saved any more."""
    training, noted = Training(tmp_path), []
    own: Any = (lambda number, frame: noted.append(number)) if handler == "the script's" else signal.SIG_IGN
    before = signal.signal(signal.SIGTERM, own)
    signal_in_steps(training, 2, 5)
    try:
        training.run()
    finally:
        after = signal.signal(signal.SIGTERM, before)
    assert len(training.seen) == EPOCHS * SAMPLES
    assert sorted(path.name for path in tmp_path.glob("*-step-*")) == ["00000001-step-3", "00000002-step-6"]
    assert after == own
    assert not noted or noted == [signal.SIGTERM] * len(noted)


def trained_elsewhere(training: Training, updates: int) -> None:
    """Train the same model on batches of a loader of its own."""
    for _ in range(updates):
        training.optimizer.zero_grad()
        training.model(torch.randn(4, 5)).square().mean().backward()
        training.optimizer.step()


def test_a_loop_that_goes_on_with_another_loader_is_warned_once(tmp_path: Path) -> None:
    training = Training(tmp_path)

    def epoch() -> None:
        for x, y, _ in training.loader:
            nn.functional.mse_loss(training.model(x), y).backward()
            training.optimizer.step()

    epoch()
    with pytest.warns(RuntimeWarning, match="from step 107 on: the loop asks for no more batches of the loader"):
        trained_elsewhere(training, 100)
    epoch()  # it comes back
    trained_elsewhere(training, 100)
    accel.undo(training.model)


def test_many_updates_with_each_batch_are_no_other_loader(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    training = Training(tmp_path)
    for x, y, _ in training.loader:  # as in reinforcement learning: another loop over what a batch has brought
        noting = signal.getsignal(signal.SIGTERM)
        for _ in range(150):
            assert not training.checkpoint._has_warned
            nn.functional.mse_loss(training.model(x), y).backward()
            training.optimizer.step()
        assert signal.getsignal(signal.SIGTERM) == noting
    assert noting != before
    accel.undo(training.model)


@pytest.mark.parametrize("after", [0, 150])
def test_sigterm_ends_a_loop_that_has_gone_on_elsewhere(tmp_path: Path, after: int) -> None:
    """The signal was noted, and nobody asked for it any more."""
    before = signal.getsignal(signal.SIGTERM)
    training = Training(tmp_path)

    training.checkpoint._terminate = stop
    for x, y, _ in training.loader:
        nn.functional.mse_loss(training.model(x), y).backward()
        training.optimizer.step()

    def terminated_elsewhere() -> None:
        trained_elsewhere(training, after)
        os.kill(os.getpid(), signal.SIGTERM)
        trained_elsewhere(training, 100)

    with pytest.warns(RuntimeWarning, match="asks for no more batches"), pytest.raises(Stopped):
        terminated_elsewhere()
    assert signal.getsignal(signal.SIGTERM) == before
    accel.undo(training.model)


def test_a_rank_that_fails_to_save_ends_with_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where another one was sent SIGTERM, it trained on alone, and waited in the next collective for ever."""
    training = Training(tmp_path)

    def told_by_another_rank(policy: Any) -> bool:
        policy.stop = policy.is_wanted = len(training.seen) == 3 * BATCH
        return policy.stop

    def no_memory(state: Any) -> None:
        raise MemoryError

    training.checkpoint._terminate = stop
    monkeypatch.setattr("accel.elastic.save_policy.SavePolicy.due", told_by_another_rank)
    monkeypatch.setattr(training.checkpoint.training.checkpoints, "save", no_memory)
    with pytest.raises(Stopped), pytest.warns(RuntimeWarning, match="no checkpoints are saved from step 3 on: Memory"):
        training.run()
    assert len(training.seen) == 3 * BATCH
