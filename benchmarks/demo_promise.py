"""What the demo may promise on a machine, by what that machine has; and what it gave on others.

Half precision is where `allow="reduced"` wins on a CPU, and only one with bfloat16 instructions has that to give. On
others bfloat16 is emulated and slower than float32, so the search leaves it off.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
CPUINFO = Path("/proc/cpuinfo")


class Processor(str, Enum):
    """What a processor has for half precision."""

    AMX = "with AMX"
    BF16 = "with bfloat16 instructions"
    FLOAT32 = "without bfloat16 instructions"
    UNKNOWN = "of a kind not known here"

    def __str__(self) -> str:
        return str(self.value)


_BF16 = {"avx512_bf16", "avx_ne_convert", "bf16", "svebf16"}
"""Flags of x86 and ARM processors that multiply bfloat16."""
_SEEN = {
    # 1.41x and 2.03x on two cores of a Zen 5, 1.33x and 1.80x on others of its kind.
    Processor.BF16: {"default": (1.25, 1.5), "reduced": (1.7, 2.2)},
    # 1.11x to 1.17x and 1.83x to 1.96x on Xeons: with real images their pooling in the plain order is less slow (3.9 ms
    # of 18.6, against 0.7 in channels_last), and a batch norm's backward pass takes 0.9 ms more in channels_last.
    Processor.AMX: {"default": (1.05, 1.25), "reduced": (1.7, 2.1)},
    # 1.37x and 1.31x, which had nothing to add.
    Processor.FLOAT32: {"default": (1.2, 1.5), "reduced": (1.2, 1.5)},
}
"""The least and the most that was seen, and 5 to 10 % on both sides: machines of one kind differ by that."""

Interval = tuple[float, float]


@dataclass(frozen=True)
class Promise:
    """What is promised of each variant; None is no figure at all.

    Attributes:
        speedups: by variant, from and to.
        machine: what the machine has, in words.
    """

    speedups: dict[str, Interval | None]
    machine: str


def promise(cores: int, kind: Processor) -> Promise:
    """Return what is promised.

    Args:
        cores: usable ones.
        kind: of processor.
    """
    machine = f"a CPU {kind}, {cores} core{'' if cores == 1 else 's'}"
    if cores < 2 or kind not in _SEEN:  # no run on such a machine has been seen
        return Promise({"default": None, "reduced": None}, machine)
    return Promise({**_SEEN[kind]}, machine)


def processor(cpuinfo: Path = CPUINFO) -> Processor:
    """Tell what this processor has for half precision, by the flags that Linux tells."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return Processor.UNKNOWN
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), None)
    if flags is None:
        return Processor.UNKNOWN
    if "amx_bf16" in flags:
        return Processor.AMX
    return Processor.FLOAT32 if _BF16.isdisjoint(flags) else Processor.BF16


def record_name(kind: Processor) -> str:
    """Return the name of the record: one for each kind of processor, so that no run replaces another machine's."""
    return "demo" if kind is Processor.BF16 else f"demo-{kind.name.lower()}"


def kept(found: dict[str, Any]) -> bool:
    """Tell whether a variant's figures are as promised, or better; without any, that it is not slower than plain.

    Intervals decide: 1.69 [1.63, 1.76] does not show that 1.7 was missed.
    """
    least = 1.0 if found["wanted"] is None else found["wanted"][0]
    return bool(found["high"] >= least)


def wanted_text(wanted: Sequence[float] | float | None) -> str:
    """Say what is promised, e.g. `1.3x to 1.5x`; until the end of 2026-11 it was the least alone."""
    if wanted is None:
        return "not slower"
    return f"{wanted}x" if isinstance(wanted, float) else f"{wanted[0]}x to {wanted[1]}x"


def elsewhere(results: Path = RESULTS) -> list[str]:
    """Say what recorded runs gave, a line for each, the newest first."""
    lines = []
    runs = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(results.glob("demo-*.json"))]
    for held in sorted(runs, key=lambda held: str(held["date"]), reverse=True):
        gave = [f"{name} {v['speedup']:.2f}x" for name, v in held["variants"].items() if "speedup" in v]
        cores = held["machine"]["cores"]
        lines.append(
            f"{held['date']}, {held['machine']['device']} {held['processor']}, {cores} cores: {', '.join(gave)}"
        )
    return lines
