"""Launching a Triton kernel again with what it has been launched with before: a look-up and a launch.

Triton's `kernel[grid](...)` binds all arguments by name in every call, derives their types and alignments and hashes
the outcome: 44 µs of host time for the forward pass of window attention, several times what the kernel takes on a small
map. Here dtypes and values are the key of a compiled kernel that was bound before. Figures:
docs/contributing/kernels.md.

    @PlannedKernel
    @triton.jit
    def _gather_kernel(x, index, out, rows, columns, BLOCK: tl.constexpr): ...

    plan = _gather_kernel.plan((programs,), rows, columns, BLOCK=128)  # to be kept for a shape
    plan(x, index, out)                                                # as kernel[grid](x, index, out, rows, ...)

What is not met before, or can't be told from that key, takes Triton's own path: another dtype, the first address that
is no multiple of 16, hooks of a profiler, the interpreter.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from accel.profiler.errors import InvalidArgument, InvalidType

PLANS = 512
"""Shapes whose plans an op keeps: a loop with other shapes in each step must not fill the memory."""
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


_Like = tuple[int, Sequence[torch.dtype | None], Sequence[int]]
"""What the tensors of a launch are like: device, dtypes, and by how much addresses miss a multiple of 16 bytes."""
_NOTHING: _Like = -1, (), ()


def _key(like: _Like) -> tuple[Hashable, ...]:
    """Return what Triton compiles a kernel of its own for: which of the tensors are aligned, not by how much not."""
    device, dtypes, odd = like
    return (device, *dtypes, *map(bool, odd))


def _are_observed(kernels: Iterable[Any]) -> bool:
    """Return whether a hook must see a launch, which only Triton's own path calls."""
    runtime = triton.knobs.runtime
    if runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:
        return True
    return any([kernel.pre_run_hooks for kernel in kernels])


class _Bound(NamedTuple):
    """A kernel that Triton has compiled and bound."""

    run: Callable[..., None]
    function: Any
    packed: Any
    rest: tuple[Any, ...]
    """What a launch takes after the tensors."""


class LaunchPlan:
    """A launch of a kernel with all but its tensors.

    Args:
        kernel: a function of `triton.jit`: its tensors come first, then its numbers, its compile-time arguments last.
        grid: programs in up to three dimensions.
        numbers: the arguments after the tensors.
        constants: the compile-time arguments, and options of the compiler.

    Raises:
        InvalidType: if a tensor comes after a number.
        InvalidArgument: if the grid is larger than a GPU takes.
    """

    __slots__ = ("_bound", "_constants", "_grid", "_kernels", "_lacks", "_last", "_launched", "_numbers", "compiles")

    def __init__(self, kernel: Any, grid: tuple[int, ...], *numbers: Any, **constants: Any) -> None:
        self._watch([kernel])
        self._grid, self._numbers, self._constants = grid, numbers, constants
        if wrong := [type(number).__name__ for number in numbers if isinstance(number, Tensor)]:
            raise InvalidType(f"a kernel's tensors must come before its numbers. Found: {wrong[0]} after a number")
        self._launched = (*grid, 1, 1)[:3]
        if max(self._launched[1:]) > _MOST_PROGRAMS:
            raise InvalidArgument(
                f"a GPU runs at most {_MOST_PROGRAMS:,} programs along the second and the third axis of a grid. "
                f"Found: {grid}"
            )
        self._bound: dict[Hashable, _Bound] = {}

    def _watch(self, kernels: list[Any]) -> None:
        self._kernels = kernels
        # Not so in the interpreter.
        self.compiles = all(isinstance(kernel, triton.runtime.JITFunction) for kernel in kernels)
        self._lacks = False
        """Whether it has been launched without some of its tensors."""
        self._last: tuple[_Like, Any] = _NOTHING, None
        """Nearly every call is like the one before, which is compared, and not hashed."""

    def __call__(self, *tensors: Tensor | None) -> None:
        """Launch on these tensors, on the device of the first; None in place of one that a kernel does without."""
        if not self.compiles:
            self.launch_each(*tensors)
            return
        driver = triton.runtime.driver.active
        device, where = driver.get_current_device(), tensors[0].get_device()  # type: ignore[union-attr]
        if where >= 0 and where != device:
            with torch.cuda.device(where):
                self(*tensors)
            return
        like = self.looked_at(device, tensors)
        last, bound = self._last
        if like != last:
            bound = self.bound_for(like)
            self._last = like, bound
        if not bound or _are_observed(self._kernels):
            self.launch_each(*tensors)
            self._last = _NOTHING, None
        else:
            self.run(bound, driver.get_current_stream(device), tensors)

    def looked_at(self, device: int, tensors: Sequence[Tensor | None]) -> _Like:
        """Return what tensors are like."""
        if not self._lacks:
            try:
                odd = [address % _ALIGNMENT for address in map(_ADDRESS, tensors)]  # type: ignore[arg-type]
                return device, list(map(_DTYPE, tensors)), odd
            except TypeError:  # there is a None
                self._lacks = True
        dtypes: list[torch.dtype | None] = []
        odd = []
        for tensor in tensors:
            dtypes.append(None if tensor is None else tensor.dtype)
            odd.append(0 if tensor is None else tensor.data_ptr() % _ALIGNMENT)
        return device, dtypes, odd

    def launch_each(self, *tensors: Tensor | None) -> None:
        """Launch as `kernel[grid](...)` does, and keep what Triton has compiled for tensors like these."""
        compiled = self._launch_by_triton(*tensors)
        if not self.compiles or compiled is None:  # None where a hook of Triton's forbids the launch
            return
        like = self.looked_at(triton.runtime.driver.active.get_current_device(), tensors)
        # Triton passes compile-time arguments too.
        names = self._kernels[0].arg_names[len(tensors) + len(self._numbers) :]
        rest = *self._numbers, *(self._constants[name] for name in names)
        with contextlib.suppress(AttributeError):  # private to Triton: without them each launch is its own
            self._bound[_key(like)] = _Bound(compiled.run, compiled.function, compiled.packed_metadata, rest)

    def _launch_by_triton(self, *tensors: Tensor | None) -> Any:
        return self._kernels[0][self._grid](*tensors, *self._numbers, **self._constants)

    def bound_for(self, like: _Like) -> Any:
        """Return what it launches on such tensors; None if it has not been launched on any."""
        return self._bound.get(_key(like))

    def run(self, bound: Any, stream: int, tensors: tuple[Tensor | None, ...]) -> None:
        """Launch what is bound to tensors like these."""
        x, y, z = self._launched
        try:
            bound.run(x, y, z, stream, bound.function, bound.packed, None, None, None, *tensors, *bound.rest)
        except TypeError:
            # Its arguments are private to Triton: a version whose launcher takes others launches as documented.
            self._launch_by_triton(*tensors)


