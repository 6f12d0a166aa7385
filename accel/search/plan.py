"""The plan: the strategies and settings chosen, as a file that can be replayed without a search."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from accel.errors import PlanError
from accel.files import write_atomic
from accel.guard.alone import is_sharded
from accel.profiler.typed_json import UnreadableJson, decode, read

SCHEMA = 1

Choices = dict[str, Any]
"""Strategy name → setting, in the order they are switched on."""


def without(plan: Choices, name: str) -> Choices:
    """Return a plan without one of its strategies."""
    return {other: setting for other, setting in plan.items() if other != name}


def fingerprint(model: nn.Module) -> str:
    """Return a hash of the names, shapes and dtypes of the model's state, not its values; a plan is bound to it.

    Parameters of lazy modules have no shape before the first call: with some, it is not yet the model's own.
    """
    target = getattr(model, "module", model) if type(model).__name__ == "DistributedDataParallel" else model
    parts = [
        f"{name} {'lazy' if is_lazy(t) else tuple(t.shape)} {t.dtype}"
        for name, t in target.state_dict(keep_vars=True).items()
        if isinstance(t, Tensor) or hasattr(t, "shape")
    ]
    return hashlib.sha256("\n".join([type(target).__name__, *parts]).encode()).hexdigest()[:16]


@dataclass(kw_only=True)
class Plan:
    """What was chosen, for which model, on what machine."""

    fingerprint: str
    """Hash of the model it was made for."""
    model: str
    """Class name, for the error message."""
    strategies: Choices = field(default_factory=dict)
    allow: str = "reordered"
    """The exactness the search was allowed."""
    device: str = ""
    torch: str = ""
    speedup: float | None = None
    schema: int = SCHEMA

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON, whole or not at all."""
        write_atomic(path, json.dumps(dataclasses.asdict(self), indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan written by `save`.

        Raises:
            PlanError: if the file can't be read or is no plan.
        """
        try:
            raw = decode(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise PlanError(f"{path} can't be read as a plan: {error}. Leave out plan= to search again.") from None
        return cls.parse(raw, str(path))

    @classmethod
    def parse(cls, raw: Any, source: str) -> Plan:
        """Check decoded JSON field by field; `source` names it in errors."""
        if not isinstance(raw, Mapping) or raw.get("schema") != SCHEMA:
            schema = raw.get("schema") if isinstance(raw, Mapping) else type(raw).__name__
            raise PlanError(
                f"{source} must have plan schema {SCHEMA}, found {schema!r}; leave out plan= to search again."
            )
        fields = {f.name for f in dataclasses.fields(cls)}  # a later version may have more
        try:
            values = {name: value for name, value in raw.items() if name in fields}
            return read(cls, values, "plan", required=("strategies", "allow"))
        except UnreadableJson as error:
            raise PlanError(f"{source} is not a whole plan: {error}; leave out plan= to search again.") from None

    def check(self, model: nn.Module) -> None:
        """Raise `PlanError` unless the plan was made for a model like this one."""
        if any(map(is_lazy, model.state_dict(keep_vars=True).values())):
            raise PlanError(
                f"the plan can't be compared with {type(model).__name__} before its lazy modules have their shapes; "
                "call it once with a batch before accel.optimize, or leave out plan= to search again."
            )
        mine = fingerprint(model)
        if mine != self.fingerprint:
            raise PlanError(
                f"the plan was made for another model ({self.model}, {self.fingerprint}), this one is "
                f"{type(model).__name__}, {mine}; leave out plan= to search again."
            )


def must_be_alike(model: nn.Module) -> tuple[str, ...]:
    """Return in words what all ranks must have alike.

    The state of a sharded model may be gathered by all ranks, and its parts have any shape.
    """
    weights = f"{len(list(model.parameters()))} weights" if is_sharded(model) else fingerprint(model)
    return f"torch {torch.__version__}", f"the model {type(model).__name__} ({weights})"
