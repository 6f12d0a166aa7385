"""Switching an optimizer's path: the fused one makes the same update, however parameters and gradients are laid out."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from accel.profiler.experiments.update_path import Paths, has_fused, moved, refusal

KINDS = [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad]
PERMUTATIONS = [(0, 1, 2, 3), (0, 2, 3, 1), (3, 2, 1, 0), (1, 0, 3, 2)]


def laid_out(shape: tuple[int, ...], permutation: tuple[int, ...], gaps: bool) -> Tensor:
    """Return random numbers whose memory has another order of dimensions, and perhaps gaps."""
    memory = [shape[dimension] for dimension in permutation]
    own = torch.randn(*memory[:-1], memory[-1] * (1 + gaps))[..., :: 1 + gaps]
    back = [permutation.index(dimension) for dimension in range(4)]
    return own.permute(back)


def trained(kind: Any, weights: list[Tensor], gradients: list[list[Tensor]], fused: bool) -> list[Tensor]:
    """Take a plain step, then some on the fused path where there is one, then a plain one."""
    params = [nn.Parameter(torch.empty_strided(w.shape, w.stride()).copy_(w)) for w in weights]
    optimizer = kind(params, 0.1, weight_decay=0.01)
    paths = Paths()
    for number, step in enumerate(gradients):
        if fused and number == 1 and has_fused(optimizer):
            paths.switch([optimizer], fused=True)
        if number == len(gradients) - 1:
            paths.restore()
        for p, gradient in zip(params, step, strict=True):
            p.grad = gradient.expand(p.shape)
        optimizer.step()
    assert not optimizer._optimizer_step_pre_hooks
    return [p.detach() for p in params]


layouts = st.tuples(st.sampled_from(PERMUTATIONS), st.booleans())


@given(st.sampled_from(KINDS), st.tuples(*[st.integers(1, 4)] * 4), layouts, st.lists(layouts, min_size=4, max_size=4))
def test_the_fused_path_makes_the_same_update_of_any_layout(
    kind: Any, shape: tuple[int, ...], weight: Any, steps: list[Any]
) -> None:
    """A CPU's takes memory as it comes: an update was once off by all of itself, without a word."""
    torch.manual_seed(0)
    weights = [laid_out(shape, *weight), torch.randn(3)]
    gradients = [[laid_out(shape, *each), torch.randn(3)] for each in steps]
    gradients[2][1] = torch.randn(1)  # expanded: one element for all
    plain, fused = (trained(kind, weights, gradients, fused) for fused in (False, True))
    for expected, actual in zip(plain, fused, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_a_parameter_with_gaps_or_of_16_bits_has_no_fused_path() -> None:
    gaps, overlapping = torch.randn(4, 6)[:, ::2], torch.randn(4, 1).expand(4, 3)
    for weight in (gaps, overlapping, torch.randn(4, 6).bfloat16()):  # SGD's leaves 16-bit weights as they are
        assert not has_fused(torch.optim.SGD([nn.Parameter(weight)], 0.1))
    assert has_fused(torch.optim.SGD([nn.Parameter(torch.randn(4, 6).T)], 0.1))


def test_a_parameter_laid_out_anew_has_none_while_its_state_is_not() -> None:
    parameter = nn.Parameter(torch.randn(2, 3, 4, 4))
    optimizer = torch.optim.Adam([parameter], 0.1)
    parameter.grad = torch.randn(2, 3, 4, 4)
    optimizer.step()
    assert has_fused(optimizer)
    parameter.data = parameter.data.to(memory_format=torch.channels_last)
    assert not has_fused(optimizer)


@pytest.mark.parametrize("kind", KINDS)
def test_the_path_and_its_hook_are_put_back(kind: Any) -> None:
    model = nn.Linear(3, 2)
    optimizer = kind(model.parameters(), 0.1)
    before = [dict(group) for group in optimizer.param_groups]
    paths = Paths()
    paths.switch([optimizer], fused=True)
    assert optimizer.param_groups[0]["fused"] and not optimizer.param_groups[0]["foreach"]
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    paths.restore()
    assert [dict(group) for group in optimizer.param_groups] == before
    assert not optimizer._optimizer_step_pre_hooks


def test_sparse_gradients_that_come_later_are_updated_as_ever() -> None:
    """Between two steps of a loop that has zeroed its gradients nothing shows that they will be sparse."""
    ends = []
    for fused in (False, True):
        torch.manual_seed(0)
        table = nn.Embedding(5, 3, sparse=True)
        optimizer = torch.optim.SGD(table.parameters(), 0.1)
        paths = Paths()
        if fused:
            paths.switch([optimizer], fused=has_fused(optimizer))
        for _ in range(3):
            table(torch.tensor([0, 2, 2])).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        paths.restore()
        ends.append(table.weight.detach())
    assert torch.equal(*ends)


def unfrozen(kind: Any, fused: bool, **options: Any) -> tuple[list[Tensor], Any]:
    """Train the head alone, then all layers, one of which is unfrozen later still."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    model[:2].requires_grad_(False)
    optimizer = kind(model.parameters(), 0.1, **options)
    paths = Paths()
    x = torch.randn(6, 4, 3)
    for number in range(6):
        if fused and number == 1:
            paths.switch([optimizer], fused=has_fused(optimizer))
        if number in (2, 4):
            model[1 - number // 4].requires_grad_(True)
        optimizer.zero_grad()
        model(x[number]).square().sum().backward()
        optimizer.step()
        assert not fused or number == 0 or optimizer.param_groups[0]["fused"]
    paths.restore()
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    return [p.detach() for p in model.parameters()], optimizer


@pytest.mark.parametrize("kind", KINDS)
def test_layers_that_are_unfrozen_later_are_updated_as_ever(kind: Any) -> None:
    """SGD's fused path takes the first step of a group for that of all its parameters, and raises at the others."""
    options = {"momentum": 0.9, "weight_decay": 0.01} if kind is torch.optim.SGD else {}
    (plain, _), (fused, _) = (unfrozen(kind, fused, **options) for fused in (False, True))
    for expected, actual in zip(plain, fused, strict=True):
        torch.testing.assert_close(actual, expected)


def test_a_step_that_raises_leaves_the_fused_path_to_the_next_one() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model[1](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    paths = Paths()
    paths.switch([optimizer], fused=True)

    def fail() -> float:
        raise KeyError("the user's own")

    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(KeyError):
        optimizer.step(fail)
    optimizer.step()
    assert optimizer.param_groups[0]["fused"]
    optimizer.step()
    paths.restore()
    assert optimizer.param_groups[0]["fused"] is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fused", [True, False])
def test_a_state_that_is_loaded_takes_the_path_and_gets_its_own_back(kind: Any, fused: bool) -> None:
    """torch makes new groups of it, which say what the state says."""
    model = nn.Linear(3, 2)
    optimizer = kind(model.parameters(), 0.1)
    paths = Paths()
    path = "fused" if fused else "foreach"

    def step() -> None:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()

    step()
    state = copy.deepcopy(optimizer.state_dict())
    paths.switch([optimizer], fused=fused)
    step()
    optimizer.load_state_dict({**state, "param_groups": [{**state["param_groups"][0], "lr": 0.25}]})
    assert not optimizer.param_groups[0][path]
    step()
    assert optimizer.param_groups[0][path]
    assert paths.switches(optimizer)
    paths.restore()
    assert (optimizer.param_groups[0]["foreach"], optimizer.param_groups[0]["fused"]) == (None, None)
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert not optimizer._optimizer_step_pre_hooks
    step()


def test_a_group_that_is_added_takes_the_path() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model[0].parameters(), 0.1, momentum=0.9)
    paths = Paths()
    paths.switch([optimizer], fused=True)
    optimizer.add_param_group({"params": list(model[1].parameters())})
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert [group["fused"] for group in optimizer.param_groups] == [True, True]
    paths.restore()
    assert [group["fused"] for group in optimizer.param_groups] == [None, None]


@pytest.mark.parametrize("named", [{"fused": True}, {"foreach": False}])
def test_a_path_that_a_loaded_state_names_is_left_to_it(named: dict[str, bool]) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    paths = Paths()
    paths.switch([optimizer], fused=False)
    state = optimizer.state_dict()
    optimizer.load_state_dict({**state, "param_groups": [{**state["param_groups"][0], "foreach": None, **named}]})
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert not paths.switches(optimizer)
    paths.restore()
    assert {name: optimizer.param_groups[0][name] for name in named} == named


def test_an_optimizer_that_is_replaced_is_let_go() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer, other = torch.optim.SGD([weight], 0.1), torch.optim.SGD([weight], 0.1)
    paths = Paths()
    paths.switch([optimizer], fused=True)
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    assert not paths.switches(other)
    paths.restore()


def test_layers_that_a_closure_unfreezes_are_updated_as_ever() -> None:
    """As Lightning steps: before the closure no gradient of theirs is there, so that nothing shows what they lack."""
    ends = []
    for fused in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        model[0].requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        paths, x = Paths(), torch.randn(5, 3)

        def closure(model: nn.Module = model, optimizer: Any = optimizer, x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            return loss

        for number in range(6):
            if number == 1 and fused:
                paths.switch([optimizer], fused=True)
            if number == 3:
                model.requires_grad_(True)
            assert torch.is_tensor(optimizer.step(closure) if number % 2 else optimizer.step(closure=closure))
        paths.restore()
        ends.append([p.detach() for p in model.parameters()])
    for expected, actual in zip(*ends, strict=True):
        torch.testing.assert_close(actual, expected)


class Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts copies from device to device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += "copy" in str(func)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
def test_a_switch_on_a_gpu_copies_all_step_counters_at_once(kind: Any) -> None:
    """One by one, each copy waited for the device: 10 ms for 1,000 tensors, at each switch of a trial."""
    with FakeTensorMode():
        params = [nn.Parameter(torch.randn(3, device="cuda")) for _ in range(20)]
        optimizer = kind(params, 0.1)
        for p in params:
            optimizer.state[p] = {"step": torch.tensor(3.0), "sum": torch.zeros_like(p)}
        paths = Paths()
        for switch, device in ((lambda: paths.switch([optimizer], fused=True), "cuda"), (paths.restore, "cpu")):
            with Copies() as copies:
                switch()
            assert copies.number == 1
            assert {optimizer.state[p]["step"].device.type for p in params} == {device}


kinds = st.tuples(
    st.sampled_from(["cpu", "meta"]), st.sampled_from([torch.float32, torch.float64]), st.sampled_from([(), (1,)])
)


@given(st.lists(kinds, max_size=12))
def test_counters_of_all_kinds_keep_their_places(of: list[Any]) -> None:
    counters = [torch.zeros(shape, dtype=dtype, device=device) for device, dtype, shape in of]
    there = moved(counters, torch.device("meta"))
    assert [(each.dtype, each.shape) for each in there] == [(each.dtype, each.shape) for each in counters]
    assert all(each.device.type == "meta" for each in there)
    on_cpu = [each for each in counters if each.device.type == "cpu"]
    assert all(a is b for a, b in zip(moved(on_cpu, torch.device("cpu")), on_cpu, strict=True))


@pytest.mark.gpu
def test_on_a_gpu_counters_keep_their_values_and_share_no_memory() -> None:
    counters = [torch.tensor(float(number)) for number in range(5)]
    there = moved(counters, torch.device("cuda", 0))
    there[0].add_(10)
    assert [float(each) for each in moved(there, torch.device("cpu"))] == [10.0, 1.0, 2.0, 3.0, 4.0]
    assert all(each.untyped_storage().nbytes() == 4 for each in moved(there, torch.device("cpu")))


@pytest.mark.parametrize("reads", [False, True])
def test_a_compiled_step_is_known_whatever_else_is_compiled(reads: bool) -> None:
    torch.compiler.reset()
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())

    def norms() -> list[Tensor]:
        return [p.norm() for group in optimizer.param_groups for p in group["params"]]

    compiled: Any = torch.compile(norms if reads else optimizer.step, backend="eager")
    model(torch.ones(3, 4)).sum().backward()
    compiled()
    optimizer.step()
    torch.compile(model, backend="eager")(torch.ones(3, 4)).sum().backward()  # marks the parameters anew
    assert refusal(optimizer) == ("" if reads else "the loop has compiled the step of AdamW")
    torch.compiler.reset()
