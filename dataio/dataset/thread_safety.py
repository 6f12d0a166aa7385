"""Whether several threads may read a dataset at once.

A dataset may say so itself by an attribute `thread_safe`. If it does not, what it holds and what
its code names is looked through: a dataset made of numbers, texts, tensors, arrays and plain
Python objects of such is read by indexing alone, which threads may do together. An open file has a
position, a database connection a cursor, a generator a state; two threads would read nonsense from
them, and no measurement would show it. Whatever is not known to be harmless counts as that.

Fetching must not write either, unless the dataset says that threads may:
`accel.dataio.dataset.fetch_watch` sees to that.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import re
import types
import uuid
from collections import deque
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accel.dataio.dataset.numbers import declared
from accel.dataio.dataset.reach import MOST, is_code, native, reachable

_HARMLESS = (
    *(int, float, bool, complex, str, bytes, type(None), type(...), range, slice, re.Pattern),
    *(dict, list, tuple, deque, set, frozenset),
    *(PurePath, enum.Enum, datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, fractions.Fraction),
    *(uuid.UUID, np.generic, np.dtype, torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
    *(Tensor, types.ModuleType, types.BuiltinFunctionType),
)


def unsafe(dataset: Any, collate: Any = None) -> str:
    """Return '' if several threads may make batches of `dataset` at once, else the reason why that is not known."""
    safe = declared(dataset, "thread_safe")
    if isinstance(safe, bool):
        return "" if safe else "the dataset declares that it is not thread-safe (thread_safe=False)"
    count = 0
    for name, thing in reachable(("the dataset", dataset), ("the collate function", collate)):
        count += 1
        if isinstance(thing, np.ndarray) and thing.dtype.hasobject:
            return f"{name} is an array of objects"
        is_harmless = isinstance(thing, (*_HARMLESS, np.ndarray)) or is_code(thing)
        # Before torch 2.13 a generator is no larger than a plain object.
        if not is_harmless and (native(type(thing)) or isinstance(thing, torch.Generator)):
            return f"{name} is a {type(thing).__name__}, which is not known to be safe to share between threads"
    return "" if count < MOST else f"the dataset reaches {MOST:,} things and more, too many to look through"
