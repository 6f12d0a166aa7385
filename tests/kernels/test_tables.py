"""Tables that are kept: whatever was on when they were made, they serve every later call."""

from __future__ import annotations

import contextlib
import copy
import itertools
import pickle
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from accel.comm import powersgd
from accel.kernels import fcos_heads, gather_rows, quantise, sign_pack
from accel.kernels.fcos_targets import near as fcos_near
from accel.kernels.fcos_targets.inputs import Grid, Rule
from accel.kernels.tables import hides_values, kept
from accel.kernels.window_attention import attention as window_attention
from accel.kernels.window_attention import regions as window_regions
from accel.kernels.window_attention import shifted_window_attention
from tests.sampling import examples

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
MODULES = (fcos_heads, fcos_near, gather_rows, window_regions, sign_pack, quantise, powersgd)
GRIDS = (Grid(4, 6, 8, 0.0, 64.0), Grid(2, 3, 16, 64.0, 1e8))

TABLES: dict[str, Callable[[int], Any]] = {
    "regions of a shift": lambda n: window_regions.shift_regions((4 * n, 4), (4, 4), (2, 2), CPU),
    "index of a bias table": lambda n: window_regions.relative_index((n, 3), CPU),
    "starts of groups": lambda n: gather_rows._starts(n, 3),
    "windows of grids": lambda n: fcos_near._windows(GRIDS, Rule(True, True, n / 2)),
    "plane of grids": lambda n: fcos_near._plane(GRIDS, n / 2),
    "offsets of grids": lambda n: fcos_near._offsets(GRIDS, 2 + n),
    "regular points": lambda n: fcos_heads._grids(((n, 3),), (8,), ((0.0, 64.0),), torch.float32),
    "signs of bytes": lambda n: sign_pack._table(CPU),
    "levels": lambda n: quantise._levels(CPU),
    "noise": lambda n: powersgd.noise(n, 2, 8, torch.float32, CPU),
}
"""Every function that keeps tensors, with a number that makes its arguments others."""


@contextlib.contextmanager
def default_dtype() -> Any:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "nothing": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "fake": FakeTensorMode,
    "flops": lambda: FlopCounterMode(display=False),
    "default device": lambda: torch.device("meta"),
    "default dtype": default_dtype,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


def tensors_in(made: Any) -> list[Tensor]:
    """Return the tensors in a table, however it holds them."""
    if isinstance(made, Tensor):
        return [made]
    parts = made if isinstance(made, tuple) else vars(made).values() if hasattr(made, "__dict__") else ()
    return [tensor for part in parts for tensor in tensors_in(part)]


@contextlib.contextmanager
def unkept(*modules: types.ModuleType) -> Any:
    """Let the functions of modules make their tables anew."""
    kept_ones = [(m, n, f) for m in modules for n, f in vars(m).items() if is_kept(f)]
    for module, name, function in kept_ones:
        setattr(module, name, function.__wrapped__)
    try:
        yield len(kept_ones)
    finally:
        for module, name, function in kept_ones:
            setattr(module, name, function)


def is_kept(function: Any) -> bool:
    return (
        callable(function)
        and getattr(function, "__globals__", {}).get("__name__") == kept.__module__
        and (hasattr(function, "__wrapped__"))
    )


def test_every_cache_of_tensors_is_one_of_these() -> None:
    with unkept(*MODULES) as found:
        assert found == len(TABLES)
    sources = [path.read_text("utf-8") for folder in ("comm", "kernels") for path in (ROOT / folder).rglob("*.py")]
    assert sum(source.count("\n@kept(") for source in sources) == len(TABLES)


@pytest.mark.sample(4)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_the_same_whatever_was_on_when_it_was_made(name: str, mode: str) -> None:
    number = 11 + list(MODES).index(mode)  # made nowhere else: the first call is the one in the mode
    with MODES[mode]():
        TABLES[name](number)
    found = tensors_in(TABLES[name](number))
    with unkept(*MODULES):
        plain = tensors_in(TABLES[name](number))

    assert len(found) == len(plain) > 0
    for mine, wanted in zip(found, plain, strict=True):
        assert type(mine) is Tensor and not mine.is_inference() and mine.device == CPU
        assert mine.dtype == wanted.dtype and torch.equal(mine, wanted)


