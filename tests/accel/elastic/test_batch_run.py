"""The batch size in real loops: decided while they train, with the learning rate of each step, and nothing lost."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import accel
from accel import entry, strategies
from accel.dataio.elastic_sampler import ElasticSampler
from accel.elastic.batch_decision import BatchDecision
from accel.elastic.batch_report import profile_of
from accel.elastic.batch_run import BatchRun
from accel.elastic.controller import BatchController
from accel.elastic.running import progress_of
from accel.elastic.scaling_rules import BatchScale, Linear, NoScaling
from accel.elastic.step_batches import StepBatches
from accel.errors import InvalidArgument
from accel.goodput.efficiency import NoiseInterval
from accel.integrations.trackers import metrics
from accel.profiler.optimizers import Optimizers
from accel.run import Run
from accel.run.ranks import Ranks
from accel.session.session import Session

PLAIN = {"cache": False, "budget": 0.001}


class Numbered(Dataset[tuple[Tensor, Tensor, int]]):
    """Samples with their number, which `seen` counts."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(count, 8, generator=generator)
        self.y = self.x.sum(1, keepdim=True)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.x[index], self.y[index], index


class Clock:
    """Counts what is done: 1 ms for a step, and a bit for each sample."""

    def __init__(self) -> None:
        self.now, self.sample_s = 0.0, 1e-6

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Time the batch run's steps by a clock of the test's own, and skip the search for strategies."""
    clock = Clock()
    plain = BatchRun.__init__

    def init(self: BatchRun, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **{**kwargs, "clock": clock})

    monkeypatch.setattr(BatchRun, "__init__", init)
    monkeypatch.setattr("accel.session.session.Session.searching", property(lambda self: False))
    return clock


def known_noise(monkeypatch: pytest.MonkeyPatch, phi: float) -> None:
    noise = NoiseInterval(phi, 0.8 * phi, 1.2 * phi)
    monkeypatch.setattr("accel.elastic.batch_run.interval_of", lambda estimate: noise)


def batch_run(model: nn.Module) -> BatchRun:
    optimized = entry.optimized(model)
    assert optimized is not None
    assert optimized.elastic is not None
    assert optimized.elastic.batch is not None
    return optimized.elastic.batch


def train(
    model: nn.Module, loader: Any, optimizer: torch.optim.Optimizer, clock: Clock, each: Callable[[int], None] = print
) -> list[list[int]]:
    """Train for one epoch, and return the samples of each batch."""
    taken = []
    for step, (x, y, index) in enumerate(loader):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        clock.now += 1e-3 + len(x) * clock.sample_s
        optimizer.step()
        taken.append(index.tolist())
        each(step)
    return taken


def nothing(step: int) -> None:
    pass


@pytest.fixture
def job() -> Iterator[tuple[nn.Module, DataLoader[Any], torch.optim.Optimizer]]:
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    yield model, DataLoader(Numbered(3000), batch_size=8, shuffle=True), torch.optim.SGD(model.parameters(), 0.01)
    accel.undo(model)


def test_the_batch_grows_by_goodput_and_each_epoch_has_each_sample_once(
    job: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    known_noise(monkeypatch, 5000.0)
    model, loader, optimizer = accel.optimize(*job, max_batch_size=256, **PLAIN)
    epochs = [train(model, loader, optimizer, clock, nothing) for _ in range(3)]

    for epoch in epochs:
        assert sorted(itertools.chain(*epoch)) == list(range(3000))
    assert len({tuple(itertools.chain(*epoch)) for epoch in epochs}) == 3  # shuffled anew
    sizes = [len(batch) for batch in itertools.chain(*epochs)]
    assert sizes[0] == 8
    assert max(sizes) == 256
    assert batch_run(model).controller.batch == 256  # type: ignore[union-attr]
    assert len(loader) == -(-3000 // 256)


def test_each_step_runs_at_the_learning_rate_of_its_batch(
    job: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    known_noise(monkeypatch, 5000.0)
    model, loader, optimizer = job
    weights = [p for p in model.parameters()]
    before: list[Tensor] = []
    ratios: list[float] = []
    optimizer.register_step_pre_hook(lambda *_: before.append(torch.cat([p.detach().flatten() for p in weights])))

    def moved(*_: Any) -> None:
        after = torch.cat([p.detach().flatten() for p in weights])
        gradient = torch.cat([p.grad.flatten() for p in weights if p.grad is not None])
        ratios.append(float((before[-1] - after).norm() / gradient.norm()) / 0.01)

    optimizer.register_step_post_hook(moved)
    model, loader, optimizer = accel.optimize(*job, max_batch_size=64, scaling_rule=Linear(), **PLAIN)
    taken = train(model, loader, optimizer, clock, nothing)

    assert optimizer.param_groups[0]["lr"] == 0.01
    for ratio, batch in zip(ratios[5:], taken[5:], strict=True):
        assert ratio == pytest.approx(max(1.0, len(batch) / 8), rel=1e-3)
    assert {len(batch) for batch in taken} >= {8, 16, 32, 64}


@pytest.mark.parametrize(("kind", "factor"), [(torch.optim.Adam, 8**0.5), (torch.optim.SGD, 8 * 4008 / 4064)])
def test_rates_are_those_of_the_last_known_noise_when_it_is_not_known_any_more(
    job: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch, kind: Any, factor: float
) -> None:
    """Else Adam's would fall to that of the user's batch, and SGD's rise to eight times its own."""
    known_noise(monkeypatch, 5000.0)
    model, loader, optimizer = job
    options = {"max_batch_size": 64, **PLAIN}
    model, loader, optimizer = accel.optimize(model, loader, kind(model.parameters(), 1e-3), **options)
    train(model, loader, optimizer, clock, nothing)
    assert len(loader) == -(-3000 // 64)

    unknown = NoiseInterval(math.inf, 0.0, math.inf)  # the loss falls too slowly to show it
    monkeypatch.setattr("accel.elastic.batch_run.interval_of", lambda estimate: unknown)
    (_, scaler), *_ = batch_run(model)._rates._scalers
    rates: list[float] = []
    for _ in range(8):
        taken = train(model, loader, optimizer, clock, lambda step: rates.append(scaler.multipliers[0].lr))
        assert {len(batch) for batch in taken[:-1]} == {64}
        rates.pop()  # the last step of an epoch has fewer samples
    assert rates == pytest.approx([factor] * len(rates), rel=1e-3)


def test_the_batch_is_decided_by_the_last_known_noise_while_it_is_hidden(
    job: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, hidden = NoiseInterval(5000.0, 4000.0, 6000.0), NoiseInterval(math.inf, 0.0, math.inf)
    noises = itertools.chain([known], itertools.repeat(hidden))
    monkeypatch.setattr("accel.elastic.batch_run.interval_of", lambda estimate: next(noises))
    model, loader, optimizer = accel.optimize(*job, max_batch_size=64, **PLAIN)
    train(model, loader, optimizer, clock, nothing)
    assert loader.batch_sampler.batch_sizes == (64,)


def test_a_noise_scale_without_an_upper_end_is_none_in_the_report(
    job: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    pure = NoiseInterval(math.inf, 4000.0, math.inf)
    monkeypatch.setattr("accel.elastic.batch_run.interval_of", lambda estimate: pure)
    model, loader, optimizer = accel.optimize(*job, max_batch_size=64, **PLAIN)
    train(model, loader, optimizer, clock, nothing)
    controller = batch_run(model).controller
    assert controller is not None and math.inf in [decision.noise for decision in controller.decisions]
    assert math.inf not in [row.noise for row in accel.explain(model).batch_rows]


@pytest.mark.parametrize(("most", "reached"), [(64, 64), (99, 99 // 2 * 2), (90, 90)])
def test_a_loop_that_accumulates_keeps_its_batches_per_step(
    job: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch, most: int, reached: int
) -> None:
    known_noise(monkeypatch, 5000.0)
    model, loader, optimizer = accel.optimize(*job, max_batch_size=most, **PLAIN)
    seen: list[int] = []
    for number, (x, y, index) in enumerate(loader):
        (nn.functional.mse_loss(model(x), y) / 2).backward()
        clock.now += 1e-3 + len(x) * clock.sample_s
        seen += index.tolist()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()

    controller = batch_run(model).controller
    assert controller is not None
    assert controller.base_batch == 16
    assert controller.batch == reached
    assert loader.batch_sampler.batch_sizes == (reached // 2,)
    assert sorted(seen) == list(range(3000))


@pytest.mark.parametrize("clips", [False, True], ids=["plain", "clips"])
def test_a_step_of_several_batches_is_one_of_all_their_samples(
    job: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch, clips: bool
) -> None:
    known_noise(monkeypatch, 5000.0)
    resumed = False

    def decide(self: BatchController, step: int, noise: NoiseInterval | None) -> BatchDecision:
        self.accumulates, self._largest = True, 9
        self._now = 32 if resumed or step >= 60 else 24 if step >= 20 else 8
        return self._decided(step, noise, "as the test says", 4)

    monkeypatch.setattr(BatchController, "decide", decide)
    monkeypatch.setattr(BatchController, "_goodput", lambda self, batch, noise: 1.0)
    plain = copy.deepcopy(job[0])
    own = torch.optim.SGD(plain.parameters(), 0.01)
    data = job[1].dataset
    model, loader, optimizer = accel.optimize(*job, max_batch_size=32, scaling_rule=NoScaling(), **PLAIN)
    pending: list[int] = []
    samples: list[int] = []

    steps: list[list[int]] = []

    def stepped(*_: Any) -> None:
        samples.append(len(pending))
        steps.append([*pending])
        pending.clear()

    optimizer.register_step_post_hook(stepped)
    for _ in range(2):
        seen = []
        for x, y, index in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            clock.now += 1e-3
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            pending += index.tolist()
            seen += index.tolist()
            optimizer.step()
        assert sorted(seen) == list(range(3000))
        assert not pending  # an epoch ends with a step
    assert set(samples[:20]) == {8} and {24, 32} <= set(samples) <= {8, 16, 24, 32}
    assert batch_run(model).note == ""
    assert any(row.batch == 32 for row in batch_run(model).rows())
    state = batch_run(model).state_dict()
    assert (state["accumulated"], state["micro_batches"]) == (4, 1)
    accel.undo(model)
    assert "step" not in optimizer.__dict__
    for step in steps:  # the same with one batch of all its samples
        own.zero_grad()
        nn.functional.mse_loss(plain(data.x[step]), data.y[step]).backward()
        if clips:
            nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        own.step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)

    # A run that goes on from there is not taken for one whose loop accumulates by itself.
    resumed = True
    model, loader, optimizer = accel.optimize(model, loader, optimizer, max_batch_size=32, **PLAIN)
    batch_run(model).load_state_dict(state)
    samples.clear()
    for x, y, index in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        clock.now += 1e-3
        pending += index.tolist()
        optimizer.step()
    assert set(samples[:4]) == {8} and set(samples[8:-1]) == {32}
    assert (batch_run(model).note, batch_run(model).state_dict()["micro_batches"]) == ("", 1)
    accel.undo(model)


@pytest.mark.parametrize("odd", ["two passes", "another optimizer"])
def test_rates_follow_the_batch_where_nothing_can_be_accumulated(
    job: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch, odd: str
) -> None:
    known_noise(monkeypatch, 5000.0)
    model, loader, optimizer = accel.optimize(*job, max_batch_size=256, scaling_rule=Linear(), **PLAIN)
    other = torch.optim.SGD(model.parameters(), 0.0)
    scales: list[tuple[int, float]] = []
    for _ in range(3):
        for x, y, _ in loader:
            optimizer.zero_grad()
            output = model(x)
            for _ in range(2 if odd == "two passes" else 1):
                nn.functional.mse_loss(output, y).backward(retain_graph=True)
            clock.now += 1e-3 + len(x) * clock.sample_s
            before = [p.detach().clone() for p in model.parameters()]
            optimizer.step()
            moved = math.hypot(
                *(float((b - p.detach()).norm()) for b, p in zip(before, model.parameters(), strict=True))
            )
            steep = math.hypot(*(float(p.grad.norm()) for p in model.parameters() if p.grad is not None))
            if steep > 1e-2:  # less is lost in the rounding of the weights
                scales.append((max(8, len(x)), moved / steep / 0.01))
            if odd == "another optimizer":
                other.step()
    assert batch_run(model).note == ""
    assert max(size for size, _ in scales) > 8
    for size, scale in scales:
        assert scale == pytest.approx(size / 8, rel=0.05)


def test_the_noise_of_the_loop_itself_lets_it_grow_and_its_labels_noise_does_not(clock: Clock) -> None:
    """Real measurements: a regression that is learnt, and one whose labels are random."""
    final = {}
    for name in ("learnt", "random"):
        torch.manual_seed(0)
        x = torch.randn(4000, 8)
        y = x.sum(1, keepdim=True) + 3 * torch.randn(4000, 1) if name == "learnt" else torch.randn(4000, 1)
        model = nn.Linear(8, 1)
        nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
        loader: Any = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
        optimizer = torch.optim.SGD(model.parameters(), 0.001)
        model, loader, optimizer = accel.optimize(model, loader, optimizer, max_batch_size=512, **PLAIN)
        for step, (a, b) in enumerate(itertools.chain(loader, loader)):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(a), b).backward()
            clock.now += 1e-3 + len(a) * clock.sample_s
            optimizer.step()
            if step == 600:
                break
        controller = batch_run(model).controller
        assert controller is not None
        final[name] = controller.batch
        accel.undo(model)

    assert final["learnt"] >= 32
    assert final["random"] == 8


def test_the_batch_is_decided_during_a_search_in_steps_without_a_candidate(
    job: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search may take a thousand steps: the noise was once measured, and the batch decided, only after it."""
    known_noise(monkeypatch, 1e5)
    steps = 0
    # Turns of ten steps, as of a trial.
    monkeypatch.setattr(Session, "is_busy", property(lambda self: steps // 10 % 2 == 1))
    left_out, begun_again, changed, measured = [], [], [], []
    monkeypatch.setattr(Session, "leave_out_step", lambda self: left_out.append(steps))
    monkeypatch.setattr(Session, "begin_again", lambda self, growth: begun_again.append(steps))
    model, loader, optimizer = accel.optimize(*job, max_batch_size=64, **PLAIN)

    def each(step: int) -> None:
        nonlocal steps
        run = batch_run(model)
        if run._meter is not None and run._meter.is_measuring:
            measured.append(steps)
        steps = step + 1
        if run.controller is not None and len(run.controller.decisions) > len(changed) + 1:
            changed.append(step)

    train(model, loader, optimizer, clock, each)
    assert changed and measured
    assert all(step // 10 % 2 == 0 for step in measured)
    others = set(left_out) - set(measured)  # after a rehearsal, and perhaps the step after the last one
    assert set(measured) <= set(left_out)
    assert len(others) <= len(changed) + 1
    assert len(begun_again) == len(changed)
    assert all(step // 10 % 2 == 0 for step in begun_again)


def test_calls_are_looked_at_only_in_steps_that_need_it(job: Any) -> None:
    model, loader, optimizer = accel.optimize(*job, max_batch_size=8, cache=False, disable=strategies.names())
    run = batch_run(model)
    passed: dict[bool, list[bool]] = {True: [], False: []}
    for x, y, _ in itertools.chain(loader, loader, loader):
        if run._meter is not None:
            passed[run._meter.is_measuring].append(run._run.gate.passes)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    assert passed[True] and not any(passed[True])
    assert sum(passed[False]) > 0.5 * len(passed[False])
    assert run._meter is not None and run._meter.noise.measured > 3


def test_a_session_leaves_out_a_step_and_begins_again(job: Any) -> None:
    model, loader, optimizer = accel.optimize(*job, cache=False)
    session = entry.optimized(model).session  # type: ignore[union-attr]
    booked = []
    for step, (x, y, _) in enumerate(loader):
        booked.append(len(session._result.measurements) + len(session._result.settling))
        if step == 8:
            session.leave_out_step()
        if step == 10:
            session.begin_again()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        if step == 12:
            break
    assert booked[8:] == [booked[8], booked[8], booked[8] + 1, 1, 2]


def test_undo_goes_back_to_the_loops_batch_and_each_epoch_is_whole(
    job: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    known_noise(monkeypatch, 5000.0)
    model, loader, optimizer = accel.optimize(*job, max_batch_size=64, **PLAIN)
    first = train(model, loader, optimizer, clock, lambda step: accel.undo(model) if step == 80 else None)
    second = train(model, loader, optimizer, clock, nothing)
    third = train(model, loader, optimizer, clock, nothing)

    assert len(first[80]) == 64
    assert {len(batch) for batch in second} == {8}
    assert [sorted(itertools.chain(*epoch)) for epoch in (first, second, third)] == [list(range(3000))] * 3
    assert second != third
    assert not optimizer._optimizer_step_pre_hooks


def test_progress_goes_on_after_undo(job: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A schedule by it stood still for the rest of the training."""
    known_noise(monkeypatch, 5000.0)
    model, loader, optimizer = accel.optimize(*job, max_batch_size=64, **PLAIN)
    counts, seen = progress_of(model), list[float]()

    def each(step: int) -> None:
        seen.append(counts.progress)
        if step == 80:
            accel.undo(model)

    train(model, loader, optimizer, clock, each)
    assert seen[80] > 81
    assert [b - a for a, b in itertools.pairwise(seen[80:])] == pytest.approx([1.0] * (len(seen) - 81))


def test_the_report_says_what_was_decided_and_why(job: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    known_noise(monkeypatch, 5000.0)
    model, loader, optimizer = accel.optimize(*job, max_batch_size=64, **PLAIN)
    train(model, loader, optimizer, clock, nothing)
    report = accel.explain(model)

    assert report.max_batch_size == 64
    assert [row.batch for row in report.batch_rows] == [8, 16, 32, 64]
    assert "2.00x the samples per second" in report.batch_rows[1].why
    assert report.batch_rows[1].measured == pytest.approx(report.batch_rows[1].goodput, rel=0.05)
    assert report.progress is not None
    assert report.progress > report.steps
    assert "8 → 64 samples" in str(report)
    assert metrics(report)["accel/batch_size"] == 64


def test_a_loop_whose_noise_cannot_be_measured_keeps_its_batch_and_the_report_says_why(clock: Clock) -> None:
    model = nn.Embedding(50, 4, sparse=True)
    data = TensorDataset(torch.randint(0, 50, (400,)))
    loader: Any = DataLoader(data, batch_size=4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, loader, optimizer = accel.optimize(model, loader, optimizer, max_batch_size=64, **PLAIN)

    def epoch() -> None:
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    with pytest.warns(RuntimeWarning, match="the gradient noise can't be measured: a gradient is sparse"):
        epoch()

    assert "can't be measured" in accel.explain(model).batch_note
    assert loader.batch_sampler.batch_sizes == (4,)
    accel.undo(model)


def test_a_rule_of_ones_own_is_asked(job: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    known_noise(monkeypatch, 5000.0)
    asked: list[BatchScale] = []

    def rule(batch: BatchScale) -> float:
        asked.append(batch)
        return 1.0

    model, loader, optimizer = accel.optimize(*job, max_batch_size=16, scaling_rule=rule, **PLAIN)
    train(model, loader, optimizer, clock, nothing)
    assert {batch.batch_size for batch in asked} >= {16}
    assert asked[-1].base_batch_size == 8
    assert asked[-1].noise == 5000.0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"max_batch_size": 4}, "at least the loader's batch over all ranks, 8 samples, got 4; raise"),
        ({"max_batch_size": 8.0}, "a number of samples or None, got 8.0"),
        ({"max_batch_size": True}, "a number of samples or None, got True"),
        ({"scaling_rule": NoScaling()}, "scaling_rule needs max_batch_size"),
        ({"max_batch_size": 64, "scaling_rule": 2}, "a rule of accel.elastic.scaling_rules or a function"),
    ],
)
def test_wrong_arguments_are_refused(job: Any, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        accel.optimize(*job, **arguments)


def _batch_run(replicas: int, local: int, most: int) -> BatchRun:
    sampler = ElasticSampler(1000, batch_size=local, num_replicas=replicas, rank=0)
    users = create_autospec(Run, instance=True, model=nn.Linear(8, 1))
    users.optimizers = Optimizers()
    run = BatchRun(create_autospec(Session, instance=True), users, sampler, most)
    run.close()  # it listens to nothing
    return run


def _saved(batch: int, base: int, **changes: Any) -> dict[str, Any]:
    controller = {"base": base, "batch": batch, "times": {}, "decisions": [], "largest_local": None}
    known = [5000.0, 4000.0, math.inf, 64.0, 0.5]
    return {
        "controller": controller,
        "noise": None,
        "known_noise": known,
        "progress": 3.5,
        "loader_batch": 8,
        "micro_batches": 2,
        "fits": 32,
        **changes,
    }


@pytest.mark.parametrize(
    ("replicas", "most", "local"),
    [(4, 256, 16), (1, 256, 32), (16, 256, 4), (3, 256, 21), (64, 256, 1), (4, 64, 8)],
    ids=lambda value: str(value),
)
def test_on_another_number_of_ranks_the_users_batch_stays(replicas: int, most: int, local: int) -> None:
    """Begun on 2 ranks with 2 batches of 8 in a step, 32 samples; 128 when it was saved.

    One rank has not had the memory of two: it begins with the largest batch that it has had.
    """
    run = _batch_run(replicas, 8, most)
    run.load_state_dict(_saved(128, 32))
    run.check()  # 64 ranks of 2 x 8 would be 1,024
    assert run._sampler.batch_sizes == (local,) * replicas
    assert (run._base, run._known_noise, run.progress) == (32, NoiseInterval(5000.0, 4000.0, math.inf, 64.0, 0.5), 3.5)
    again = _batch_run(replicas, 8, most)
    again.load_state_dict(run.state_dict())
    assert again.state_dict() == run.state_dict()


def test_ranks_that_the_largest_batch_leaves_without_a_sample_are_refused() -> None:
    run = _batch_run(64, 8, 100)
    run.load_state_dict(_saved(64, 32))
    with pytest.raises(InvalidArgument, match="loader's batch over all ranks, 128 samples, got 100; raise it"):
        run.check()


@pytest.mark.parametrize(("memory", "local"), [(80, 64), (78, 64), (40, 8)])
def test_a_device_with_less_memory_begins_with_the_users_share(
    monkeypatch: pytest.MonkeyPatch, memory: int, local: int
) -> None:
    """It ran out of memory in its first step, began again from the same checkpoint, and so on."""
    monkeypatch.setattr("accel.elastic.batch_run.total_memory", lambda device: memory)
    run = _batch_run(2, 8, 256)
    run.load_state_dict(_saved(256, 32, fits=64, memory=80, steps=700))
    assert (run._sampler.batch_sizes, run._fits) == ((local, local), local)
    assert (run.state_dict()["memory"], run.state_dict()["steps"]) == (memory, 700)


def test_another_batch_of_the_loader_is_another_batch_of_the_users() -> None:
    run = _batch_run(2, 16, 256)
    run.load_state_dict(_saved(128, 32))
    assert (run._base, run._sampler.batch_sizes) == (None, (16, 16))
    with pytest.raises(InvalidArgument, match="loader's batch over all ranks, 256 samples, got 200; raise it"):
        _batch_run(16, 16, 200).check()


def test_one_loader_has_one_batch_size(job: Any) -> None:
    loader = accel.optimize(*job, max_batch_size=64, **PLAIN)[1]
    again = accel.optimize(*job, max_batch_size=64, **PLAIN)
    assert again[1] is loader  # the plain loader once more, as in a loop over folds

    other = nn.Linear(8, 1)
    with pytest.raises(InvalidArgument, match="max_batch_size and checkpoint must be given for one model"):
        accel.optimize(other, loader, max_batch_size=64)
    accel.optimize(other, loader, **PLAIN)
    accel.undo(other)


def test_a_call_with_other_settings_and_one_after_undo_count_each_sample_once(
    job: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    known_noise(monkeypatch, 5000.0)
    model, loader, optimizer = accel.optimize(*job, max_batch_size=64, **PLAIN)
    epochs = [train(model, loader, optimizer, clock, nothing)]
    model, loader, optimizer = accel.optimize(model, loader, optimizer, max_batch_size=128, **PLAIN)
    epochs.append(train(model, loader, optimizer, clock, nothing))
    accel.undo(model)
    model, loader, optimizer = accel.optimize(model, loader, optimizer, max_batch_size=32, **PLAIN)
    epochs.append(train(model, loader, optimizer, clock, nothing))

    assert [sorted(itertools.chain(*epoch)) for epoch in epochs] == [list(range(3000))] * 3


def test_rates_stay_those_of_the_batch_where_the_session_hears_of_no_steps(
    job: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    known_noise(monkeypatch, 5000.0)
    model, loader, optimizer = accel.optimize(*job, max_batch_size=64, scaling_rule=Linear(), **PLAIN)
    train(model, loader, optimizer, clock, nothing)
    (_, scaler), *_ = batch_run(model)._rates._scalers
    with accel.disabled():
        taken = train(model, loader, optimizer, clock, nothing)
        assert len(taken[0]) == 64
        assert scaler.multipliers[0].lr == max(1.0, len(taken[-1]) / 8)
    optimized = entry.optimized(model)
    assert optimized is not None
    optimized.session.close()  # as where the search itself fails
    taken = train(model, loader, optimizer, clock, nothing)
    assert scaler.multipliers[0].lr == max(1.0, len(taken[-1]) / 8)


def test_a_rule_by_the_epoch_is_asked_all_along_also_where_the_session_hears_of_no_steps(
    job: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    known_noise(monkeypatch, 5000.0)
    options = {**PLAIN, "scaling_rule": lambda batch: 1.0 + batch.epoch}
    model, loader, optimizer = accel.optimize(*job, max_batch_size=64, **options)
    train(model, loader, optimizer, clock, nothing)
    (_, scaler), *_ = batch_run(model)._rates._scalers
    epochs: list[float] = []
    train(model, loader, optimizer, clock, lambda step: epochs.append(scaler.multipliers[0].lr - 1))
    optimized = entry.optimized(model)
    assert optimized is not None
    optimized.session.close()
    train(model, loader, optimizer, clock, lambda step: epochs.append(scaler.multipliers[0].lr - 1))
    steps = math.ceil(3000 / 64)
    expected = [epoch + min(1.0, 64 * step / 3000) for epoch in (1, 2) for step in range(1, steps + 1)]
    assert epochs == pytest.approx(expected, abs=0.0101)


def holding(loader: Any) -> Iterator[Any]:
    """Fetch each batch while the one before is trained on."""
    held = None
    for batch in loader:
        if held is not None:
            yield held
        held = batch
    yield held


@pytest.mark.parametrize("fetches_ahead", [False, True])
def test_a_loop_that_accumulates_nothing_is_left_to_itself_unless_it_fetches_ahead(
    job: Any, clock: Clock, fetches_ahead: bool
) -> None:
    """That it does is seen at its epoch's end: its batches are not those that a step begins with."""
    model, loader, optimizer = accel.optimize(*job, max_batch_size=8, **PLAIN)
    for step, (x, y, _) in enumerate(holding(loader) if fetches_ahead else loader):
        if step in (5, 200):
            assert ("step" in vars(optimizer)) == (step == 5 or fetches_ahead)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        clock.now += 1e-3
        optimizer.step()
    assert ("no batch of its own" in batch_run(model)._step.refusal) == fetches_ahead


@pytest.mark.parametrize(
    ("counts", "before", "expected"),
    [
        ([(1, False)] * 4, None, 1),
        ([(5, False), (1, False), (1, False), (1, False)], None, 1),  # a look at five batches
        ([(4, False), (4, False), (4, False), (1, True)], None, 4),  # an epoch ends with fewer
        ([(2, True)] * 4, None, 2),  # each epoch is one step
        ([(4, False), (4, False), (1, True), (4, False)], 1, 4),
        ([(3, False), (1, False), (1, True), (3, False)], 1, 1),  # what the run before knew
        ([], None, 1),
    ],
)
def test_what_a_loop_accumulates_is_what_most_of_its_first_steps_do(
    counts: list[tuple[int, bool]], before: int | None, expected: int
) -> None:
    """It was what the fourth one did, also where that was an epoch's last, or came after a look."""
    step = StepBatches(ElasticSampler(100, batch_size=4))
    step.by_loop = before or 1
    for step.batches, ends_epoch in counts:
        step.end(ends_epoch=ends_epoch)
    step.judge(before)
    assert step.by_loop == expected


def test_a_look_before_the_fourth_step_is_no_accumulation(
    job: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    known_noise(monkeypatch, 5000.0)
    model, loader, optimizer = accel.optimize(*job, max_batch_size=64, **PLAIN)
    batches = iter(loader)
    for step in range(90):
        if step == 3:
            del batches
            list(itertools.islice(loader, 3))
            batches = iter(loader)
        x, y, _ = next(batches)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        clock.now += 1e-3
        optimizer.step()
    controller = batch_run(model).controller
    assert controller is not None and controller.base_batch == 8
    assert controller.batch == 64


@pytest.mark.parametrize(("accumulates", "told"), [(False, (32, None, 0)), (True, (1024, 16, 31))])
def test_a_scheduler_is_told_of_no_batch_that_a_loss_of_sums_rules_out(accumulates: bool, told: Any) -> None:
    controller = BatchController(32, 1024, replicas=2)
    for _ in range(12):
        controller.timed(32, 0.01)
    controller.sums, controller.accumulates = True, accumulates
    noise = NoiseInterval(5000.0, 4000.0, 6000.0)
    controller.decide(12, noise)
    profile = profile_of(controller, noise, max_batch_size=1024, most_replicas=2, restart_s=1.0, progress=12.0)
    assert profile is not None
    limits = profile.limits
    assert (limits.max_batch_size, limits.local_max, limits.max_accumulation) == told


def test_a_profile_is_rank_0s() -> None:
    """Each rank wrote one, those that don't decide with a model of the times that they never fitted."""
    run = _batch_run(2, 8, 256)
    run.controller = create_autospec(BatchController, instance=True, base_batch=16, replicas=2, micro_batches=1)
    run._known_noise = NoiseInterval(5000.0, 4000.0, 6000.0)
    run._ranks = create_autospec(Ranks, instance=True, leads=False)
    assert run.profile() is None
