"""The public calls: what comes back, what stays as it was, and how it is taken back."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import accel
from accel import entry, strategies
from accel.profiler.loop.update_hooks import UPDATES
from accel.search import priority
from accel.strategies.fused_optimizer import FusedOptimizer
from tests.accel.loops import (
    BATCH,
    SAMPLES,
    CopiesByHand,
    KeepsItsSlot,
    Net,
    Quick,
    advance,
    advance_until,
    assert_same,
    assert_trains_the_same,
    everything,
    go_to,
    loss_of,
    make,
    make_loader,
    plain_run,
    settled,
    training,
)

PHASES = ("observe", "trial", "hold")


def hooks() -> tuple[int, int]:
    return len(UPDATES._before.functions), len(UPDATES._after.functions)


# -- what comes back ---------------------------------------------------------------------------------------------------


def test_model_and_optimizer_come_back_as_the_same_objects() -> None:
    model, loader, optimizer = make()
    forward, kind = model.forward, type(model)

    back = accel.optimize(model, loader, optimizer, budget=60)
    assert len(back) == 3
    assert back[0] is model
    assert back[2] is optimizer
    assert type(model) is kind
    assert model.forward == forward

    accel.undo(model)
    assert len(accel.optimize(model, loader, budget=60)) == 2


def test_the_loader_answers_as_the_one_it_stands_for() -> None:
    model, loader, _ = make()
    _, proxy = accel.optimize(model, loader)

    assert len(proxy) == len(loader) == 13
    assert bool(proxy)
    assert proxy.dataset is loader.dataset
    assert proxy.sampler is loader.sampler
    assert proxy.batch_size == BATCH
    assert isinstance(proxy, DataLoader)
    proxy.epoch_number = 3
    assert loader.epoch_number == 3  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = proxy.no_such_thing
    assert pickle.loads(pickle.dumps(proxy)).batch_size == BATCH


def test_any_iterable_of_batches_is_a_loader() -> None:
    class Indexed:
        def __getitem__(self, index: int) -> Tensor:
            return batches[index]

    batches = [torch.full((2, 6), float(i)) for i in range(4)]
    generated = (batch for batch in batches)
    for loader in (batches, Indexed(), generated):
        _, proxy = accel.optimize(Net(), loader)
        assert bool(proxy)
        assert [float(batch[0, 0]) for batch in proxy] == [0.0, 1.0, 2.0, 3.0]
    with pytest.raises(TypeError, match="len"):
        len(proxy)


# -- what stays as it was ----------------------------------------------------------------------------------------------


def test_a_run_leaves_the_same_bits_as_the_plain_one(only_quick: None) -> None:
    """Weights, BatchNorm's buffers, momentum and the random state, at the end and in the middle of the search."""
    model, loader, optimizer = accel.optimize(*make(), allow="exact", budget=60)
    loop = training(model, loader, optimizer)

    steps = go_to("trial", loop, model)
    assert_same(everything(model, optimizer), plain_run(steps))
    steps += go_to("hold", loop, model)
    assert_same(everything(model, optimizer), plain_run(steps))


def test_state_dict_keys_stay_while_searching_and_after(only_quick: None) -> None:
    model, loader, optimizer = make()
    keys = list(model.state_dict())
    model, loader, optimizer = accel.optimize(model, loader, optimizer, budget=60)
    loop = training(model, loader, optimizer)
    for phase in PHASES:
        go_to(phase, loop, model)
        assert list(model.state_dict()) == keys
        model.load_state_dict(model.state_dict())
    accel.undo(model)
    assert list(model.state_dict()) == keys


def _pickled(model: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(model))


