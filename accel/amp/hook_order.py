"""Where a hook stands among those of the user's, which torch calls in the order of their registration."""

from __future__ import annotations

from typing import Any

from torch.utils.hooks import RemovableHandle


def put_first(hooks: Any, handle: RemovableHandle) -> None:
    """Have a hook called before all others."""
    hooks.move_to_end(handle.id, last=False)


def put_last(hooks: Any, handle: RemovableHandle) -> None:
    """Have a hook called after all others, those that were registered since too."""
    if handle.id in hooks and next(reversed(hooks)) != handle.id:
        hooks.move_to_end(handle.id)
