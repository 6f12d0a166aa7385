"""What searches found, one file for each kind of run; the file of the last writer stands."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import accel
from accel.cache.folder import NoFolder, cache_folder, delete_file, file_name, read_file, write_file
from accel.profiler.interruptions import ours
from accel.profiler.typed_json import UnreadableJson, decode, read
from accel.report.report import NOTHING_REMEMBERED
from accel.run import Run
from accel.search.plan import fingerprint
from accel.search.remembered import RememberedSearch

SCHEMA = 2
_PROCESS = secrets.token_hex(8)
"""Tells this process from an earlier one of the same number."""
_WHAT = "What accel's search found for this kind of run, tried first in the next one. Delete it to search again."


class RememberedPlans:
    """Keep the results of searches in the cache folder.

    Whatever goes wrong with a file, the run goes on; `note` says what did.

    Args:
        conditions: returns what tells this kind of run from others; called once its batches are known.
    """

    def __init__(self, conditions: Callable[[], dict[str, Any]]) -> None:
        self._conditions = conditions
        self._path: Path | None = None
        self._key: dict[str, Any] = {}
        self._last: RememberedSearch | None = None
        self.interrupted = ""
        """Why the remembered plan is not to be tried: a run ended without notice while it checked it; else ''."""
        self.note = ""
        """For the report: the file, or why there is none."""
        self._passed_over = ""
        """What was wrong with the file that was found."""

    def recall(self) -> RememberedSearch | None:
        """Return what is remembered for runs like this one, None if nothing is."""
        self._path, self._last, self.interrupted, self._passed_over = None, None, "", ""
        try:
            self._key = json.loads(json.dumps(self._conditions()))
            digest = hashlib.sha256(json.dumps(self._key, sort_keys=True).encode()).hexdigest()
            path = cache_folder() / "plans" / file_name(str(self._key.get("model", "")), digest)
        except NoFolder as error:
            self.note = f"{NOTHING_REMEMBERED}: {error}" if error.args else ""
            return None
        except ours() as error:  # a model or a loader whose own methods fail
            self.note = f"{NOTHING_REMEMBERED}: this run can't be told from others: {type(error).__name__}: {error}"
            return None
        self._path, self.note = path, str(path)
        try:
            text = read_file(path)
            if text is not None:
                self._last, self.interrupted = self._parse(text)
        except ours() as error:  # whatever stands there, the run goes on without it
            self._passed_over = str(error)
            self.note = f"{path} is passed over: {error}"
        return self._last

    def _parse(self, text: str) -> tuple[RememberedSearch | None, str]:
        """Return what a file holds, and why its plan is not to be tried.

        Raises:
            UnreadableJson: if it is no file of ours.
        """
        raw = decode(text)
        if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
            raise UnreadableJson(f"it must be a file of schema {SCHEMA}")
        if raw.get("conditions") != self._key:
            raise UnreadableJson("it is about another kind of run")
        search = read(RememberedSearch, raw.get("found"), "found", required=("searched", "plan"))
        search.check()
        return search, _interrupted(raw.get("checking"))

    def begin_check(self) -> None:
        """Note in the file which process checks the plan now."""
        if self._last is not None:
            self._write(self._last, {"host": platform.node(), "process": os.getpid(), "token": _PROCESS})

    def store(self, search: RememberedSearch) -> None:
        """Write the file."""
        self._last = search
        self._write(search, None)

    def _write(self, search: RememberedSearch, checking: dict[str, Any] | None) -> None:
        if self._path is None:
            return
        content = {
            "what": _WHAT,
            "schema": SCHEMA,
            "conditions": self._key,
            "found": dataclasses.asdict(search),
            "checking": checking,
        }
        try:
            write_file(self._path, json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
            before = f"; what it held before is passed over: {self._passed_over}" if self._passed_over else ""
            self.note = f"{self._path}{before}"
        except (OSError, TypeError, ValueError) as error:
            self.note = f"{NOTHING_REMEMBERED}: {self._path} can't be written: {error}"

    def forget(self) -> None:
        """Delete the file."""
        self._last = None
        if self._path is not None:
            delete_file(self._path)


def _interrupted(checking: object) -> str:
    """Return why the plan is not to be tried: a process of this host died while it checked it."""
    if not isinstance(checking, dict) or checking.get("host") != platform.node() or checking.get("token") == _PROCESS:
        return ""  # another host's process may be running
    process = checking.get("process")
    if not isinstance(process, int) or process <= 0 or (process != os.getpid() and _is_running(process)):
        return ""
    return "the last run that checked it was killed"


def _is_running(process: int) -> bool:
    if os.name != "posix":
        return True  # elsewhere signal 0 is no mere question
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True


# Conditions of a run: two runs with the same ones may expect the same of a plan.


def conditions(run: Run, options: dict[str, Any]) -> dict[str, Any]:
    """Return what a plan depends on, as JSON that people can read.

    Args:
        run: after some observed steps: its batches and optimizers are known.
        options: of the call of `optimize`.
    """
    loader = run.loader
    return {
        "model": type(run.model).__name__,
        "parameters": fingerprint(run.model),
        "modules": _digest(_structure(run.model)),
        # Where it is chosen while training, the search begins at this batch in one run and at that one in the next.
        "batch": str(_of_any_size(run.observed.batch) if "max_batch_size" in options else run.observed.batch),
        "inputs": sorted(run.observed.input_dtypes),
        "own_autocast": run.observed.autocast,
        "optimizers": sorted(_kind(optimizer) for optimizer in run.optimizers),
        "loader": _kind(loader),
        "dataset": _kind(getattr(loader, "dataset", None)),
        "loader_workers": str(getattr(loader, "num_workers", None)),
        **options,
        "device": run.device_name,
        "cores": run.cores,
        "threads": run.threads,
        "ranks": run.world_size,
        "ranks_per_host": os.environ.get("LOCAL_WORLD_SIZE", ""),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "accel": accel.__version__,
    }


def _of_any_size(shape: Any) -> Any:
    """Return a batch's shape with a star in place of the number of its samples."""
    if isinstance(shape, torch.Size):
        return ("*", *shape[1:]) if shape else ()
    return tuple(map(_of_any_size, shape)) if isinstance(shape, tuple) else shape


def _structure(model: nn.Module) -> Iterable[str]:
    """Yield what the names and shapes of the parameters don't tell: classes, strides and the like, what is trained."""
    for name, module in model.named_modules():
        # Other classes' `extra_repr` may hold addresses, or take long.
        known = type(module).__module__.startswith("torch.nn.")
        yield f"{name} {_kind(module)} {module.extra_repr() if known else ''}"
    for name, parameter in model.named_parameters():
        yield f"{name} {parameter.requires_grad}"


def _kind(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode(errors="replace")).hexdigest()[:16]
