"""What is refused: one clear sentence, and nothing modified."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from accel.errors import InvalidArgument
from accel.optim import FusedAdam, FusedAdamW, FusedLAMB, FusedLARS, FusedSGD

KINDS = [FusedSGD, FusedAdam, FusedAdamW, FusedLAMB, FusedLARS]


@pytest.mark.parametrize(
    ("param", "words"),
    [
        (torch.zeros(2, dtype=torch.complex64), "must be float32, float16, bfloat16 or float64. Found: complex64"),
        (torch.zeros(2, dtype=torch.int64), "Found: int64"),
        (torch.zeros(1).expand(3), r"memory of its own. Found: \[3\] with strides \(0,\)"),
        (torch.zeros(7).as_strided((3, 3), (2, 1)), r"memory of its own. Found: \[3, 3\] with strides \(2, 1\)"),
        (torch.zeros(2, device="meta"), "on one device. Found: cpu and meta"),
        (torch.eye(2).to_sparse(), "must be dense"),
    ],
    ids=["complex", "integers", "overlap", "overlapping rows", "two devices", "sparse"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_parameters(kind: Any, param: torch.Tensor, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        kind([torch.zeros(1), param])
    optimizer = kind([torch.zeros(1)])
    with pytest.raises(InvalidArgument, match=words):
        optimizer.add_param_group({"params": [param]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_with_gaps_are_taken(kind: Any) -> None:
    whole = torch.zeros(4, 6, 2)
    kind([whole[:, ::2], whole[:, :3].transpose(0, 1), whole[::4, 0], whole[..., 1]])


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (FusedSGD, {"lr": -1}, "FusedSGD: lr must be at least 0. Found: -1."),
        (FusedSGD, {"lr": "fast"}, "lr must be a number. Found: 'fast'"),
        (FusedSGD, {"lr": torch.zeros(2)}, r"a tensor of one. Found: \[2\]"),
        (FusedSGD, {"nesterov": True}, "needs a momentum, and no dampening. Found: momentum 0, dampening 0"),
        (FusedSGD, {"max_grad_norm": 0.0}, "max_grad_norm must be larger than 0. Found: 0"),
        (FusedAdam, {"betas": (0.9, 1.0)}, r"betas\[1\] must be at least 0 and smaller than 1. Found: 1"),
        (FusedAdam, {"betas": 0.9}, "betas must be two numbers. Found: 0.9"),
        (FusedAdamW, {"eps": float("nan")}, "eps must be at least 0. Found: nan"),
        (FusedLAMB, {"weight_decay": -0.1}, "weight_decay must be at least 0"),
        (FusedLARS, {"trust_coefficient": 0.0}, "trust_coefficient must be larger than 0"),
        (FusedAdam, {"backend": "cuda"}, "backend must be one of accel, apex. Found: 'cuda'"),
    ],
)
def test_options(kind: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        kind([torch.zeros(1)], **options)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sparse_gradient_stops_the_step_before_anything_moved(kind: Any) -> None:
    params = [nn.Parameter(torch.ones(3, 2)) for _ in range(2)]
    optimizer = kind(params, lr=0.1)
    params[0].grad, params[1].grad = torch.ones(3, 2), torch.ones(3, 2).to_sparse()
    with pytest.raises(InvalidArgument, match=r"gradients must be dense.*sparse=False"):
        optimizer.step()
    assert not optimizer.state
    assert torch.equal(params[0].detach(), torch.ones(3, 2))


def _states() -> dict[str, Any]:
    param = nn.Parameter(torch.ones(3, 2))
    param.grad = torch.ones(3, 2)
    others = [torch.optim.RMSprop([param], lr=0.1), torch.optim.Adam([param]), torch.optim.SGD([param], momentum=0.9)]
    others.append(torch.optim.RAdam([param]))
    for optimizer in others:
        optimizer.step()
    return {type(o).__name__: o.state_dict() for o in others}


def _other_shape() -> dict[str, Any]:
    state = copy.deepcopy(_states()["Adam"])
    state["state"][0]["exp_avg"] = torch.zeros(7)
    return state


def _uncounted() -> dict[str, Any]:
    state = copy.deepcopy(_states()["Adam"])
    del state["state"][0]["step"]
    return state


@pytest.mark.parametrize(
    ("kind", "state", "words"),
    [
        (FusedAdam, lambda: _states()["SGD"], "of another optimizer: its groups have no 'betas'"),
        (FusedSGD, lambda: _states()["Adam"], "of another optimizer: its groups have no 'momentum'"),
        (FusedAdam, lambda: _states()["RAdam"], "of another optimizer: its groups have capturable"),
        (FusedLAMB, lambda: _states()["Adam"], "of another optimizer: its groups have amsgrad"),
        (FusedLARS, lambda: _states()["SGD"], "of another optimizer: its groups have dampening"),
        (FusedAdam, lambda: FusedLAMB([torch.ones(3, 2)]).state_dict(), "its groups have adam_w_mode"),
        (FusedSGD, lambda: FusedLARS([torch.ones(3, 2)]).state_dict(), "its groups have always_adapt"),
        (FusedSGD, lambda: _states()["RMSprop"], r"a parameter has \['square_avg'\]"),
        (FusedAdam, _other_shape, r"of other parameters: exp_avg is \[7\] for a parameter of \[3, 2\]"),
        (FusedAdam, _uncounted, "must say how many steps were done"),
        (FusedAdam, lambda: {"model": {}}, r"Found: \['model'\]"),
        (FusedAdam, lambda: FusedAdam([torch.zeros(1), torch.zeros(1)]).state_dict(), r"\[1\]. Found: \[2\]"),
    ],
)
def test_a_foreign_state_leaves_all_as_it_is(kind: Any, state: Any, words: str) -> None:
    param = nn.Parameter(torch.ones(3, 2))
    param.grad = torch.ones(3, 2)
    optimizer = kind([param], lr=0.5)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(InvalidArgument, match=words):
        optimizer.load_state_dict(state())
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert str(after["state"]) == str(before["state"])
    assert not optimizer._optimizer_load_state_dict_pre_hooks


def test_a_state_on_another_device_is_named(interpreted: None) -> None:
    param = nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    optimizer = FusedAdam([param])
    optimizer.state[param] = {name: torch.zeros(3, device="meta") for name in ("exp_avg", "exp_avg_sq")}
    with pytest.raises(ValueError, match=r"on cpu, as the parameters. Found: meta"):
        optimizer.step()
    assert torch.equal(param.detach(), torch.ones(3))
