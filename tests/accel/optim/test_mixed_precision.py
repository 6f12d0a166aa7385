"""Loss scales, overflow, clipping and master weights: torch's protocol, its results, and nothing lost on the way."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel.optim import FusedAdam, FusedAdamW, FusedLAMB, FusedLARS, FusedSGD, MultiTensorOptimizer

KINDS: list[tuple[type[MultiTensorOptimizer], dict[str, Any]]] = [
    (FusedSGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1}),
    (FusedAdamW, {"lr": 0.1}),
    (FusedLAMB, {"lr": 0.1}),
    (FusedLARS, {"lr": 0.1, "weight_decay": 0.1}),
]
_CASES = [
    # The interpreter takes half a second for each of these: one in the default run, all in the slow one.
    pytest.param(
        kind,
        options,
        path,
        id=f"{path}-{kind.__name__}",
        marks=[pytest.mark.slow] if path == "kernels" and kind is not FusedAdamW else [],
    )
    for path in ("plain", "kernels")
    for kind, options in KINDS
]
EACH = pytest.mark.parametrize(("kind", "options", "path"), _CASES, indirect=["path"])
pytestmark = pytest.mark.usefixtures("path")


def params_of(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(2)
    return [nn.Parameter(torch.randn(shape, generator=draw).to(dtype)) for shape in ((4, 3), (), (5,))]


def give_grads(params: list[nn.Parameter], seed: int, factor: float = 1.0) -> None:
    draw = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = (torch.randn(p.shape, generator=draw) * factor).to(p.dtype)


def everything(optimizer: MultiTensorOptimizer, params: list[nn.Parameter]) -> list[Tensor]:
    states = [optimizer.state[p][name] for p in params if p in optimizer.state for name in sorted(optimizer.state[p])]
    return [t.detach().clone() for t in (*params, *states)]


@pytest.mark.sample(2)
@EACH
def test_a_scaler_gives_what_no_scaler_gives(kind: Any, options: Any) -> None:
    scaled, plain = params_of(), params_of()
    first, second = kind(scaled, **options), kind(plain, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    for step in range(2):
        give_grads(scaled, step, 4.0)
        give_grads(plain, step)
        scaler.step(first)
        scaler.update()
        second.step()
    assert not hasattr(first, "grad_scale")
    for a, b in zip(scaled, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.sample(3)
@pytest.mark.parametrize("at", [0, 1], ids=["first step", "second step"])
@EACH
def test_overflow_changes_no_bit_and_halves_the_scale(kind: Any, options: Any, at: int) -> None:
    params, others = params_of(), params_of()
    optimizer, plain = kind(params, **options), kind(others, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    for step in range(3):
        give_grads(params, step, scaler.get_scale())
        give_grads(others, step)
        if step == at:
            params[2].grad[1] = torch.inf if at else torch.nan  # type: ignore[index]
            before = everything(optimizer, params)
            scaler.step(optimizer)
            scaler.update()
            after = everything(optimizer, params)
            if not at:  # moments are made in the first step, skipped or not
                assert not any(bool(state.any()) for p in params for n, state in optimizer.state[p].items())
                before, after = before[: len(params)], after[: len(params)]
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
            assert scaler.get_scale() == 2.0
            assert optimizer.overflow is not None
            assert float(optimizer.overflow) == 1.0
            continue
        scaler.step(optimizer)
        scaler.update()
        plain.step()
    for a, b in zip(params, others, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@EACH
def test_a_step_looks_for_overflow_itself(kind: Any, options: Any) -> None:
    params = params_of(torch.float16)
    optimizer = kind(params, **options)
    optimizer.grad_scale = torch.full((1,), 8.0)
    give_grads(params, 0, 8.0)
    optimizer.step()
    assert float(optimizer.overflow) == 0.0
    # All finite, and their squares not: no overflow.
    give_grads(params, 1, 2.0**13)
    optimizer.step()
    assert float(optimizer.overflow) == 0.0
    before = everything(optimizer, params)
    params[0].grad[0, 0] = -torch.inf  # type: ignore[index]
    optimizer.step()
    assert float(optimizer.overflow) == 1.0
    assert all(torch.equal(a, b) for a, b in zip(before, everything(optimizer, params), strict=True))


@EACH
def test_clipping_is_torchs_and_leaves_gradients_as_they_are(kind: Any, options: Any) -> None:
    params, others = params_of(), params_of()
    # One of two groups is clipped, by the norm of both.
    groups = [
        [{"params": own[:1], "max_grad_norm": norm}, {"params": own[1:], "max_grad_norm": None}]
        for own, norm in ((params, 0.5), (others, None))
    ]
    optimizer, plain = (kind(group, **options) for group in groups)
    for step in range(2):
        give_grads(params, step)
        give_grads(others, step)
        grads = [p.grad.clone() for p in params if p.grad is not None]
        norm = nn.utils.get_total_norm([p.grad for p in others if p.grad is not None])
        nn.utils.clip_grads_with_norm_(others[:1], 0.5, norm)
        optimizer.step()
        plain.step()
        torch.testing.assert_close(optimizer.grad_norm, norm)
        assert all(torch.equal(a, b.grad) for a, b in zip(grads, params, strict=True))  # type: ignore[arg-type]
    for a, b in zip(params, others, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_without_a_scaler_nan_is_not_hidden() -> None:
    params = params_of()
    optimizer = FusedAdam(params, max_grad_norm=1.0)
    give_grads(params, 0)
    params[0].grad[0, 0] = torch.nan  # type: ignore[index]
    optimizer.step()
    assert all(bool(p.isnan().any()) for p in params)  # as clip_grad_norm_ leaves it


@EACH
def test_small_updates_of_half_weights_are_not_lost(kind: Any, options: Any) -> None:
    param = nn.Parameter(torch.ones(3, dtype=torch.float16))
    optimizer = kind([param], **{**options, "lr": 1e-4, "weight_decay": 0.0})
    for _ in range(3):
        param.grad = torch.full((3,), 0.5, dtype=torch.float16)
        optimizer.step()
    master = optimizer.state[param]["master"]
    assert master.dtype == torch.float32
    assert bool((master < 1).all())
    assert torch.equal(param.detach(), master.half())


@pytest.mark.sample(2)
@EACH
def test_what_is_restored_goes_on_bit_for_bit(kind: Any, options: Any) -> None:
    params = params_of(torch.float16)
    optimizer = kind(params, **options)
    for step in range(2):
        give_grads(params, step)
        optimizer.step()
    model, state = copy.deepcopy([p.detach() for p in params]), copy.deepcopy(optimizer.state_dict())
    restored = params_of(torch.float16)
    again = kind(restored, lr=7.0)
    again.load_state_dict(state)
    with torch.no_grad():  # weights after the optimizer: the masters are still those of the checkpoint
        for p, value in zip(restored, model, strict=True):
            p.copy_(value)
    for step in range(2, 4):
        for own, each in ((params, optimizer), (restored, again)):
            give_grads(own, step)
            each.step()
    for a, b in zip(everything(optimizer, params), everything(again, restored), strict=True):
        assert torch.equal(a, b)


def test_weights_that_someone_else_wrote_are_taken_over() -> None:
    params = params_of(torch.float16)
    optimizer = FusedSGD(params, lr=0.125)
    give_grads(params, 0)
    optimizer.step()
    with torch.no_grad():
        params[0].fill_(2.0)
    for p in params:
        p.grad = torch.ones_like(p)
    kept = optimizer.state[params[2]]["master"].clone()
    optimizer.refresh()  # as before a replay; a step would do so itself
    assert torch.equal(optimizer.state[params[0]]["master"], torch.full((4, 3), 2.0))
    optimizer.step()
    assert torch.equal(params[0].detach(), torch.full((4, 3), 1.875, dtype=torch.float16))
    torch.testing.assert_close(optimizer.state[params[2]]["master"], kept - 0.125)


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_step_says_whether_it_was_skipped_where_somebody_has_looked(clip: float | None) -> None:
    params = params_of()
    optimizer: Any = FusedSGD(params, lr=0.1, max_grad_norm=clip)
    give_grads(params, 0)
    optimizer.step()
    assert optimizer.overflow is None
    for skipped in (0.0, 1.0, 0.0):
        optimizer.found_inf = torch.tensor([skipped])
        optimizer.step()
        assert float(optimizer.overflow) == skipped


def test_a_saved_graph_hears_of_the_update() -> None:
    param = nn.Parameter(torch.ones(2))
    loss = (param * param).sum()
    optimizer = FusedSGD([param], lr=0.1)
    param.grad = torch.ones(2)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("kind", [FusedSGD, FusedAdamW])
def test_weights_that_have_gone_on_stay_when_an_earlier_state_is_loaded(kind: Any) -> None:
    """The next step once took them back to the master weights of that state, without a word."""
    param = nn.Parameter(torch.zeros(4, dtype=torch.float16))
    optimizer = kind([param], lr=1.0, weight_decay=0.0)
    saved: dict[str, Any] = {}
    for step in range(4):
        param.grad = torch.ones_like(param)
        optimizer.step()
        if step == 0:
            saved = copy.deepcopy(optimizer.state_dict())
    weights = param.detach().clone()
    optimizer.load_state_dict(saved)
    param.grad = torch.zeros_like(param)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert torch.equal(param.detach(), weights)
    assert torch.equal(optimizer.state[param]["master"], weights.float())
