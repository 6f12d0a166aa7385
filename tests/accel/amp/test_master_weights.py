"""Parameters are the master weights: whatever updates them does what it does in a float32 loop, bit for bit."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from accel import optim
from accel.amp import decorate, master_params, undecorate
from benchmarks.suite import packages
from tests.accel.amp.amp_models import batches, cnn, loss_of, mlp, train
from tests.kernels.hosts import need

HALVES = (torch.float16, torch.bfloat16)
Make = Callable[[Any], Any]

TORCH: dict[str, Make] = {
    kind.__name__: functools.partial(kind, lr=0.01)
    for kind in (
        *(torch.optim.Adadelta, torch.optim.Adafactor, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW),
        *(torch.optim.Adamax, torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop),
        *(torch.optim.Rprop, torch.optim.SGD),
    )
}
MORE: dict[str, Make] = {
    "AdamW fused": functools.partial(torch.optim.AdamW, lr=0.01, fused=True),
    "SGD fused": functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9, fused=True),
    "Muon": lambda params: torch.optim.Muon([p for p in params if p.dim() == 2], lr=0.01),
    "FusedAdamW": functools.partial(optim.FusedAdamW, lr=0.01),
    "FusedLAMB": functools.partial(optim.FusedLAMB, lr=0.01),
    "FusedSGD": functools.partial(optim.FusedSGD, lr=0.01, momentum=0.9),
}
OPTIMIZERS = TORCH | MORE


def of_timm() -> dict[str, Make]:
    """Return all optimizers of timm that are to be had here; the others wrap packages of CUDA kernels."""
    need("timm")
    packages.timm()
    import timm.optim

    made: dict[str, Make] = {}
    # Adahessian reads the graph of its gradients, which no one can record.
    for name in [*(each for each in timm.optim.list_optimizers() if each != "adahessian"), "lookahead_adamw"]:

        def make(params: Any, name: str = name) -> Any:
            return timm.optim.create_optimizer_v2([*params], name, lr=0.01)

        try:
            make([nn.Parameter(torch.zeros(3, 2))])
        except Exception:
            continue
        made[name] = make
    return made


def fed(model: nn.Module, make: Make, gradients: list[list[Tensor | None]]) -> tuple[list[Tensor], Any]:
    """Return what gradients make of a float32 model, and its optimizer."""
    torch.manual_seed(7)
    params = list(model.parameters())
    optimizer = make(params)
    for own in gradients:
        for p, grad in zip(params, own, strict=True):
            p.grad = None if grad is None else grad.clone()
        optimizer.step()
    return [p.detach() for p in params], optimizer


def recorded(model: nn.Module, make: Make, count: int) -> tuple[list[list[Tensor | None]], Any]:
    """Train a decorated model, and return its gradients and its optimizer."""
    torch.manual_seed(7)
    optimizer, gradients = make(model.parameters()), []
    for x, target in batches(count, 8):
        optimizer.zero_grad()
        loss_of(model(x), target).backward()
        gradients.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        optimizer.step()
    return gradients, optimizer


def check(make: Make, dtype: torch.dtype, **options: Any) -> None:
    model, plain = mlp(), mlp()
    decorate(model, dtype=dtype, **options)
    gradients, optimizer = recorded(model, make, 4)
    assert all(grad is not None and grad.dtype == torch.float32 for own in gradients for grad in own)
    weights, other = fed(plain, make, gradients)
    assert all(map(torch.equal, model.parameters(), weights))
    assert optimizer.state_dict()["state"].keys() == other.state_dict()["state"].keys()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_updates_as_in_float32(name: str, dtype: torch.dtype) -> None:
    check(OPTIMIZERS[name], dtype, **({"loss_scale": 1024.0} if dtype == torch.float16 else {}))


def test_optimizers_of_timm_update_as_in_float32() -> None:
    made = of_timm()
    assert len(made) > 40
    for number, (name, make) in enumerate(made.items()):
        dtype, options = ((torch.bfloat16, {}), (torch.float16, {"loss_scale": 1024.0}))[number % 2]
        try:
            check(make, dtype, **options)
        except AssertionError as error:
            raise AssertionError(f"{name}, {dtype}") from error


@functools.cache
def every() -> dict[str, Make]:
    try:
        return OPTIMIZERS | {f"timm {name}": make for name, make in of_timm().items()}
    except pytest.skip.Exception:
        return OPTIMIZERS


def resumed(make: Make, at: int, model_first: bool, dtype: torch.dtype | None) -> bool:
    """Return whether a run that stops at a step, and goes on in another model, comes to the same weights."""
    data = batches(6, 8)

    def fresh(start: int) -> tuple[nn.Module, Any]:
        model = mlp(start)
        optimizer = make(model.parameters())
        if dtype is not None:
            decorate(model, optimizer, dtype=dtype)
        return model, optimizer

    model, optimizer = fresh(0)
    train(model, optimizer, data[:at])
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    torch.manual_seed(1)
    expected = train(model, optimizer, data[at:])
    other, own = fresh(1)
    for part in (0, 1) if model_first else (1, 0):
        (other, own)[part].load_state_dict(copy.deepcopy(saved[part]))
    torch.manual_seed(1)
    return all(map(torch.equal, train(other, own, data[at:]), expected))


@given(draw=st.data(), at=st.integers(0, 5), model_first=st.booleans(), dtype=st.sampled_from(HALVES))
def test_a_run_that_stops_at_any_step_goes_on_as_if_it_had_not(
    draw: st.DataObject, at: int, model_first: bool, dtype: torch.dtype
) -> None:
    """Of every optimizer for which a float32 run does: some of timm's keep more than their state."""
    make = every()[draw.draw(st.sampled_from(sorted(every())))]
    try:
        does = resumed(make, at, model_first, None)
    except Exception:
        does = False
    assert resumed(make, at, model_first, dtype) if does else True


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_states_go_between_precisions(dtype: torch.dtype) -> None:
    """Of the model and of the optimizer: they are those of a float32 loop."""
    model, plain = mlp(), mlp(1)
    optimizer, other = (torch.optim.AdamW(each.parameters(), 0.01) for each in (model, plain))
    decorate(model, optimizer, dtype=dtype)
    train(model, optimizer, batches(3, 8))
    plain.load_state_dict(model.state_dict())
    other.load_state_dict(optimizer.state_dict())
    assert all(map(torch.equal, plain.parameters(), model.parameters()))
    train(plain, other, batches(1, 8))
    optimizer.load_state_dict(other.state_dict())
    train(model, optimizer, batches(1, 8))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", ["AdamW", "AdamW fused", "SGD fused", "FusedAdamW", "FusedSGD"])
