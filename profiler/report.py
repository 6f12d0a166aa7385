"""The report of a profiled run: what it says, and its JSON form.

The schema number goes up when a field changes its meaning or goes away; a reader refuses numbers it does not know.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from dataclasses import dataclass, field
from typing import Any

from accel.profiler.evidence import GpuShare, LineTime, OpTime, Roofline, SyncPoint, ThreadShare

SCHEMA = 1
KIND = "profile"


@dataclass(kw_only=True)
class Saving:
    """A share of the step's time, 0…1, that a remedy removes."""

    value: float
    low: float
    high: float


@dataclass(kw_only=True)
class Finding:
    """One cause that holds the run back."""

    cause: str
    """Name in the table of causes, e.g. `input.storage`."""
    bottleneck: str
    """DESIGN's class, e.g. `input`."""
    title: str
    """What is the matter, one clause."""
    why: list[str]
    """The evidence, one sentence each, numbers included."""
    remedy: str
    """What to do."""
    strategy: str = ""
    """The strategy of `accel.optimize` that does it, '' if none."""
    share: float = 0.0
    """Of the step's time that the cause accounts for, 0…1."""
    predicted: Saving | None = None
    """What removing it can give; None if that can't be told from what was seen."""
    measured: Saving | None = None
    """What the counterfactual experiment gave; None if there was none."""
    confirmed: bool = False
    """True if the experiment has shown that removing the cause saves time."""
    experiment: str = ""
    """What the experiment did, or why there was none."""


@dataclass(kw_only=True)
class Node:
    """One part of the step's time; the children add up to the parent."""

    name: str
    ms: float
    """Per step, mean."""
    share: float
    """Of the whole step."""
    note: str = ""
    children: list[Node] = field(default_factory=list)


@dataclass(kw_only=True)
class Experiment:
    """One counterfactual: real steps with and without something, interleaved."""

    name: str
    what: str
    """What the B steps did differently."""
    before_ms: float
    after_ms: float
    saving: Saving
    pairs: int
    verdict: str
    """`keep` (shown to help), `drop` (shown not to), `refused` (too noisy to tell) or `void` (it took no hold)."""
    changes_learning: bool
    """True if the B steps trained on something else; the state from before them was put back."""


@dataclass(kw_only=True)
class RankRow:
    """One rank's part."""

    rank: int
    host: str
    steps: int
    step_ms: float
    phases_ms: dict[str, float]
    """Phase → ms per step, mean."""
    thread: ThreadShare | None = None
    straggler: bool = False


@dataclass(kw_only=True)
class StepRow:
    """One step of the timeline."""

    step: int
    ms: float
    phases_ms: dict[str, float]


@dataclass(kw_only=True)
class HostFacts:
    """The machine and how the run used it."""

    cores: int = 0
    threads: int = 0
    device: str = ""
    platform: str = ""
    python: str = ""
    torch: str = ""
    accel: str = ""
    foreign_cores: float | None = None
    thread: ThreadShare | None = None
    workers: list[ThreadShare] = field(default_factory=list)
    loader: str = ""
    """The loader in one phrase, e.g. `DataLoader, 2 workers`."""
    optimizer: str = ""
    model: str = ""


