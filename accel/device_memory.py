"""Memory of the device that an attempt has taken and does not need any more."""

from __future__ import annotations

import contextlib

import torch


def give_memory_back() -> None:
    """Give the device what the caching allocator holds unused, after an attempt that may have run out of memory.

    For after the exception's handler: the exception holds frames, and they the tensors. Without CUDA nothing is done.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        with contextlib.suppress(RuntimeError):  # a capture that has failed may be under way in the allocator
            torch.cuda.empty_cache()
