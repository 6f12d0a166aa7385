"""The frameworks that own a training loop, where they are installed."""

from __future__ import annotations

import importlib.util

import pytest

NEEDS = {
    "transformers": ("transformers", "accelerate"),
    "lightning": ("lightning",),
    "accelerate": ("accelerate",),
}

LET_TORCHVISION_IMPORT = "from benchmarks.suite.packages import let_torchvision_import as let\nlet()\n"
"""Code to run first: they import torchvision, whose wheel may be built for another torch."""


def need(framework: str) -> None:
    """Skip without the packages that a framework takes."""
    for name in NEEDS[framework]:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs {name}, which is not installed")
