"""The report as text for a terminal or a log: verdict first, then what each strategy gave and what it cost.

Top to bottom: the words for single numbers and sentences (`webpage.py` uses the same ones), `Page`, which wraps and
colours lines, then `render`, one function a section, and `decision_line` for the log.
"""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import sys
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from accel.report.model import Report, StrategyRow
from accel.report.quiet_rich import Console, Table, Text, cell_len

MAX_WIDTH = 100
MIN_WIDTH = 20
EVENTS_SHOWN = 20

STATUS_STYLES = {"kept": "bold green", "undone": "red", "refused": "yellow"}

_ASCII = str.maketrans(
    {"→": "->", "±": "+-", "÷": "/", "×": "x", "…": "...", "–": "-", "—": "-", "≈": "~", "µ": "u", "█": "#", "▏": "|"}
)


# --- words -----------------------------------------------------------------------------------------------------------


def clean(text: object, keep: str = "") -> str:
    """Return `text` without characters that would move the cursor, break a line or turn the writing direction.

    Args:
        text: anything; it is turned into a string.
        keep: characters to leave alone, e.g. a newline.

    Returns:
        The text on one line (but for `keep`): white space becomes a space; control, format and surrogate characters go.
    """
    return "".join(char if char in keep else _harmless(char) for char in str(text))


def _harmless(char: str) -> str:
    if char.isspace():
        return " "
    return "" if unicodedata.category(char) in {"Cc", "Cf", "Cs", "Zl", "Zp"} else char


def clip(text: str, width: int) -> str:
    """Return `text` cut to `width` terminal columns, with an ellipsis where something was cut."""
    if cell_len(text) <= width:
        return text
    while text and cell_len(text) > width - 1:
        text = text[:-1]
    return text.rstrip() + "…"


def finite(value: float | None) -> float | None:
    """Return `value`, or None if it is missing, infinite or not a number."""
    return None if value is None or not math.isfinite(value) else value


def ms_text(value: float | None) -> str:
    """Say a time in ms with three digits and without an exponent where a reader expects none; `-` when missing."""
    value = finite(value)
    if value is None:
        return "-"
    return f"{value:,.0f}" if 100 <= abs(value) < 1e7 else f"{value:.3g}"


