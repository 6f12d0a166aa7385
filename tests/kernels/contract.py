"""Whether an operator keeps what it has declared to torch."""

from __future__ import annotations

import warnings
from typing import Any

import torch


def opcheck(op: Any, arguments: tuple[Any, ...], **options: Any) -> None:
    """Check it as `torch.library.opcheck` does; from torch 2.14 on that reads `.grad` of tensors that are no leaves."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        torch.library.opcheck(op, arguments, **options)
