"""A process group of the test's own process alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

_ENDED: list[Any] = []
"""Groups that were destroyed, which are never freed: torch's destructor waits, with the GIL, for a thread that may need
the GIL to free the tensors of its last collective. On one core a test hung so for good."""


@contextlib.contextmanager
def group_of_one(folder: Path) -> Iterator[None]:
    """Have a Gloo group of one rank, which meets in a file of this folder."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
    _ENDED.append(dist.group.WORLD)
    try:
        yield
    finally:
        dist.destroy_process_group()
