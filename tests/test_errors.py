"""Every error that accel raises on purpose is an AccelError, so that one `except` is enough."""

from __future__ import annotations

import ast
import builtins
import importlib
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import accel
from accel.errors import AccelError, InvalidArgument, InvalidState, InvalidType
from benchmarks.source_tree import library, text

# Of the system, or what Python asks of an object: whoever reads a file, or indexes, expects them by these names.
ALLOWED = {
    *("AttributeError", "EOFError", "FileNotFoundError", "ImportError", "IndexError", "KeyboardInterrupt"),
    *("NotImplementedError", "OSError", "StopIteration", "SystemExit", "TimeoutError"),
}
BUILTIN = {name for name in vars(builtins) if name.endswith(("Error", "Exception", "Exit", "Interrupt", "Iteration"))}


def foreign(source: str) -> list[str]:
    """Return the errors that a file defines or raises beside accel's, with their lines."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Name) and node.exc.id in BUILTIN - ALLOWED:
            found.append(f"{node.lineno}: raises {node.exc.id}")
        elif isinstance(node, ast.Call) and node.args and ast.unparse(node.func) in BUILTIN - ALLOWED:
            found.append(f"{node.lineno}: makes {ast.unparse(node.func)}")
        elif isinstance(node, ast.ClassDef) and node.bases:
            bases = [ast.unparse(base) for base in node.bases]
            if set(bases) <= BUILTIN - {"BaseException"}:
                found.append(f"{node.lineno}: {node.name} is no AccelError")
    return found


def test_the_library_raises_its_own_errors() -> None:
    places = [f"{module}:{place}" for module, path in library().items() for place in foreign(text(path))]
    assert places == ["accel.profiler.errors:6: AccelError is no AccelError"]


def test_what_is_foreign_is_seen() -> None:
    lines = ["class Lost(RuntimeError): ...", "def f():", "    raise ValueError('x')", "    raise Lost"]
    source = "\n".join([*lines, "    raise OSError", "    raise TypeError"])
    assert sorted(foreign(source)) == ["1: Lost is no AccelError", "3: makes ValueError", "6: raises TypeError"]


@pytest.mark.parametrize("module", ["accel.comm.ranks.failure", "accel.comm.bandwidth.table", "accel.graphs.obstacles"])
def test_errors_of_other_folders_are_caught_as_accel_s(module: str) -> None:
    kinds = [each for each in vars(importlib.import_module(module)).values() if isinstance(each, type)]
    own = [each for each in kinds if issubclass(each, Exception) and each.__module__ == module]
    assert own and all(issubclass(each, AccelError) for each in own)


@pytest.mark.parametrize(
    ("kind", "builtin"), [(InvalidArgument, ValueError), (InvalidType, TypeError), (InvalidState, RuntimeError)]
)
def test_they_are_errors_of_python_too_and_come_out_of_worker_processes(
    kind: type[Exception], builtin: type[Exception]
) -> None:
    error = pickle.loads(pickle.dumps(kind("size must be above 0. Found: 0")))
    assert isinstance(error, AccelError) and isinstance(error, builtin)
    assert str(error) == "size must be above 0. Found: 0"


LOADER: Any = DataLoader(cast("Any", [torch.zeros(1)] * 8), batch_size=2)
PUBLIC: Any = accel  # whose types are not asked
TAKES_NUMBERS: dict[str, tuple[Callable[..., Any], list[str], dict[str, Any]]] = {
    # what takes numbers → it, their names, and what else it needs
    "loader": (partial(accel.ContinuousLoader, LOADER), ["num_workers", "prefetch_factor"], {}),
    "images": (partial(accel.ImageDataset, [], accel.Resize(8)), ["threads", "seed", "reducing_gap"], {}),
    "crop": (accel.RandomResizedCrop, ["size"], {}),
    "resize": (accel.Resize, ["size"], {}),
    "elastic sampler": (partial(accel.ElasticSampler, 8), ["batch_size"], {}),
    "ranks of a sampler": (partial(accel.ElasticSampler, 8), ["num_replicas", "rank"], {"batch_size": 2}),
    "lengths": (partial(accel.LengthBalancedBatchSampler, [1, 2]), ["max_tokens", "batch_size", "jitter"], {}),
    "DGC": (accel.DGC, ["ratio", "max_grad_norm", "warmup_steps", "exact_below"], {}),
    "1-bit": (accel.OneBit, ["block", "exact_below", "start_step"], {}),
    "int8": (accel.Int8, ["block"], {}),
    "PowerSGD": (accel.PowerSGD, ["rank"], {}),
    "checkpoints": (accel.Checkpointing, ["interval_s", "keep"], {"folder": "runs"}),
    "batch": (accel.Elastic, ["max_batch_size"], {}),
    "loss scale": (accel.amp.DynamicLossScale, ["init_scale", "growth_factor", "growth_interval"], {}),
    "AdamW": (partial(accel.optim.FusedAdamW, [*nn.Linear(1, 1).parameters()]), ["lr", "weight_decay"], {}),
    "SGD": (partial(accel.optim.FusedSGD, [*nn.Linear(1, 1).parameters()]), ["momentum"], {"lr": 0.1}),
    "run": (partial(accel.optimize, nn.Linear(1, 1), LOADER), ["steps", "epochs"], {}),
}


@pytest.mark.parametrize(("call", "names", "more"), TAKES_NUMBERS.values(), ids=list(TAKES_NUMBERS))
def test_a_number_in_quotes_is_refused(call: Callable[..., Any], names: list[str], more: dict[str, Any]) -> None:
    """As options of a command line come, of which nobody has made numbers."""
    for name in names:
        with pytest.raises(InvalidArgument, match=rf"{name} must be .*['\[]?3"):
            call(**{**more, name: "3"})


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: PUBLIC.explain("model"), r"must have been passed to accel.optimize .* for this str\. Pass the object"),
        (lambda: PUBLIC.undo(LOADER), r"undo takes the model that optimize got, got a DataLoader; pass the model"),
        (lambda: PUBLIC.Checkpointing(folder=None), r"folder must be a path, got None; name the folder"),
        (lambda: PUBLIC.RandomResizedCrop((224,)), r"size must be one number of pixels or .*, got \(224,\)"),
        (lambda: PUBLIC.Normalize(mean=0.5), r"mean and std must be a number for each channel, got 0.5 and .*; pass"),
        (lambda: PUBLIC.Normalize(dtype="float16"), r"dtype must be one of torch's, got 'float16'; pass torch.float16"),
        (lambda: PUBLIC.ImageDataset([], PUBLIC.Resize), r"transform must be an accel.Random.* got <class"),
        (lambda: PUBLIC.ImageDataset([], nn.Identity()), r"got Identity\(\); apply other transforms to the batch"),
        (lambda: PUBLIC.measure_links(), r"needs a process group: call torch.distributed.init_process_group first"),
    ],
)  # fmt: skip
def test_what_is_of_another_kind_is_refused_with_a_remedy(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(AccelError, match=text):
        call()
