"""The global random generators of Python, torch (CPU) and numpy: read, seeded and restored one at a time."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch


class Stream(NamedTuple):
    """One global generator. States can be compared by `==`."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], None]
    seed: Callable[[int], None]


def _read_torch() -> bytes:
    return torch.get_rng_state().numpy().tobytes()


def _write_torch(state: bytes) -> None:
    torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _seed_torch(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


@dataclass(frozen=True)
class _Numpy:
    """State of numpy's: its arrays as bytes, to be compared, and as it is, to be written."""

    compared: dict[str, Any]
    state: dict[str, Any] = field(compare=False)


def _read_numpy() -> _Numpy:
    state = sys.modules["numpy"].random.get_state(legacy=False)
    inner = {name: part.tobytes() if hasattr(part, "tobytes") else part for name, part in state["state"].items()}
    return _Numpy({**state, "state": inner}, state)


def _write_numpy(state: _Numpy) -> None:
    sys.modules["numpy"].random.set_state(state.state)


def _seed_numpy(seed: int) -> None:
    numpy = sys.modules["numpy"]
    try:
        numpy.random.seed(seed & 0xFFFFFFFF)
    except TypeError:  # only its own kind can be seeded; this one came by set_bit_generator
        own = numpy.random.get_bit_generator()
        own.state = type(own)(seed).state


_TORCH = Stream("torch", _read_torch, _write_torch, _seed_torch)
_PYTHON = Stream("python", random.getstate, random.setstate, random.seed)
_NUMPY = Stream("numpy", _read_numpy, _write_numpy, _seed_numpy)


def streams() -> list[Stream]:
    """Return the generators there are: numpy's if it is loaded."""
    return [_TORCH, _PYTHON, *([_NUMPY] if "numpy" in sys.modules else [])]


def random_state() -> tuple[Any, ...]:
    """Return the states of all, so that two of them can be compared."""
    return tuple(stream.read() for stream in streams())


@contextlib.contextmanager
def states_of_their_own() -> Iterator[None]:
    """Put the states of the generators back after the block."""
    before = states()
    try:
        yield
    finally:
        put_back(before)


def states() -> list[tuple[Stream, Any]]:
    """Return the generators with their states."""
    return [(stream, stream.read()) for stream in streams()]


def put_back(before: list[tuple[Stream, Any]]) -> None:
    """Write the states that have changed."""
    for stream, state in before:
        if stream.read() != state:
            stream.write(state)


def seed_everything(seed: int) -> None:
    """Seed Python, torch (CPU) and, if it is loaded, numpy."""
    for stream in streams():
        stream.seed(seed)


def derived_seed(base_seed: int, number: int) -> int:
    """Return the seed of batch `number` of an epoch: splitmix64 of both, 0 to 2**63 - 1."""
    z = (base_seed + (number + 1) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (z ^ (z >> 31)) >> 1


def others_could_draw() -> bool:
    """Return whether a thread beside this one could draw random numbers; this package's draw none."""
    named, mine = threading.enumerate(), threading.get_ident()
    unnamed = len(sys._current_frames()) > len(named)  # started by native code
    return unnamed or any(each.ident != mine and not each.name.startswith("accel-") for each in named)
