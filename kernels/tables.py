"""Small tables that are made once and kept: indices, regions, the points of grids.

A tensor keeps the modes under which it was made. Made under `inference_mode`, it can't be saved for backward; made
among fake tensors or within a transform, it has no values; made under another default device, it lies there. So a kept
table is made with all modes off. Where tensors have no values it is made again each time, and not kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes, is_in_torch_dispatch_mode

_R = TypeVar("_R")


def kept(most: int) -> Callable[[Callable[..., _R]], Callable[..., _R]]:
    """Cache a function's results for its last `most` arguments, and for captured graphs; they must not be written to.

    The function must name device and dtype of its tensors: among fake tensors it runs under the caller's defaults.
    """

    def decorate(make: Callable[..., _R]) -> Callable[..., _R]:
        keep = functools.lru_cache(most)(functools.partial(_make_plainly, make))

        @functools.wraps(make)
        def table(*key: Any) -> _R:
            return make(*key) if hides_values() else held(keep(*key))

        return table

    return decorate


_read_by_graphs: dict[int, Any] = {}
"""Tables by their ids, so that each is here once."""


def held(table: _R) -> _R:
    """Return a table, which is kept for good if a CUDA graph is being captured.

    The graph will read it by its address, and holds no reference: its memory must not be freed when others take its
    place among those that are kept.
    """
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        _read_by_graphs[id(table)] = table
    return table


def hides_values() -> bool:
    """Return whether tensors made here have no values: in a compiler, among fake tensors, in a transform."""
    return (
        torch.compiler.is_compiling()
        or (is_in_torch_dispatch_mode() and is_in_a_tracing_mode())
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def is_in_a_tracing_mode() -> bool:
    """Return whether one of torch's own dispatch modes is on; counters of operations don't count."""
    keys = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(key) is not None for key in (keys.FAKE, keys.PROXY, keys.FUNCTIONAL)) or (
        torch._ops._len_torch_dispatch_stack_pre_dispatch() > 0  # type: ignore[no-untyped-call]
    )


def _make_plainly(make: Callable[..., _R], *key: Any) -> _R:
    with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunction(), _disable_current_modes():
        return make(*key)
