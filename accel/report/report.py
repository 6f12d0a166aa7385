"""The report of a run: its data, printed, saved as JSON or as a page, shown in a notebook, and read again.

`words.py` has its texts, `optimize_document.py` lays them out.
"""

from __future__ import annotations

import itertools
import os
import shlex
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from accel.errors import ReportError
from accel.files import write_atomic
from accel.profiler import stderr
from accel.profiler.interruptions import ours
from accel.profiler.report import KIND, SCHEMA, MachineFacts, ProfileReport, ReportHead, from_object
from accel.profiler.typed_json import UnreadableJson, decode, read

NOTHING_REMEMBERED = "nothing is remembered"
"""How `Report.cache` begins where the result could not be written."""

Status = Literal["kept", "undone", "inconclusive", "not applicable", "not allowed", "disabled", "not tried"]
State = Literal["searching", "done", "interrupted", "replayed", "undone"]


@dataclass(kw_only=True)
class StrategyRow:
    """The result of one strategy."""

    name: str
    """Registered name, e.g. `channels_last`."""
    summary: str
    """What it does, one line."""
    treats: list[str]
    """Bottlenecks it treats."""
    exactness: str
    """`exact`, `reordered`, `reduced`, `float8` or `lossy`."""
    status: Status = "not tried"
    """`kept`; `undone` (slower, wrong or failed); `inconclusive` (too noisy to decide); or why it was never tried."""
    why: str = ""
    """One sentence that explains the status."""
    setting: str = ""
    """The setting that was kept or tried last, e.g. `workers=2`; empty when there is none."""
    before_ms: float | None = None
    """Median step without it, ms, in its own trial."""
    after_ms: float | None = None
    """Median step with it, ms, in its own trial."""
    spread_ms: float | None = None
    """Half the interquartile range of `after_ms`, ms."""
    gain: float | None = None
    """Speed-up as a ratio: 1.25 means 25 % more steps a second."""
    gain_low: float | None = None
    """Lower end of the confidence interval of `gain`."""
    gain_high: float | None = None
    """Upper end of the confidence interval of `gain`."""
    output_error: float | None = None
    """Relative RMS difference of the outputs from the plain path; 0 means the same bits."""
    gradient_error: float | None = None
    """Worst relative RMS difference of a parameter's gradient from the plain path."""
    tolerance: float | None = None
    """What `gradient_error` was allowed to be."""
    cost_s: float = 0.0
    """Seconds of its guard, its one-off work and its slower trial steps."""
    steps: int = 0
    """Training steps its trial used (real steps: none was thrown away)."""


@dataclass(kw_only=True)
class Event:
    """An event at a step, as text."""

    step: int
    text: str


@dataclass(kw_only=True)
class BatchRow:
    """One decision on the batch size that changed it."""

    step: int
    """Steps that had ended, of the training: also in the processes before, where it goes on from a checkpoint."""
    batch: int
    """Samples of a step from then on, over all ranks."""
    tried: bool = False
    """It had not been timed before: the next decision settled or undid it."""
    why: str = ""
    goodput: float | None = None
    """Predicted, samples per second as if of the user's batch; None where nothing was timed yet."""
    measured: float | None = None
    """The same by the time of its steps; None until they were timed."""
    noise: float | None = None
    """Gradient noise scale, samples; None where it was not known."""


@dataclass(kw_only=True)
class Machine(MachineFacts):
    """Where the run was measured, and with how many processes."""

    world_size: int = 1


