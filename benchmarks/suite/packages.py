"""Packages of models, imported when a model of theirs is made."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch

_LIBRARIES: list[Any] = []


def let_torchvision_import() -> None:
    """Import torchvision, also beside another build of torch.

    Its usual wheel is built for CUDA; beside a torch for CPUs its compiled operators don't load, and its Python code
    wants two of them to be known. No model here calls them.
    """
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        library: Any = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _LIBRARIES.append(library)  # its operators go with it


def timm() -> Any:
    """Return the package timm."""
    let_torchvision_import()
    return importlib.import_module("timm")


def transformers() -> Any:
    """Return the package transformers."""
    let_torchvision_import()
    return importlib.import_module("transformers")