def _ratio(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 1e4 else f"{value:.3g}"


def gain_text(gain: float | None, low: float | None, high: float | None) -> str:
    """Say a speed-up with its confidence interval, e.g. `1.31x [1.27, 1.35]`; `-` when there is none."""
    gain, low, high = finite(gain), finite(low), finite(high)
    if gain is None:
        return "-"
    return f"{_ratio(gain)}x" + ("" if low is None or high is None else f" [{_ratio(low)}, {_ratio(high)}]")


def step_text(row: StrategyRow) -> str:
    """Say the step before and after a strategy in ms, e.g. `26.6 → 18.4 ± 0.3`; `-` when it was not measured."""
    if finite(row.before_ms) is None and finite(row.after_ms) is None:
        return "-"
    spread = finite(row.spread_ms)
    tail = "" if spread is None else f" ± {spread:.2g}" if abs(spread) < 100 else f" ± {ms_text(spread)}"
    return f"{ms_text(row.before_ms)} → {ms_text(row.after_ms)}{tail}"


def _error(value: float | None) -> str:
    value = finite(value)
    return "-" if value is None else "same bits" if value == 0 else f"{value:.1g}"


def numerics_text(row: StrategyRow) -> str:
    """Say how far outputs and gradients are from the plain path, e.g. `3e-07/2e-06`; `same bits` for no difference."""
    output, gradient = _error(row.output_error), _error(row.gradient_error)
    return output if output == gradient else f"{output}/{gradient}"


def seconds_text(value: float) -> str:
    """Say a cost in seconds, e.g. `0.8 s`."""
    return f"{value:.1f} s" if 0.05 <= abs(value) < 1e5 else f"{value:.2g} s"


def interval_text(report: Report) -> str:
    """Say the confidence interval of the speed-up as ratios and as percentages of more steps a second."""
    low, high = finite(report.speedup_low), finite(report.speedup_high)
    if low is None or high is None:
        return "confidence interval not known"
    more = " to ".join(f"{100 * (end - 1):+.3g} %" for end in (low, high))
    return f"confidence interval [{_ratio(low)}x, {_ratio(high)}x], that is {more} steps a second"


def pay_back_text(report: Report) -> str:
    """Say when the search has paid, or will have paid, for itself."""
    if report.break_even_step is not None:
        return f"{'paid' if report.steps >= report.break_even_step else 'pays'} back at step {report.break_even_step}"
    if report.search_s <= 0:
        return "nothing to pay back"
    if report.state == "searching" or report.speedup is None:
        return "not known yet when it pays back"
    return "does not pay back"


def search_text(report: Report) -> str:
    """Say what the search took and when it pays back, in one sentence."""
    trials = f"{report.search_steps} of {report.steps} steps were trial steps"
    return f"{trials}, cost {seconds_text(report.search_s)}; {pay_back_text(report)}"


def limit_text(report: Report) -> str:
    """Say what limits the run now, its share of the step and what would treat it."""
    if not report.bottleneck:
        return "not known"
    share = finite(report.bottleneck_share)
    part = "" if share is None else f", {100 * share:.0f} % of the step"
    return f"{report.bottleneck}{part}" + (f"; {report.bottleneck_advice}" if report.bottleneck_advice else "")


def machine_text(report: Report) -> str:
    """Say where the numbers were measured: device, cores, threads, processes and versions."""
    machine = report.machine
    counts = [(machine.cores, "core"), (machine.threads, "thread"), (machine.world_size, "process")]
    versions = [("Python", machine.python), ("torch", machine.torch), ("accel", machine.accel)]
    words = [machine.device or "device not known", *(count_text(n, noun) for n, noun in counts if n), machine.platform]
    return ", ".join([word for word in words if word] + [f"{name} {version}" for name, version in versions if version])


def model_text(report: Report) -> str:
    """Say which model ran and what accel was allowed to do."""
    words = [report.model or "model not known", f"{report.parameters:,} parameters" if report.parameters else ""]
    words += [f"{name} {value}" for name, value in (("allow", report.allow), ("budget", report.budget)) if value]
    return ", ".join(word for word in words if word)


def count_text(number: int, noun: str) -> str:
    """Say a number of things, e.g. `2 cores`."""
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{number} {noun if number == 1 else plural}"


def phases(report: Report) -> list[str]:
    """List the phases of the step in the order they were first measured, before and after together."""
    return list(dict.fromkeys([*report.anatomy_before, *report.anatomy_after]))


# --- layout ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell of a row of text."""

    text: str
    width: int
    """Columns; more where a word of the text, or all of it, would break otherwise."""
    style: str = ""
    right: bool = False
    """Set flush right, as numbers are; never broken."""
    whole: bool = False
    """Never broken: a name, or a number with its interval."""
    prose: bool = False
    """A sentence: it takes the room there is, and its longest words may break."""


class Page:
    """Lines of text, wrapped to a width, with or without colour.

    Args:
        width: columns; None asks the terminal. Never more than `MAX_WIDTH`.
        color: whether to write ANSI codes; None writes them only to a terminal, and never under `NO_COLOR`.
    """

    def __init__(self, width: int | None = None, color: bool | None = None) -> None:
        columns = shutil.get_terminal_size((MAX_WIDTH, 24)).columns if width is None else width
        self.width = max(MIN_WIDTH, min(columns, MAX_WIDTH))
        self._ascii = not _stdout_is_unicode()
        self._out = io.StringIO()
        color = _stdout_has_color() if color is None else color
        self._console = Console(
            file=self._out,
            width=self.width,
            color_system="standard" if color else None,
            no_color=not color,
            force_jupyter=False,
            legacy_windows=False,
        )

    def say(self, text: str, style: str = "", indent: int = 0) -> None:
        """Write one paragraph; lines after its first are indented by two more columns."""
        room = self.width - indent - 2
        for number, line in enumerate(Text(self._safe(text), style).wrap(self._console, room, overflow="fold")):
            self._console.print(Text(" " * (indent + 2 * (number > 0))).append_text(line), crop=False, no_wrap=True)

    def heading(self, text: str) -> None:
        """Write an empty line and a heading."""
        self._console.print()
        self.say(text, "bold underline")

    def row(self, cells: Sequence[Cell]) -> None:
        """Write cells side by side, two columns apart; one after another where the page is too narrow for that."""
        widths = [self._room(cell) for cell in cells]
        if sum(width + 2 for width in widths) - 2 > self.width:
            self.items([cell.text for cell in cells if cell.text.strip()])
            return
        grid = Table.grid(padding=(0, 2), pad_edge=False)
        for cell, width in zip(cells, widths, strict=True):
            grid.add_column(width=width, overflow="fold", justify="right" if cell.right else "left")
        grid.add_row(*(Text(self._safe(cell.text), cell.style) for cell in cells))
        self._console.print(grid)

    def _room(self, cell: Cell) -> int:
        if cell.prose:
            return cell.width
        return max(cell.width, self.length(cell.text, whole=cell.whole or cell.right))

    def length(self, text: str, *, whole: bool) -> int:
        """Return how many columns a text, or else its longest word, takes on this page."""
        safe = self._safe(text)
        return cell_len(safe) if whole else max((cell_len(word) for word in safe.split()), default=0)

    def items(self, texts: Sequence[str], separator: str = "  ", indent: int = 0) -> None:
        """Write texts one after another, and none over the end of a line that it fits on."""
        line = ""
        for number, text in enumerate(texts):
            more = separator if number + 1 < len(texts) else ""
            if line and indent + 2 + self.length(line + text + more.rstrip(), whole=True) > self.width:
                self.say(line.rstrip(), indent=indent)
                line = ""
            line += text + more
        if line:
            self.say(line.rstrip(), indent=indent)

    def text(self) -> str:
        """Return the page so far, without spaces at line ends and without a newline at its own end."""
        return "\n".join(line.rstrip() for line in self._out.getvalue().splitlines())

    def _safe(self, text: str) -> str:
        text = clean(text)
        return text.translate(_ASCII).encode("ascii", "replace").decode() if self._ascii else text


def _stdout_is_unicode() -> bool:
    encoding = getattr(sys.stdout, "encoding", None)
    # No encoding means a StringIO or no stream at all: both take any text.
    return encoding is None or encoding.lower().replace("-", "").startswith("utf")


def _stdout_has_color() -> bool:
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return sys.stdout is not None and sys.stdout.isatty()


# --- report ----------------------------------------------------------------------------------------------------------


def render(report: Report, width: int | None = None, color: bool | None = None) -> str:
    """Render the report as text, verdict first.

    Args:
        report: what to show.
        width: columns; None asks the terminal. The text is never wider than `min(width, 100)`, readable down to 60;
            below 20 it is laid out as for 20.
        color: whether to write ANSI codes; None writes them only to a terminal, and never when `NO_COLOR` is set.

    Returns:
        Lines without a final newline; plain ASCII if stdout can't take Unicode.
    """
    page = Page(width, color)
    for section in (_verdict, _strategies, _cost, _anatomy, _events, _unseen, _origin):
        section(page, report)
    return page.text()


def _verdict(page: Page, report: Report) -> None:
    mark = "" if report.state == "done" else f"[{report.state}] "
    page.say(f"accel: {mark}{report.verdict()}", "bold green" if report.plan else "bold")
    if report.speedup is not None:
        page.say(f"speed-up: {_ratio(report.speedup)}x, {interval_text(report)}")
    page.say(f"training the same: {report.training_same or 'not known'}")


def _strategies(page: Page, report: Report) -> None:
    page.heading("strategies")
    if not report.rows:
        page.say("none was considered yet", "dim")
        return
    texts = [_texts(row) for row in report.rows]
    widths = {}
    for title, width in _WIDTHS.items():
        lengths = (page.length(row[title], whole=title != "strategy") for row in texts)
        widths[title] = max(width, *lengths)
    shown = fitting(widths, page.width)
    page.row([Cell(text=title, width=widths[title], style="dim") for title in shown])
    for row, cells in zip(report.rows, texts, strict=True):
        _strategy(page, row, cells, widths, shown)


_WIDTHS = {"strategy": 19, "status": 14, "gain": 18, "ms per step": 18, "numerics": 15, "cost": 6}
"""Columns of the strategies, at the least."""


def _texts(row: StrategyRow) -> dict[str, str]:
    return {
        "strategy": f"{row.name} {row.setting}".strip(),
        "status": row.status,
        "gain": gain_text(row.gain, row.gain_low, row.gain_high),
        "ms per step": step_text(row),
        "numerics": numerics_text(row),
        "cost": seconds_text(row.cost_s) if row.cost_s else "-",
    }


def fitting(titles: dict[str, int], width: int) -> list[str]:
    """List the leading columns that fit; the others go to the line below."""
    shown: list[str] = []
    for title, columns in titles.items():
        width -= columns + 2 * bool(shown)
        if width < 0:
            break
        shown.append(title)
    return shown


def _strategy(page: Page, row: StrategyRow, texts: dict[str, str], widths: dict[str, int], shown: list[str]) -> None:
    styles = {"strategy": "bold", "status": STATUS_STYLES.get(row.status, "dim")}
    cells = [
        Cell(text=texts[title], width=widths[title], style=styles.get(title, ""), whole=title != "strategy")
        for title in shown
    ]
    page.row(cells) if cells else page.say(texts["strategy"], "bold")
    page.items([f"{title} {text}" for title, text in texts.items() if title not in shown and text != "-"], ", ", 2)
    if row.why:
        page.say(row.why, "dim", indent=2)


def _cost(page: Page, report: Report) -> None:
    page.heading("cost and what is left")
    page.say(f"search: {search_text(report)}")
    page.say(f"limits the run now: {limit_text(report)}")


def _anatomy(page: Page, report: Report) -> None:
    names = phases(report)
    if not names:
        return
    page.heading("step anatomy in ms (> marks the longest phase now)")
    now = report.anatomy_after or report.anatomy_before
    longest = max(now, key=lambda name: now[name])
    sums = [sum(part.values()) if part else None for part in (report.anatomy_before, report.anatomy_after)]
    rows = [["phase", "before", "share", "after", "share"]]
    rows += [[f"{'>' if name == longest else ' '} {name}", *_shares(report, name)] for name in names]
    rows += [["  sum of phases", ms_text(sums[0]), "", ms_text(sums[1]), ""]]
    lengths = [[page.length(text, whole=True) for text in column] for column in zip(*rows, strict=True)]
    widths = [max(least, *column) for least, column in zip((20, 9, 6, 9, 6), lengths, strict=True)]
    for number, texts in enumerate(rows):
        style = "dim" if number in (0, len(rows) - 1) else "bold" if texts[0].startswith(">") else ""
        columns = enumerate(zip(texts, widths, strict=True))
        page.row([Cell(text=t, width=w, style=style, right=place > 0, whole=True) for place, (t, w) in columns])


def _shares(report: Report, name: str) -> list[str]:
    cells = []
    for part in (report.anatomy_before, report.anatomy_after):
        value, total = finite(part.get(name)), finite(sum(part.values()))
        cells += [ms_text(value), f"{100 * value / total:.0f} %" if value is not None and total else "-"]
    return cells


def _events(page: Page, report: Report) -> None:
    if not report.events:
        return
    page.heading("events")
    hidden = len(report.events) - EVENTS_SHOWN
    if hidden > 0:
        page.say(f"… {hidden} earlier events are in the JSON report", "dim")
    for event in report.events[-EVENTS_SHOWN:]:
        page.say(f"step {event.step}: {event.text}")


def _unseen(page: Page, report: Report) -> None:
    if not report.unseen:
        return
    page.heading("what could not be seen")
    for sentence in report.unseen:
        page.say(f"- {sentence}")


def _origin(page: Page, report: Report) -> None:
    page.heading("where and how")
    page.say(f"machine: {machine_text(report)}")
    page.say(f"model: {model_text(report)}")
    if report.started:
        page.say(f"started: {report.started}")
    if report.command:
        page.say(f"command: {report.command}")
    if report.plan:
        page.say(f"plan: {json.dumps(report.plan, default=str)}")


def decision_line(row: StrategyRow, done: int, total: int) -> str:
    """Render one decision as one log line, e.g. `accel [3/9] channels_last kept: 1.45x [1.38, 1.52], 26.6 → 18.4 ms`.

    Args:
        row: the strategy that was decided.
        done: how many strategies are decided, this one included; 0 for one that is not counted.
        total: how many there are.

    Returns:
        One line of at most 100 columns, unless the name alone is longer; a long reason is cut there.
    """
    name = clean(f"{row.name} {row.setting}".strip())
    head = f"accel{f' [{done}/{total}]' if done else ':'} {name} {clean(row.status)}"
    if finite(row.gain) is not None:
        head += f": {gain_text(row.gain, row.gain_low, row.gain_high)}"
    if finite(row.before_ms) is not None and finite(row.after_ms) is not None:
        head += f"{',' if finite(row.gain) is not None else ':'} {ms_text(row.before_ms)} → {ms_text(row.after_ms)} ms"
    room = MAX_WIDTH - cell_len(head) - 2
    why = clip(clean(row.why), room) if room > 10 else ""
    return f"{head}; {why}" if why else head
