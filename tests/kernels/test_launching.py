"""A planned launch gives the driver what Triton's own would, and leaves to Triton what it can't tell."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from operator import is_
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from accel.kernels.launching import LaunchPlan, PlannedKernel, PreparedLaunches, ceil_div, next_power_of_2
from accel.kernels.rows import compact_triton, gather_rows_triton, threshold_triton
from accel.kernels.window_attention import Spec
from accel.kernels.window_attention import launchers as window_launchers


@PlannedKernel
@triton.jit
def _scale_kernel(x, factor, out, n, times, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    scaled = tl.load(x + i, mask=i < n) * times
    if factor is not None:
        scaled *= tl.load(factor)
    tl.store(out + i, scaled, mask=i < n)


def test_interpreted_it_computes(interpreted: None) -> None:
    x, out = torch.arange(10.0), torch.empty(10)
    plan = _scale_kernel.plan((1,), 10, 3.0, BLOCK=16)
    for factor, expected in ((None, 3 * x), (torch.tensor(2.0), 6 * x)):
        plan(x, factor, out.fill_(-1))
        assert torch.equal(out, expected)
    kept = PreparedLaunches([(plan, (x, None, out))])
    for value in (1.0, 2.0):
        x.fill_(value)
        kept()
        assert torch.equal(out, 3 * x)


def test_a_tensor_after_a_number_is_refused() -> None:
    with pytest.raises(TypeError, match=r"tensors must come before its numbers. Found: Tensor after a number"):
        _scale_kernel.plan((1,), 10, torch.ones(1), BLOCK=16)


def test_plans_are_kept_apart() -> None:
    given: tuple[Any, ...] = (((1,), 1, 1, 16), ((1,), True, 1, 16), ((1,), 1, 1.0, 16), ((2,), 1, 1, 16))
    plans = [[_scale_kernel.plan(*numbers, BLOCK=block) for *numbers, block in given] for _ in range(2)]
    assert all(map(is_, *plans))
    assert len(set(map(id, plans[0]))) == 4


@pytest.mark.parametrize(("size", "block", "count"), [(0, 4, 0), (1, 4, 1), (4, 4, 1), (5, 4, 2)])
def test_blocks_cover_a_size(size: int, block: int, count: int) -> None:
    assert ceil_div(size, block) == count == triton.cdiv(size, block)


def test_powers_of_2_are_tritons() -> None:
    assert all(next_power_of_2(size) == triton.next_power_of_2(size) for size in range(1, 300))


HUGE: dict[str, Callable[[], LaunchPlan]] = {
    "gather_rows": lambda: gather_rows_triton._gather_plan(3, 2, 2**28, 2**29, 2**28, 1),
    "gather_rows backward": lambda: gather_rows_triton._scatter_plan(8, 2048, 50_257),  # the last token of each text
    "compact": lambda: compact_triton._take_plan(5, 3, 2**28),
    "compact backward": lambda: compact_triton._put_plan(5, 3, 2**28),
    "block_maxima": lambda: threshold_triton._block_maxima_plan(2**36),
    "at_least": lambda: threshold_triton._take_plan(2**36, 10, 2**26),
    "window_attention": lambda: window_launchers._forward_plan(_layer((1, 2**13, 2**13, 96), heads=1)),
    "window_attention, many heads": lambda: window_launchers._forward_plan(_layer((64, 56, 56, 3 * 512), heads=512)),
}
"""Of each op whose programs are counted by what a caller gives: a plan for more of it than 65,535 blocks."""


def _layer(shape: tuple[int, ...], heads: int) -> window_launchers._Layer:
    spec = Spec(heads=heads, window=(8, 8))
    return window_launchers._Layer(spec, torch.Size(shape), torch.float16, torch.device("cpu"), 0, False, "tf32")


@pytest.mark.parametrize("name", HUGE)
def test_a_grid_is_as_large_as_a_gpu_takes(name: str) -> None:
    """CUDA takes 2³¹ - 1 programs along the first axis, and 65,535 along the others."""
    first, *others = HUGE[name]()._launched
    assert first < 2**31 and max(others) <= 65_535


def test_more_programs_along_an_axis_than_a_gpu_takes_are_named() -> None:
    with pytest.raises(ValueError, match=r"at most 65,535 programs along the second.*Found: \(1, 65536\)"):
        _scale_kernel.plan((1, 65_536), 10, 3.0, BLOCK=16)


_SCRIPT = '''
import torch, triton, triton.language as tl
from triton.runtime.jit import JITFunction
from accel.kernels.launching import LaunchSequence, PlannedKernel, PreparedLaunches
from benchmarks.kernels import no_op_driver

no_op_driver.install()
launched, bound = [], []
no_op_driver._Launch.__call__ = lambda self, *arguments: launched.append(arguments)
run = JITFunction.run
JITFunction.run = lambda *arguments, **more: (bound.append(1), run(*arguments, **more))[1]


@PlannedKernel
@triton.jit
def scale(x, factor, out, n, times, BLOCK: tl.constexpr, ADD: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    scaled = tl.load(x + i, mask=i < n) * times + ADD
    if factor is not None:
        scaled *= tl.load(factor)
    tl.store(out + i, scaled, mask=i < n)


def same(one, other):
    one, other = (each[:6] + each[9:] for each in (one, other))  # without metadata and hooks, which nobody has set
    return len(one) == len(other) and all(a is b or a == b for a, b in zip(one, other))


def check(tensors, *numbers, planned=True, grid=(7,), BLOCK=16, ADD=1, **options):
    """The second call launches what Triton itself launches, through its binder or not."""
    constants = {"BLOCK": BLOCK, "ADD": ADD, **options}
    plan = scale.plan(grid, *numbers, **constants)
    plan(*tensors)
    scale.kernel[grid](*tensors, *numbers, **constants)
    bound.clear()
    plan(*tensors)
    by_triton, ours = launched[-2:]
    assert same(by_triton, ours), (by_triton, ours)
    assert bool(bound) != planned, (bound, planned)


x, out, factor = torch.ones(100), torch.empty(100), torch.ones(1)
half, weight = x.half(), torch.nn.Parameter(x)
check((x, None, out), 100, 2.0)
check((x, factor, out), 100, 3, grid=(7, 2), ADD=0, num_warps=8)
check((half, None, out), 1, 2.0)
check((weight, None, out), True, 2.0)
for each in range(3):  # numbers of floating point are no part of what is compiled
    check((x, None, out), 100, each / 7)
shifted, moved = torch.ones(101)[1:], torch.ones(102)[2:]
for _ in range(2):  # slices: what is compiled depends on which of the tensors are aligned to 16 bytes
    for tensors in ((shifted, None, out), (x, None, shifted), (moved, None, shifted), (x, moved[:1], out)):
        check(tensors, 100, 2.0)
    check((x, None, out), 100, 2.0)
hook = lambda *arguments: None
triton.knobs.runtime.launch_enter_hook.add(hook)
check((x, None, out), 100, 2.0, planned=False)
triton.knobs.runtime.launch_enter_hook.remove(hook)
check((x, None, out), 100, 2.0)

first, second = (scale.plan((7,), 100, times, BLOCK=16, ADD=1) for times in (2.0, 3.0))
sequence = LaunchSequence((first, (0, 1, 2)), (second, (2, 1, 3)))
last = torch.empty(100)
slices = ((x, out, last), (half, out, last), (x, shifted, last), (x, out, shifted), (x, out, last))
for by, (a, c, d) in ((by, each) for by in (factor, None, factor) for each in slices):
    for planned in (False, True, True):
        bound.clear()
        sequence(a, by, c, d)
        assert not (planned and bound)
        ours = launched[-2:]
        scale.kernel[(7,)](a, by, c, 100, 2.0, BLOCK=16, ADD=1)
        scale.kernel[(7,)](c, by, d, 100, 3.0, BLOCK=16, ADD=1)
        assert all(map(same, ours, launched[-2:])), launched[-4:]

kept = PreparedLaunches((first, (x, by, out)) for by in (None, factor))
for planned in (False, True, True):
    bound.clear()
    kept()
    assert not (planned and bound)
    ours = launched[-2:]
    for by in (None, factor):
        scale.kernel[(7,)](x, by, out, 100, 2.0, BLOCK=16, ADD=1)
    assert all(map(same, ours, launched[-2:])), launched[-4:]

triton.knobs.runtime.launch_enter_hook.add(hook)
bound.clear()
sequence(x, factor, out, last)
kept()
assert len(bound) == 4
triton.knobs.runtime.launch_enter_hook.remove(hook)

def refuse(*arguments):
    raise TypeError("the launcher of another Triton takes other arguments")

first(x, factor, out)
first._bound = {key: each._replace(run=refuse) for key, each in first._bound.items()}
first._last = first._last[0], first.bound_for(first._last[0])
before = len(launched)
first(x, factor, out)
assert len(launched) == before + 1

type(first)._launch_by_triton = lambda self, *tensors: launched.append(tensors) or launched
second._bound.clear()
second._last = first._last[0], None
for _ in range(2):  # of another Triton nothing is known to launch by
    second(x, factor, out)
assert len(launched) == before + 3
print("the same")
'''


def test_launches_are_tritons_own(tmp_path: Path) -> None:
    """In an interpreter of its own: here kernels are interpreted."""
    (tmp_path / "script.py").write_text(_SCRIPT)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.getcwd()
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout == "the same\n", done.stderr
