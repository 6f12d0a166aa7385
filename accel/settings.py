"""The arguments of `optimize`, checked."""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from accel import strategies
from accel.errors import InvalidArgument
from accel.exactness import Exactness, check_level
from accel.files import check_report
from accel.search.budget import Budget
from accel.search.plan import Plan

if TYPE_CHECKING:
    from accel.elastic.options import Checkpointing
    from accel.elastic.scaling_rules import Rule


@dataclass(frozen=True)
class OptimizeSettings:
    """The options of a call, checked."""

    level: Exactness
    enable: frozenset[str]
    disable: frozenset[str]
    plan: Plan | None
    budget: Budget
    report: str | None
    cache: bool
    max_batch_size: int | None = None
    scaling_rule: Rule | None = None
    checkpoint: str | Checkpointing | None = None
    steps: int | None = field(default=None, compare=False)
    epochs: float | None = field(default=None, compare=False)

    @property
    def conditions(self) -> dict[str, Any]:
        """What tells this kind of run from others: what is found in one holds for another under the same."""
        own = {"allow": self.level.word, "enable": sorted(self.enable), "disable": sorted(self.disable)}
        return own if self.max_batch_size is None else {**own, "max_batch_size": self.max_batch_size}

    @property
    def is_elastic(self) -> bool:
        """True if accel deals out the loader's batches."""
        return self.max_batch_size is not None or self.checkpoint is not None


def check_settings(
    model: nn.Module,
    allow: Any,
    enable: Any,
    disable: Any,
    plan: Any,
    budget: Any,
    report: Any,
    cache: Any,
    elastic: Any = None,
    steps: Any = None,
    epochs: Any = None,
) -> OptimizeSettings:
    """Return checked arguments of `optimize`; raises InvalidArgument for one that is wrong."""
    level = check_level("allow", allow)
    enabled, disabled = strategies.check_names("enable", enable), strategies.check_names("disable", disable)
    if enabled & disabled:
        raise InvalidArgument(f"{sorted(enabled & disabled)} are in both enable and disable; keep them in one")
    replayed = _check_plan(plan, model)
    if replayed is not None:  # passing a plan enables its strategies
        enabled |= frozenset(replayed.strategies) - disabled
    if not isinstance(cache, bool):
        raise InvalidArgument(f"cache must be True or False, got {cache!r}; ACCEL_CACHE=FOLDER names the folder")
    if not isinstance(report, str | os.PathLike | None) or report == "":
        raise InvalidArgument(f"report must be a path, or None for the terminal alone, got {report!r}")
    target = None if report is None else os.fspath(report)
    if target is not None:
        check_report("report", Path(os.path.abspath(target)))
    most, rule, checkpoint = _check_elastic(elastic)
    saved = os.fspath(checkpoint) if isinstance(checkpoint, str | os.PathLike) else checkpoint
    _check_length(steps, epochs)
    return OptimizeSettings(
        level=level,
        enable=enabled,
        disable=disabled,
        plan=replayed,
        budget=Budget.parse(budget),
        report=None if target is None else os.path.abspath(target),
        cache=cache,
        max_batch_size=most,
        scaling_rule=rule,
        checkpoint=_absolute(saved),
        steps=steps,
        epochs=epochs,
    )


def _absolute(checkpoint: str | Checkpointing | None) -> str | Checkpointing | None:
    """Return the same with its folder as an absolute path: it is used for as long as the run lasts."""
    if isinstance(checkpoint, str):
        return os.path.abspath(checkpoint)
    return None if checkpoint is None else replace(checkpoint, folder=os.path.abspath(checkpoint.folder))


def _check_elastic(elastic: Any) -> tuple[int | None, Rule | None, str | os.PathLike[str] | Checkpointing | None]:
    if elastic is None:
        return None, None, None
    from accel.elastic.options import Elastic

    if not isinstance(elastic, Elastic):
        raise InvalidArgument(
            f"elastic must be an accel.Elastic or None. Found: {_kind(elastic)}; pass accel.Elastic(max_batch_size=512)"
        )
    return elastic.max_batch_size, elastic.scaling_rule, elastic.checkpoint


def _check_length(steps: Any, epochs: Any) -> None:
    if steps is not None and epochs is not None:
        raise InvalidArgument(f"the length of the run must be given once, got steps={steps!r} and epochs={epochs!r}")
    for name, value, kinds in (("steps", steps, int), ("epochs", epochs, (int, float))):
        if value is None:
            continue
        if not isinstance(value, kinds) or isinstance(value, bool) or not 0 < value < math.inf:
            raise InvalidArgument(
                f"{name} must be how many {name} the run will have, above 0, got {value!r}; leave it out if not known"
            )


def check_objects(model: Any, loader: Any, optimizer: Any) -> None:
    if not isinstance(model, nn.Module):
        swapped = " (model and loader are swapped)" if isinstance(loader, nn.Module) else ""
        remedy = "call it for each" if isinstance(model, list | tuple) else "pass the module itself"
        raise InvalidArgument(f"model must be a torch.nn.Module, got {_kind(model)}{swapped}; {remedy}")
    several = isinstance(loader, list | tuple) and any(isinstance(each, DataLoader) for each in loader)
    has_batches = hasattr(loader, "__iter__") or (hasattr(loader, "__getitem__") and not isinstance(loader, Dataset))
    if several or not has_batches or isinstance(loader, str | bytes | dict | type):
        is_swapped = isinstance(loader, Optimizer) and hasattr(optimizer, "__iter__")
        remedy = "call it for each" if several else "pass the DataLoader of the training loop"
        remedy = "the order is model, loader, optimizer" if is_swapped else remedy
        raise InvalidArgument(f"loader must be an iterable of batches, got {_kind(loader)}; {remedy}")
    with contextlib.suppress(TypeError, NotImplementedError):  # an iterable dataset has no length
        if len(loader) == 0:
            raise InvalidArgument("loader must hold at least one batch, it is empty; check the dataset and drop_last")
    if optimizer is None:
        return
    if not isinstance(optimizer, Optimizer):
        raise InvalidArgument(
            f"optimizer must be a torch.optim.Optimizer, got {_kind(optimizer)}; leave it out instead"
        )
    mine = {id(p) for p in model.parameters()}
    if not any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
        raise InvalidArgument(
            f"optimizer must hold parameters of the model, this {type(optimizer).__name__} holds none of "
            f"{type(model).__name__}'s; make it from model.parameters() after the model is on its device"
        )


def _kind(thing: Any) -> str:
    if isinstance(thing, type):
        return f"the class {thing.__name__}"
    return f"a {type(thing).__name__}" if thing is not None else "None"


def _check_plan(plan: Any, model: nn.Module) -> Plan | None:
    if plan is None:
        return None
    if not isinstance(plan, Plan | str | os.PathLike):
        raise InvalidArgument(f"plan must be a plan or the path of its file, got {_kind(plan)}")
    loaded = plan if isinstance(plan, Plan) else Plan.load(plan)
    loaded.check(model)
    strategies.check_names("plan", loaded.strategies)
    return loaded
