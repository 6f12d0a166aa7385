"""A call replayed on a part of its batch: the mode that suits a model, and models that no part can be told of."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from accel.goodput.noise_meter import NoiseMeter
from tests.accel.goodput.noise_loops import Kept, finish, meter_for, per_sample_truth, train, with_meter

Loss = Callable[[Tensor, Tensor], Tensor]


def measured(
    model: nn.Module,
    *,
    loss: Loss = F.cross_entropy,
    shape: tuple[int, ...] = (16, 12),
    targets: tuple[int, ...] | None = None,
    samples: int | None = None,
    steps: int = 16,
    **options: Any,
) -> tuple[NoiseMeter, Kept]:
    """Train a model with weights that stay, and return what was measured."""
    generator = torch.Generator().manual_seed(0)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, 0.0)
    noise = Kept()
    meter = meter_for(model, optimizer, noise=noise, **options)
    begin = meter.begin_batch
    if samples is not None:
        meter.begin_batch = lambda _: begin(samples)  # type: ignore[method-assign]

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(shape, generator=generator)
        return x, torch.randint(0, 5, targets or shape[:1], generator=generator)

    finish(train(meter, model, optimizer, batch, loss, steps=steps))
    return meter, noise


def net(*between: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), *between, nn.Tanh(), nn.Linear(16, 5))


def test_rows_suit_an_ordinary_model() -> None:
    meter, noise = measured(net())
    assert meter._replay.mode == "rows"
    assert noise.all


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(16), nn.Dropout(0.3)], ids=["batch norm", "dropout"])
def test_masks_suit_what_depends_on_the_whole_batch(layer: nn.Module) -> None:
    meter, noise = measured(net(layer))
    assert meter._replay.mode == "masks"
    assert len(noise.all) > 3
    assert not meter.reason


def test_dropout_counts_as_noise_of_the_samples() -> None:
    """Per-sample gradients under the step's own masks are the oracle."""
    torch.manual_seed(0)
    model, x, y = net(nn.Dropout(0.5)), torch.randn(32, 12), torch.randint(0, 5, (32,))
    optimizer, noise, meter = with_meter(model)
    ratios = []
    steps = train(meter, model, optimizer, lambda _: (x, y), F.cross_entropy, steps=140)
    state = torch.get_rng_state()
    for _ in steps:
        after = torch.get_rng_state()
        if len(noise.all) > len(ratios):
            torch.set_rng_state(state)
            losses = F.cross_entropy(model(x), y, reduction="none")
            own = [torch.autograd.grad(each, model.parameters(), retain_graph=True) for each in losses]
            flat = torch.stack([torch.cat([g.flatten() for g in each]) for each in own])
            true = float((flat - flat.mean(0)).square().sum(1).mean()) * 32 / 31
            ratios.append(noise.all[-1].variance / true)
            torch.set_rng_state(after)
        state = after
    assert math.fsum(ratios) / len(ratios) == pytest.approx(1, rel=0.1)


def test_batch_norm_is_close_to_the_noise_between_batches() -> None:
    """tr(Σ) by definition: n times the variance of the gradient over independent batches of n."""
    torch.manual_seed(0)
    model = net(nn.BatchNorm1d(16))
    _, noise = measured(model, shape=(64, 12), steps=160)
    gradients = []
    generator = torch.Generator().manual_seed(9)
    for _ in range(200):
        x, y = torch.randn(64, 12, generator=generator), torch.randint(0, 5, (64,), generator=generator)
        own = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
        gradients.append(torch.cat([g.flatten() for g in own]))
    flat = torch.stack(gradients)
    true = 64 * float((flat - flat.mean(0)).square().sum()) / 199
    average = math.fsum(sums.variance for sums in noise.all) / len(noise.all)
    assert average == pytest.approx(true, rel=0.2)  # batch statistics share noise that no part alone has


class Losses(nn.Module):
    """Returns its own loss."""

    def __init__(self, layer: nn.Module, reduction: str = "mean") -> None:
        super().__init__()
        self.inner, self.reduction = net(layer), reduction
        self.register_buffer("labels", torch.arange(16) % 5)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logits = self.inner(x)
        labels = x[:, :5].argmax(1)
        return {"loss": F.cross_entropy(logits, labels, reduction=self.reduction), "logits": logits}


def own_loss(output: Any, y: Tensor) -> Tensor:
    loss: Tensor = output["loss"]
    return loss


@pytest.mark.parametrize("layer", [nn.Identity(), nn.Dropout(0.3)])
def test_models_that_return_their_loss(layer: nn.Module) -> None:
    is_plain = isinstance(layer, nn.Identity)
    model = Losses(layer)
    meter, noise = measured(model, loss=own_loss, steps=200 if is_plain else 16)
    assert meter._replay.mode == "losses"
    assert not meter.reason
    if is_plain:
        x = torch.randn(2000, 12)
        _, variance = per_sample_truth(model.inner.double(), F.cross_entropy, x, x[:, :5].argmax(1))
        average = math.fsum(sums.variance for sums in noise.all) / len(noise.all)
        assert average == pytest.approx(variance, rel=0.1)


def test_factor_of_a_sum_leaves_phi_as_it_is() -> None:
    _, means = measured(net())
    _, sums = measured(net(), loss=lambda output, y: F.cross_entropy(output, y, reduction="sum"))
    for one, other in zip(means.all, sums.all, strict=True):
        assert other.variance / other.squared_norm == pytest.approx(one.variance / one.squared_norm, rel=1e-3)


# Refused


