"""Triton's interpreter, without what it does again for each call in a kernel: a third of these tests' time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest

from accel.kernels import support


@contextmanager
def interpreted() -> Iterator[None]:
    """Run kernels on CPU tensors, as `support.interpreted` does.

    Triton replaces the operators of its language by those of the interpreter at each launch, and again, 5 ms, at each
    call of a function that kernels share (`tl.sum` is one): there they stand replaced already.
    """
    from triton.runtime import interpreter

    with support.interpreted(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", _unless_patched(interpreter._patch_lang))
        yield


def _unless_patched(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    from triton.language import core
    from triton.runtime import interpreter

    def is_patched(language: ModuleType) -> bool:
        operators = [language.load, core.tensor.__add__, core.tensor_descriptor_base.load]
        return not any(map(core.is_builtin, operators))

    def patched(function: Any) -> Any:
        languages = [value for value in function.__globals__.values() if value is interpreter.tl or value is core]
        return interpreter._LangPatchScope() if all(map(is_patched, languages)) else patch(function)

    return patched
