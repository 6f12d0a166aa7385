"""A digest of a kernel and of what it is compiled with: while it stays, the recorded row of the table holds."""

from __future__ import annotations

import inspect
import io
import tokenize
from collections.abc import Callable, Mapping
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from typing import Any

from accel.kernels.launching import PlannedKernel


def digest(kernel: Any, *parameters: Mapping[str, Any]) -> str:
    """Return 12 digits of the source, the parameters and the compiler's version; comments don't count."""
    parts = [version("triton"), *(f"{name}={value}" for part in parameters for name, value in sorted(part.items()))]
    return sha256("\n".join(parts + _sources(kernel)).encode()).hexdigest()[:12]


def _sources(kernel: Any) -> list[str]:
    """Return the text of a kernel, and of the functions and constants that it uses."""
    known: dict[str, str] = {}
    found = [("", kernel)]
    while found:
        name, value = found.pop()
        if name in known:
            continue
        function = getattr(value, "fn", None)  # compiled or interpreted, a kernel holds its function
        if not inspect.isfunction(function):
            known[name] = repr(value)
            continue
        known[name] = _text(function)
        used = ((word, function.__globals__.get(word)) for word in function.__code__.co_names)
        found += [(word, one) for word, one in used if one is not None and not inspect.ismodule(one)]
    return [f"{name}: {text}" for name, text in sorted(known.items())]


@cache  # helpers are part of most kernels, and a kernel of several variants
def _text(function: Callable[..., Any]) -> str:
    skipped = (tokenize.COMMENT, tokenize.NL)
    # How a kernel is launched is no part of what it is compiled to.
    lines = io.StringIO(inspect.getsource(function).removeprefix(f"@{PlannedKernel.__name__}\n")).readline
    return " ".join(token.string for token in tokenize.generate_tokens(lines) if token.type not in skipped)
