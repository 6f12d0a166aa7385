"""Read by Python as it starts, for plain and accelerated runs alike: scripts without a seed get one.

Where $STEP_TIMES names a file, the time at the end of each step of an optimizer is written there, in seconds.

torchvision is let import beside any torch: see `benchmarks.suite.packages`, whose package imports all models.
"""

from __future__ import annotations

import atexit
import json
import os
import random
import sys
import time
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

_Execute = Callable[[ModuleType], None]


def _seed_torch(execute: _Execute, module: ModuleType) -> None:
    execute(module)
    module.manual_seed(0)
    if "STEP_TIMES" in os.environ:
        times: list[float] = []
        hooks = sys.modules["torch.optim.optimizer"]
        hooks.register_optimizer_step_post_hook(lambda *_: times.append(time.perf_counter()))
        path, process = Path(os.environ["STEP_TIMES"]), os.getpid()
        atexit.register(lambda: os.getpid() == process and path.write_text(json.dumps(times), encoding="utf-8"))


def _seed_numpy(execute: _Execute, module: ModuleType) -> None:
    execute(module)
    module.random.seed(0)


def _let_import(execute: _Execute, module: ModuleType) -> None:
    try:
        execute(module)
    except RuntimeError:  # its wheel is built for another torch: two operators have to be known
        from torch.library import Library

        library: Any = Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        execute(module)
        module._library = library  # type: ignore[attr-defined]


_AROUND = {"torch": _seed_torch, "numpy": _seed_numpy, "torchvision": _let_import}


class _Around(MetaPathFinder):
    """Runs a module's code inside one of the functions above."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in _AROUND:
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module
            loader.exec_module = lambda module: _AROUND[name](execute, module)
        return spec


random.seed(0)
sys.meta_path.insert(0, _Around())
