"""What a script trains is found while it runs: models, loaders and optimizers of all kinds of loops."""

from __future__ import annotations

import copy
import gc
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import accel
from accel import entry
from accel.profiler.loop import called_modules, callslot
from accel.run import ranks
from accel.run.gate import Gate
from accel.script.training import ScriptTraining
from tests.accel.loops import Net, Quick, assert_same, everything, loss_of, make, make_loader
from tests.accel.script_followed import OPTIONS, assert_followed_with_the_same_bits, epochs, step, steps_of, training

__all__ = ["training"]


class Reassigned:
    """Assigns the step of an optimizer before and after each one, as accelerate does when it scales the loss."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self._plain = optimizer, optimizer.step
        self.zero_grad = optimizer.zero_grad

    def step(self) -> None:
        self._optimizer.step = lambda: self._plain()  # type: ignore[method-assign]
        self._optimizer.step()
        self._optimizer.step = self._plain  # type: ignore[method-assign]


wrapped = pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, Reassigned], ids=["plain", "reassigned"])
Wrap = Callable[[torch.optim.Optimizer], Any]


@wrapped
def test_a_loop_over_a_loader_is_optimized_in_the_middle_of_its_first_epoch(
    training: ScriptTraining, wrap: Wrap
) -> None:
    model, loader, optimizer = make()
    epochs(model, loader, wrap(optimizer), 1)
    assert 8 <= steps_of(model) <= 11  # of 13: the first two are needed to learn
    epochs(model, loader, wrap(optimizer), 15)
    report = accel.explain(model)
    assert report.state == "done" and report.plan == {"quick": None}
    assert steps_of(model) >= 16 * 13 - 5
    assert type(model) is Net and type(loader) is DataLoader
    assert entry.MODELS[model].session.run.loader is loader


@wrapped
def test_the_bits_are_those_of_the_plain_script(only_quick: None, wrap: Wrap) -> None:
    def run() -> dict[str, Tensor]:
        model, loader, optimizer = make()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4)
        for _ in range(8):
            epochs(model, loader, wrap(optimizer), 1)
            scheduler.step()
            with torch.no_grad():
                for x, _ in loader:
                    model(x)
        return everything(model, optimizer)

    assert_followed_with_the_same_bits(run)


@wrapped
@pytest.mark.parametrize("place", ["optimize", "learn"])
def test_a_failure_of_accel_s_own_ends_accel_and_not_the_script(
    training: ScriptTraining,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    place: str,
    wrap: Wrap,
) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr(*{"optimize": (entry, "optimize"), "learn": (training, "_look_at")}[place], broken)
    model, loader, optimizer = make()
    epochs(model, loader, wrap(optimizer), 2)
    assert capsys.readouterr().err == "accel: RuntimeError: broken; the script goes on without accel\n"
    assert entry.optimized(model) is None
    assert training.why_nothing() == ""


def test_a_loop_that_makes_its_own_batches_ends_its_steps_where_the_optimizer_steps(training: ScriptTraining) -> None:
    def train(count: int) -> dict[str, Tensor]:
        torch.manual_seed(3)
        model, _, optimizer = make()
        for _ in range(count):
            step(model, optimizer, torch.randn(8, 6), torch.randint(9, (8,)))
        models.append(model)
        return everything(model, optimizer)

    models: list[nn.Module] = []
    followed = train(300)
    report = accel.explain(models[0])
    assert report.steps >= 290
    assert report.state == "done" and report.plan == {"quick": None}
    training.stop()
    Quick.on = False
    assert_same(followed, train(300))


@wrapped
def test_loops_that_make_their_own_batches_may_follow_one_another(training: ScriptTraining, wrap: Wrap) -> None:
    for seed in range(2):
        model, _, optimizer = make(seed)
        for _ in range(100):
            step(model, wrap(optimizer), torch.randn(8, 6), torch.randint(9, (8,)))
        assert wrap is Reassigned or "step" not in vars(optimizer)
        assert steps_of(model) >= 90


def test_a_step_of_two_optimizers_ends_with_the_second(training: ScriptTraining) -> None:
    model, _, _ = make()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.01) for part in (model.inner, model.head)]
    for _ in range(60):
        loss_of(model(torch.randn(8, 6)), torch.randint(9, (8,))).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert training.models.count == 1
    assert 55 <= steps_of(model) <= 60
    assert entry.MODELS[model].session.run.optimizers == optimizers


@pytest.mark.parametrize("has_loader", [True, False])
def test_both_models_of_a_gan_are_found(training: ScriptTraining, has_loader: bool) -> None:
    generator, discriminator = nn.Linear(6, 6), nn.Linear(6, 1)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (discriminator, generator)]
    loader = make_loader() if has_loader else [(torch.randn(8, 6), None)] * 13
    for _ in range(3):
        for x, _ in loader:
            fake = generator(torch.randn_like(x))
            for optimizer, loss in zip(
                optimizers,
                (
                    lambda x=x, fake=fake: discriminator(x).mean() - discriminator(fake.detach()).mean(),
                    lambda fake=fake: discriminator(fake).mean(),
                ),
                strict=True,
            ):
                optimizer.zero_grad()
                loss().backward()
                optimizer.step()
    assert training.models.count == 2
    assert min(steps_of(generator), steps_of(discriminator)) >= 30


def test_optimizers_that_step_only_once_are_let_go_of(
    training: ScriptTraining, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new one for each step, as beginners write it, and FedSGD: all of them stayed, and slowed each call down."""
    scans: list[int] = []
    find = called_modules._modules
    monkeypatch.setattr(called_modules, "_modules", lambda: scans.append(1) or find())
    model, _, _ = make()
    alive = weakref.WeakSet[Any]()
    gc.disable()
    try:
        for _ in range(80):
            optimizer = torch.optim.Adam(model.parameters())
            alive.add(optimizer)
            step(model, optimizer, torch.randn(8, 6), torch.randint(9, (8,)))
            assert len(model._forward_hooks) <= 2
        assert len(alive) <= 3
    finally:
        gc.enable()
    assert len(scans) <= 16  # each takes 20 ms
    training.stop()
    assert not model._forward_hooks and not callslot.contents(model)


