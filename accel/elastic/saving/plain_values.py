"""What a checkpoint may hold: tensors and plain values, which `torch.load(weights_only=True)` reads.

Other values are refused when they are saved, with their place, since nobody could load them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from accel.errors import InvalidArgument

_ATOMS = frozenset({str, float, bool, type(None)})
_SEQUENCES = frozenset({list, tuple, torch.Size})
_MAPPINGS = frozenset({dict, OrderedDict, Counter})  # torch's schedulers count milestones with a Counter
_TENSORS = frozenset({Tensor, nn.Parameter})
_MOST_BITS = 2032  # beyond 255 bytes pickle writes integers in a form that torch doesn't load
_DEEPEST = 100  # pickle itself recurses, and gives up at some hundreds

_REMEDY = (
    "keep tensors, str, int, float, bool, None, and dicts, lists and tuples of these (int(…) and float(…) turn NumPy's "
    "numbers into such, torch.from_numpy its arrays)"
)


def check_plain(value: Any, path: str = "state") -> None:
    """Raise InvalidArgument, with the place of the first value that a checkpoint can't hold.

    Example:
        >>> check_plain({"weights": torch.ones(3), "epoch": 4})
        >>> check_plain({"metrics": [1.0, {2.0}]})
        Traceback (most recent call last):
        ...
        accel.InvalidArgument: a checkpoint holds tensors and plain values only, got a set at \
state['metrics'][1]; keep tensors, str, int, float, bool, None, and dicts, lists and tuples of these (int(…) and \
float(…) turn NumPy's numbers into such, torch.from_numpy its arrays)
    """
    _check(value, path, 0)


def with_plain_numbers(value: Any) -> Any:
    """Return a value with Python's numbers in place of NumPy's, as `np.logspace` gives."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (list, tuple):
        return type(value)(map(with_plain_numbers, value))
    # A model's state is a dict with attributes, and of tensors alone.
    return {key: with_plain_numbers(item) for key, item in value.items()} if type(value) is dict else value


def _check(value: Any, path: str, depth: int) -> None:
    kind = type(value)
    if kind in _ATOMS:
        return
    if depth > _DEEPEST:
        raise InvalidArgument(
            f"a checkpoint must not be nested deeper than {_DEEPEST} levels, got more at {path[:80]}…; "
            "flatten it, or take out a container that contains itself"
        )
    if kind is int:
        if value.bit_length() > _MOST_BITS:
            raise InvalidArgument(
                f"an integer of a checkpoint must have at most {_MOST_BITS} bits, got {value.bit_length()} at {path}; "
                "keep it as a string"
            )
    elif kind in _TENSORS:
        if value.is_meta:
            raise InvalidArgument(f"a tensor of a checkpoint must have values, got one on the meta device at {path}")
        _check_attributes(value, path, depth)
    elif kind in _SEQUENCES:
        for number, item in enumerate(value):
            _check(item, f"{path}[{number}]", depth + 1)
    elif kind in _MAPPINGS:
        for key, item in value.items():
            if type(key) not in (str, int):
                _refuse(key, f"a key of {path}")
            _check(item, f"{path}[{key!r}]", depth + 1)
        _check_attributes(value, path, depth)
    else:
        _refuse(value, path)


def _check_attributes(value: Any, path: str, depth: int) -> None:
    """Check what is pickled with a tensor or a dict: `_metadata` of a model's state, say."""
    for name, item in getattr(value, "__dict__", {}).items():
        _check(item, f"{path}.{name}", depth + 1)


def _refuse(value: Any, path: str) -> None:
    kind = type(value)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    raise InvalidArgument(f"a checkpoint holds tensors and plain values only, got a {name} at {path}; {_REMEDY}")
