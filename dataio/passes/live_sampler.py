"""What torch's samplers read of themselves at each index list, which the loop may set within an epoch.

`BatchSampler` reads its batch size (with drop_last only when an epoch begins), `SubsetRandomSampler` its indices. Lists
that were drawn before the loop set them are made those that would be drawn now.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, SubsetRandomSampler

from accel.dataio.passes.epochs import ordering


class LiveSampler:
    """Know the batch size and the subset under which index lists are drawn.

    Args:
        loader: whose sampler it is; of samplers that aren't torch's nothing is known, and nothing changes.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        outer, sampler = loader._index_sampler, ordering(loader)
        self._batches = outer if type(outer) is BatchSampler and not outer.drop_last else None
        self._size = self.batch_size
        self._subset = sampler if type(sampler) is SubsetRandomSampler else None
        chosen: Any = () if self._subset is None else self._subset.indices
        self._kept: Any = list(chosen) if isinstance(chosen, list) else copy.deepcopy(chosen)
        self._places = {int(index): place for place, index in enumerate(chosen)}

    @property
    def batch_size(self) -> int:
        """Of the next list; 0 where lists stay as they were drawn."""
        return 0 if self._batches is None else self._batches.batch_size

    def changed(self) -> bool:
        """Return whether the loop has set something since, by which lists would be others."""
        if self.batch_size != self._size or self._subset is None:
            return self.batch_size != self._size
        now: Any = self._subset.indices
        kept = self._kept
        if isinstance(now, Tensor) and isinstance(kept, Tensor):
            return not torch.equal(now, kept)
        return not np.array_equal(now, kept) if isinstance(now, np.ndarray) else bool(now != kept)

    def now(self, drawn: Any) -> Any:
        """Return the samples of a list as the subset has them now."""
        if self._subset is None:
            return drawn
        places = (self._places.get(int(index)) for index in drawn)
        return [i if place is None else self._subset.indices[place] for i, place in zip(drawn, places, strict=True)]