class Contrastive(nn.Module):
    """Returns a loss over pairs of samples of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 8), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        scores = self.first(x) @ self.second(x).T
        return {"loss": F.cross_entropy(3 * scores, torch.arange(len(x)))}


class AcrossSamples(nn.Module):
    """Attends to the other samples, in evaluation mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(torch.softmax(x @ x.T / 8, 1) @ x)
        return out


class Recurrent(nn.Module):
    """Takes (time, batch, features)."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.RNN(12, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.rnn(x)[0])
        return out


class Flat(nn.Module):
    """Returns its rows and those of all positions in one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x.view(-1, 6))
        return out


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 5, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.table((x[:, 0].abs() * 7).long() % 7)
        return out


class Repeats(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(torch.cat([x, -x]))
        return out


def sequences(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), y.flatten())


def penalised(model: nn.Module) -> Loss:
    def loss(output: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(output, y) + sum((p.square().sum() for p in model.parameters()), torch.zeros(()))

    return loss


def cases() -> dict[str, tuple[nn.Module, dict[str, Any], str]]:
    torch.manual_seed(0)
    plain = net()
    return {
        "sum": (Losses(nn.Identity(), "sum"), {"loss": own_loss}, "not a mean over samples"),
        "contrastive": (Contrastive(), {"loss": own_loss}, "not a mean over samples"),
        "across": (AcrossSamples(), {}, "depends on the samples beside it"),
        "time first": (
            Recurrent(),
            {"loss": sequences, "shape": (6, 4, 12), "targets": (6, 4)},
            "depends on the samples beside it, or the first dimension is not the batch",
        ),
        "time first, counted": (
            Recurrent(),
            {"loss": sequences, "shape": (6, 3, 12), "targets": (6, 3), "samples": 3},
            "no input of the model has the batch's 3 samples as its first dimension; the first has 6",
        ),
        "flat": (
            Flat(),
            {"loss": lambda output, y: F.cross_entropy(output, y.repeat(2))},
            r"shape \(32, 5\) has not the 16 samples",
        ),
        "repeats": (
            Repeats(),
            {"loss": lambda output, y: F.cross_entropy(output, y.repeat(2))},
            r"shape \(32, 5\) has not the 16 samples",
        ),
        "sparse": (Sparse(), {}, r"nn.Embedding\(sparse=False\)"),
        "penalty": (plain, {"loss": penalised(plain)}, "adds up to the step's gradient with an error of"),
        "one sample": (net(), {"shape": (1, 12)}, "a batch of one sample has no parts"),
        "zero": (net(), {"loss": lambda output, y: 0 * output.sum()}, "gradient is zero"),
        "loss and more": (
            Losses(nn.Dropout(0.3)),
            {"loss": lambda output, y: output["loss"] + output["logits"].square().mean()},
            "adds up to the step's gradient with an error of",
        ),
        "penalty alone": (net(), {"loss": None}, "no gradient has arrived at the outputs"),
    }


@pytest.mark.parametrize("name", cases())
def test_what_has_no_parts_is_refused_with_its_reason(name: str) -> None:
    model, options, message = cases()[name]
    if options.get("loss", ...) is None:
        options["loss"] = lambda output, y: sum((p.square().sum() for p in model.parameters()), torch.zeros(()))
    meter, noise = measured(model, **options)
    assert re.search(message, meter.reason), meter.reason
    assert meter.refusal == meter.reason
    assert not noise.all


def test_a_model_that_is_called_twice_in_a_step_is_refused() -> None:
    model, other = net(), torch.randn(16, 12)
    optimizer, _, meter = with_meter(model)

    def loss(output: Tensor, y: Tensor) -> Tensor:
        return (output * (meter.call(model, (other,), {}) if meter.wants_call else model(other))).sum()

    finish(train(meter, model, optimizer, lambda _: (-other, other), loss, steps=20))
    assert "the model was called 2 times in one step" in meter.refusal


def test_gradients_after_an_update_are_refused() -> None:
    model = net()
    optimizer, _, meter = with_meter(model)
    x, y = torch.randn(16, 12), torch.randint(0, 5, (16,))

    def update() -> None:
        for _ in range(2):
            meter.before_update(optimizer)
            optimizer.step()
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()

    finish(train(meter, model, optimizer, lambda _: (x, y), F.cross_entropy, steps=20, update=update))
    assert "gradients arrived after an optimizer had stepped" in meter.refusal


def test_refused_for_a_while_is_not_refused_for_good() -> None:
    """Two odd steps, then ordinary ones."""
    model = net()
    optimizer, _, meter = with_meter(model)
    reasons = []

    def batch(step: int) -> tuple[Tensor, Tensor]:
        size = 1 if step < 12 else 16
        return torch.randn(size, 12), torch.randint(0, 5, (size,))

    for _ in train(meter, model, optimizer, batch, F.cross_entropy, steps=30):
        reasons.append(meter.reason)
    assert "a batch of one sample has no parts" in reasons
    assert not meter.refusal
    assert not meter.reason
    assert meter.noise.measured > 3


def test_a_penalty_that_comes_later_is_noticed_when_it_is_looked_at_again() -> None:
    model = net()
    optimizer, noise, meter = with_meter(model)
    penalty = penalised(model)

    def loss(output: Tensor, y: Tensor) -> Tensor:
        return penalty(output, y) if len(noise.all) > 5 else F.cross_entropy(output, y)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        return torch.randn(16, 12), torch.randint(0, 5, (16,))

    finish(train(meter, model, optimizer, batch, loss, steps=60))
    assert "adds up to the step's" in meter.refusal
    assert len(noise.all) < 12
