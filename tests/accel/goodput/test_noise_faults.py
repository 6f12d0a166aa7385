"""What goes wrong in a measurement is none of the loop's errors, and leaves nothing in the loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from accel.goodput import noise_gradients
from accel.goodput.noise_gradients import Unmeasurable
from accel.goodput.noise_meter import NoiseMeter
from accel.guard import guard
from tests.accel.goodput import noise_loops as loops
from tests.accel.goodput.test_noise_replay import Losses, own_loss


def labelled(step: int) -> tuple[Tensor, Tensor]:
    return torch.randn(16, 12), torch.randint(0, 5, (16,))


def linear() -> tuple[nn.Linear, torch.optim.Optimizer, NoiseMeter]:
    torch.manual_seed(0)
    model = nn.Linear(12, 5)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    return model, optimizer, loops.meter_for(model, optimizer)


def hooks_of(model: nn.Module) -> list[Any]:
    return [p._backward_hooks for p in model.parameters() if p._backward_hooks]


@pytest.mark.parametrize("between", ["begins twice", "is skipped"])
def test_a_measured_step_without_an_end_leaves_no_hooks(between: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An epoch's last request begins a step, and the next epoch's first one begins it again."""
    model, optimizer, meter = linear()
    plain = meter.begin_step

    def begin() -> None:
        plain()
        meter.skip_step(0) if between == "is skipped" else None
        plain()

    monkeypatch.setattr(meter, "begin_step", begin)
    for _ in loops.train(meter, model, optimizer, labelled, F.cross_entropy, steps=30):
        assert len(hooks_of(model)) == 0
    assert meter.noise.measured > 3
    meter.close()
    assert not hooks_of(model)


def test_a_small_last_batch_is_no_error_of_the_loop() -> None:
    """A fourth of five samples is one, of which batch normalisation makes no statistics."""
    torch.manual_seed(0)
    model = Losses(nn.BatchNorm1d(16))
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    meter = loops.meter_for(model, optimizer)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        samples = 16 if step < 14 else 2 + step % 4
        return torch.randn(samples, 12), torch.randint(0, 5, (samples,))

    steps = list(loops.train(meter, model, optimizer, batch, own_loss, steps=40))
    assert len(steps) == 40


ERRORS: dict[str, Callable[[], BaseException]] = {
    "memory": lambda: torch.OutOfMemoryError("CUDA out of memory."),
    "error": lambda: RuntimeError("of the model's replay"),
}


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("after", [0, 3, 6])
def test_a_replay_that_fails_ends_the_measuring_and_not_the_loop(
    error: str, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer, meter = linear()
    replay, calls = guard.replay, [0]

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] > after:
            raise ERRORS[error]()
        return replay(*args, **kwargs)

    monkeypatch.setattr(guard, "replay", failing)
    steps = list(loops.train(meter, model, optimizer, labelled, F.cross_entropy, steps=40))
    assert len(steps) == 40
    assert calls[0] > after
    assert str(ERRORS[error]()) in meter.refusal
    assert not hooks_of(model)


def test_outputs_that_can_not_be_listened_to_are_no_error_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: Any, outputs: Any) -> None:
        raise RuntimeError("no hooks here")

    monkeypatch.setattr(guard.Recording, "listen", failing)
    model, optimizer, meter = linear()
    assert len(list(loops.train(meter, model, optimizer, labelled, F.cross_entropy, steps=20))) == 20
    assert "no hooks here" in meter.refusal


def test_parameters_without_averages_are_left_out_of_adams_coordinates() -> None:
    used, unused, foreign = (nn.Parameter(torch.ones(n)) for n in (3, 2, 1))
    optimizer = torch.optim.Adam([used, unused], 0.01)
    with pytest.raises(Unmeasurable, match="no averages of squared gradients yet"):
        noise_gradients.denominators([used, unused], [optimizer])
    used.grad = torch.ones(3)
    optimizer.step()
    found = noise_gradients.denominators([used, unused, foreign], [optimizer])
    assert found is not None
    assert (torch.ones(6) / found).tolist() == pytest.approx([1, 1, 1, 0, 0, 0], rel=1e-6)


def test_with_a_head_that_is_never_used_the_noise_is_measured() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"used": nn.Linear(12, 5), "unused": nn.Linear(12, 5)})
    model.forward = lambda x: model["used"](x)  # type: ignore[method-assign]
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)
    meter = loops.meter_for(model, optimizer)
    list(loops.train(meter, model, optimizer, labelled, F.cross_entropy, steps=20))
    assert not meter.refusal
    assert meter.noise.measured > 3
