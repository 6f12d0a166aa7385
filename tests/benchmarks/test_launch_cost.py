"""What repeated calls cost the host: rows of all ops, in an interpreter of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_SCRIPT = """
from benchmarks import launch_cost
from triton.runtime.jit import JITFunction

launch_cost._BATCHES = launch_cost._CALLS = 3
bound, run = [], JITFunction.run
with launch_cost.no_op():
    for call in launch_cost.calls():
        row = launch_cost.measure(call)
        assert row["launches"] >= 1, row
        JITFunction.run = lambda *arguments, **more: (bound.append(call.name), run(*arguments, **more))[1]
        call.run()
        JITFunction.run = run
        print(row["call"])
assert not bound, bound
"""


@pytest.mark.slow
def test_no_repeated_call_of_any_op_is_bound_anew() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", _SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ops = {line.split(",")[0].split(" (")[0] for line in done.stdout.splitlines()}
    assert ops == {
        *("window_attention", "gather_rows", "compact", "block_maxima", "at_least", "quantise", "sign_pack"),
        *("fcos_targets", "simota_assign"),
    }
