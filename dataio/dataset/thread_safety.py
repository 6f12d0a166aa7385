"""Whether several threads may read a dataset at once.

A dataset may say so itself by an attribute `thread_safe`. If it doesn't, what it holds is looked through: a dataset
made of numbers, texts, tensors, arrays and plain Python objects of such is read by indexing alone, which threads may do
together. An open file has a position, a database connection a cursor, a generator a state; two threads would read
nonsense from them, and no measurement would show it. Whatever is not known to be harmless counts as that.

Fetching must not write either, unless the dataset says that threads may: `accel.dataio.dataset.fetch_watch` sees to
that.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import functools
import re
import types
import uuid
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accel.dataio.dataset.numbers import declared
from accel.dataio.dataset.reach import own_attributes

_DEPTH = 8
# Of a long list the first few stand for all.
_LOOKED = 64
_HARMLESS = (
    *(int, float, bool, complex, str, bytes, type(None), type(...), range, slice, re.Pattern),
    *(PurePath, enum.Enum, datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, fractions.Fraction),
    *(uuid.UUID, np.generic, np.dtype, torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
    *(Tensor, type, types.ModuleType, types.BuiltinFunctionType),
)


def unsafe(dataset: Any) -> str:
    """Return '' if several threads may read `dataset` at once, else the reason why that is not known."""
    safe = declared(dataset, "thread_safe")
    if isinstance(safe, bool):
        return "" if safe else "the dataset declares that it is not thread-safe (thread_safe=False)"
    return _look(dataset, "the dataset", _DEPTH, set())


def _look(thing: Any, name: str, depth: int, seen: set[int]) -> str:
    if isinstance(thing, _HARMLESS) or id(thing) in seen:
        return ""
    seen.add(id(thing))
    if depth == 0:
        return f"{name} is nested too deeply to be inspected"
    if isinstance(thing, np.ndarray):
        return f"{name} is an array of objects" if thing.dtype.hasobject else ""
    parts = _parts(thing)
    if parts is None:
        return f"{name} is a {type(thing).__name__}, which is not known to be safe to share between threads"
    for part, value in parts:
        reason = _look(value, f"{name}{part}", depth - 1, seen)
        if reason:
            return reason
    return ""


def _parts(thing: Any) -> list[tuple[str, Any]] | None:
    """Return what an object is made of; None if that can't be seen."""
    if isinstance(thing, dict):
        return [(f"[{key!r}]", value) for key, value in list(thing.items())[:_LOOKED]]
    if isinstance(thing, list | tuple):
        return [(f"[{place}]", value) for place, value in enumerate(thing[:_LOOKED])]
    if isinstance(thing, set | frozenset):
        return []  # members can be hashed, so they don't change
    if isinstance(thing, types.FunctionType):
        cells = thing.__closure__ or ()
        return [
            (f" → {name}", cell.cell_contents) for name, cell in zip(thing.__code__.co_freevars, cells, strict=True)
        ]
    if isinstance(thing, types.MethodType):
        return [("", thing.__self__)]
    if isinstance(thing, functools.partial):
        return [("'s function", thing.func), ("'s arguments", [*thing.args, *thing.keywords.values()])]
    attributes = own_attributes(thing)
    if attributes is None or not _written_in_python(type(thing)):
        return None
    hidden = getattr(type(thing), "accel_hides", ())
    return [(f".{name}", value) for name, value in attributes.items() if name not in hidden]


class _PlainClass:
    pass


def _written_in_python(kind: type) -> bool:
    """Return whether a class adds nothing to `object` but Python code: what it holds is then in its `__dict__`.

    A class of C code, and one with `__slots__`, has room for more in its instances.
    """
    return kind.__basicsize__ <= _PlainClass.__basicsize__ and kind.__itemsize__ == 0
