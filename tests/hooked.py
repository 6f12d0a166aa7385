"""Classes whose clock or disk is a test's."""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")


def hooked(kind: type[T], **attributes: Any) -> type[T]:
    """Return a class with private attributes in place of its own: a clock, a disk.

    Args:
        kind: the class.
        attributes: by their names without the underscore.
    """
    own = {f"_{name}": staticmethod(value) if callable(value) else value for name, value in attributes.items()}
    assert all(hasattr(kind, name) for name in own)
    return type(kind.__name__, (kind,), own)
