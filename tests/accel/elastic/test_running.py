"""What a script may ask of a training whose batch size changes, or that is saved."""

from __future__ import annotations

import contextlib
import itertools
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel import entry
from accel.elastic.batch_size.report import PROFILE, TimeBook
from accel.elastic.options import Checkpointing
from accel.elastic.progress import ProgressSchedule
from accel.elastic.running import job_profile, progress_of, request_checkpoint, save_checkpoint
from accel.elastic.sample_position import remaining_epochs
from accel.elastic.saving.run import CheckpointRun
from accel.errors import InvalidArgument
from accel.goodput.job import JobProfile, LostTime
from tests.accel.elastic.batch_loops import Clock, batch_run, known_noise, time_by

PLAIN: dict[str, Any] = {"cache": False, "budget": "0.001s", "allow": "exact"}


class Training:
    """Steps of 1 ms whatever the batch, so that it grows as far as it may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, phi: float = 1e6, **elastic: Any) -> None:
        self.clock = Clock()
        time_by(self.clock, monkeypatch)
        known_noise(monkeypatch, phi)
        torch.manual_seed(0)
        self.model: nn.Module = nn.Linear(4, 1)
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), 0.01)
        loader = DataLoader(TensorDataset(torch.randn(4000, 4), torch.randn(4000, 1)), batch_size=8, shuffle=True)
        self.model, self.loader, self.optimizer = accel.optimize(
            self.model, loader, self.optimizer, elastic=accel.Elastic(**elastic), **PLAIN
        )
        self._batches = itertools.chain.from_iterable(itertools.repeat(self.loader))

    @property
    def checkpoint(self) -> CheckpointRun:
        run = entry.optimized(self.model)
        assert run is not None and run.elastic is not None and run.elastic.checkpoint is not None
        return run.elastic.checkpoint

    def steps(self, count: int) -> None:
        for x, y in itertools.islice(self._batches, count):
            self.optimizer.zero_grad()
            nn.functional.mse_loss(self.model(x), y).backward()
            self.optimizer.step()
            self.clock.now += 1e-3


def test_a_schedule_goes_by_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(monkeypatch, max_batch_size=64)
    progress = progress_of(training.model)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(training.optimizer, T_max=1000)
    schedule = ProgressSchedule(cosine, progress)
    taken = 0
    while cosine.last_epoch < 1000:
        training.steps(1)
        schedule.step()
        taken += 1
        assert cosine.last_epoch == int(progress.progress + 1e-6)
    assert taken < 500  # up to eight steps of the user's in one
    assert training.optimizer.param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-5)
    accel.undo(training.model)


def test_progress_goes_on_step_by_step_where_the_controller_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(monkeypatch, max_batch_size=64)
    training.steps(300)
    progress = progress_of(training.model)
    with pytest.warns(RuntimeWarning, match="the batch size is the loop's own from step"):
        batch_run(training.model)._fail(RuntimeError("played"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = progress.progress
        training.steps(10)
    assert progress.progress - before == pytest.approx(10, abs=8)  # the batch dealt ahead is still a large one
    assert training.optimizer.param_groups[0]["lr"] == 0.01
    accel.undo(training.model)


def test_a_scheduler_reads_the_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(monkeypatch, max_batch_size=64, checkpoint=tmp_path)
    training.steps(1)
    with pytest.raises(InvalidArgument, match="not known yet on this rank; ask on rank 0, after the first decision"):
        job_profile(training.model)
    training.steps(300)
    profile = job_profile(training.model)
    assert (profile.base_batch, profile.most_replicas, profile.limits.max_batch_size) == (8, 1, 64)
    assert profile.noise.phi == 1e6
    assert 0 < profile.restart_s < 3600
    assert profile.progress > 300
    written = JobProfile.load(tmp_path / PROFILE)
    assert (written.base_batch, written.limits, written.noise) == (8, profile.limits, profile.noise)
    assert profile.speedup(1, 2) >= 1.0
    assert written.total is None
    remaining_epochs(training.loader, 20)
    training.steps(600)  # the progress alone has changed
    assert JobProfile.load(tmp_path / PROFILE).progress > 2 * written.progress
    assert job_profile(training.model).total == 20 * math.ceil(len(training.loader.dataset) / 8)
    (tmp_path / PROFILE).unlink()
    training.steps(5)  # by no tenth
    assert not (tmp_path / PROFILE).exists()
    accel.undo(training.model)


def test_lost_time_is_booked_by_cause() -> None:
    now = 100.0
    book = TimeBook(None, lambda: now)
    for wait_s, step_s in ((3.0, 7.0), (2.0, 1.0)):
        book.batch_requested()
        now += wait_s
        book.batch_delivered(None, None)
        now += step_s
    book.batch_requested()
    first = book.lost(start_s=10.0, checkpoint_s=0.5)
    assert first == LostTime(start=7.0, input=5.0, checkpoint=0.5)  # the first wait is no part of the start
    assert TimeBook(first, lambda: now).lost(4.0, 0.0) == LostTime(start=7.0, restart=4.0, input=5.0, checkpoint=0.5)


def test_a_resumed_training_goes_on_booking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = None
    for steps in (300, 600):
        training = Training(monkeypatch, max_batch_size=64, checkpoint=tmp_path)
        training.steps(steps)
        save_checkpoint(training.model)
        lost = JobProfile.load(tmp_path / PROFILE).lost
        accel.undo(training.model)
        if before is None:
            assert lost.start > 0 and lost.restart == 0 and lost.input > 0 and lost.checkpoint > 0
        else:
            assert lost.start == before.start and lost.restart > 0
            assert lost.input > before.input and lost.checkpoint > before.checkpoint
        before = lost


def test_a_checkpoint_is_saved_at_once_between_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(monkeypatch, checkpoint=tmp_path)
    save_checkpoint(training.model)
    saved = training.checkpoint.training.checkpoints.load_latest()
    assert saved is not None and saved["step"] == 0
    accel.undo(training.model)


ASKS = [request_checkpoint, save_checkpoint, progress_of, job_profile]


@pytest.mark.parametrize("ask", ASKS, ids=lambda ask: ask.__name__)
def test_a_model_that_is_not_elastic_is_refused(ask: Any) -> None:
    with pytest.raises(
        InvalidArgument, match=rf"{ask.__name__} needs a model that is optimized with .*a Linear that is"
    ):
        ask(nn.Linear(2, 1))


def test_a_grad_scaler_that_is_saved_is_divided_out_of_the_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    checkpoint = Checkpointing(folder=tmp_path, more={"scaler": scaler})
    training = Training(monkeypatch, max_batch_size=64, checkpoint=checkpoint)
    training.steps(20)
    meter = batch_run(training.model).noise.meter
    assert meter is not None and meter._scaler is scaler
    accel.undo(training.model)
    assert Checkpointing(folder=tmp_path).scaler is None


@pytest.mark.parametrize("how", ["ACCEL=0", "disabled"])
def test_where_accel_is_switched_off_the_script_runs_all_the_same(
    how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, data = nn.Linear(4, 1), TensorDataset(torch.randn(12, 4), torch.randn(12, 1))
    loader, optimizer = DataLoader(data, batch_size=4), torch.optim.SGD(model.parameters(), 0.1)
    with monkeypatch.context() as patch, accel.disabled() if how == "disabled" else contextlib.nullcontext():
        if how == "ACCEL=0":
            patch.setenv("ACCEL", "0")
        passed = accel.optimize(model, loader, optimizer, elastic=accel.Elastic(max_batch_size=8, checkpoint=tmp_path))
    assert passed == (model, loader, optimizer)
    progress = progress_of(model)
    for _ in remaining_epochs(loader, 3):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    assert progress.progress == 9
    with pytest.warns(RuntimeWarning, match="accel is switched off, so no checkpoint is saved"):
        save_checkpoint(model)
    with pytest.warns(RuntimeWarning, match="request_checkpoint: accel is switched off"):
        request_checkpoint(model)
    with pytest.raises(ValueError, match="must be the one that accel"):
        remaining_epochs(DataLoader(data), 3)
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_may_be_asked_for_before_the_first_step_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one of several ranks, say: the others begin when their first step ends."""
    training = Training(monkeypatch, checkpoint=tmp_path)
    request_checkpoint(training.model)
    assert training.checkpoint.policy is None
    training.steps(2)
    assert training.checkpoint.training.checkpoints.latest is not None
    accel.undo(training.model)
