"""How the process ends after Ctrl-C."""

from __future__ import annotations

import contextlib
import sys


def is_interactive() -> bool:
    """Return whether the interpreter goes on after what was interrupted: a statement typed, or a script with -i."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


def end_as_interrupted() -> None:
    """At exit, let a process that Ctrl-C has ended end by SIGINT, as Python has it when nobody catches Ctrl-C.

    A shell's loop then ends too. CPython remembers what the last source text that it ran ended with, not the script.
    Imports for the report run some: dataclasses and named tuples are made from text.
    """
    if getattr(sys, "last_type", None) is KeyboardInterrupt and not is_interactive():
        with contextlib.suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt")
