"""torch's own database of optimizers, run over ours: the same weights, the same schedules, states both ways."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from accel.optim import FusedAdam, FusedAdamW, FusedLARS, FusedSGD, MultiTensorOptimizer
from tests import effort
from tests.accel.optim.torch_database import database

OURS: dict[str, type[MultiTensorOptimizer]] = {"SGD": FusedSGD, "Adam": FusedAdam, "AdamW": FusedAdamW}
INFOS = [info for info in database.optim_db if info.name in OURS]
# As a device that can be captured would be asked: "capturable" is torch's word for what ours always does.
INPUTS = [
    (info, given.desc, {name: value for name, value in given.kwargs.items() if name != "capturable"})
    for info in INFOS
    for given in info.optim_inputs_func(device="cuda")
]
NAMES = [f"{info.name}: {words}" for info, words, _ in INPUTS]
DTYPES = [torch.float32, torch.float64]

Params = list[torch.nn.Parameter]


FORMS = ["forloop", "foreach", "fused"]


def plain(options: dict[str, Any], form: str = "forloop") -> dict[str, Any]:
    """Return options as one of torch's own forms takes them; its loop over parameters is the oracle."""
    betas = options.get("betas")
    changed = {"betas": tuple(float(b) for b in betas)} if betas else {}
    if form == "foreach" and isinstance(options.get("lr"), Tensor):
        changed["lr"] = float(options["lr"])  # torch wants it captured then
    return {**copy.deepcopy(options), **changed, "foreach": form == "foreach", "fused": form == "fused"}


def rounded(options: dict[str, Any]) -> torch.dtype:
    """Return the dtype in which torch computes with a learning rate."""
    return torch.float32 if isinstance(options.get("lr"), Tensor) else torch.float64


def params_of(dtype: torch.dtype, form: str = "forloop") -> Params:
    torch.manual_seed(3)
    gaps = torch.randn(10, 8, dtype=dtype)[:, ::2]
    shapes = [(10, 5), (10,), (), (0,), (3, 4, 5)]
    own = [torch.randn(shape, dtype=dtype) for shape in shapes]
    if form == "fused":  # on a CPU torch's takes the elements in the gaps for those of the parameter
        gaps = gaps.contiguous()
    return [torch.nn.Parameter(x) for x in (*own, own[0].clone().T, gaps)]


def stepped(
    optimizer: torch.optim.Optimizer, params: Params, steps: int, after: Callable[[float], None] | None = None
) -> None:
    """Minimise a bowl; every third step, one parameter has no gradient."""
    for number in range(steps):
        optimizer.zero_grad()
        loss = sum(((p - i / 7) ** 2 * (1 + j)).sum() for j, p in enumerate(params) for i in (number % 3,))
        assert isinstance(loss, Tensor)
        loss.backward()
        if number % 3 == 1:
            params[1].grad = None
        optimizer.step()
        if after is not None:
            after(float(loss.detach()))


def compare(ours: Params, theirs: Params, steps: int, least: torch.dtype = torch.float64) -> None:
    for a, b in zip(ours, theirs, strict=True):
        # Each step may round otherwise; the bowl draws weights together.
        tolerance = 4 * steps * max(torch.finfo(dtype).eps for dtype in (a.dtype, least))
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "fp64"])
@pytest.mark.parametrize(("info", "words", "options"), INPUTS, ids=NAMES)
@pytest.mark.parametrize("form", FORMS)
def test_weights_are_torchs(info: Any, words: str, options: dict[str, Any], dtype: torch.dtype, form: str) -> None:
    theirs, ours = params_of(dtype, form), params_of(dtype, form)
    stepped(info.optim_cls(theirs, **plain(options, form)), theirs, 8)
    stepped(OURS[info.name](ours, **copy.deepcopy(options)), ours, 8)
    compare(ours, theirs, 8, rounded(options))


def _by_kernels() -> Iterator[Any]:
    """Yield some for 2 steps, and in the slow run all for 20."""
    for i, (info, words, options) in enumerate(INPUTS):
        for dtype in DTYPES:
            name = f"{info.name}: {words} {dtype}"
            yield pytest.param(info, options, dtype, 20, marks=pytest.mark.slow, id=f"{name} 20")
            if i % 6 == 1 and dtype == torch.float32:
                yield pytest.param(info, options, dtype, 2, id=f"{name} 2")


