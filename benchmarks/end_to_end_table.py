"""Whole processes in words: a row for each model, the means over all of them, and what accel is held to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean

from benchmarks.render import SOURCE, Cell, Row, block, times
from benchmarks.spread import geometric_mean
from benchmarks.variants import BY_HAND, RIVALS

LIMIT = 0.98
"""No model may take fewer steps than this part of the plain ones."""
HAND_LIMIT = 0.95
"""Of the hand-tuned best, and of the best rival on any model."""


def grouped(rows: Iterable[Row]) -> list[dict[str, Row]]:
    """Return the rows of each model by their variant, with the hand-tuned best as "hand", the best rival as "rival"."""
    models: dict[str, dict[str, Row]] = {}
    for row in rows:
        models.setdefault(row["model"], {})[row.get("variant", "first")] = row
    for variants in models.values():
        by_hand = [row for name, row in variants.items() if name.startswith(BY_HAND)]
        rivals = [row for name, row in variants.items() if name in RIVALS]
        for name, rest in (("hand", by_hand), ("rival", rivals)):
            if rest:
                variants[name] = max(rest, key=lambda row: float(row["ratio"]))
    return list(models.values())


def table_block(result: Row) -> str:
    """Return the table of a result, with the means over all models under it."""
    rows = result["rows"]
    head = f"{SOURCE.format_map(result)}. {_what(rows)}"
    columns: dict[str, Cell] = {
        "model": lambda variants: _any(variants)["model"],
        "s": lambda variants: f"{_any(variants)['seconds']:.0f}",
        "plain steps": lambda variants: f"{_any(variants)['plain_steps']:.0f}",
        "first run": lambda variants: _ratio(variants.get("first")),
        "second run": lambda variants: _ratio(variants.get("second")),
        "best by hand": lambda variants: _named(variants.get("hand")),
        "best rival": lambda variants: _named(variants.get("rival")),
        "s to the same loss, plain and second": lambda variants: _loss(variants.get("second")),
        "MB, plain and second": lambda variants: _memory(variants.get("second")),
        "kept": lambda variants: ", ".join(_last(variants)["kept"]) or "-",
    }
    return "\n".join([block(head, columns, grouped(rows)), "", *(f"- {line}" for line in summary(rows))])


def _what(rows: Sequence[Row]) -> str:
    hold = max((row.get("hold", 0.0) for row in rows), default=0.0)
    early = (
        f" Tuned by hand and rivals ended {hold:.0f} s after their third step; the rest is counted at their rate in "
        "those seconds."
        if hold
        else ""
    )
    beside = {
        True: "a plain one that took turns with it [95 %]",
        False: "the plain ones before and after it [least, most]",
    }
    kinds = sorted({"turn_s" in row for row in rows}, reverse=True)
    others = " or, in rows of another day, ".join(beside[kind] for kind in kinds)
    return f"Steps of a whole process in the same time, imports and search included, ÷ those of {others}.{early}"


def _any(variants: dict[str, Row]) -> Row:
    return next(iter(variants.values()))


def _last(variants: dict[str, Row]) -> Row:
    return variants.get("second") or variants.get("first") or _any(variants)


def _ratio(row: Row | None) -> str | None:
    return None if row is None else times("ratio", "low", "high").format_map(row)


def _named(row: Row | None) -> str | None:
    return None if row is None else f"{_ratio(row)}, {row['variant'].removeprefix(BY_HAND)}"


def _loss(row: Row | None) -> str | None:
    if row is None or row["plain_loss_s"] is None:
        return None
    return f"{row['plain_loss_s']:.0f}, " + ("not reached" if row["loss_s"] is None else f"{row['loss_s']:.0f}")


def _memory(row: Row | None) -> str | None:
    return None if row is None else f"{row['plain_peak_mb']:.0f}, {row['peak_mb']:.0f}"


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """Yield what the rows say together: means, the worst model, and how accel compares with hand tuning and rivals."""
    models = grouped(rows)
    for variant, words in (("first", "first run"), ("second", "second run"), ("hand", "tuned by hand")):
        chosen = [variants[variant] for variants in models if variant in variants]
        ratios = {str(row["model"]): float(row["ratio"]) for row in chosen}
        if not ratios:
            continue
        worst = min(ratios, key=lambda model: ratios[model])
        slow = [model for model, ratio in ratios.items() if ratio < LIMIT]
        line = f"{words}: geometric mean {geometric_mean(list(ratios.values())):.2f}x over {len(ratios)} models"
        yield f"{line}, least {worst} {ratios[worst]:.2f}x, below {LIMIT}: {', '.join(slow) or 'none'}"
    yield from _against(models, "hand", "the hand-tuned best")
    yield from _against(models, "rival", "the best rival")


def _against(models: Sequence[dict[str, Row]], other: str, words: str) -> Iterator[str]:
    """Compare the second run (or the first where there is no second) with another variant."""
    parts: dict[str, float] = {}
    for variants in models:
        own = variants.get("second") or variants.get("first")
        if own is not None and other in variants:
            parts[own["model"]] = float(own["ratio"]) / float(variants[other]["ratio"])
    if not parts:
        return
    share = fmean(part >= 1.0 for part in parts.values())
    behind = [f"{model} {part:.2f}" for model, part in parts.items() if part < HAND_LIMIT]
    yield (
        f"accel ÷ {words}: geometric mean {geometric_mean(list(parts.values())):.2f}, at least as fast on {share:.0%} "
        f"of {len(parts)} models, more than 5 % behind: {', '.join(behind) or 'none'}"
    )
