"""Scripts run in a process that has imported torch. Nothing here asserts: what they print is returned."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from pathlib import Path


def run_script(rank: int, world: int, script: str, *options: str) -> str:
    """Run a script as `python SCRIPT OPTIONS` does and return what it prints."""
    sys.argv, sys.path[0] = [script, *options], str(Path(script).parent)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(script, run_name="__main__")
    return printed.getvalue()
