"""The random states of a process as plain values, and back, bit for bit.

Python's `random`, NumPy's global state, torch's on the CPU and on CUDA devices. NumPy's and Python's own forms hold
arrays and tuples of a kind that `torch.load(weights_only=True)` refuses, or that take 6 kB of text.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accel.errors import InvalidArgument
from accel.profiler.interruptions import ours

_NUMPY_WORDS = 624
"""Of its Mersenne Twister, which takes any place among them."""


def random_state() -> dict[str, Any]:
    """Return the random states of this process as plain values.

    Those of CUDA devices are in it once the process has used CUDA, with the current device.

    Example:
        >>> state = random_state()
        >>> before = torch.rand(2)
        >>> set_random_state(state)
        >>> torch.equal(torch.rand(2), before)
        True
    """
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "numpy": _plain_of_numpy(np.random.get_state(legacy=False)),
        "torch": torch.get_rng_state(),
        "cuda": None,
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = {"current": torch.cuda.current_device(), "states": torch.cuda.get_rng_state_all()}
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Put this process where `random_state` was taken.

    If there are as many CUDA devices as there were, each gets its state; else the current one gets that of the device
    which was current. Without CUDA its states are left out.

    Raises:
        InvalidArgument: if it is not such a state; nothing has been changed then.
    """
    before = random_state()
    try:
        _set(state)
    except BaseException as error:  # whatever damaged or hostile contents make of the generators
        _set(before)
        if not isinstance(error, ours()):
            raise
        raise InvalidArgument(
            f"a random state must be one that random_state() returned, got one that does not fit "
            f"({type(error).__name__}: {error}); take it from a checkpoint of this version"
        ) from error


def _set(state: Mapping[str, Any]) -> None:
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    np.random.set_state(_numpy_of_plain(state["numpy"]))
    if not 0 <= np.random.get_state(legacy=False)["state"].get("pos", 0) <= _NUMPY_WORDS:
        raise InvalidArgument("NumPy would read beyond its words")
    torch.set_rng_state(state["torch"])
    _set_cuda(state["cuda"])


def _set_cuda(state: Mapping[str, Any] | None) -> None:
    if state is None or not torch.cuda.is_available():
        return
    states, current = state["states"], state["current"]
    if len(states) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states)
    else:
        torch.cuda.set_rng_state(states[current])


def _plain_of_numpy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain_of_numpy(one) for name, one in value.items()}
    if isinstance(value, np.ndarray):
        # As bytes: torch has few operators for unsigned integers, and loads those of 32 bits since 2.3 only.
        return {"dtype": str(value.dtype), "bytes": torch.from_numpy(value.copy().view(np.uint8))}
    return value.item() if isinstance(value, np.generic) else value


def _numpy_of_plain(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    raw = value.get("bytes")
    if isinstance(raw, Tensor):
        return raw.numpy().view(np.dtype(value["dtype"])).copy()
    return {name: _numpy_of_plain(one) for name, one in value.items()}
