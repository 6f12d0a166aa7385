"""What operators move between memory and a cache, counted: the addresses they touch, through a cache that is modelled.

Operators on ranges that were touched just before find them in the cache; a pass over more than it holds goes to memory
again. So what is counted depends on the order of the operators and on how much each takes at once, not on the machine.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LINE = 4096
CACHE_BYTES = 2 << 20


class Traffic(TorchDispatchMode):
    """Count bytes while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.read = 0
        """Bytes fetched into the cache."""
        self.calls = 0
        self.allocated = 0
        """Bytes of new tensors larger than the cache."""
        self._held: OrderedDict[int, None] = OrderedDict()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given = [one for one in tree_leaves((args, kwargs or {})) if isinstance(one, Tensor)]
        made = [one for one in tree_leaves(found) if isinstance(one, Tensor)]
        storages = {one.untyped_storage().data_ptr() for one in given}
        if func.is_view or func._schema.name in ("aten::empty", "aten::empty_like", "aten::new_empty"):
            new = [one for one in made if one.untyped_storage().data_ptr() not in storages]
            self.allocated += sum(one.nbytes for one in new if one.nbytes > CACHE_BYTES)
            return found
        new = [one for one in made if one.untyped_storage().data_ptr() not in storages]
        self.allocated += sum(one.nbytes for one in new if one.nbytes > CACHE_BYTES)
        self.calls += 1
        # Operands are gone through side by side.
        for lines in zip_longest(*map(_lines, [*given, *new])):
            for line in lines:
                if line is not None:
                    self._touch(line)
        return found

    def _touch(self, line: int) -> None:
        if line in self._held:
            self._held.move_to_end(line)
            return
        self.read += LINE
        self._held[line] = None
        if len(self._held) > CACHE_BYTES // LINE:
            self._held.popitem(last=False)


def _lines(values: Tensor) -> Iterator[int]:
    if values.numel() == 0 or values.device.type != "cpu":
        return iter(())
    span = sum((size - 1) * stride for size, stride in zip(values.shape, values.stride(), strict=True)) + 1
    first = values.data_ptr()
    return iter(range(first // LINE, (first + span * values.element_size() - 1) // LINE + 1))