@dataclass(kw_only=True)
class ProfileReport:
    """What `accel profile` found."""

    schema: int = SCHEMA
    kind: str = KIND
    verdict: str = ""
    """The outcome in one line."""
    bottleneck: str = ""
    """DESIGN's class of the first finding; `none` if nothing holds the run back; '' if no verdict was reached."""
    refused: str = ""
    """Why there is no verdict, '' if there is one."""
    findings: list[Finding] = field(default_factory=list)
    """The largest first."""
    next: list[str] = field(default_factory=list)
    """What to do now, in order."""
    evidence: Node | None = None
    """Where the step's time went; adds up to the step."""
    unattributed: float = 0.0
    """Share of the wall time that belongs to no phase."""
    steps: int = 0
    """Steps observed."""
    step_ms: float = 0.0
    """Mean."""
    samples_per_s: float | None = None
    wall_s: float = 0.0
    """From the first batch asked for to the end of the script."""
    experiments: list[Experiment] = field(default_factory=list)
    ranks: list[RankRow] = field(default_factory=list)
    timeline: list[StepRow] = field(default_factory=list)
    """At most 120 consecutive steps."""
    lines: list[LineTime] = field(default_factory=list)
    ops: list[OpTime] = field(default_factory=list)
    syncs: list[SyncPoint] = field(default_factory=list)
    roofline: Roofline | None = None
    gpus: list[GpuShare] = field(default_factory=list)
    host: HostFacts = field(default_factory=HostFacts)
    trace_file: str = ""
    unseen: list[str] = field(default_factory=list)
    command: str = ""
    started: str = ""
    """ISO 8601, UTC."""
    ended: str = "completed"
    """How the script ended: `completed`, `exited with N`, `raised …` or `interrupted`."""

    def to_json(self) -> str:
        """Return the report as JSON."""
        return json.dumps(dataclasses.asdict(self), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


class UnreadableReport(ValueError):
    """The text is not a profile report of this schema; the message says how."""


def from_json(text: str) -> ProfileReport:
    """Read a report.

    Raises:
        UnreadableReport: if the text is not JSON, not a profile report, or of another schema.
    """
    try:
        held = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnreadableReport(f"it must be JSON, it is not: {error}") from None
    if not isinstance(held, dict) or held.get("kind") != KIND:
        raise UnreadableReport(f"it must be a profile report (kind {KIND!r}), it is not")
    if held.get("schema") != SCHEMA:
        raise UnreadableReport(f"its schema must be {SCHEMA}, got {held.get('schema')!r}; make it again")
    try:
        report: ProfileReport = _read(ProfileReport, held, "report")
    except (OverflowError, RecursionError) as error:
        raise UnreadableReport(f"it holds what no report holds: {error}") from None
    return report


def _read(wanted: Any, held: Any, where: str) -> Any:
    """Check `held` against the declared type and build what it stands for."""
    origin = typing.get_origin(wanted)
    if origin in (types.UnionType, typing.Union):
        options = [option for option in typing.get_args(wanted) if option is not type(None)]
        return None if held is None else _read(options[0], held, where)
    if origin is list:
        _demand(isinstance(held, list), where, "a list", held)
        return [_read(typing.get_args(wanted)[0], item, f"{where}[{n}]") for n, item in enumerate(held)]
    if origin is dict:
        _demand(isinstance(held, dict), where, "an object", held)
        return {key: _read(typing.get_args(wanted)[1], value, f"{where}.{key}") for key, value in held.items()}
    if dataclasses.is_dataclass(wanted):
        return _read_object(typing.cast("type[Any]", wanted), held, where)
    if wanted is float:
        _demand(isinstance(held, int | float) and not isinstance(held, bool), where, "a number", held)
        return float(held)
    _demand(isinstance(held, wanted) and (wanted is bool or not isinstance(held, bool)), where, wanted.__name__, held)
    return held


def _read_object(wanted: type[Any], held: Any, where: str) -> Any:
    _demand(isinstance(held, dict), where, "an object", held)
    hints = typing.get_type_hints(wanted)
    declared = {f.name for f in dataclasses.fields(wanted)}
    unknown = sorted(set(held) - declared)
    _demand(not unknown, where, f"without {unknown}", held)
    values = {name: _read(hints[name], value, f"{where}.{name}") for name, value in held.items()}
    try:
        return wanted(**values)
    except TypeError as error:
        raise UnreadableReport(f"{where} is incomplete: {error}") from None


def _demand(holds: bool, where: str, what: str, held: Any) -> None:
    if not holds:
        raise UnreadableReport(f"{where} must be {what}, got {str(held)[:60]!r}")