class LaunchSequence(LaunchPlan):
    """Launches of several kernels on the tensors of one call, which are looked at once and not for each launch.

    Args:
        launches: plans, each with the places of its tensors, two or more, in the call.
    """

    __slots__ = ("_launches",)

    def __init__(self, *launches: tuple[LaunchPlan, tuple[int, ...]]) -> None:
        self._watch([kernel for plan, _ in launches for kernel in plan._kernels])
        self._launches = [(plan, itemgetter(*places)) for plan, places in launches]

    def bound_for(self, like: _Like) -> list[_Bound] | None:
        """Return what the plans launch on their parts of such tensors; None if one has not been launched on any."""
        device, dtypes, odd = like
        bound = [plan.bound_for((device, of(dtypes), of(odd))) for plan, of in self._launches]
        return None if None in bound else bound

    def run(self, bound: list[_Bound], stream: int, tensors: tuple[Tensor | None, ...]) -> None:
        """Launch what is bound to tensors like these, one after the other."""
        for (plan, of), each in zip(self._launches, bound, strict=True):
            plan.run(each, stream, of(tensors))

    def launch_each(self, *tensors: Tensor | None) -> None:
        """Launch the kernels, each by a look at its own tensors."""
        for plan, of in self._launches:
            plan(*of(tensors))


class PreparedLaunches:
    """Launches one after the other, always on the same tensors, which nobody gives another dtype.

    Args:
        launches: plans, each with its tensors.
    """

    __slots__ = ("_bound", "_device", "_kernels", "_launches")

    def __init__(self, launches: Iterable[tuple[LaunchPlan, tuple[Tensor | None, ...]]]) -> None:
        self._launches = list(launches)
        self._kernels = [kernel for plan, _ in self._launches for kernel in plan._kernels]
        self._bound: list[_Bound] = []
        """[] before the first call, and where Triton's interpreter is at work."""
        self._device = -1

    def __call__(self) -> None:
        """Launch the kernels on the present device."""
        driver = triton.runtime.driver.active if self._bound else None
        if driver is None or driver.get_current_device() != self._device or _are_observed(self._kernels):
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
            device = self._device = triton.runtime.driver.active.get_current_device()
            bound = [plan.bound_for(plan.looked_at(device, tensors)) for plan, tensors in self._launches]
            self._bound = [] if None in bound else bound


class PlannedKernel:
    """A Triton kernel that keeps its plans.

    Args:
        kernel: a function of `triton.jit`.

    Attributes:
        kernel: the same.
        plan: returns the `LaunchPlan` of a grid, numbers and compile-time arguments. True and 1.0 equal 1, but are
            compiled otherwise.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.plan = functools.lru_cache(PLANS, typed=True)(functools.partial(LaunchPlan, kernel))
