"""Calls that a rank makes alone: no data-parallel model talks to the others, and all is as before afterwards."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from accel.guard.alone import on_this_rank_alone


class JoinConfig(NamedTuple):
    enable: bool
    throw_on_early_termination: bool = False


class Parallel(nn.parallel.DistributedDataParallel):
    """Does as `DistributedDataParallel` does with its attributes, and notes what it would tell the others."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module
        self._join_config = JoinConfig(enable=True)
        self.require_forward_param_sync = self.require_backward_grad_sync = True
        self._told: list[str] = []

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def forward(self, x: Tensor) -> Tensor:
        told = {
            "of the step": self._join_config.enable,
            "buffers": self.require_forward_param_sync,
            "gradients": self.require_backward_grad_sync,
        }
        self._told += [what for what, tells in told.items() if tells]
        self.require_forward_param_sync = self.require_backward_grad_sync
        return self.module(x)  # type: ignore[no-any-return]


def state(model: Parallel) -> tuple[object, ...]:
    return model._join_config, model.require_forward_param_sync, model.require_backward_grad_sync


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_told_and_all_is_as_before(within: bool, fails: bool) -> None:
    parallel = Parallel(nn.Linear(2, 2))
    model = nn.Sequential(parallel) if within else parallel
    before = state(parallel)
    with contextlib.suppress(KeyError), on_this_rank_alone(model):
        model(torch.ones(1, 2))
        parallel.require_forward_param_sync = False
        model(torch.ones(1, 2))
        if fails:
            raise KeyError
    assert parallel._told == [] and state(parallel) == before
    model(torch.ones(1, 2))
    assert parallel._told == ["of the step", "buffers", "gradients"]


def test_the_attributes_are_those_of_ddp() -> None:
    parallel = nn.parallel.DistributedDataParallel
    source = inspect.getsource(parallel.__init__) + inspect.getsource(parallel._pre_forward)
    assert all(f"self.{name}" in source for name in ("_join_config", "require_forward_param_sync"))
    assert hasattr(parallel, "no_sync")


def test_other_models_are_called_as_ever() -> None:
    with on_this_rank_alone(nn.Linear(2, 2)):
        pass
