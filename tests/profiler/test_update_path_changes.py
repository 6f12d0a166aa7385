"""A loop that changes its model or optimizer between two steps: the switched path goes on as the plain one would."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from accel.profiler.experiments.update_path import Paths
from tests import optimizer_changes
from tests.optimizer_changes import Change, options, turned
from tests.profiler.test_update_path import KINDS


def _fewer_rows(parameters: list[nn.Parameter], optimizer: Any) -> None:
    parameters[0].data = parameters[0].data[:2].clone()


def _more_rows(parameters: list[nn.Parameter], optimizer: Any) -> None:
    parameters[0].data = parameters[0].data.repeat(8, 1)


def _state_in(dtype: torch.dtype) -> Change:
    def change(parameters: list[nn.Parameter], optimizer: Any) -> None:
        for state in optimizer.state.values():
            state |= {name: value.to(dtype) for name, value in state.items() if name != "step"}

    return change


def _a_state_turned_and_loaded(parameters: list[nn.Parameter], optimizer: Any) -> None:
    state = copy.deepcopy(optimizer.state_dict())
    for values in state["state"].values():
        values |= {name: turned(value) for name, value in values.items()}
    groups = [{**group, "foreach": None, "fused": None} for group in state["param_groups"]]
    optimizer.load_state_dict({**state, "param_groups": groups})


def _nothing(parameters: list[nn.Parameter], optimizer: Any) -> None: ...


CHANGES = optimizer_changes.CHANGES | {
    "nothing": _nothing,
    "a state turned and loaded": _a_state_turned_and_loaded,
    "fewer rows": _fewer_rows,
    "more rows": _more_rows,
    "states in float64": _state_in(torch.float64),
    "states in bfloat16": _state_in(torch.bfloat16),
    "a weight decay that is a tensor": options(weight_decay=torch.tensor(0.01)),
    "momentum that is a tensor": options(momentum=torch.tensor(0.5)),
    "betas that are tensors": options(betas=(torch.tensor(0.8), torch.tensor(0.9))),
}


def changed(kind: Any, path: str | None, changes: list[str], **given: Any) -> tuple[list[Tensor], list[str]]:
    """Train parameters of some layouts, and change them on the chosen; return them, and what steps raised."""
    torch.manual_seed(0)
    weights = torch.randn(4, 6), torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.randn(3)
    parameters = [nn.Parameter(w) for w in weights]
    optimizer = kind(parameters[:], 0.1, **given)
    paths, errors = Paths(), []
    for change in [None, None, *changes, None]:
        if change is not None:
            CHANGES[change](parameters, optimizer)
        for _ in range(2):
            for p in parameters:
                p.grad = torch.randn(p.shape).to(p.dtype)
            try:
                optimizer.step()
            except Exception as error:
                errors.append(type(error).__name__)
        if path and not paths.saved:
            paths.switch([optimizer], fused=path == "fused")
    paths.restore()
    assert all(not group.get("fused") and not group["foreach"] for group in optimizer.param_groups)
    return [p.detach() for p in parameters], errors


def assert_as_plain(kind: Any, path: str, changes: list[str], **given: Any) -> None:
    (plain, refused), (other, also) = (changed(kind, chosen, changes, **given) for chosen in (None, path))
    assert also == refused
    if refused:  # what a step has done before it raises depends on the path
        return
    for expected, actual in zip(plain, other, strict=True):
        is_rough = expected.dtype in (torch.bfloat16, torch.float16) or "states in bfloat16" in changes
        close = {"rtol": 0.03, "atol": 0.03} if is_rough else {}
        torch.testing.assert_close(actual, expected, **close)


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("path", ["fused", "foreach"])
def test_whatever_the_loop_changes_steps_do_as_on_the_plain_path(path: str, change: str, kind: Any) -> None:
    """A fused step was silently wrong after a change of format, and wrote beyond a state after one of size."""
    assert_as_plain(kind, path, [change])


@pytest.mark.parametrize("path", ["fused", "foreach"])
@given(
    st.sampled_from([(kind, {}) for kind in KINDS] + [(torch.optim.SGD, {"momentum": 0.9})]),
    st.lists(st.sampled_from(list(CHANGES)), min_size=2, max_size=4),
)
def test_after_several_changes_too(path: str, kind: Any, changes: list[str]) -> None:
    assert_as_plain(kind[0], path, changes, **kind[1])


@pytest.mark.parametrize("fused", [True, False])
def test_a_path_that_is_restored_within_a_closure_lets_the_step_end(fused: bool) -> None:
    """As where the guard undoes it in the forward pass that a closure makes."""
    parameter = nn.Parameter(torch.ones(3))
    optimizer, paths = torch.optim.SGD([parameter], 0.5), Paths()
    paths.switch([optimizer], fused=fused)

    def closure() -> float:
        parameter.grad = torch.ones(3)
        paths.restore()
        return 0.0

    optimizer.step(closure)  # type: ignore[arg-type]
    assert parameter.tolist() == [0.5] * 3


def test_momentum_that_comes_back_makes_the_buffers_that_are_missing() -> None:
    ends = []
    for fused in (False, True):
        parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
        optimizer, paths = torch.optim.SGD(parameters, 0.5, momentum=0.9), Paths()
        for number, momentum in enumerate((0.9, 0.0, 0.0, 0.9, 0.9)):
            optimizer.param_groups[0]["momentum"] = momentum
            for p in parameters[: 1 + (number > 0)]:
                p.grad = torch.ones_like(p)
            if number == 1 and fused:
                paths.switch([optimizer], fused=True)
            optimizer.step()
        paths.restore()
        ends.append([p.detach() for p in parameters])
    for expected, actual in zip(*ends, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_states_of_another_dtype_are_seen_where_all_is_contiguous(dtype: torch.dtype) -> None:
    ends = []
    for fused in (False, True):
        parameter = nn.Parameter(torch.ones(3))
        optimizer, paths = torch.optim.SGD([parameter], 0.5, momentum=0.9), Paths()
        for number in range(4):
            parameter.grad = torch.ones(3)
            if fused and number == 1:
                paths.switch([optimizer], fused=True)
            if number == 3:
                _state_in(dtype)([parameter], optimizer)
            optimizer.step()
        paths.restore()
        ends.append(parameter.detach())
    torch.testing.assert_close(*ends)


def test_gradients_that_are_views_of_the_loops_own_buffer_stay_so() -> None:
    """Others stood in for them for good: the buffer that the loop cleared and clipped was nobody's."""
    weight = nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
    flat = torch.zeros(weight.numel())
    optimizer = torch.optim.SGD([weight], 0.1)
    paths = Paths()
    paths.switch([optimizer], fused=True)
    weight.grad = view = flat.view(weight.shape)
    for _ in range(2):
        before = weight.detach().clone()
        flat.fill_(1.0)
        optimizer.step()
        assert weight.grad is view
        torch.testing.assert_close(weight.detach(), before - 0.1)
    paths.restore()
