"""Launching a Triton kernel again with what it has been launched with before: a look-up and a launch.

Triton's `kernel[grid](...)` binds all arguments by name in every call, derives their types and alignments and hashes
the outcome: 44 µs of host time for the forward pass of window attention, several times what the kernel takes on a small
map. Here dtypes and values are the key of a compiled kernel that was bound before. Figures: docs/kernels.md.

    @PlannedKernel
    @triton.jit
    def _gather_kernel(x, index, out, rows, columns, BLOCK: tl.constexpr): ...

    _gather_kernel[(programs,)](x, index, out, rows, columns, BLOCK=128)  # as with triton.jit
    plan = _gather_kernel.plan((programs,), rows, columns, BLOCK=128)     # a fourth of that, to be kept for a shape
    plan(x, index, out)

What is not met before, or can't be told from that key, takes Triton's own path: another dtype, the first address that
is no multiple of 16, hooks of a profiler, the interpreter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

_MOST = 1024
"""Plans that a kernel keeps: a loop with other shapes in each step must not fill the memory."""
PLANS = 512
"""Shapes whose plans an op keeps."""
_MOST_PROGRAMS = 65_535
"""Of CUDA, along every axis of a grid but the first, which takes 2³¹ - 1."""
_DTYPE, _ADDRESS = attrgetter("dtype"), torch.Tensor.data_ptr
_ALIGNMENT = 16
"""Bytes; Triton compiles a kernel of its own for tensors that are not aligned so."""


def ceil_div(size: int, block: int) -> int:
    """Return how many blocks cover a size. `triton.cdiv` is for kernels: on the host it takes 2 µs."""
    return -(-size // block)


def next_power_of_2(size: int) -> int:
    """Return the least power of 2 that is no less than a size of at least 1."""
    return 1 << (size - 1).bit_length()


def _key(
    device: int, dtypes: Sequence[torch.dtype | None], tensors: Sequence[Tensor | None], *, aligned: bool
) -> tuple[Hashable, ...]:
    """Return what Triton compiles a kernel of its own for: which of the tensors begin at no multiple of 16 too."""
    if aligned:
        return (device, *dtypes)
    return (device, *dtypes, *(tensor is not None and tensor.data_ptr() % _ALIGNMENT == 0 for tensor in tensors))


def _are_observed(*kernels: Any) -> bool:
    """Return whether a hook must see a launch, which only Triton's own path calls."""
    runtime = triton.knobs.runtime
    if runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:
        return True
    return any([kernel.pre_run_hooks for kernel in kernels])


class _Bound:
    """A kernel that Triton has compiled and bound for tensors of these dtypes."""

    __slots__ = ("device", "dtypes", "function", "packed", "rest", "run")

    def __init__(self, device: int, dtypes: list[torch.dtype | None], compiled: Any, rest: tuple[Any, ...]) -> None:
        self.device, self.dtypes, self.rest = device, dtypes, rest
        self.run, self.function, self.packed = compiled.run, compiled.function, compiled.packed_metadata


