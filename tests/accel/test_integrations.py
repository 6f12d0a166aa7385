"""Frameworks that own the loop train under a callback, and trackers get the figures."""

from __future__ import annotations

import copy
import gc
import math
import textwrap
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel import entry
from accel.errors import InvalidArgument
from accel.integrations.callback import TrainingCallback
from accel.integrations.trackers import log_batches, log_report, metrics
from accel.report import Report, StrategyRow
from accel.report.report import BatchRow
from accel.script.training import ScriptTraining
from tests import warm
from tests.accel.frameworks import LET_TORCHVISION_IMPORT, need
from tests.accel.loops import Quick, advance, advance_until, in_trial, make, training
from tests.accel.script_followed import training as followed

__all__ = ["followed"]

OPTIONS: dict[str, Any] = {"allow": "exact", "budget": 60, "enable": (), "disable": (), "report": None, "cache": True}
UNREMEMBERED = {**OPTIONS, "cache": False}


def report() -> Report:
    words = {"summary": "", "treats": (), "exactness": "exact"}
    rows = [
        StrategyRow(name="allocator", status="kept", gain=1.2, **words),
        StrategyRow(name="tf32", status="not applicable", **words),
    ]
    return Report(
        model="Net",
        speedup=1.2,
        speedup_low=1.1,
        speedup_high=1.3,
        plain_ms=12.0,
        accel_ms=10.0,
        rows=rows,
        plan={"allocator": None},
    )


def test_figures_have_names_and_unknown_ones_are_left_out() -> None:
    figures = metrics(report())
    assert figures["accel/speedup"] == 1.2
    assert figures["accel/gain/allocator"] == 1.2
    assert "accel/gain/tf32" not in figures
    assert metrics(Report()).keys() == {"accel/search_s"}


class Calls:
    """Has one method, and notes its calls."""

    def __init__(self, *names: str) -> None:
        self.made: list[tuple[str, tuple[Any, ...], Any]] = []
        for name in names:
            setattr(self, name, lambda *args, _name=name, step=None: self.made.append((_name, args, step)))


def test_each_tracker_is_called_as_it_wants() -> None:
    board, mlflow, wandb = Calls("add_scalar", "add_text"), Calls("log_metrics"), Calls("log")
    for tracker in (board, mlflow, wandb):
        log_report(report(), tracker, 7)
    assert ("add_scalar", ("accel/speedup", 1.2, 7), None) in board.made
    assert [name for name, _, _ in board.made].count("add_text") == 1
    assert mlflow.made == [("log_metrics", (metrics(report()),), 7)]
    ((name, (logged,), step),) = wandb.made
    assert (name, step) == ("log", 7)
    assert logged["accel/verdict"].startswith("1.20x")
    with pytest.raises(InvalidArgument, match=r"add_scalar .* got object"):
        log_report(report(), object())


def test_only_a_step_that_was_given_is_passed_to_what_drops_earlier_ones() -> None:
    mlflow, wandb = Calls("log_metrics"), Calls("log")
    for tracker in (mlflow, wandb):
        log_report(replace(report(), steps=90), tracker)
    assert [step for *_, step in mlflow.made] == [90]
    ((_, (logged,), step),) = wandb.made
    assert (logged["accel/step"], step) == (90, None)
    log_report(report(), wandb, 0)
    _, (logged,), step = wandb.made[-1]
    assert ("accel/step" in logged, step) == (False, 0)


def test_every_change_of_the_batch_is_logged_at_its_step() -> None:
    rows = [BatchRow(step=16, batch=32, why="as it was"), BatchRow(step=40, batch=64, goodput=9.0, noise=math.inf)]
    board, mlflow, wandb = Calls("add_scalar", "add_text"), Calls("log_metrics"), Calls("log")
    for tracker in (board, mlflow, wandb):
        log_batches(replace(report(), batch_rows=rows), tracker)
    assert [(name, *arguments) for name, arguments, _ in board.made] == [
        ("add_scalar", "accel/batch_size", 32.0, 16),
        ("add_text", "accel/batch_size/why", "as it was", 16),
        ("add_scalar", "accel/batch_size", 64.0, 40),
        ("add_scalar", "accel/goodput", 9.0, 40),
        ("add_text", "accel/batch_size/why", "", 40),
    ]
    assert [step for _, _, step in mlflow.made] == [16, 40]
    first = {"accel/batch_size": 32.0, "accel/batch_size/why": "as it was", "accel/step": 16}
    assert wandb.made[0] == ("log", (first,), None)
    assert [logged["accel/step"] for _, (logged,), _ in wandb.made] == [16, 40]
    with pytest.raises(InvalidArgument, match=r"add_scalar .* got object"):
        log_batches(replace(report(), batch_rows=rows), object())


