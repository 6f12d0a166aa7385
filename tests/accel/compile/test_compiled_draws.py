"""A compiled model draws the random numbers of the plain one, from the same generator and in the same order."""

from __future__ import annotations

import copy
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from accel.compile import compiled_draws
from accel.compile.compiled_draws import compile_with_plain_draws
from accel.guard.draws import ReplayedDraws

ROOT = Path(__file__).resolve().parents[3]

SECOND_PROCESS = """
import sys, torch
from torch import nn
from torch._dynamo.utils import counters
from accel.compile.compiled_draws import compile_with_plain_draws

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.Linear(16, 3))
call = model.forward
compiled = torch.compile(lambda x: call(x), backend=compile_with_plain_draws)
x = torch.randn(8, 6)
state = torch.get_rng_state()
outputs = compiled(x)
outputs.sum().backward()
gradient = model[0].weight.grad.clone()
model.zero_grad()
torch.set_rng_state(state)
plain = model(x)
plain.sum().backward()
torch.testing.assert_close(outputs, plain)
torch.testing.assert_close(gradient, model[0].weight.grad)
print(counters["aot_autograd"]["autograd_cache_hit"], counters["aot_autograd"]["autograd_cache_bypass"])
"""


class Attention(nn.Module):
    """Causal or masked attention with dropout on weights and outputs."""

    def __init__(self, heads: int = 2, mask: str = "causal") -> None:
        super().__init__()
        self.heads, self.mask = heads, mask
        self.into, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        n, length, _ = x.shape
        q, k, v = self.into(x).view(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        allowed = torch.ones(length, length).tril(1)
        mask = {"causal": None, "boolean": allowed.bool(), "added": (1 - allowed) * -3.0}[self.mask]
        rate = 0.3 if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(q, k, v, mask, rate, is_causal=self.mask == "causal")
        return x + self.drop(self.out(mixed.transpose(1, 2).reshape(n, length, -1)))


class Reparametrised(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        mean = super().forward(x)
        return mean + torch.randn_like(mean) * mean.exp() + torch.rand(mean.shape) + torch.bernoulli(mean.sigmoid())


def images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.Dropout2d(0.3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5), nn.Dropout(0.2, inplace=True)
    )


MODELS = {
    "dropout": (lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3), nn.Dropout(0.1)), (4, 6)),
    "same shapes": (lambda: nn.Sequential(*(nn.Dropout(0.5) for _ in range(4)), nn.Linear(6, 3)), (4, 6)),
    "nothing and all": (lambda: nn.Sequential(nn.Dropout(0.0), nn.Linear(6, 3), nn.Dropout(1.0)), (4, 6)),
    "images": (images, (2, 3, 8, 8)),
    "sequences": (lambda: nn.Sequential(nn.Conv1d(3, 4, 3), nn.Dropout1d(0.3)), (2, 3, 8)),
    "one sequence": (lambda: nn.Sequential(nn.Conv1d(3, 8, 3), nn.Dropout1d(0.3)), (3, 8)),
    "one image": (lambda: nn.Sequential(nn.Linear(5, 6), nn.Dropout2d(0.3)), (8, 4, 5)),
    "volumes": (lambda: nn.Sequential(nn.Conv3d(2, 4, 2), nn.Dropout3d(0.3)), (2, 2, 4, 4, 4)),
    "one volume": (lambda: nn.Sequential(nn.Conv3d(2, 8, 2), nn.Dropout3d(0.3)), (2, 4, 4, 4)),
    "attention": (lambda: nn.Sequential(Attention(), Attention()), (2, 5, 16)),
    "boolean mask": (lambda: Attention(mask="boolean"), (2, 5, 16)),
    "added mask": (lambda: Attention(mask="added"), (2, 5, 16)),
    "other draws": (lambda: Reparametrised(6, 6), (4, 6)),
}


def step(model: nn.Module, call: object, x: Tensor, seed: int) -> tuple[Tensor, list[Tensor], Tensor]:
    torch.manual_seed(seed)
    model.zero_grad()
    out = call(x)  # type: ignore[operator]
    out.square().sum().backward()
    return out.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None], torch.get_rng_state()


def assert_draws_alike(name: str) -> None:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model = make()
    compiled = torch.compile(copy.deepcopy(model), backend=compile_with_plain_draws)
    x = torch.randn(shape)
    for seed in range(3):
        with ReplayedDraws(canonical=True):
            out, gradients, state = step(model, model, x, seed)
        out_too, gradients_too, state_too = step(compiled, compiled, x, seed)
        torch.testing.assert_close(out_too, out)
        torch.testing.assert_close(gradients_too, gradients, rtol=1e-4, atol=1e-5)
        assert torch.equal(state_too, state)
    model.eval(), compiled.eval()
    torch.testing.assert_close(compiled(x), model(x)) if name != "other draws" else None


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.sample(6, every_value=False)
@pytest.mark.filterwarnings("ignore:dropout2d:UserWarning")
@pytest.mark.parametrize("name", MODELS)
def test_the_changed_graph_draws_as_the_model_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_draws, "compile_fx", lambda graph, inputs, **_: aot_eager(graph, inputs))
    assert_draws_alike(name)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler's own
@pytest.mark.parametrize("name", MODELS)
def test_compiled_models_draw_as_plain_ones_do(name: str) -> None:
    assert_draws_alike(name)


def test_the_mask_has_its_mean_and_leaves_other_values_alone() -> None:
    torch.manual_seed(0)
    mask = compiled_draws.dropout_mask(torch.ones(100, 1000), 0.2)
    assert set(mask.unique().tolist()) == {0.0, 1.25}
    assert math.isclose(mask.mean(), 1, abs_tol=0.01)
    assert compiled_draws.dropout_mask(torch.ones(2, dtype=torch.bfloat16), 0.5).dtype == torch.bfloat16


@pytest.mark.slow
def test_the_next_process_finds_what_torch_has_compiled(tmp_path: Path) -> None:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", SECOND_PROCESS]
    runs = [subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT) for _ in range(2)]
    assert [run.stdout.split() for run in runs] == [["0", "0"], ["1", "0"]], runs


@pytest.mark.parametrize(("device", "operator"), [("cuda", "aten.native_dropout"), ("cpu", "accel.dropout_mask")])
def test_on_a_gpu_dropout_is_left_to_the_kernel_that_eager_runs(device: str, operator: str) -> None:
    """It draws and masks in one kernel of its own, in another order than any mask that is drawn before."""
    called: list[str] = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(str(func))
            return func(*args, **(kwargs or {}))

    with FakeTensorMode(), Log():
        compiled_draws._dropout(torch.empty(4, 8, device=device), 0.3, True)
    assert any(name.startswith(operator) for name in called), called
