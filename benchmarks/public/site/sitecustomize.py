"""Read by Python as it starts, for plain and accelerated runs alike: lets torchvision import beside any torch."""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any


class _BeforeTorchvision(MetaPathFinder):
    """See `benchmarks.suite.packages`, which is loaded alone: its package imports all models."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name != "torchvision":
            return
        sys.meta_path.remove(self)
        place = Path(__file__).resolve().parents[2] / "suite" / "packages.py"
        spec = importlib.util.spec_from_file_location("_packages", place)
        assert spec is not None
        assert spec.loader is not None
        sys.modules["_packages"] = packages = importlib.util.module_from_spec(spec)  # its operators stay with it
        spec.loader.exec_module(packages)
        packages.let_torchvision_import()


sys.meta_path.insert(0, _BeforeTorchvision())