def test_a_model_that_becomes_channels_last_after_it_was_decorated(name: str, dtype: torch.dtype) -> None:
    def trained(last: bool) -> list[Tensor]:
        model = cnn()
        optimizer = OPTIMIZERS[name](model.parameters())
        decorate(model, optimizer, dtype=dtype)
        if last:
            model.to(memory_format=torch.channels_last)
        return train(model, optimizer, batches(5, 3, 8, 8))

    start = [p.detach() for p in cnn().parameters()]
    for i, (one, other) in enumerate(zip(trained(False), trained(True), strict=True)):
        # Batch normalisation takes out what the convolution's bias adds: its gradient is nothing but rounding.
        assert i == 1 or float((one - other).norm()) < 0.1 * float((one - start[i]).norm())


@pytest.mark.sample(2)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("what", ["optimizer", "step", "model", "model in place"])
def test_what_is_compiled_does_the_same(what: str, dtype: torch.dtype) -> None:
    def trained(compiled: Any) -> list[Tensor]:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        decorate(model, optimizer, dtype=dtype)
        call: Any = model
        step: Any = optimizer.step
        if what == "model":
            call = compiled(model)
        elif what == "model in place" and compiled is not plainly:
            model.compile(backend="aot_eager")
        elif what == "optimizer":
            step = compiled(optimizer.step)

        def whole(x: Tensor, target: Tensor) -> None:
            optimizer.zero_grad()
            loss_of(call(x), target).backward()
            step()

        run = compiled(whole) if what == "step" else whole
        for x, target in batches(4, 8):
            run(x, target)
        return [p.detach().clone() for p in model.parameters()]

    def plainly(function: Any) -> Any:
        return function

    torch._dynamo.reset()
    for one, other in zip(
        trained(functools.partial(torch.compile, backend="aot_eager")), trained(plainly), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


class Sharpness(torch.optim.Optimizer):
    """Sharpness-aware minimisation, as it is written everywhere: two passes, and another optimizer inside."""

    def __init__(self, params: Iterable[Tensor], base: Any, rho: float = 0.05) -> None:
        super().__init__(params, {"rho": rho})
        self.base = base(self.param_groups)
        self.before: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def first_step(self) -> None:
        params = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            self.before[p] = p.data.clone()
            p.add_(p.grad * (0.05 / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for p, before in self.before.items():
            p.data = before
        self.base.step()
        self.zero_grad()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_optimizers_that_step_another_one_inside(dtype: torch.dtype) -> None:
    def trained(dtype: torch.dtype | None) -> Tensor:
        model = mlp()
        optimizer = Sharpness(model.parameters(), functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9))
        if dtype is not None:
            decorate(model, optimizer, dtype=dtype)
        for x, target in batches(8, 8):
            loss_of(model(x), target).backward()
            optimizer.first_step()
            loss_of(model(x), target).backward()
            optimizer.second_step()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    start = torch.cat([p.detach().flatten() for p in mlp().parameters()])
    plain, own = trained(None), trained(dtype)
    assert float((own - plain).norm()) < 0.03 * float((plain - start).norm())


class ByName(torch.optim.SGD):
    """Looks parameters up by identity, and reads what the loop has left on them."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model.parameters(), **options)
        self.names = {p: name for name, p in model.named_parameters()}

    def step(self, closure: Any = None) -> Any:
        for p in (p for group in self.param_groups for p in group["params"]):
            p.grad.mul_(p.lr_scale if "bias" in self.names[p] else 1.0)
        return super().step(closure)


def test_optimizers_that_look_parameters_up() -> None:
    model = mlp()
    for p in model.parameters():
        p.lr_scale = 0.5
    optimizer = ByName(model, lr=0.1)
    decorate(model, optimizer, dtype=torch.float16)
    train(model, optimizer, batches(2, 8))


def test_a_moving_average_follows_and_can_be_swapped_in() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    decorate(model, optimizer, dtype=torch.bfloat16)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    for x, target in batches(5, 8):
        train(model, optimizer, [(x, target)])
        average.update_parameters(model)
    x = torch.randn(3, 8)
    with torch.no_grad():
        own, its = model(x), average(x)
        for name, value in model.state_dict().items():
            value.copy_(average.module.state_dict()[name])
        assert not torch.equal(own, its) and torch.equal(model(x), its)


def test_clipping_and_schedulers_need_nothing() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    decorate(model, optimizer, dtype=torch.float16)
    for x, target in batches(3, 8):
        optimizer.zero_grad()
        loss_of(model(x), target).backward()
        norm = nn.utils.clip_grad_norm_(master_params(optimizer), 0.1)
        assert 0.1 < norm < 10
        optimizer.step()
        scheduler.step()
    assert master_params(optimizer) == list(model.parameters())
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**3


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("name", ["SGD", "AdamW", "AdamW fused", "FusedAdamW"])
def test_the_native_grad_scaler_needs_no_change(name: str, clips: bool) -> None:
    model, plain = mlp(), mlp()
    optimizer = OPTIMIZERS[name](model.parameters())
    decorate(model, optimizer, dtype=torch.float16, loss_scale=None)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=10**6)
    gradients: list[list[Tensor | None]] = []
    data = batches(5, 8)
    for number, (x, target) in enumerate(data):
        optimizer.zero_grad()
        loss = loss_of(model(x), target) * (torch.inf if number == 2 else 1.0)
        scaler.scale(loss).backward()
        if clips:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if number != 2:
            factor = 1.0 if clips else 1 / scaler.get_scale()
            gradients.append([p.grad * factor for p in model.parameters()])
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 128.0
    weights, _ = fed(plain, OPTIMIZERS[name], gradients)
    for own, other in zip(model.parameters(), weights, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-7)


def test_sparse_gradients_stay_sparse() -> None:
    model = nn.Sequential(nn.Embedding(10, 8, sparse=True), nn.Linear(8, 4))
    optimizers = [torch.optim.SparseAdam(model[0].parameters()), torch.optim.SGD(model[1].parameters(), 0.1)]
    decorate(model, optimizers, dtype=torch.float16)
    before = model[0].weight.detach().clone()
    model(torch.tensor([1, 3])).square().mean().backward()
    assert model[0].weight.grad.is_sparse and model[0].weight.grad.dtype == torch.float32
    for optimizer in optimizers:
        optimizer.step()
    assert (model[0].weight != before).any(1).tolist() == [i in (1, 3) for i in range(10)]


def test_parameters_without_a_gradient_have_none() -> None:
    """Their hooks are not called: it was once None that they got."""
    model, called = nn.ModuleDict({"used": nn.Linear(8, 4), "other": nn.Linear(8, 4)}), []

    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.parts["used"](x)
            return y

    whole = Partly()
    model["other"].weight.register_hook(called.append)
    decorate(whole, dtype=torch.bfloat16)
    whole(torch.randn(2, 8)).sum().backward()
    assert called == [] and model["other"].weight.grad is None and model["other"].bias.grad is None


def test_a_weight_s_gradient_arrives_while_the_pass_goes_on() -> None:
    """Not at its end: DistributedDataParallel sends the first buckets meanwhile, and no 16-bit gradients pile up."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    events: list[str] = []
    for i, layer in enumerate(model):
        layer.weight.register_hook(lambda grad, i=i: events.append(f"weight {i}"))
        layer.register_full_backward_hook(lambda module, given, own, i=i: events.append(f"layer {i}"))
    decorate(model, dtype=torch.bfloat16)
    model(torch.randn(2, 64, requires_grad=True)).sum().backward()
    assert events.index("weight 3") < events.index("layer 1")


def test_an_optimizer_that_is_passed_twice() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    decorate(model, [optimizer, optimizer], dtype=torch.float16)
    train(model, optimizer, batches(2, 8))
    optimizer.load_state_dict(optimizer.state_dict())
    undecorate(model)
    assert "loss_scale" not in optimizer.state_dict()


def test_undecorate_leaves_a_plain_loop_at_any_time() -> None:
    model, plain = mlp(), mlp()
    optimizer, other = (torch.optim.AdamW(each.parameters(), 0.01) for each in (model, plain))
    decorate(model, optimizer, dtype=torch.float16)
    loss_of(model(batches(1, 8)[0][0]), batches(1, 8)[0][1]).backward()
    undecorate([model, plain])
    assert all(map(torch.equal, train(model, optimizer, batches(3, 8)), train(plain, other, batches(3, 8))))
    assert "loss_scale" not in optimizer.state_dict()
