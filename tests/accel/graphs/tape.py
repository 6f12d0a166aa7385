"""A CUDA graph's stand-in on the CPU: operators are written down once and run again on the same memory.

As with a real one, recording changes nothing on the "device", Python runs only while it records, and whatever was a
number in Python stays what it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_T = TypeVar("_T")
_UNDECLARED = ("running_mean", "running_var")
"""Arguments that batch norm writes to although its schema doesn't say so."""


class TapeGraph(TorchDispatchMode):
    """Writes operators down, and runs them again."""

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any, bool]] = []
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        self.resets = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "_local_scalar_dense" in str(func):
            raise RuntimeError("operation not permitted when stream is capturing")
        for argument, value in self._written(func, args, kwargs):
            self._keep(argument, value)
        out = func(*args, **kwargs)
        self._operations.append((func, args, kwargs, out, torch.is_grad_enabled()))  # some kernels ask for it
        return out

    def _written(self, func: Any, args: Any, kwargs: Any) -> list[tuple[Any, Any]]:
        schema = func._schema.arguments
        named = {argument.name: value for argument, value in zip(schema, args, strict=False)} | kwargs
        return [
            (argument, named[argument.name])
            for argument in schema
            if argument.name in named
            and ((argument.alias_info is not None and argument.alias_info.is_write) or argument.name in _UNDECLARED)
        ]

    def _keep(self, argument: Any, value: Any) -> None:
        for tensor in tree_leaves(value):
            if isinstance(tensor, Tensor):
                whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())  # type: ignore[call-overload]
                self._before.setdefault(whole.data_ptr(), (whole, whole.clone()))

    def restore(self) -> None:
        """Undo what recording has written to memory that was there before."""
        for whole, content in self._before.values():
            whole.copy_(content)
        self._before.clear()

    def spoil(self) -> None:
        """Let what a recording that failed has made be what it is on a GPU: memory that nobody has written to."""
        made, others = set[int](), set[int]()
        with torch.no_grad():
            for func, args, kwargs, out, _ in self._operations:
                others |= {_memory(leaf) for leaf in tree_leaves([args, kwargs]) if _is_float(leaf)} - made
                fresh = all(returned.alias_info is None for returned in func._schema.returns)
                for leaf in filter(_is_float, tree_leaves(out) if fresh else []):
                    if _memory(leaf) not in others:
                        leaf.detach().fill_(torch.nan)
                        made.add(_memory(leaf))

    def replay(self) -> None:
        """Run the operators again."""
        with torch.no_grad(), torch.autocast("cpu", enabled=False):  # casts are among the operators
            for func, args, kwargs, out, has_gradients in self._operations:
                with torch._C._AutoDispatchBelowAutograd(), torch.set_grad_enabled(has_gradients):
                    again = func(*args, **kwargs)
                if out is None:
                    continue
                fresh = [returned.alias_info is None for returned in func._schema.returns]
                outs, agains = ((each if isinstance(each, tuple | list) else [each]) for each in (out, again))
                if len(fresh) == 1:
                    fresh *= len(outs)
                for new, old, is_fresh in zip(agains, outs, fresh, strict=True):
                    if is_fresh and isinstance(old, Tensor):
                        old.detach().copy_(new)

    def reset(self) -> None:
        """Count."""
        self.resets += 1


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class TapeRecorder:
    """Stands in for `CudaRecorder`."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.graphs: list[TapeGraph] = []

    def aside(self, run: Callable[[], _T]) -> _T:
        """Run."""
        return run()

    def record(self, run: Callable[[], _T]) -> tuple[TapeGraph, _T]:
        """Write down what runs, and undo it."""
        graph, random = TapeGraph(), torch.get_rng_state()
        try:
            with graph:
                result = run()
        except Exception:
            graph.spoil()
            raise
        finally:
            graph.restore()
            torch.set_rng_state(random)
        self.graphs.append(graph)
        return graph, result

    def waits(self) -> None:
        """Wait for nothing."""
