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
from tests.profiler.test_update_path import KINDS


def turned(tensor: Tensor) -> Tensor:
    """Return a copy with its dimensions in another order in memory."""
    is_plain = tensor.is_contiguous()
    order = tuple(range(tensor.dim()))[::-1]
    return tensor.permute(order).contiguous().permute(order) if is_plain else tensor.contiguous()


def _as_another_format(parameters: list[nn.Parameter], optimizer: Any) -> None:
    for p in parameters:
        p.data = turned(p.data)


def _state_as_another_format(parameters: list[nn.Parameter], optimizer: Any) -> None:
    for state in optimizer.state.values():
        state |= {name: turned(value) for name, value in state.items()}


def _state_data_as_another_format(parameters: list[nn.Parameter], optimizer: Any) -> None:
    for state in optimizer.state.values():
        for value in state.values():
            value.data = turned(value.data)


def _with_gaps(parameters: list[nn.Parameter], optimizer: Any) -> None:
    for p in parameters:
        p.data = torch.stack((p.data, p.data), -1)[..., 0]


def _smaller(parameters: list[nn.Parameter], optimizer: Any) -> None:
    parameters[0].data = parameters[0].data[:2].clone()


def _larger(parameters: list[nn.Parameter], optimizer: Any) -> None:
    parameters[0].data = parameters[0].data.repeat(8, 1)


def _in(dtype: torch.dtype) -> Any:
    def change(parameters: list[nn.Parameter], optimizer: Any) -> None:
        for p in parameters:
            p.data = p.data.to(dtype)

    return change


def _set_in_groups(**options: Any) -> Any:
    def change(parameters: list[nn.Parameter], optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group |= options

    return change


def _another_group(parameters: list[nn.Parameter], optimizer: Any) -> None:
    parameters.append(nn.Parameter(torch.ones(4, 6)[:, ::2]))
    optimizer.add_param_group({"params": parameters[-1:], "lr": 0.05})


def _other_parameters(parameters: list[nn.Parameter], optimizer: Any) -> None:
    optimizer.state.pop(parameters[0], None)  # a state that is saved may name parameters of groups only
    parameters[0] = optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.ones(5, 4).T)


def _state_in(dtype: torch.dtype) -> Any:
    def change(parameters: list[nn.Parameter], optimizer: Any) -> None:
        for state in optimizer.state.values():
            state |= {name: value.to(dtype) for name, value in state.items() if name != "step"}

    return change


def _state_of_another_format(parameters: list[nn.Parameter], optimizer: Any) -> None:
    state = copy.deepcopy(optimizer.state_dict())
    for values in state["state"].values():
        values |= {name: turned(value) for name, value in values.items()}
    groups = [{**group, "foreach": None, "fused": None} for group in state["param_groups"]]
    optimizer.load_state_dict({**state, "param_groups": groups})


def _nothing(parameters: list[nn.Parameter], optimizer: Any) -> None: ...


CHANGES: dict[str, Any] = {
    "nothing": _nothing,
    "another format": _as_another_format,
    "a state of another format": _state_as_another_format,
    "a state of another format in place": _state_data_as_another_format,
    "a loaded state of another format": _state_of_another_format,
    "gaps": _with_gaps,
    "fewer rows": _smaller,
    "more rows": _larger,
    "float64": _in(torch.float64),
    "bfloat16": _in(torch.bfloat16),
    "float16": _in(torch.float16),
    "states in float64": _state_in(torch.float64),
    "states in bfloat16": _state_in(torch.bfloat16),
    "another group": _another_group,
    "other parameters": _other_parameters,
    "a rate that is a tensor": _set_in_groups(lr=torch.tensor(0.05)),
    "a rate": _set_in_groups(lr=0.05),
    "a weight decay that is a tensor": _set_in_groups(weight_decay=torch.tensor(0.01)),
    "momentum that is a tensor": _set_in_groups(momentum=torch.tensor(0.5)),
    "betas that are tensors": _set_in_groups(betas=(torch.tensor(0.8), torch.tensor(0.9))),
}


def changed(kind: Any, path: str | None, changes: list[str], **options: Any) -> tuple[list[Tensor], list[str]]:
    """Train parameters of some layouts, and change them on the chosen; return them, and what steps raised."""
    torch.manual_seed(0)
    weights = torch.randn(4, 6), torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.randn(3)
    parameters = [nn.Parameter(w) for w in weights]
    optimizer = kind(parameters[:], 0.1, **options)
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


def assert_as_plain(kind: Any, path: str, changes: list[str], **options: Any) -> None:
    (plain, refused), (other, also) = (changed(kind, chosen, changes, **options) for chosen in (None, path))
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