def test_a_notebook_shows_the_page_in_a_frame() -> None:
    html = report()._repr_html_()
    assert html.startswith('<iframe srcdoc="&lt;!DOCTYPE html&gt;')
    assert html.count('"') == 4  # the page's own are escaped


def test_options_are_checked_when_the_callback_is_made() -> None:
    with pytest.raises(InvalidArgument, match="allow must be one of"):
        TrainingCallback(**{**OPTIONS, "allow": "anything"})
    with pytest.raises(InvalidArgument, match="enable"):
        TrainingCallback(**{**OPTIONS, "enable": ["no such strategy"]})
    with pytest.raises(InvalidArgument, match="did you mean '3%'"):
        TrainingCallback(**{**OPTIONS, "budget": 0.03})
    with pytest.raises(InvalidArgument, match="cache must be True or False"):
        TrainingCallback(**{**OPTIONS, "cache": "runs/cache"})


@pytest.mark.parametrize("cache", [True, False])
def test_what_is_trained_between_begin_and_end_is_optimized_and_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: bool
) -> None:
    monkeypatch.setenv("ACCEL_CACHE", str(tmp_path))

    def train(follow: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        data = TensorDataset(torch.randn(256, 8), torch.randint(0, 2, (256,)))
        model, loader = nn.Linear(8, 2), DataLoader(data, 8, shuffle=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        callback = TrainingCallback(**{**OPTIONS, "cache": cache})
        assert callback.report is None
        if follow:
            callback._begin()
        for _ in range(3):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
        callback._end()
        assert (callback.report is not None) == follow
        if follow:
            found = callback.report
            assert found is not None and found.steps > 50
            assert found.cache.startswith(str(tmp_path) if cache else "") and bool(found.cache) == cache
        return [p.detach().clone() for p in model.parameters()]

    iterate = DataLoader.__iter__
    plain = train(False)
    assert all(map(torch.equal, plain, train(True)))
    assert DataLoader.__iter__ is iterate
    monkeypatch.setenv("ACCEL", "0")
    callback = TrainingCallback(**OPTIONS)
    callback._begin()
    assert DataLoader.__iter__ is iterate


def fit(callback: TrainingCallback, job: tuple[Any, Any, Any], steps: int) -> Report:
    """Train from the first batch of an epoch, as a Trainer does, and return the report."""
    callback._begin()
    advance(training(*job), steps)
    callback._end()
    found = callback.report
    assert found is not None
    return copy.deepcopy(found)  # it goes on changing


def test_a_second_training_of_a_model_is_followed_like_the_first(only_quick: None, tmp_path: Path) -> None:
    callback = TrainingCallback(**{**UNREMEMBERED, "report": tmp_path / "fit.json"})
    job = make()
    first, second = fit(callback, job, 240), fit(callback, job, 230)
    for found, steps in ((first, 240), (second, 230)):
        assert found.steps >= steps - 4
        assert found.state == "done" and found.plan == {"quick": None}
    assert Quick.on  # what has been kept stays on
    accel.undo(job[0])
    assert callback.report is None
    assert Report.load(tmp_path / "fit.json").steps == first.steps
    assert Report.load(tmp_path / "fit-2.json").steps == second.steps


def test_the_model_of_an_earlier_training_is_let_go(only_quick: None) -> None:
    callback = TrainingCallback(**UNREMEMBERED)
    fold = make()
    fit(callback, fold, 26)
    seen = weakref.ref(fold[0])
    del fold
    fit(callback, make(1), 26)
    gc.collect()
    assert seen() is None


def test_a_model_that_the_script_optimizes_itself_meanwhile_is_left_to_it(only_quick: None) -> None:
    callback = TrainingCallback(**UNREMEMBERED)
    model, loader, optimizer = make()
    fit(callback, (model, loader, optimizer), 26)
    accel.undo(model)
    accel.optimize(model, loader, optimizer)
    callback._begin()
    assert entry.optimized(model) is not None
    callback._end()


@pytest.mark.parametrize("together", [True, False])
def test_what_is_on_trial_when_a_training_ends_is_switched_off(only_quick: None, together: bool) -> None:
    callback = TrainingCallback(**UNREMEMBERED)
    model, loader, optimizer = make()
    callback._begin()
    loop = training(model, loader, optimizer)
    advance_until(loop, in_trial)
    found = entry.optimized(model)
    assert found is not None and found.session.active == {"quick": None}
    callback._end(together)
    assert not Quick.on
    steps = accel.explain(model).steps
    advance(loop, 40)  # as a notebook may go on with the iterator that it has
    assert not Quick.on and accel.explain(model).steps == steps


def test_a_training_that_another_callback_was_not_told_the_end_of_is_let_go_of(only_quick: None) -> None:
    """A notebook's cell with a Trainer, interrupted and run again: its loop recursed without end."""
    replaced = DataLoader.__iter__
    job = make()
    first, second = (TrainingCallback(**UNREMEMBERED) for _ in range(2))
    first._begin()
    loop = training(*job)
    advance_until(loop, in_trial)
    del loop
    assert fit(second, job, 240).plan == {"quick": None}
    assert first.report is None
    assert DataLoader.__iter__ is replaced
    first._end()


def test_a_callback_in_a_script_that_is_followed_comes_first(followed: ScriptTraining) -> None:
    """Under `accel run`; what the script trains after the Trainer is followed as before."""
    callback = TrainingCallback(**UNREMEMBERED)
    found = fit(callback, make(), 240)
    assert found.plan == {"quick": None} and found.steps > 200
    assert (followed.models.count, followed.why_nothing()) == (0, "")
    other = make(1)
    advance(training(*other), 26)
    assert followed.models.modules == [other[0]]


@pytest.mark.sample(2)
@pytest.mark.parametrize("scheduled", [True, False])
@pytest.mark.parametrize("steps", [1, 4, 240])
def test_a_callback_takes_over_what_the_script_has_trained_before(
    followed: ScriptTraining, steps: int, scheduled: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """It did nothing where `accel run` had the model, and had no say where that followed the optimizer."""
    job = make()
    advance(training(*job), steps)
    if scheduled:
        torch.optim.lr_scheduler.ExponentialLR(job[2], 0.9)  # wraps the step that it comes to
    callback = TrainingCallback(**{**UNREMEMBERED, "budget": 50})
    found = fit(callback, job, 240)
    assert found.plan == {"quick": None} and found.steps > 200
    record = entry.optimized(job[0])
    assert record is not None and record.settings.budget.text == "50s"
    assert followed.models.modules == []
    callback._release()
    advance(training(*job), 26)
    assert followed.models.modules == [job[0]]
    assert "goes on without accel" not in capsys.readouterr().err


def test_what_is_on_trial_is_off_when_a_callback_begins(followed: ScriptTraining) -> None:
    """It stayed on for the whole training, where no step ended its trial."""
    advance_until(training(*make()), in_trial)
    callback = TrainingCallback(**UNREMEMBERED)
    callback._begin()
    assert not Quick.on
    callback._end()


def test_several_ranks_keep_what_is_on_unless_it_is_on_trial(only_quick: None) -> None:
    model, loader, optimizer = accel.optimize(*make(), allow="exact", budget=60)
    loop = training(model, loader, optimizer)
    advance_until(loop, in_trial)
    found = entry.optimized(model)
    assert found is not None
    assert found.journal.kept == {}
    found.session.run.world_size = 2  # only rank 0 knows the plan
    assert found.journal.kept == {}
    advance_until(loop, lambda: not found.session.searching)
    assert found.journal.kept == {"quick": None}


TRAINER = """
import sys
import torch
from torch import nn
from transformers import Trainer, TrainingArguments
from accel.integrations.transformers import TransformersCallback

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))

    def forward(self, x, labels=None):
        logits = self.net(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 1280
    def __getitem__(self, index):
        return {"x": torch.full((32,), index / 1280), "labels": index % 2}

torch.manual_seed(0)
arguments = TrainingArguments(
    output_dir="out", per_device_train_batch_size=8, num_train_epochs=1, report_to=[], save_strategy="no",
    disable_tqdm=True, use_cpu=True,
)
callback = TransformersCallback(allow="exact", budget=60)
model = Net()
Trainer(model=model, args=arguments, train_dataset=Data(), callbacks=[callback] if sys.argv[1] == "1" else []).train()
print("weights", sum(p.double().sum().item() for p in model.parameters()))
if callback.report:
    print("steps", callback.report.steps, file=sys.stderr)
"""

LIGHTNING = """
import sys
import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from lightning.pytorch.loggers import CSVLogger
from accel.integrations.lightning import LightningCallback

class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))

    def training_step(self, batch, index):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def validation_step(self, batch, index):
        x, y = batch
        self.log("val", nn.functional.cross_entropy(self.net(x), y))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def data(size):
    return DataLoader(TensorDataset(torch.randn(size, 32), torch.arange(size) % 2), batch_size=8, shuffle=True)

torch.manual_seed(0)
callback = LightningCallback(allow="exact", budget=60)
trainer = lightning.Trainer(
    max_epochs=2, accelerator="cpu", devices=1, logger=CSVLogger("logs"), enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, callbacks=[callback] if sys.argv[1] == "1" else [],
)
model = Net()
trainer.fit(model, data(640), data(32))
print("weights", sum(p.double().sum().item() for p in model.parameters()))
if callback.report:
    print("steps", callback.report.steps, file=sys.stderr)
"""

ACCELERATE = """
import sys
import torch
import accel
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(640, 32), torch.arange(640) % 2), batch_size=8, shuffle=True)
model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
if sys.argv[1] == "1":
    model, loader, optimizer = accel.optimize(model, loader, optimizer, allow="exact", budget=60)
for epoch in range(2):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
print("weights", sum(p.double().sum().item() for p in model.parameters()))
if sys.argv[1] == "1":
    print("steps", accel.explain(model).steps, file=sys.stderr)
"""

REORDERED = """
import torch
import accel
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(60)))
optimizer = torch.optim.AdamW(net.parameters(), lr=0.001)
loader = DataLoader(TensorDataset(torch.randn(640, 8)), batch_size=8)
model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
model, loader, optimizer = accel.optimize(model, loader, optimizer, budget=60, cache=False)
for epoch in range(4):
    for (x,) in loader:
        before = net[-1].weight.detach().clone()
        accelerator.backward(nn.functional.mse_loss(model(x), x))
        optimizer.step()
        optimizer.zero_grad()
        assert not torch.equal(before, net[-1].weight)
row = next(row for row in accel.explain(model).rows if row.name == "fused_optimizer")
assert "its update" not in row.why and "Error" not in row.why, row  # whether it is kept is the machine's affair
print("updated", len(optimizer.param_groups[0]["params"]))
"""


@pytest.mark.integration
def test_an_accelerate_optimizer_goes_on_updating_when_its_path_is_tried(tmp_path: Path) -> None:
    need("accelerate")
    (tmp_path / "train.py").write_text(REORDERED)
    run = warm.run(["train.py"], cwd=tmp_path, before=LET_TORCHVISION_IMPORT)
    assert run.returncode == 0, run.stderr
    assert "updated 120" in run.stdout


SCRIPTS = {
    "transformers": TRAINER,
    "transformers, bf16": TRAINER.replace("use_cpu=True", "use_cpu=True, bf16=True"),
    "transformers, accumulation": TRAINER.replace(
        "use_cpu=True", "use_cpu=True, gradient_accumulation_steps=4"
    ).replace("num_train_epochs=1", "num_train_epochs=4"),
    "transformers, frozen weights": TRAINER.replace(
        "model = Net()\n", "model = Net()\nmodel.net[0].requires_grad_(False)\n"
    ),
    "lightning": LIGHTNING,
    "accelerate": ACCELERATE,
}
"""Framework, and what of it → script; docs/hugging_face.md says what applies to these arguments."""


@pytest.mark.integration
@pytest.mark.parametrize("framework", SCRIPTS)
def test_a_framework_trains_to_the_same_weights(tmp_path: Path, framework: str) -> None:
    need(framework.partition(",")[0])
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPTS[framework]))
    plain, followed = (warm.run(["train.py", way], cwd=tmp_path, before=LET_TORCHVISION_IMPORT) for way in ("0", "1"))

    assert plain.returncode == followed.returncode == 0, plain.stderr + followed.stderr
    weights = [line for line in plain.stdout.splitlines() if line.startswith("weights")]
    assert len(weights) == 1
    assert weights[0] in followed.stdout.splitlines()
    steps = next(line for line in followed.stderr.splitlines() if line.startswith("steps"))
    assert int(steps.split()[1]) > 100
    if framework == "lightning":
        assert "accel/search_s" in (tmp_path / "logs/lightning_logs/version_1/metrics.csv").read_text()
