"""An unmodified loop, recorded: which steps, which phases, which loader, and everything put back."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from accel.profiler.loop.recorder import Recorder
from accel.profiler.phases import Measurement
from tests.accel.loops import PlayedClock


def parts() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    data = TensorDataset(torch.randn(40, 8), torch.zeros(40, dtype=torch.long))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=4)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any, after: Callable[[], None] = lambda: None
) -> None:
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        after()


def test_a_loop_with_a_loader(recorder: Recorder, seen: list[Measurement]) -> None:
    model, optimizer, loader = parts()
    for _ in range(3):
        train(model, optimizer, loader)

    assert recorder.delivery.steps == len(seen) == 30  # the request that finds the epoch over ends its last step
    assert [m.first for m in seen] == [n % 10 == 0 for n in range(30)]
    assert {m.samples for m in seen} == {4}
    assert recorder.loaders.loader is loader
    assert recorder.roots.modules == [model]
    for measured in seen[3:]:
        for phase in ("data", "forward", "loss", "backward", "optimizer"):
            assert measured.phases[phase] > 0, phase
        assert sum(measured.phases.values()) == pytest.approx(measured.seconds)
    assert recorder.delivery.unattributed() < 0.02


def test_a_plain_iterator(recorder: Recorder, seen: list[Measurement]) -> None:
    model, optimizer, _ = parts()
    train(model, optimizer, [(torch.randn(4, 8), torch.zeros(4, dtype=torch.long))] * 20)

    # A step ends where the next forward pass begins, once the model is known.
    assert recorder.delivery.steps == len(seen) >= 17
    assert recorder.loader_facts().kind == "own iterator"
    assert all(m.phases["forward"] > 0 and m.phases["backward"] > 0 for m in seen[2:])


def test_evaluation_between_steps_is_its_own_phase(
    recorder: Recorder, seen: list[Measurement], clock: PlayedClock
) -> None:
    model, optimizer, loader = parts()
    other = DataLoader(TensorDataset(torch.randn(8, 8)), batch_size=4)

    def evaluate() -> None:
        with torch.no_grad():
            for (x,) in other:
                model(x)
                clock.sleep(0.002)

    for _ in range(2):
        train(model, optimizer, loader, evaluate)

    assert recorder.loaders.loader is loader
    assert {m.samples for m in seen[1:]} == {4}
    for measured in seen[3:]:
        assert measured.phases["evaluation"] > 0.004
        assert measured.phases["evaluation"] > measured.phases["data"] + measured.phases["outside"]


def test_what_follows_the_last_step_is_in_no_account(
    recorder: Recorder, seen: list[Measurement], clock: PlayedClock
) -> None:
    model, optimizer, loader = parts()
    recorder.delivery.deferred = True
    batches = iter(loader)
    for _ in range(8):
        train(model, optimizer, [next(batches)])
    clock.sleep(0.3)
    recorder.clock.enter("evaluation")
    recorder.delivery.catch_up()

    assert len(seen) == 7
    assert recorder.delivery.unattributed() < 0.02


def test_accumulation_is_one_step_of_several_batches(recorder: Recorder, seen: list[Measurement]) -> None:
    model, optimizer, loader = parts()
    for _ in range(3):
        for number, (x, y) in enumerate(loader):
            nn.functional.cross_entropy(model(x), y).backward()
            if number % 5 == 4:
                optimizer.step()
                optimizer.zero_grad()

    assert [(m.batches, m.samples) for m in seen] == [(5, 20)] * 6


def test_two_optimizers_are_one_step(recorder: Recorder, seen: list[Measurement]) -> None:
    one, first, loader = parts()
    other, second, _ = parts()
    for x, y in loader:
        for model, optimizer in ((one, first), (other, second)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    assert recorder.delivery.steps == 10
    assert len(recorder.roots.modules) == 2


def test_a_container_that_is_never_called_gives_way_to_its_children(
    recorder: Recorder, seen: list[Measurement]
) -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(8, 2)

    holder = Holder()
    optimizer = torch.optim.SGD(holder.parameters(), lr=0.1)
    _, _, loader = parts()
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(holder.net(x), y).backward()
            optimizer.step()

    assert recorder.roots.modules == [holder.net]
    assert seen[-1].phases["forward"] > 0


def test_fetching_ahead_stands_outside_the_step(
    recorder: Recorder, seen: list[Measurement], clock: PlayedClock
) -> None:
    model, optimizer, loader = parts()

    def slow(samples: Any) -> Any:
        clock.sleep(0.01)
        return torch.utils.data.default_collate(samples)

    loader.collate_fn = slow
    got: list[int] = []

    def switch(measured: Measurement) -> None:
        seen.append(measured)
        recorder.loaders.ahead = len(seen) >= 5

    recorder.delivery.on_step = switch
    for x, y in loader:
        got.append(x.shape[0])
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    assert got == [4] * 10  # no batch is lost or seen twice
    assert all(m.phases["data"] >= 0.01 for m in seen[1:5])
    assert max(m.phases["data"] for m in seen[5:]) < 2e-3


def test_another_thread_s_loader_and_backward_pass_are_not_the_loop_s(
    recorder: Recorder, seen: list[Measurement]
) -> None:
    model, optimizer, loader = parts()
    other, other_optimizer, other_loader = parts()
    thread = threading.Thread(target=lambda: train(other, other_optimizer, other_loader))
    thread.start()
    thread.join()

    assert (recorder.delivery.steps, recorder.loaders.fetched, recorder.backwards) == (0, 0, 0)
    train(model, optimizer, loader)
    assert recorder.delivery.steps == 10


def test_a_raising_batch_passes_through(recorder: Recorder) -> None:
    class Broken(TensorDataset):
        def __getitem__(self, index: Any) -> Any:
            if index == 9:
                raise KeyError("nine")
            return super().__getitem__(index)

    model, optimizer, _ = parts()
    loader: DataLoader[Any] = DataLoader(Broken(torch.randn(40, 8), torch.zeros(40, dtype=torch.long)), batch_size=4)

    with pytest.raises(KeyError, match="nine"):
        train(model, optimizer, loader)
    assert recorder.clock.code == "host"


def test_a_fault_of_its_own_does_not_reach_the_loop(recorder: Recorder) -> None:
    def broken(measured: Measurement) -> None:
        raise RuntimeError("mine")

    recorder.delivery.on_step = broken
    model, optimizer, loader = parts()
    train(model, optimizer, loader)

    assert recorder.delivery.failed == "the recorder stopped at step 1: RuntimeError: mine"


def what_is_marked() -> tuple[Any, ...]:
    return (
        DataLoader.__iter__,
        _BaseDataLoaderIter.__init__,
        _BaseDataLoaderIter.__next__,
        torch.autograd.backward,
        torch.autograd.grad,
        torch.distributed.all_reduce,
        list(gc.callbacks),
        dict(_global_optimizer_pre_hooks),
        dict(_global_optimizer_post_hooks),
    )


def test_everything_is_put_back() -> None:
    before = what_is_marked()
    recorder = Recorder()
    recorder.start()
    model, optimizer, loader = parts()
    train(model, optimizer, loader)
    assert "_compiled_call_impl" in vars(model)
    recorder.stop()

    assert what_is_marked() == before
    assert "_compiled_call_impl" not in vars(model)


def test_training_is_bit_for_bit_the_same(recorder: Recorder) -> None:
    def trained() -> torch.Tensor:
        model, optimizer, loader = parts()
        torch.manual_seed(3)
        train(model, optimizer, DataLoader(loader.dataset, batch_size=4, shuffle=True))
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    watched = trained()
    recorder.stop()
    assert torch.equal(watched, trained())


def test_steps_put_by_are_the_same_steps(recorder: Recorder, seen: list[Measurement]) -> None:
    model, optimizer, loader = parts()
    train(model, optimizer, loader)
    recorder.delivery.deferred = True
    for _ in range(20):
        train(model, optimizer, loader)
    assert recorder.delivery.steps < 210  # the last piece is still on the tape
    recorder.delivery.catch_up()

    assert [m.step for m in seen] == list(range(210))
    assert [m.first for m in seen] == [n % 10 == 0 for n in range(210)]
    for measured in seen[3:]:
        assert sum(measured.phases.values()) == pytest.approx(measured.seconds)
        assert min(measured.phases[phase] for phase in ("data", "forward", "backward", "optimizer")) > 0
    assert recorder.delivery.unattributed() < 0.02


def test_a_long_tape_is_parsed_in_between(recorder: Recorder, seen: list[Measurement]) -> None:
    recorder.delivery.keep_steps = 150
    model, optimizer, loader = parts()
    recorder.delivery.deferred = True
    for _ in range(50):
        train(model, optimizer, loader)
    assert 300 <= len(seen) < 500
    recorder.delivery.catch_up()

    assert [m.step for m in seen] == list(range(500))
    assert recorder.delivery.unattributed() < 0.02


def test_hooks_of_a_marked_model_run_whenever_they_come(recorder: Recorder) -> None:
    model, optimizer, loader = parts()
    train(model, optimizer, loader)
    ran: list[str] = []
    handles = [
        model.register_forward_pre_hook(lambda *_: ran.append("before")),
        model.register_forward_hook(lambda *_: ran.append("after")),
        model.register_full_backward_pre_hook(lambda *_: ran.append("before backward")),
        model.register_full_backward_hook(lambda *_: ran.append("backward")),
    ]
    for handle in handles:
        ran.clear()
        model(torch.randn(4, 8, requires_grad=True)).sum().backward()
        assert len(ran) == len(handles) - handles.index(handle)
        handle.remove()
    ran.clear()
    everywhere = nn.modules.module.register_module_forward_hook(lambda *_: ran.append("everywhere"))
    model(torch.randn(4, 8))
    everywhere.remove()
    model(torch.randn(4, 8))
    assert ran and set(ran) == {"everywhere"}


def test_a_forward_put_in_later_is_called(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, loader = parts()
    train(model, optimizer, loader)
    monkeypatch.setattr(model, "forward", lambda x: "mine")

    assert model(torch.randn(4, 8)) == "mine"