@dataclass(kw_only=True)
class Report(ReportHead):
    """Everything that accel reports about one run.

    Times are in ms or s as the names say; `anatomy_*` map a phase of the step to its median ms.
    """

    machine: Machine = field(default_factory=Machine)
    model: str = ""
    """Class name of the model."""
    parameters: int = 0
    """Number of parameters."""
    fingerprint: str = ""
    """Hash of class, names, shapes and dtypes; a plan is bound to it."""
    allow: str = "reordered"
    budget: str = ""
    state: State = "searching"
    samples_per_step: float | None = None
    """Samples in a step (a step may hold several batches), or None when the batch has no length."""
    plain_ms: float | None = None
    """Median plain step in the closing trial of the whole plan, ms."""
    accel_ms: float | None = None
    """Median step under the plan in the same trial, ms."""
    speedup: float | None = None
    """plain ÷ accelerated, from that interleaved trial."""
    speedup_low: float | None = None
    speedup_high: float | None = None
    training_same: str = ""
    """Evidence that the model learns the same, one phrase, e.g. `gradients agree to 3e-07`."""
    steps: int = 0
    """Steps seen so far."""
    remembered: str = ""
    """What an earlier run had found, and whether it was kept when checked again; '' if nothing was remembered."""
    cache: str = ""
    """The file in which the result is remembered, or why it is not; '' if that is switched off."""
    search_steps: int = 0
    """Steps that belonged to trials."""
    search_s: float = 0.0
    """What the search cost, s: guards, one-off work, and the time trial steps took above the plain step."""
    break_even_step: int | None = None
    """Step at which the search has paid for itself; None if it never does."""
    bottleneck: str = ""
    """What limits the run now."""
    bottleneck_share: float | None = None
    """Its share of the step, 0…1."""
    bottleneck_advice: str = ""
    """What would treat it, one sentence."""
    anatomy_before: dict[str, float] = field(default_factory=dict)
    anatomy_after: dict[str, float] = field(default_factory=dict)
    offers: dict[str, float] = field(default_factory=dict)
    """Number format that `allow` leaves out → about how many times as fast a step would be with it."""
    rows: list[StrategyRow] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    plan: dict[str, Any] = field(default_factory=dict)
    """Strategy name → setting, as chosen."""
    max_batch_size: int | None = None
    """The most samples of a step, over all ranks; None if the batch size stays."""
    batch_rows: list[BatchRow] = field(default_factory=list)
    """Changes of the batch size, the user's own first."""
    batch_note: str = ""
    """Why the batch size is not changed, or no more; '' if it may be."""
    progress: float | None = None
    """Steps of the user's batch that the steps so far were worth; None if the batch size stays."""

    @property
    def is_settled(self) -> bool:
        """False if the plan stays by what its strategies have shown alone: noise has left its closing trial open."""
        return not self.plan or self.speedup_low is None or not self.speedup_low <= 1.0

    def verdict(self) -> str:
        """Return the outcome in one line, speed first."""
        from accel.report.words import run_verdict_text

        return run_verdict_text(self)

    def kept_text(self) -> str:
        """Return what was kept in trials of its own, with its gains, in one line."""
        from accel.report.words import kept_text

        return kept_text(self)

    def to_json(self) -> str:
        """Return the report as JSON, with what to do next."""
        from accel.report.next_step import after_run

        self.next_step = after_run(self)
        return super().to_json()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report as JSON, or as a self-contained web page if `path` ends in `.html`; whole or not at all."""
        if str(path).endswith(".html"):
            from accel.report.rendering import as_page

            write_atomic(path, as_page(self))
        else:
            write_atomic(path, self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Report:
        """Read a report written by `save`.

        Raises:
            ReportError: if the file is no JSON, is of another kind or schema, or lacks a field.
        """
        report = load(path)
        if not isinstance(report, cls):
            raise ReportError(
                f"{path} is a report of `accel profile`, not of accel.optimize; read it with `accel report`."
            )
        return report

    def _repr_html_(self) -> str:
        """Show the page in a notebook, in a frame of its own: its styles are not the notebook's."""
        from accel.report.rendering import as_page

        return f'<iframe srcdoc="{escape(as_page(self))}" style="width: 100%; height: 40em; border: 0"></iframe>'

    def __str__(self) -> str:
        from accel.report.rendering import as_text

        return as_text(self)


def load(path: str | os.PathLike[str]) -> Report | ProfileReport:
    """Read the report in a file, or in a folder's report.json; its field `kind` says of which kind it is.

    Raises:
        ReportError: if the file can't be read, is no JSON, or is no whole report of a schema that this version knows.
    """
    file = Path(path, "report.json") if os.path.isdir(path) else Path(path)
    try:
        raw = decode(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ReportError(
            f"{path} can't be read as a report: {error}. "
            f"Make one with `accel profile`, or with report={str(path)!r} of accel.optimize."
        ) from None
    if isinstance(raw, dict) and raw.get("kind") == KIND:
        try:
            return from_object(raw)
        except UnreadableJson as error:
            raise ReportError(
                f"{path} is not a whole profile report: {error}. Make it again with `accel profile`."
            ) from None
    return _of_optimize(raw, path)


def _of_optimize(raw: Any, path: str | os.PathLike[str]) -> Report:
    schema = raw.get("schema") if isinstance(raw, dict) else type(raw).__name__
    if schema != SCHEMA:
        raise ReportError(
            f"{path} must have report schema {SCHEMA}, found {schema!r}; make it again with this version."
        )
    try:
        # Every report has these: without them, a file is something else that has a schema.
        return read(Report, raw, "report", required=("machine", "rows", "events"))
    except UnreadableJson as error:
        raise ReportError(f"{path} is not a whole report: {error}. Make it again with this version.") from None


class ReportPlace:
    """Where the report of a model goes: beside those of others that were to go to the same place.

    Args:
        report: a `.json` or `.html` file, a folder, or None for the terminal alone.
        taken: where the reports of other models go.

    Attributes:
        target: the file or folder.
        whole: how to see the whole report.
    """

    def __init__(self, report: str | None, taken: Container[Path | None] = ()) -> None:
        self.target: Path | None = None
        self.whole, self._files = "print(accel.explain(model))", list[Path]()
        if report is None:
            return
        places = (numbered(Path(report), number) for number in itertools.count(1))
        target = self.target = next(place for place in places if place not in taken)
        if target.suffix != ".json":
            # Now, not at exit: there the import makes Python forget that Ctrl-C ended the run: exit status 1, not 130.
            for module in ("jinja2", "accel.report.rendering"):
                import_module(module)
        is_file = target.suffix in (".json", ".html")
        self._files = [target] if is_file else [target / "report.json", target / "report.html"]
        first = str(self._files[0])
        self.whole = first if target.suffix == ".html" else f"accel report {shlex.quote(first)}"

    def write(self, report: Report, save_plan: Callable[[Path], None]) -> None:
        """Write the files; a folder gets one of the plan, too."""
        try:
            for file in self._files:
                report.save(file)
            if len(self._files) > 1:
                save_plan(self._files[0].with_name("plan.json"))
        # A full disk, or a setting that JSON does not know, must neither end the plan nor raise from `undo`.
        except ours(OSError, TypeError, ValueError) as error:
            stderr.write(f"accel: the report could not be written: {error}")


def numbered(report: Path, model: int) -> Path:
    """Return where the report of the n-th model goes: a file or a folder beside that of the first."""
    if model == 1:
        return report
    if report.suffix in (".json", ".html"):
        return report.with_name(f"{report.stem}-{model}{report.suffix}")
    return report.with_name(f"{report.name}-{model}")  # a folder, such as lr0.001