def test_models_that_are_copied_for_one_step_are_let_go_of(training: ScriptTraining) -> None:
    model, _, _ = make()
    alive = weakref.WeakSet[Any]()
    gc.disable()
    try:
        for _ in range(30):
            copied = copy.deepcopy(model)
            alive.add(copied)
            optimizer = torch.optim.SGD(copied.parameters(), lr=0.01)
            step(copied, optimizer, torch.randn(8, 6), torch.randint(9, (8,)))
        assert len(alive) <= 9
    finally:
        gc.enable()


def test_an_optimizer_that_is_replaced_after_one_step_leaves_the_model_uncompiled(training: ScriptTraining) -> None:
    """What counts the calls was taken for the user's compiled call, and torch_compile was refused."""
    model, loader, first = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number, (x, target) in enumerate(loader):
        step(model, optimizer if number else first, x, target)
    assert training.models.count == 1
    assert not entry.MODELS[model].session.run.gate.compiled_by_user
    assert "step" not in vars(first)


def test_a_call_that_is_compiled_while_the_model_is_learned_stays(training: ScriptTraining) -> None:
    model, loader, optimizer = make()

    def compiled(*args: Any, **kwargs: Any) -> Any:
        return model._call_impl(*args, **kwargs)

    for number, (x, target) in enumerate(loader):
        if number == 1:
            model._compiled_call_impl = compiled
        step(model, optimizer, x, target)
    training.models.undo()
    assert model._compiled_call_impl is compiled


def test_a_call_that_is_only_counted_is_not_compiled() -> None:
    model = Net()
    callslot.fill(model, callslot.SlotCall(model._call_impl))
    assert not Gate(model, []).compiled_by_user


def test_the_optimizer_of_an_outer_loop_is_found_between_inner_ones(training: ScriptTraining) -> None:
    """First-order MAML with one inner step, by a new optimizer of the same parameters for each task."""
    model, _, outer = make()
    for _ in range(10):
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        for optimizer in (inner, outer):
            step(model, optimizer, torch.randn(8, 6), torch.randint(9, (8,)))
    assert training.models.count == 1


def test_an_optimizer_for_each_parameter_ends_its_steps_after_the_last(training: ScriptTraining) -> None:
    model, _, _ = make()
    optimizers = [torch.optim.SGD([parameter], lr=0.01) for parameter in model.parameters()]
    for _ in range(20):
        loss_of(model(torch.randn(8, 6)), torch.randint(9, (8,))).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert training.models.count == 1
    assert 15 <= steps_of(model) <= 20


def test_an_evaluation_is_left_alone(training: ScriptTraining) -> None:
    loader = make_loader()
    with torch.no_grad():
        iterator = iter(loader)
    assert type(iterator) is type(DataLoader.__iter__.__wrapped__(loader))
    assert training.loaders.proxies == []


def test_a_loop_without_a_loader_that_calls_no_module_is_left_alone_and_told(training: ScriptTraining) -> None:
    model = Parts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(20):
        optimizer.zero_grad()
        model.loss(torch.randn(8, 6)).sum().backward()
        optimizer.step()
    assert training.models.count == 0
    assert training.why_nothing().startswith("the loop neither takes batches from a DataLoader nor calls a module")
    assert "_compiled_call_impl" not in vars(model)


def test_batches_taken_by_another_thread_say_nothing_of_the_training(training: ScriptTraining) -> None:
    model, loader, optimizer = make()
    iterator = iter(loader)
    for _ in range(13):
        taken: list[Any] = []
        thread = threading.Thread(target=lambda into=taken: into.append(next(iterator)))
        thread.start()
        thread.join()
        step(model, optimizer, *taken[0])
    assert training.loaders.delivered == 0
    assert steps_of(model) >= 9  # its steps end where the optimizer steps