def _saved(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.sample(3)
@pytest.mark.parametrize("copied", [copy.deepcopy, _pickled, _saved])
@pytest.mark.parametrize("kind", [Net, KeepsItsSlot, CopiesByHand])
def test_a_copy_made_while_searching_is_plain(only_quick: None, kind: type[Net], copied: Any) -> None:
    model, loader, optimizer = make(kind=kind)
    _, loader, _ = accel.optimize(model, loader, optimizer, budget=60)
    go_to("trial", training(model, loader, optimizer), model)

    other = copied(model)

    assert type(other) is kind
    assert other._compiled_call_impl is None
    calls: list[int] = []
    other.register_forward_hook(lambda *_: calls.append(1))
    other.eval()
    x = torch.randn(4, 6)
    got = other(x)
    assert calls == [1]  # its own forward has run, not that of the model it was copied from
    training_before = model.training
    assert torch.equal(got, model.eval()(x))
    model.train(training_before)


def test_training_mode_is_the_loop_s_own(only_quick: None) -> None:
    model, loader, optimizer = accel.optimize(*make(), budget=60)
    model.inner.eval()
    loop = training(model, loader, optimizer)
    for phase in PHASES:
        go_to(phase, loop, model)
        assert model.training
        assert not model.inner.training
        model.eval()
        with torch.no_grad():
            one, other = model(loader.dataset.x), model(loader.dataset.x)
        assert torch.equal(one, other)
        assert not model.training
        model.train()
        model.inner.eval()


def test_forward_hooks_run_in_each_call(only_quick: None) -> None:
    def train(model: Any, loader: Any, optimizer: Any) -> None:
        seen: list[Tensor] = []
        model.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
        model.register_forward_hook(lambda module, args, output: seen.append(output) or output * 2)
        ran: list[bool] = []

        def loss(outputs: Tensor, target: Tensor) -> Tensor:
            ran.append(torch.equal(outputs, seen[-1] * 2))
            return loss_of(outputs, target)

        advance(training(model, loader, optimizer, loss=loss), 180)
        assert all(ran)
        assert entry.optimized(model) is None or accel.explain(model).rows[0].steps > 0

    assert_trains_the_same(train)


def test_learning_rate_schedulers_work_as_before(only_quick: None) -> None:
    rates: list[float] = []

    def train(model: Any, loader: Any, optimizer: Any) -> None:
        schedulers = (
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 400),
        )
        loop = training(model, loader, optimizer)
        for _ in range(180):
            next(loop)
            for scheduler in schedulers:
                scheduler.step()  # warns, and so fails, if it does not see the optimizer's steps
        rates.append(optimizer.param_groups[0]["lr"])

    assert_trains_the_same(train)
    assert rates[0] == rates[1]


def test_gradient_scalers_leave_out_the_same_steps(only_quick: None) -> None:
    scales: list[float] = []

    def train(model: Any, loader: Any, optimizer: Any) -> None:
        # So large that the first gradients overflow, and again each time it has grown.
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_factor=2.0**10, growth_interval=40)
        for _ in range(14):
            for x, target in loader:
                optimizer.zero_grad()
                scaler.scale(1e3 * loss_of(model(x), target)).backward()  # type: ignore[no-untyped-call]
                scaler.step(optimizer)
                scaler.update()
        scales.append(scaler.get_scale())

    assert_trains_the_same(train)
    assert scales[0] == scales[1] < 2.0**127