@pytest.mark.parametrize(("info", "options", "dtype", "steps"), list(_by_kernels()))
def test_weights_are_torchs_by_kernels(
    info: Any, options: dict[str, Any], dtype: torch.dtype, steps: int, interpreted: None
) -> None:
    theirs, ours = params_of(dtype), params_of(dtype)
    stepped(info.optim_cls(theirs, **plain(options)), theirs, steps)
    stepped(OURS[info.name](ours, **copy.deepcopy(options)), ours, steps)
    compare(ours, theirs, steps, rounded(options))


@pytest.mark.sample(3)
@pytest.mark.parametrize(("info", "words", "options"), INPUTS, ids=NAMES)
@pytest.mark.parametrize("form", FORMS)
def test_states_go_both_ways(info: Any, words: str, options: dict[str, Any], form: str) -> None:
    """Train in one, go on in the other, by a file."""
    theirs, ours = params_of(torch.float32, form), params_of(torch.float32, form)
    torchs, own = info.optim_cls(theirs, **plain(options, form)), OURS[info.name](ours, **copy.deepcopy(options))
    stepped(torchs, theirs, 3)
    stepped(own, ours, 3)
    from_torch, from_ours = saved(torchs), saved(own)
    torchs, own = info.optim_cls(theirs, lr=77.0), OURS[info.name](ours, lr=77.0)
    torchs.load_state_dict(from_ours)
    own.load_state_dict(from_torch)
    stepped(torchs, theirs, 3)
    stepped(own, ours, 3)
    compare(ours, theirs, 6)
    again = OURS[info.name](params_of(torch.float32))
    again.load_state_dict(saved(own))
    assert {k: set(v) for k, v in again.state_dict()["state"].items()} == {
        k: set(v) for k, v in own.state_dict()["state"].items()
    }


def saved(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    state: dict[str, Any] = torch.load(file)  # weights_only, as by default
    return state


def test_options_that_torch_has_not_outlive_its_state() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = FusedAdam([{"params": [param], "max_grad_norm": 0.5}], max_grad_norm=3.0, master_weights=False)
    optimizer.load_state_dict(torch.optim.Adam([param], lr=0.25).state_dict())
    (group,) = optimizer.param_groups
    assert [group[name] for name in ("lr", "max_grad_norm", "master_weights")] == [0.25, 0.5, False]


@pytest.mark.parametrize("copied", [copy.deepcopy, "pickled"], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("kind", OURS.values())
def test_a_copy_goes_on_alike(kind: type[MultiTensorOptimizer], copied: Any) -> None:
    params = params_of(torch.float32)
    optimizer = kind(params, lr=0.01)
    stepped(optimizer, params, 3)
    if copied == "pickled":
        file = io.BytesIO()
        torch.save((params, optimizer), file)
        file.seek(0)
        others, other = torch.load(file, weights_only=False)
    else:
        others, other = copied((params, optimizer))
    stepped(optimizer, params, 3)
    stepped(other, others, 3)
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))


def _schedules() -> list[Any]:
    return [
        pytest.param(info, i, id=f"{info.name} {i}")
        for info in INFOS
        for i in range(len(info.scheduler_inputs))  # lists of what is stepped together
    ]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("info", "index"), _schedules())
@pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])
def test_schedulers_are_followed(info: Any, index: int, tensor: bool) -> None:
    results = []
    for kind in (info.optim_cls, OURS[info.name]):
        params = params_of(torch.float32)
        optimizer = kind(params, lr=torch.tensor(0.01) if tensor else 0.01)
        schedulers = [make(optimizer) for make in info.scheduler_inputs[index]]
        stepped(optimizer, params, 12, lambda loss, own=schedulers: _advance(own, loss))  # type: ignore[misc]
        results.append(params)
    compare(results[1], results[0], 12)


def _advance(schedulers: list[Any], loss: float) -> None:
    for scheduler in schedulers:
        scheduler.step(loss) if isinstance(scheduler, ReduceLROnPlateau) else scheduler.step()


