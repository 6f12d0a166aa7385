"""What the demo may promise on a machine, by what that machine has; and what it gave on others.

Half precision is where `allow="reduced"` wins on a CPU, and only one with bfloat16 instructions has that to give. On
others bfloat16 is emulated and slower than float32, so the search leaves it off.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
CPUINFO = Path("/proc/cpuinfo")
_BF16 = {"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16", "svebf16"}
"""Flags of x86 and ARM processors that multiply bfloat16."""


@dataclass(frozen=True)
class Promise:
    """What is promised of each variant; None is no figure at all.

    Attributes:
        speedups: by variant.
        machine: what the machine has, in words.
    """

    speedups: dict[str, float | None]
    machine: str


def promise(cores: int, bf16: bool | None) -> Promise:
    """Return what is promised.

    Args:
        cores: usable ones.
        bf16: whether the processor multiplies bfloat16; None if that can't be told.
    """
    count = f"{cores} core{'' if cores == 1 else 's'}"
    words = {
        True: "with bfloat16 instructions",
        False: "without bfloat16 instructions",
        None: "of a kind not known here",
    }
    machine = f"a CPU {words[bf16]}, {count}"
    if cores < 2 or bf16 is None:  # no run on such a machine has been seen
        return Promise({"default": None, "reduced": None}, machine)
    if bf16:
        return Promise({"default": 1.3, "reduced": 1.8}, machine)
    # Seen without these instructions: 1.37x by default and 1.31x reduced, which had nothing to add.
    return Promise({"default": 1.2, "reduced": 1.2}, machine)


def multiplies_bf16(cpuinfo: Path = CPUINFO) -> bool | None:
    """Tell whether this processor has instructions for bfloat16, None if it does not say what it has."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), None)
    return None if flags is None else not _BF16.isdisjoint(flags)


def kept(found: dict[str, Any]) -> bool:
    """Tell whether a variant's figures are as promised; without a figure, that it is not slower than plain.

    The interval decides: 1.79 [1.73, 1.86] does not show that 1.8 was missed.
    """
    wanted = 1.0 if found["wanted"] is None else found["wanted"]
    return bool(found["high"] >= wanted)


def wanted_text(wanted: float | None) -> str:
    """Say what is promised, e.g. `1.3x`."""
    return "not slower" if wanted is None else f"{wanted}x"


def elsewhere(results: Path = RESULTS) -> list[str]:
    """Say what recorded runs gave, a line for each, the newest first."""
    lines = []
    for file in sorted(results.glob("demo-*.json"), reverse=True):
        held = json.loads(file.read_text(encoding="utf-8"))
        gave = [f"{name} {v['speedup']:.2f}x" for name, v in held["variants"].items() if "speedup" in v]
        cores = held["machine"]["cores"]
        bf16 = {True: ", bfloat16 instructions", False: ", no bfloat16 instructions"}.get(held.get("bf16"), "")
        lines.append(f"{held['date']}, {held['machine']['device']}, {cores} cores{bf16}: {', '.join(gave)}")
    return lines
