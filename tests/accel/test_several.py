"""Several models over one loader, several loaders of one model: each is seen, none is dropped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import accel
from accel import entry
from accel.session.turns import Turns
from tests.accel.loops import Net, Quick, assert_same, everything, loss_of, make, make_loader, training


def gan(generator: Any, discriminator: Any, loader: Any, optimizers: Any, epochs: int, every: int = 1) -> int:
    """Train two models on each batch, as GANs do; the generator every so many batches."""
    steps = 0
    for _ in range(epochs):
        for number, (x, target) in enumerate(loader):
            optimizers[0].zero_grad()
            made = generator(x)[:, [0, 1, 2, 0, 1, 2]].detach()
            (loss_of(discriminator(x), target) + discriminator(made).sigmoid().mean()).backward()
            optimizers[0].step()
            if number % every == 0:
                optimizers[1].zero_grad()
                loss_of(generator(x), target).backward()
                optimizers[1].step()
            steps += 1
    return steps


def make_gan() -> tuple[Net, Net, Any, list[torch.optim.Optimizer]]:
    discriminator, loader, optimizer = make()
    torch.manual_seed(1)
    generator = Net()
    return generator, discriminator, loader, [optimizer, torch.optim.SGD(generator.parameters(), lr=0.05)]


@pytest.mark.sample(3)
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("way", ["chained", "same", "first", "two loaders"])
def test_both_models_of_a_gan_see_their_steps(
    only_quick: None, way: str, every: int, capsys: pytest.CaptureFixture[str]
) -> None:
    generator, discriminator, plain, optimizers = make_gan()
    discriminator, first, _ = accel.optimize(discriminator, plain, optimizers[0], allow="exact", budget=60)
    passed = {"chained": first, "same": plain, "first": first, "two loaders": make_loader()}[way]
    generator, second = accel.optimize(generator, passed, allow="exact", budget=60)
    iterated = first if way in ("first", "two loaders") else second
    steps = gan(generator, discriminator, iterated, optimizers, 4, every)

    seen = [accel.explain(model).steps for model in (discriminator, generator)]
    printed = capsys.readouterr().err
    if way == "two loaders":  # the generator's is not iterated, and that is said
        assert seen[1] == 0
        assert "Net was updated 3 times without a batch from the loader that accel.optimize returned" in printed
        assert seen[0] >= steps - 2
        return
    assert second is first
    assert "without a batch" not in printed
    assert seen[0] >= steps - 2
    assert seen[1] >= steps // every - 2
    accel.undo(discriminator)
    gan(generator, discriminator, iterated, optimizers, 1)
    assert accel.explain(generator).steps > seen[1]
    accel.undo(generator)
    assert type(iter(iterated)) is type(iter(plain))
    assert Quick.on is False


def test_two_models_over_one_loader_leave_the_bits_of_the_plain_loop(only_quick: None) -> None:
    def run(optimized: bool) -> list[dict[str, torch.Tensor]]:
        generator, discriminator, loader, optimizers = make_gan()
        if optimized:
            discriminator, loader = accel.optimize(discriminator, loader, allow="exact", budget=60)
            generator, loader = accel.optimize(generator, loader, allow="exact", budget=60)
        gan(generator, discriminator, loader, optimizers, 12)
        return [everything(discriminator, optimizers[0]), everything(generator, optimizers[1])]

    for accelerated, plain in zip(run(True), run(False), strict=True):
        assert_same(accelerated, plain)


def test_two_searches_in_the_same_steps_take_turns(only_quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    generator, discriminator, loader, optimizers = make_gan()
    discriminator, loader = accel.optimize(discriminator, loader, budget=60)
    generator, loader = accel.optimize(generator, loader, budget=60)
    sessions = [entry.MODELS[model].session for model in (discriminator, generator)]
    both = 0
    for _ in range(40):
        gan(generator, discriminator, loader, optimizers, 1)
        both += all(session.searching for session in sessions)
        if not any(session.searching for session in sessions):
            break
    assert both == 0
    assert "the search for Net begins once that for Net, in the same steps, has ended" in capsys.readouterr().err
    rows = [row for row in accel.explain(generator).rows if row.name == "quick"]
    assert rows[0].status != "not applicable"


def test_a_loader_is_tried_for_one_of_its_models(monkeypatch: pytest.MonkeyPatch) -> None:
    generator, discriminator, loader, _ = make_gan()
    _, loader = accel.optimize(discriminator, loader)
    accel.optimize(generator, loader)
    rows = {row.name: row for row in accel.explain(generator).rows}
    assert rows["loader_workers"].status == "not applicable"
    assert "another model's too" in rows["loader_workers"].why
    assert {row.name: row for row in accel.explain(discriminator).rows}["loader_workers"].why == ""


def test_a_search_waits_for_one_in_the_same_steps_only() -> None:
    class Searcher:
        searching = False

    turns, one, other = Turns(), Searcher(), Searcher()
    turns.join(one)
    turns.join(other)
    assert turns.step(one) is None
    one.searching = True
    assert turns.step(other) is one  # one's step has come between
    assert turns.step(other) is None  # its loop has been left, or goes on later
    turns.step(one)
    assert turns.step(other) is one
    one.searching = False
    turns.step(one)
    assert turns.step(other) is None
    one.searching = True
    turns.step(one)
    turns.leave(one)
    assert turns.step(other) is None


@pytest.mark.parametrize("order", ["train first", "validation first"])
def test_a_model_with_a_training_and_a_validation_loader_sees_its_steps(only_quick: None, order: str) -> None:
    def run(optimized: bool) -> tuple[dict[str, torch.Tensor], int]:
        model, train, optimizer = make()
        validation = make_loader(shuffle=False)
        if optimized and order == "train first":
            model, train, optimizer = accel.optimize(model, train, optimizer, allow="exact", budget=60)
        if optimized:
            model, validation = accel.optimize(model, validation, allow="exact", budget=60)
        if optimized and order != "train first":
            model, train, optimizer = accel.optimize(model, train, optimizer, allow="exact", budget=60)
        for _ in range(4):
            model.train()
            for x, target in train:
                optimizer.zero_grad()
                loss_of(model(x), target).backward()
                optimizer.step()
            model.eval()
            with torch.no_grad():
                for x, target in validation:
                    loss_of(model(x), target)
        steps = accel.explain(model).steps if optimized else 4 * 13
        if optimized:
            session = entry.MODELS[model].session
            assert session.run.loader is train._accel_loader
        return everything(model, optimizer), steps

    plain, accelerated = run(False), run(True)
    assert_same(accelerated[0], plain[0])
    assert accelerated[1] >= plain[1] - 2


def test_a_loader_made_anew_for_each_epoch_is_followed(only_quick: None) -> None:
    def train_epoch(model: nn.Module, optimizer: Any, optimized: bool) -> None:
        loader = make_loader()
        if optimized:
            model, loader, optimizer = accel.optimize(model, loader, optimizer, allow="exact", budget=60)
        for x, target in loader:
            optimizer.zero_grad()
            loss_of(model(x), target).backward()
            optimizer.step()

    def run(optimized: bool) -> dict[str, torch.Tensor]:
        model, _, optimizer = make()
        for _ in range(12):
            train_epoch(model, optimizer, optimized)
        if optimized:
            assert accel.explain(model).steps >= 12 * 13 - 2
        return everything(model, optimizer)

    assert_same(run(True), run(False))


def test_fetching_strategies_go_on_to_the_loader_that_took_the_first_one_s_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, first, optimizer = make()
    Quick.on = True
    model, _, optimizer = accel.optimize(model, first, optimizer, allow="exact", budget=60)
    model, second, optimizer = accel.optimize(model, make_loader(), optimizer, allow="exact", budget=60)
    session = entry.MODELS[model].session
    for _ in range(3):
        for x, target in second:
            optimizer.zero_grad()
            loss_of(model(x), target).backward()
            optimizer.step()
    assert session.run.loader is second._accel_loader
    assert session.run.fetching is second._accel_fetching
    assert session.failed == ""


def test_folds_each_with_a_model_of_its_own_see_their_steps(only_quick: None) -> None:
    for fold in range(3):
        model, loader, optimizer = accel.optimize(*make(fold), allow="exact", budget=60)
        loop = training(model, loader, optimizer)
        for _ in range(30):
            next(loop)
        loop.close()
        assert accel.explain(model).steps >= 28
        session = entry.MODELS[model].session
        assert session.searching  # the folds before, whose loops have been left, hold up nobody