def _errors() -> list[Any]:
    ours = []
    for info in INFOS:
        for wrong in info.optim_error_inputs_func(device="cpu", dtype=torch.float32):
            kwargs = wrong.optimizer_error_input.kwargs
            # Switches between torch's paths; that both betas are tensors, or none, is its own limit.
            skipped = {"foreach", "fused", "differentiable", "capturable"} & kwargs.keys()
            if not skipped and "either both floats" not in wrong.error_regex:
                ours.append(
                    pytest.param(info, wrong, id=f"{info.name}: {wrong.optimizer_error_input.desc.replace(' ', '_')}")
                )
    return ours


@pytest.mark.parametrize(("info", "wrong"), _errors())
def test_what_torch_refuses_is_refused(info: Any, wrong: Any) -> None:
    given = wrong.optimizer_error_input
    assert wrong.error_on is database.OptimizerErrorEnum.CONSTRUCTION_ERROR
    params = [torch.nn.Parameter(torch.zeros(2, 2))] if given.params is None else given.params
    if issubclass(wrong.error_type, Warning):
        with pytest.warns(wrong.error_type, match=wrong.error_regex):
            OURS[info.name](params, **given.kwargs)
        return
    with pytest.raises(wrong.error_type):
        OURS[info.name](params, **given.kwargs)


# Without weight decay LARS takes no ratio, so that with the rate outside of the momentum it is SGD.
SWITCHED: list[tuple[type[MultiTensorOptimizer], dict[str, Any]]] = [
    (FusedSGD, {}),
    (FusedLARS, {"lr_in_momentum": False}),
]


@pytest.mark.parametrize(("kind", "options"), SWITCHED, ids=["SGD", "LARS"])
def test_dampening_may_be_switched_on_and_off(kind: Any, options: dict[str, Any], path: str) -> None:
    """It spares the first update, which need not be the first that is counted."""
    theirs, ours = params_of(torch.float32), params_of(torch.float32)
    plainly = torch.optim.SGD(theirs, lr=0.01, momentum=0.9)
    optimizer = kind(ours, lr=0.01, momentum=0.9, weight_decay=0.0, **options)
    for dampening in (0.0, 0.5, 0.0, 0.25):
        for each, params in ((plainly, theirs), (optimizer, ours)):
            each.param_groups[0]["dampening"] = dampening
            stepped(each, params, 2)
    compare(ours, theirs, 8)


@pytest.mark.parametrize("kind", OURS.values())
def test_closure_hooks_and_groups(kind: type[MultiTensorOptimizer]) -> None:
    first, second = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    optimizer = kind([first], lr=0.1)
    optimizer.add_param_group({"params": (p for p in [second]), "lr": 0.0})
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (first + second).sum()
        assert torch.is_grad_enabled()
        loss.backward()
        return loss.detach()

    assert float(optimizer.step(closure)) == 6.0
    assert seen == ["before", "after"]
    assert bool((first < 1).all())
    assert torch.equal(second.detach(), torch.ones(3))


@pytest.mark.parametrize(
    ("kind", "theirs", "options"),
    [
        (FusedSGD, torch.optim.SGD, {"momentum": 0.9}),
        (FusedAdam, torch.optim.Adam, {"amsgrad": True}),
        (FusedAdamW, torch.optim.AdamW, {}),
    ],
)
def test_less_python_around_the_same_kernel(kind: Any, theirs: Any, options: Any) -> None:
    """On a CPU the update is torch's fused kernel: what is around it must not make it slower."""
    efforts = []
    for make in (kind, partial(theirs, fused=True)):
        params = [torch.nn.Parameter(torch.zeros(4)) for _ in range(50)]
        for p in params:
            p.grad = torch.ones(4)
        optimizer = make(params, lr=0.1, **options)
        optimizer.step()
        efforts.append(effort.of(optimizer.step))
    ours, torchs = efforts
    assert ours.calls < torchs.calls
    assert ours.instructions < torchs.instructions


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler's own
@pytest.mark.parametrize("kind", [FusedSGD, FusedAdamW])
def test_a_compiled_step_runs_as_it_is(kind: Any) -> None:
    params, others = params_of(torch.float32), params_of(torch.float32)
    compiled, plain = kind(params, lr=0.01), kind(others, lr=0.01)
    torch._dynamo.reset()
    step = torch.compile(compiled.step, backend="eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            for p, q in zip(params, others, strict=True):
                p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
            step()
            plain.step()
    assert all(torch.equal(p, q) for p, q in zip(params, others, strict=True))
