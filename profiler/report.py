"""The report of a profiled run, its JSON form, and the head that it shares with the report of `accel.optimize`.

The schema number goes up when a field changes its meaning or goes away; a reader refuses numbers it does not know.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import Any

from accel.profiler.evidence import GpuShare, LineTime, OpTime, Roofline, SyncPoint, ThreadShare
from accel.profiler.typed_json import UnreadableJson, decode, read

SCHEMA = 1
"""Of what every report has."""
PROFILE_SCHEMA = 2
KIND = "profile"


@dataclass(kw_only=True)
class MachineFacts:
    """Where the numbers of a report were measured."""

    device: str = ""
    """e.g. `cpu (AMD EPYC)` or `cuda (NVIDIA H200)`."""
    cores: int = 0
    threads: int = 0
    """Intra-op threads when the run began."""
    platform: str = ""
    python: str = ""
    torch: str = ""
    accel: str = ""


@dataclass(kw_only=True)
class NextStep:
    """What to do after a report, for scripts and coding agents."""

    action: str
    """One sentence."""
    command: str = ""
    """A command that does it, '' if it takes a change of the script."""
    gain: float | None = None
    """Expected speed-up of a step, a ratio; None if it is not known."""
    gain_low: float | None = None
    gain_high: float | None = None
    risk: str = ""
    """What may change in the training."""


@dataclass(kw_only=True)
class ReportHead:
    """What every report says about its run."""

    schema: int = SCHEMA
    started: str = ""
    """ISO 8601, with offset."""
    command: str = ""
    unseen: list[str] = field(default_factory=list)
    """What could not be measured, one sentence each."""
    next_step: NextStep | None = None

    def to_json(self) -> str:
        """Return the report as JSON; a number that is infinite or none is null."""
        return json.dumps(_storable(dataclasses.asdict(self)), indent=1, ensure_ascii=False, allow_nan=False)


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
    """The bottleneck's class, e.g. `input`."""
    title: str
    why: list[str]
    """The evidence, one sentence each, numbers included."""
    remedy: str
    strategy: str = ""
    """The strategy of `accel.optimize` that applies the remedy, '' if none."""
    share: float = 0.0
    """Of the step's time that the cause accounts for, 0…1."""
    predicted: Saving | None = None
    """The saving if it is removed; None if the evidence allows no estimate."""
    measured: Saving | None = None
    """The saving in the counterfactual experiment; None if there was none."""
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
    """`keep` (shown to help), `drop` (shown not to), `inconclusive` or `void` (the switch had no effect)."""
    changes_learning: bool = False
    """True if the B steps learned something else; the state from before them was restored."""


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
class HostFacts(MachineFacts):
    """The machine and how the run used it."""

    foreign_cores: float | None = None
    thread: ThreadShare | None = None
    workers: list[ThreadShare] = field(default_factory=list)
    loader: str = ""
    """The loader in one phrase, e.g. `DataLoader, 2 workers`."""
    optimizer: str = ""
    model: str = ""


@dataclass(kw_only=True)
class ProfileReport(ReportHead):
    """What `accel profile` found."""

    schema: int = PROFILE_SCHEMA
    kind: str = KIND
    verdict: str = ""
    """The outcome in one line."""
    bottleneck: str = ""
    """The class of the first finding; `none` if nothing holds the run back; '' if no verdict was reached."""
    refused: str = ""
    """Why there is no verdict, '' if there is one."""
    beside: str = ""
    """Who else kept cores busy, where the verdict stands all the same; '' on a quiet machine."""
    findings: list[Finding] = field(default_factory=list)
    """The largest first."""
    borderline: list[Finding] = field(default_factory=list)
    """What may be a cause or none: its share of the step is too near the limit for either; the largest first."""
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
    ended: str = "completed"
    """How the script ended: `completed`, `exited with N`, `raised …` or `interrupted`."""


def from_json(text: str) -> ProfileReport:
    """Read a report.

    Raises:
        UnreadableJson: if the text is not JSON, not a profile report, or of another schema.
    """
    return from_object(decode(text))


def from_object(raw: Any) -> ProfileReport:
    """Read a report from its decoded JSON, or raise `UnreadableJson`."""
    if not isinstance(raw, dict) or raw.get("kind") != KIND:
        raise UnreadableJson(f"it must be a profile report (kind {KIND!r}), it is not")
    if raw.get("schema") != PROFILE_SCHEMA:
        raise UnreadableJson(f"its schema must be {PROFILE_SCHEMA}, got {raw.get('schema')!r}; make it again")
    return read(ProfileReport, raw, "report")


def utf8(text: str) -> str:
    """Return `text` as a file in UTF-8 can hold it: Python has surrogates for the bytes of arguments that are none."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _storable(value: Any) -> Any:
    """Return a value of a report as JSON in UTF-8 can hold it."""
    if isinstance(value, str):
        return utf8(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {_storable(key): _storable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_storable(item) for item in value]
    return value
