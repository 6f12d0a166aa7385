"""Kernels in Triton's interpreter, and poisoned memory, for optimizers too."""

from __future__ import annotations

from tests.kernels.conftest import _poison, interpreted, path, waits_for_nothing

__all__ = ["_poison", "interpreted", "path", "waits_for_nothing"]
