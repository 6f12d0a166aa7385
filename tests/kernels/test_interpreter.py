"""Triton's language is patched once for a launch, whatever its kernel calls, and is itself again afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter


@triton.jit
def _square(x):
    return x * x


@triton.jit
def _norms_kernel(x, out, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    values = tl.load(x + row * n + i, mask=i < n, other=0.0)
    tl.store(out + row, tl.sum(_square(values)) + tl.max(_square(values)))


def test_functions_of_a_kernel_are_called_without_patching_anew(
    interpreted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[Any] = []
    patch_builtin = interpreter._patch_builtin

    def counted(package: Any, *rest: Any) -> None:
        looked.append(package)
        patch_builtin(package, *rest)

    monkeypatch.setattr(interpreter, "_patch_builtin", counted)
    x = torch.arange(15.0).reshape(3, 5)
    for number in range(2):
        out = torch.empty(3)
        looked.clear()
        _norms_kernel[(3,)](x, out, 5, BLOCK=8)
        assert torch.equal(out, x.square().sum(1) + x.square().amax(1))
        assert looked.count(tl) == 1, "nine calls of functions and one launch"
        assert len(looked) <= 4 or number == 0, "what tl.sum is written in stays patched"
        assert tl.core.is_builtin(tl.load) and tl.core.is_builtin(tl.tensor.__add__)