class Parts(nn.Module):
    """A module that is never called: its loop calls a part of it, or a method."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.other = Net(), nn.Linear(2, 2)

    def loss(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.net.inner.weight)


def test_a_part_that_is_called_in_place_of_the_whole_is_optimized(training: ScriptTraining) -> None:
    model = Parts()
    epochs(model.net, make_loader(), torch.optim.SGD(model.parameters(), lr=0.01), 2)
    assert entry.optimized(model) is None
    assert steps_of(model.net) >= 20


def test_of_a_module_that_is_never_called_loader_and_optimizer_remain(
    training: ScriptTraining, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Parts()
    optimizer, loader = torch.optim.SGD(model.parameters(), lr=0.01), make_loader()
    for _ in range(4):
        for x, target in loader:
            optimizer.zero_grad()
            loss_of(model.loss(x), target).backward()
            optimizer.step()
    assert steps_of(model) >= 20
    assert "the training steps never call Parts itself" in capsys.readouterr().err


def test_an_optimizer_made_later_for_a_model_that_is_known_is_left_to_its_session(training: ScriptTraining) -> None:
    model, loader, optimizer = make()
    epochs(model, loader, optimizer, 1)
    later = torch.optim.Adam(model.parameters(), lr=1e-3)
    epochs(model, loader, later, 1)
    assert training.models.count == 1
    assert entry.MODELS[model].session.run.optimizers == [optimizer, later]


def test_models_of_earlier_folds_are_let_go(training: ScriptTraining) -> None:
    folds = [make(seed) for seed in range(4)]
    for model, loader, optimizer in folds:
        epochs(model, loader, optimizer, 20)
    assert [entry.optimized(model) is not None for model, *_ in folds] == [False, False, False, True]


def test_a_script_that_calls_optimize_itself_is_left_to_it(training: ScriptTraining) -> None:
    model, loader, optimizer = accel.optimize(*make(), budget=60)
    epochs(model, loader, optimizer, 2)
    assert training.models.count == 0
    assert steps_of(model) >= 23


def test_everything_is_restored_when_the_script_has_ended(only_quick: None) -> None:
    hooks = sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks
    before = DataLoader.__iter__, dict(hooks)
    training = ScriptTraining(dict(OPTIONS), threading.get_ident(), whole="")
    training.start()
    model, loader, optimizer = make()
    step(model, optimizer, *next(iter(loader)))
    training.stop()
    assert (DataLoader.__iter__, dict(hooks)) == before
    assert "step" not in vars(optimizer) and "_compiled_call_impl" not in vars(model)
    assert training.why_nothing().startswith("the optimizer steps seen were too few (1)")


def test_a_scheduler_made_after_the_first_step_finds_the_optimizer_s_step(training: ScriptTraining) -> None:
    model, loader, optimizer = make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model, optimizer, *next(iter(loader)))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        epochs(model, loader, optimizer, 1)
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.025
    assert steps_of(model) >= 8


@pytest.mark.parametrize(
    ("train", "why"),
    [
        (lambda: None, "no step of a torch optimizer was seen (0 batches from a DataLoader)"),
        (lambda: list(make_loader()), "no step of a torch optimizer was seen (13 batches from a DataLoader)"),
    ],
)
def test_a_script_that_trains_nothing_is_told(training: ScriptTraining, train: Callable[[], Any], why: str) -> None:
    train()
    assert training.why_nothing() == f"{why}; a loop without one calls accel.optimize(model, loader) itself"


def test_training_in_another_thread_is_told(training: ScriptTraining) -> None:
    thread = threading.Thread(target=lambda: epochs(*make(), 1))
    thread.start()
    thread.join()
    assert training.models.count == 0
    assert training.why_nothing() == "13 updates ran in other threads; train in the thread that runs the script"


@pytest.mark.parametrize(
    ("before", "meanwhile", "left_alone"),
    [
        ({}, {"WORLD_SIZE": "2", "LOCAL_RANK": "0"}, True),  # Lightning starts `python train.py` for the others
        ({}, {"WORLD_SIZE": "2", "RANK": "0"}, False),  # a script that is started by hand for each rank
        ({}, {}, False),
        ({"WORLD_SIZE": "2", "RANK": "0"}, {}, False),  # torchrun
        ({"WORLD_SIZE": "2"}, {"LOCAL_RANK": "0"}, False),
    ],
)
def test_ranks_that_the_script_starts_itself_are_without_accel(
    only_quick: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    before: dict[str, str],
    meanwhile: dict[str, str],
    left_alone: bool,
) -> None:
    """Rank 0 waited ten seconds for them, and then said that every rank must call accel.optimize."""
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    training = ScriptTraining(dict(OPTIONS), threading.get_ident(), whole="")
    training.start()
    for name, value in meanwhile.items():
        monkeypatch.setenv(name, value)
    begun: list[nn.Module] = []
    monkeypatch.setattr(training.models, "begin", lambda model, *others: begun.append(model))
    monkeypatch.setattr(ranks, "are_several", lambda: True)
    try:
        epochs(*make(), 1)
    finally:
        training.stop()
    told = capsys.readouterr().err
    assert (not begun) == left_alone
    assert told.count("start them all with torchrun") == left_alone
    assert training.why_nothing() == "" or not left_alone
