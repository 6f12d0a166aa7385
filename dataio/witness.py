"""Watch whether fetching a batch draws random numbers or changes the dataset.

Fetching may move to another process only if it is a function of the indices alone. A dataset that draws random numbers
(augmentation), counts, caches or keeps its own generator is such a function of history, and moving it would change what
the model sees. The witness compares, around a fetch in the plain loop, the global random states (torch, numpy, Python),
the dataset's own small state, and where files stand that were open before.
"""

from __future__ import annotations

import random
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from accel.dataio.drawing import others_could_draw
from accel.dataio.handles import moved, positions
from accel.dataio.randomness import random_state

_SCALARS = (int, float, bool, str, bytes, complex, type(None))
# Depth and width that cover dataset → Subset.dataset → transform → its parts; deeper state is not looked at.
_DEPTH = 4
_WIDTH = 256
_DRAWS_OR_OTHERS = "random numbers are drawn while a sample is fetched, by it or by another thread"


def object_state(thing: Any, depth: int = _DEPTH) -> Hashable:
    """Return a fingerprint of an object's small state: its scalars, tensor versions, generators and sizes.

    Containers are looked into up to 256 entries and four levels. Big arrays count by identity and, for tensors, by
    version, so an in-place change of a tensor shows and one of a numpy array doesn't.
    """
    if isinstance(thing, _SCALARS):
        return thing
    if isinstance(thing, Tensor):
        return ("tensor", id(thing), thing._version)
    if isinstance(thing, torch.Generator):
        return ("generator", thing.get_state().numpy().tobytes())
    if isinstance(thing, random.Random):
        return ("random", hash(thing.getstate()))
    if hasattr(thing, "bit_generator"):
        return ("numpy", repr(thing.bit_generator.state))
    return _container_state(thing, depth)


def _container_state(thing: Any, depth: int) -> Hashable:
    if isinstance(thing, dict):
        items = list(thing.items())
        inner = tuple((repr(k), object_state(v, depth - 1)) for k, v in items[:_WIDTH]) if depth else ()
        return ("dict", len(items), inner)
    if isinstance(thing, list | tuple | set | frozenset):
        values = list(thing) if not isinstance(thing, set | frozenset) else []
        looked = values[:_WIDTH] if depth and len(values) <= _WIDTH else []
        return (type(thing).__name__, len(thing), tuple(object_state(v, depth - 1) for v in looked))
    attributes = getattr(thing, "__dict__", None)
    if depth and isinstance(attributes, dict) and not isinstance(thing, type) and not callable_code(thing):
        return (id(thing), tuple((name, object_state(value, depth - 1)) for name, value in attributes.items()))
    return ("object", id(thing))


def callable_code(thing: Any) -> bool:
    """Tell whether `thing` is code (a function, method or module) that has no state of its own."""
    return type(thing).__name__ in {"function", "method", "module", "builtin_function_or_method"}


class Witness:
    """Collects, over some fetches of the plain loop, why fetching may not move.

    Args:
        dataset: what is fetched from.
        draws: look at the global random states too.

    Example:
        >>> witness = Witness(dataset)
        >>> witness.before(); batch = fetch(); witness.after()
        >>> witness.finding          # '' while fetching depends on the indices alone
    """

    def __init__(self, dataset: Any, *, draws: bool = True) -> None:
        self.dataset, self._draws = dataset, draws
        self.finding = ""
        self.fetches = 0
        self.moved_file = ""
        """A file that was open before a fetch and stood elsewhere after it."""
        self._seen: tuple[Any, Hashable, dict[str, int]] | None = None

    def before(self) -> None:
        """Note the states before a fetch."""
        self._seen = (self._random_state(), object_state(self.dataset), positions())

    def after(self) -> None:
        """Compare the states after the fetch with those before; keeps the first finding."""
        if self._seen is None:
            return
        (drawn, own, stood), self._seen = self._seen, None
        self.fetches += 1
        self.moved_file = self.moved_file or moved(stood, positions())
        if self.finding:
            return
        if self._random_state() != drawn:
            # Whoever drew: where that can't be told, fetching is left where it is.
            self.finding = _DRAWS_OR_OTHERS if others_could_draw() else "fetching a sample draws random numbers"
        elif object_state(self.dataset) != own:
            self.finding = "fetching a sample changes the dataset"
        elif self.moved_file:
            self.finding = f"fetching a sample reads on in a file that was open before, {self.moved_file}"

    def _random_state(self) -> Any:
        return random_state() if self._draws else None
