"""The words of every report: numbers with their units, and texts made safe to show."""

from __future__ import annotations

import math
import unicodedata

from accel.profiler.report import MachineFacts


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


def finite(value: float | None) -> float | None:
    """Return `value`, or None if it is missing, infinite or not a number."""
    return None if value is None or not math.isfinite(value) else value


def ms_text(value: float | None) -> str:
    """Format a number, such as ms, with three digits, without an exponent where none is expected; `-` when missing."""
    value = finite(value)
    if value is None:
        return "-"
    return f"{value:,.0f}" if 100 <= abs(value) < 1e7 else f"{value:.3g}"


def seconds_text(value: float) -> str:
    """Format a cost in seconds, e.g. `0.8 s`."""
    return f"{value:.1f} s" if 0.05 <= abs(value) < 1e5 else f"{value:.2g} s"


def count_text(number: int, noun: str) -> str:
    """Format a number of things, e.g. `2 cores`."""
    return f"{number} {noun if number == 1 else plural(noun)}"


def plural(noun: str) -> str:
    """Return the plural of a noun."""
    return noun + ("es" if noun.endswith("s") else "s")


def number_text(share: float | None) -> str:
    """Format a share as a number of percent, e.g. `67`; with two digits below one percent; `-` when missing."""
    value = finite(None if share is None else 100 * share)
    if value is None:
        return "-"
    return f"{value:.2g}" if 0 < abs(value) < 0.95 else str(round(value)) if abs(value) < 1e4 else f"{value:.3g}"


def percent_text(share: float | None) -> str:
    """Format a share in percent, e.g. `67 %`; `-` when missing."""
    text = number_text(share)
    return text if text == "-" else f"{text} %"


def ratio_text(value: float) -> str:
    """Format a ratio with two decimals, e.g. `1.31`."""
    return f"{value:.2f}" if abs(value) < 1e4 else f"{value:.3g}"


def gain_text(gain: float | None, low: float | None, high: float | None) -> str:
    """Format a speed-up with its confidence interval, e.g. `1.31x [1.27, 1.35]`; `-` when there is none."""
    gain, low, high = finite(gain), finite(low), finite(high)
    if gain is None:
        return "-"
    return f"{ratio_text(gain)}x" + ("" if low is None or high is None else f" [{ratio_text(low)}, {ratio_text(high)}]")


def machine_text(machine: MachineFacts, processes: int = 0) -> str:
    """Format where the numbers were measured: device, cores, threads, processes and versions."""
    counts = [(machine.cores, "core"), (machine.threads, "thread"), (processes, "process")]
    versions = [("Python", machine.python), ("torch", machine.torch), ("accel", machine.accel)]
    words = [machine.device or "device not known", *(count_text(n, noun) for n, noun in counts if n), machine.platform]
    return ", ".join([word for word in words if word] + [f"{name} {version}" for name, version in versions if version])