def test_a_table_is_made_once() -> None:
    made = []

    @kept(2)
    def table(number: int) -> Tensor:
        made.append(number)
        return torch.full((2,), number, device="cpu")

    assert table(1) is table(1)
    table(2), table(3), table(1)
    assert made == [1, 2, 3, 1], "the last two are kept"


def test_what_has_no_values_is_not_kept() -> None:
    @kept(2)
    def table(number: int) -> Tensor:
        return torch.full((2,), number, device="cpu")

    with FakeTensorMode():
        assert hides_values() and table(1) is not table(1)
    torch.func.grad(lambda x: x * table(2).sum())(torch.ones(()))
    assert not hides_values()
    assert table(1).tolist() == [1, 1] and table(2).tolist() == [2, 2]


# -- one layer, in any order of modes ----------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    """A shifted window attention."""

    def __init__(self, window: tuple[int, int]) -> None:
        super().__init__()
        self.window = window
        self.table = torch.nn.Parameter(torch.randn((2 * window[0] - 1) * (2 * window[1] - 1), 2))

    def forward(self, qkv: Tensor) -> Tensor:
        tall, wide = self.window
        return shifted_window_attention(qkv, self.table, heads=2, window=self.window, shift=(tall // 2, wide // 2))


def train(layer: Layer, qkv: Tensor) -> Tensor:
    layer.zero_grad()
    out = layer(qkv)
    out.square().sum().backward()
    assert layer.table.grad is not None
    return torch.cat([out.detach().flatten(), layer.table.grad.flatten()])


def within(mode: str) -> Callable[[Layer, Tensor], Any]:
    def call(layer: Layer, qkv: Tensor) -> None:
        with MODES[mode]():
            layer(qkv)

    return call


def fake(layer: Layer, qkv: Tensor) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        layer(mode.from_tensor(qkv))


def export(layer: Layer, qkv: Tensor) -> None:
    program = torch.export.export(layer, (qkv,))
    torch.testing.assert_close(program.module()(qkv), layer(qkv))


def compiled(layer: Layer, qkv: Tensor) -> None:
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(layer, backend="aot_eager", fullgraph=True)(qkv), layer(qkv))


QUICK: dict[str, Callable[[Layer, Tensor], Any]] = {
    **{mode: within(mode) for mode in ("no_grad", "inference", "flops", "autocast", "default dtype")},
    "fake": fake,
    "transform": lambda layer, qkv: torch.func.grad(lambda q: layer(q).sum())(qkv),
    "deepcopy": lambda layer, qkv: copy.deepcopy(layer)(qkv),
    "pickle": lambda layer, qkv: pickle.loads(pickle.dumps(layer))(qkv),
    "train": train,
}
SLOW = {**QUICK, "export": export, "compile": compiled}
_windows = itertools.product(range(2, 30), range(2, 8))
"""No two tests ask for the same tables."""


def trains_after(actions: list[str]) -> None:
    torch.manual_seed(0)
    tall, wide = next(_windows)
    layer, qkv = Layer((tall, wide)), torch.randn(1, 2 * tall, 2 * wide, 3 * 2 * 4)
    for action in actions:
        SLOW[action](layer, qkv)
    found = train(layer, qkv)
    with unkept(window_attention):
        wanted = train(layer, qkv)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@settings(max_examples=examples(30))
@given(st.lists(st.sampled_from(sorted(QUICK)), min_size=1, max_size=5))
def test_a_layer_trains_after_anything(actions: list[str]) -> None:
    trains_after(actions)


@pytest.mark.filterwarnings("ignore")  # of the compiler's own
@pytest.mark.parametrize("action", ["export", "compile"])
def test_a_layer_trains_after_it_was_traced(action: str) -> None:
    trains_after([action, "inference"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler's own
@settings(max_examples=examples(30))
@given(st.lists(st.sampled_from(sorted(SLOW)), min_size=1, max_size=4))
def test_a_layer_trains_after_anything_traced_too(actions: list[str]) -> None:
    trains_after(actions)
