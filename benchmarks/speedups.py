"""The plot of the front page: speed-ups of whole runs, from committed results.

    python -m benchmarks.speedups docs/speedups.svg

Nothing is measured. The text of the SVG follows the reader's colour scheme, and its description names each bar.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import click

from accel.files import write_atomic
from benchmarks.gpu import searches
from benchmarks.record import newest
from benchmarks.render import Row

GPU = "GPU, allow='reduced'; baseline: the same loop in float32 with torch's defaults"
CPU = "two CPU cores, small models, default level; baseline: the same loop without accel"
_INK = "#123456"
"""Stands for the reader's text colour until the SVG is written; no other part of the plot has it."""
_STYLE = ":root{--ink:#1f2328}@media (prefers-color-scheme: dark){:root{--ink:#e6edf3}}"


class Bar(NamedTuple):
    """One speed-up."""

    panel: str
    name: str
    ratio: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.name} ({self.panel}): {self.ratio:.2f}x [{self.low:.2f}, {self.high:.2f}]"


def bars(found: Callable[[str], Row | None] = newest) -> list[Bar]:
    """Return the last search of each model on a GPU, and the second run of each model on the CPU, the largest first."""
    gpu, cpu = dict[str, Bar](), list[Bar]()
    if record := found("searches"):
        device = str(record["machine"]).removeprefix("NVIDIA ").partition(",")[0]
        for row in searches.rows(record):
            if row["is_last"] and "[" in row["figure"]:
                ratio, low, high = (float(each) for each in row["figure"].replace("x [", ",").rstrip("]").split(","))
                gpu[row["model"]] = Bar(GPU, f"{row['model']}, {device}", ratio, low, high)
    if record := found("end-to-end"):
        cpu = [
            Bar(CPU, str(row["model"]), row["ratio"], row["low"], row["high"])
            for row in record["rows"]
            if row.get("variant") == "second"
        ]
    return [bar for panel in (gpu.values(), cpu) for bar in sorted(panel, key=lambda bar: -bar.ratio)]


def draw(shown: Sequence[Bar]) -> str:
    """Return the SVG: a horizontal bar with its interval for each speed-up, a line at 1."""
    import matplotlib
    from matplotlib.figure import Figure

    groups = {name: [bar for bar in shown if bar.panel == name][::-1] for name in (GPU, CPU)}
    figure = Figure(figsize=(7.2, 1.4 + 0.24 * len(shown)), layout="constrained")
    heights = [len(group) + 1 for group in groups.values()]
    panels = figure.subplots(len(groups), 1, sharex=True, height_ratios=heights)
    for panel, (title, group), colour in zip(panels, groups.items(), ("#2f81f7", "#2da44e"), strict=True):
        sides = [[bar.ratio - bar.low for bar in group], [bar.high - bar.ratio for bar in group]]
        ratios = [bar.ratio for bar in group]
        panel.barh([bar.name for bar in group], ratios, color=colour, xerr=sides, ecolor="#8b949e", height=0.62)
        for place, bar in enumerate(group):
            panel.text(bar.high + 0.06, place, f"{bar.ratio:.2f}x", va="center", fontsize=9, color=_INK)
        panel.axvline(1, color="#8b949e", linewidth=1)
        panel.set_title(title, fontsize=10, loc="left", color=_INK)
        panel.tick_params(colors=_INK, labelsize=9)
        panel.spines[["top", "right"]].set_visible(False)
        panel.spines[["left", "bottom"]].set_color("#8b949e")
        panel.set_xlim(0)
    panels[-1].set_xlabel("times as fast (higher is better)", fontsize=9, color=_INK)
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "accel"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    described = f"<title>Speed-ups of whole runs</title><desc>{'; '.join(map(str, shown))}</desc>"
    head, _, rest = buffer.getvalue().partition("<defs>")
    return f"{head}{described}\n <style>{_STYLE}</style>\n <defs>{rest}".replace(_INK, "var(--ink)")


@click.command()
@click.argument("path", type=click.Path(path_type=Path, dir_okay=False))
def main(path: Path) -> None:
    """Draw what is recorded to PATH, an SVG."""
    write_atomic(path, draw(bars()))


if __name__ == "__main__":
    main()