class LaunchPlan:
    """A launch of a kernel with all but its tensors, on the device of the first of them.

    Args:
        kernel: a function of `triton.jit`.
        grid: programs in up to three dimensions.
        numbers: the arguments after the tensors.
        constants: the compile-time arguments, and options of the compiler.

    Raises:
        TypeError: if a tensor comes after a number.
        ValueError: if the grid is larger than a GPU takes.
    """

    __slots__ = ("_bound", "_constants", "_grid", "_lacks", "_last", "_launched", "_numbers", "compiles", "kernel")

    def __init__(self, kernel: Any, grid: tuple[int, ...], numbers: tuple[Any, ...], constants: dict[str, Any]) -> None:
        self.kernel, self._grid, self._numbers, self._constants = kernel, grid, numbers, constants
        if wrong := [type(number).__name__ for number in numbers if isinstance(number, Tensor)]:
            raise TypeError(f"a kernel's tensors must come before its numbers. Found: {wrong[0]} after a number")
        self._launched = (*grid, 1, 1)[:3]
        if max(self._launched[1:]) > _MOST_PROGRAMS:
            raise ValueError(
                f"a GPU runs at most {_MOST_PROGRAMS:,} programs along the second and the third axis of a grid. "
                f"Found: {grid}"
            )
        self.compiles = isinstance(kernel, triton.runtime.JITFunction)  # not so in the interpreter
        self._bound: dict[Hashable, _Bound] = {}
        self._lacks = False
        """Whether it has been launched without some of its tensors."""
        self._last: _Bound | None = None
        """Nearly every launch is like the one before: its dtypes are compared, and not hashed."""

    def __call__(self, *tensors: Tensor | None) -> None:
        """Launch the kernel on these tensors; None in place of one that the kernel does without."""
        if not self.compiles:
            self.kernel[self._grid](*tensors, *self._numbers, **self._constants)
            return
        driver = triton.runtime.driver.active
        device, where = driver.get_current_device(), tensors[0].get_device()  # type: ignore[union-attr]
        if where >= 0 and where != device:
            with torch.cuda.device(where):
                self(*tensors)
            return
        addresses = 0
        dtypes: list[torch.dtype | None] = []
        if self._lacks:
            for tensor in tensors:
                if tensor is None:
                    dtypes.append(None)
                else:
                    addresses |= tensor.data_ptr()
                    dtypes.append(tensor.dtype)
        else:
            try:
                dtypes = list(map(_DTYPE, tensors))  # 0.03 µs less for each than a step of the loop
            except AttributeError:
                self._lacks = True
                self(*tensors)
                return
            for tensor in tensors:
                addresses |= tensor.data_ptr()  # type: ignore[union-attr]
        bound, key = self._last, None
        if addresses % _ALIGNMENT or bound is None or bound.dtypes != dtypes or bound.device != device:
            # A slice of an output begins anywhere: it has a kernel of its own, and a launch as short.
            key = _key(device, dtypes, tensors, aligned=addresses % _ALIGNMENT == 0)
            bound = self._bound.get(key)
        if bound is None or _are_observed(self.kernel):
            compiled = self.kernel[self._grid](*tensors, *self._numbers, **self._constants)
            if compiled is not None and key is not None:  # None where a hook of Triton's forbids it
                self._bound[key] = _Bound(device, dtypes, compiled, self._rest(tensors))
            return
        if addresses % _ALIGNMENT == 0:
            self._last = bound
        self.run(bound, driver.get_current_stream(device), tensors)

    def run(self, bound: _Bound, stream: int, tensors: tuple[Tensor | None, ...]) -> None:
        """Launch what is bound to tensors like these."""
        x, y, z = self._launched
        bound.run(x, y, z, stream, bound.function, bound.packed, None, None, None, *tensors, *bound.rest)

    def bound_to(self, device: int, tensors: Sequence[Tensor | None]) -> _Bound | None:
        """Return what it launches on such tensors; None if it has not been launched on any."""
        dtypes = [None if tensor is None else tensor.dtype for tensor in tensors]
        aligned = all(tensor.data_ptr() % _ALIGNMENT == 0 for tensor in tensors if tensor is not None)
        return self._bound.get(_key(device, dtypes, tensors, aligned=aligned))

    def _rest(self, tensors: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
        """Return what a launch takes after the tensors: Triton passes compile-time arguments too."""
        names = self.kernel.arg_names[len(tensors) + len(self._numbers) :]
        return *self._numbers, *(self._constants[name] for name in names)


class LaunchSequence:
    """Launches of several kernels on the tensors of one call, which are looked at once and not for each launch.

    Args:
        launches: plans, each with the places of its tensors, two or more, in the call.
    """

    __slots__ = ("_bound", "_compiles", "_kernels", "_lacks", "_last", "_launches")

    def __init__(self, *launches: tuple[LaunchPlan, tuple[int, ...]]) -> None:
        self._launches = [(plan, itemgetter(*places)) for plan, places in launches]
        self._kernels = [plan.kernel for plan, _ in launches]
        self._compiles = all(plan.compiles for plan, _ in launches)
        self._bound: dict[Hashable, list[_Bound]] = {}
        self._lacks = False
        """Whether it has been launched without some of its tensors."""
        self._last: tuple[Any, list[_Bound]] = None, []
        """What the tensors of the last call were like, and its launches; most calls are like the one before."""

    def __call__(self, *tensors: Tensor | None) -> None:
        """Launch the kernels, one after the other, each on its part of these tensors, all on the first one's device."""
        if not self._compiles:
            self.launch_each(*tensors)
            return
        driver = triton.runtime.driver.active
        device, where = driver.get_current_device(), tensors[0].get_device()  # type: ignore[union-attr]
        if where >= 0 and where != device:
            with torch.cuda.device(where):
                self(*tensors)
            return
        like = device, *self._looked_at(tensors)
        last, bounds = self._last
        if like != last:
            key = (device, *like[1], *map(bool, like[2]))
            bounds = self._bound.get(key) or self._bound_to(key, tensors)
            if bounds:
                self._last = like, bounds
        if not bounds or _are_observed(*self._kernels):
            self.launch_each(*tensors)
            return
        stream = driver.get_current_stream(device)
        for (plan, of), bound in zip(self._launches, bounds, strict=True):
            plan.run(bound, stream, of(tensors))

    def _looked_at(self, tensors: tuple[Tensor | None, ...]) -> tuple[list[torch.dtype | None], list[int]]:
        """Return dtypes, and by how much addresses miss a multiple of 16 bytes."""
        if not self._lacks:
            try:
                odd = [address % _ALIGNMENT for address in map(_ADDRESS, tensors)]  # type: ignore[arg-type]
                return list(map(_DTYPE, tensors)), odd
            except TypeError:  # there is a None
                self._lacks = True
        dtypes = [None if tensor is None else tensor.dtype for tensor in tensors]
        return dtypes, [0 if tensor is None else tensor.data_ptr() % _ALIGNMENT for tensor in tensors]

    def _bound_to(self, key: tuple[Any, ...], tensors: tuple[Tensor | None, ...]) -> list[_Bound]:
        """Return what the plans launch on such tensors, and keep it; [] if one has not been launched on any."""
        bound = [plan.bound_to(key[0], of(tensors)) for plan, of in self._launches]
        known = [each for each in bound if each is not None]
        if len(known) < len(bound):
            return []
        self._bound[key] = known
        return known

    def launch_each(self, *tensors: Tensor | None) -> None:
        """Launch the kernels, each by a look at its own tensors."""
        for plan, of in self._launches:
            plan(*of(tensors))


class PreparedLaunch(NamedTuple):
    """A launch with its tensors."""

    plan: LaunchPlan
    tensors: tuple[Tensor | None, ...]


class PreparedLaunches:
    """Launches one after the other, always on the same tensors, which nobody gives another dtype.

    Args:
        launches: of them.
    """

    __slots__ = ("_bound", "_device", "_kernels", "_launches")

    def __init__(self, launches: Iterable[PreparedLaunch]) -> None:
        self._launches = list(launches)
        self._kernels = [plan.kernel for plan, _ in self._launches]
        self._bound: list[_Bound] = []
        """[] before the first call, and where Triton's interpreter is at work."""
        self._device = -1

    def __call__(self) -> None:
        """Launch the kernels on the present device."""
        driver = triton.runtime.driver.active if self._bound else None
        if driver is None or driver.get_current_device() != self._device or _are_observed(*self._kernels):
            self.launch_each()
            return
        stream = driver.get_current_stream(self._device)
        for (plan, tensors), bound in zip(self._launches, self._bound, strict=True):
            plan.run(bound, stream, tensors)

    def launch_each(self) -> None:
        """Launch the kernels, each by a look at its tensors."""
        for plan, tensors in self._launches:
            plan(*tensors)
        if all(plan.compiles for plan, _ in self._launches):
            self._device = triton.runtime.driver.active.get_current_device()
            bound = [plan.bound_to(self._device, tensors) for plan, tensors in self._launches]
            self._bound = [each for each in bound if each is not None] if None not in bound else []


class PlannedKernel:
    """A Triton kernel that keeps a plan for each combination of numbers and compile-time arguments.

    Args:
        kernel: a function of `triton.jit`. Its tensors come first, then its numbers, its compile-time arguments last.

    Attributes:
        kernel: the same.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._plans: dict[Hashable, LaunchPlan] = {}

    def plan(self, grid: tuple[int, ...], *numbers: float, **constants: Any) -> LaunchPlan:
        """Return a plan for one grid, to be launched with tensors alone."""
        return LaunchPlan(self.kernel, grid, numbers, constants)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """Return what launches the kernel with so many programs, in up to three dimensions.

        It takes tensors, None in place of a tensor, and numbers, in the kernel's order; by name the compile-time
        arguments, and options of the compiler such as num_warps.
        """
        return functools.partial(self._launch, grid)

    def prepared(self, grid: tuple[int, ...], /, *arguments: Any, **constants: Any) -> PreparedLaunch:
        """Return a launch that takes nothing more: it is kept where the tensors stay the same.

        Args:
            grid: programs in up to three dimensions.
            arguments: tensors, None in place of a tensor, and numbers, in the kernel's order.
            constants: the compile-time arguments, and options of the compiler.
        """
        count = 0
        for argument in arguments:
            if argument is not None and not isinstance(argument, Tensor):
                break
            count += 1
        numbers = arguments[count:]
        # True and 1.0 equal 1, but are compiled otherwise.
        key = (grid, count, *numbers, *map(type, numbers), *constants.items())
        plan = self._plans.get(key)
        if plan is None:
            plan = LaunchPlan(self.kernel, grid, numbers, constants)
            if len(self._plans) >= _MOST:
                self._plans.clear()
            self._plans[key] = plan
        return PreparedLaunch(plan, arguments[:count])

    def _launch(self, grid: tuple[int, ...], /, *arguments: Any, **constants: Any) -> None:
        plan, tensors = self.prepared(grid, *arguments, **constants)
        plan(*tensors)