def test_an_optimizer_made_later_is_met(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategies, "REGISTRY", [FusedOptimizer])
    # Its share of the step is about what makes a trial worth while, or not.
    monkeypatch.setattr(priority, "too_little", lambda *args: "")
    model, loader, _ = make()
    model, loader = accel.optimize(model, loader, budget=60)
    assert any("an optimizer" in unseen for unseen in accel.explain(model).unseen)
    other = nn.Linear(2, 2)
    stranger = torch.optim.SGD(other.parameters(), lr=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loop = training(model, loader, optimizer)

    stranger.step()
    advance_until(loop, settled(model))

    report = accel.explain(model)
    assert not any("an optimizer" in unseen for unseen in report.unseen)
    assert report.rows[0].setting in ("fused", "foreach")
    assert report.rows[0].steps > 0
    assert stranger.param_groups[0]["fused"] is None  # not the model's: left alone
    accel.undo(model)
    assert optimizer.param_groups[0]["fused"] is None
    assert optimizer.param_groups[0]["foreach"] is None


def test_a_loop_without_an_optimizer_is_followed_batch_by_batch(only_quick: None) -> None:
    model, loader, _ = make()
    model, loader = accel.optimize(model, loader, budget=60)
    for _ in range(20):
        for x, target in loader:
            loss_of(model(x), target).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.01 * parameter.grad
                    parameter.grad = None
    assert accel.explain(model).plan == {"quick": None}


def test_inputs_that_can_not_be_copied_are_passed_on_and_nothing_is_tried(only_quick: None) -> None:
    class Fixed(list[Tensor]):
        def __init__(self, first: Tensor, second: Tensor) -> None:
            super().__init__([first, second])

        def __copy__(self) -> Any:
            raise TypeError("there is one of it")

    class Takes(Net):
        def forward(self, x: Any) -> Tensor:
            return super().forward(x[0])

    model, loader, optimizer = make(kind=Takes)
    model, loader = accel.optimize(model, loader, optimizer, budget=60)[:2]
    for _ in range(3):
        for x, target in loader:
            loss_of(model(Fixed(x, x)), target).backward()
            optimizer.step()
    row = accel.explain(model).rows[0]
    assert row.status == "undone"
    assert "can't be recorded" in row.why


# -- called twice ------------------------------------------------------------------------------------------------------


def test_called_twice_with_the_same_arguments_it_goes_on(only_quick: None) -> None:
    model, loader, optimizer = make()
    first = accel.optimize(model, loader, optimizer, budget=60)
    advance(training(*first), 20)
    sizes = hooks()

    for again in (loader, first[1]):
        second = accel.optimize(model, again, optimizer, budget=60)
        assert second[0] is model
        assert second[1] is first[1]
        assert second[2] is optimizer
    assert hooks() == sizes
    assert accel.explain(model).steps > 0


@pytest.mark.parametrize("other", [{"allow": "exact"}, {"budget": 30}, {"disable": ("quick",)}])
def test_called_with_other_arguments_it_starts_anew(
    only_quick: None, other: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    model, loader, optimizer = make()
    _, old, _ = accel.optimize(model, loader, optimizer, budget=60)
    loop = training(model, old, optimizer)
    go_to("trial", loop, model)
    sizes = hooks()

    _, new, _ = accel.optimize(model, old, optimizer, **{"budget": 60, **other})

    assert "Net was passed with other settings" in capsys.readouterr().err
    assert new is old  # so that a loop which goes on with what it had is seen too
    assert hooks() == sizes
    assert not Quick.on
    assert accel.explain(model).steps == 0
    advance(loop, 30)
    assert sorted(i for _, target in old for i in target.tolist()) == list(range(SAMPLES))
    assert accel.explain(model).steps > 20


# -- taken back --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", PHASES)
def test_undo_leaves_all_as_it_was_found(only_quick: None, phase: str) -> None:
    sizes = hooks()
    model, loader, optimizer = make()
    before = dict(vars(model))
    model, loader, optimizer = accel.optimize(model, loader, optimizer, allow="exact", budget=60)
    assert hooks() == (sizes[0] + 1, sizes[1] + 1)
    go_to(phase, training(model, loader, optimizer), model)

    accel.undo(model)

    assert hooks() == sizes
    assert not Quick.on
    assert vars(model) == before
    assert model._compiled_call_impl is None
    assert type(iter(loader)) is type(iter(make_loader()))
    with pytest.raises(accel.AccelError, match="must have been passed to accel"):
        accel.explain(model)
    accel.undo(model)  # once more is nothing
    accel.undo(Net())


@pytest.mark.parametrize("phase", PHASES)
def test_undo_in_the_middle_of_an_epoch_loses_no_batch(only_quick: None, phase: str) -> None:
    model, loader, optimizer = accel.optimize(*make(), allow="exact", budget=60)
    loop = training(model, loader, optimizer)
    steps = go_to(phase, loop, model)
    accel.undo(model)
    steps += len(advance(loop, 30))  # the rest of this epoch and two more
    assert_same(everything(model, optimizer), plain_run(steps))


@pytest.mark.parametrize("phase", PHASES)
def test_a_disabled_block_runs_plainly_and_the_search_goes_on(only_quick: None, phase: str) -> None:
    model, loader, optimizer = accel.optimize(*make(), allow="exact", budget=60)
    loop = training(model, loader, optimizer)
    steps = go_to(phase, loop, model)
    counted = accel.explain(model).steps
    was_on = Quick.on

    with accel.disabled(), accel.disabled():
        assert not Quick.on
        steps += len(advance(loop, 20))
        assert not Quick.on
        plain = make_loader()
        assert accel.optimize(model, plain)[1] is plain
    assert Quick.on == was_on
    assert accel.explain(model).steps == counted

    steps += advance_until(loop, settled(model)) if phase != "hold" else 0
    assert accel.explain(model).plan == {"quick": None}
    assert_same(everything(model, optimizer), plain_run(steps))


def test_the_environment_switches_accel_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL", "0")
    model, loader, optimizer = make()
    sizes = hooks()
    back = accel.optimize(model, loader, optimizer)
    assert all(a is b for a, b in zip(back, (model, loader, optimizer), strict=True))
    assert len(accel.optimize(model, loader)) == 2
    assert hooks() == sizes
    assert "_compiled_call_impl" not in vars(model)


def test_an_undone_model_is_freed(only_quick: None) -> None:
    model, loader, optimizer = accel.optimize(*make(), budget=60)
    go_to("trial", training(model, loader, optimizer), model)
    accel.undo(model)
    seen = weakref.ref(model)
    del model, loader, optimizer
    gc.collect()
    assert seen() is None
