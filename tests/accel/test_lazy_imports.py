"""What a run has not come to need is not imported: the machinery of a strategy waits until it is going to be tried."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# torch imports its compiler when the first optimizer is made, so this loop updates its weights by hand.
IMPORTED = """
import json, sys, time
import torch

HEAVY = ["torch._dynamo", "torch._inductor", "sympy", "triton", "matplotlib", "rich", "accel.comm", "accel.kernels"]
HEAVY += ["accel.dataio.engine.processes", "accel.dataio.dataset.thread_safety"]
loaded = {}

def look(when):
    loaded[when] = [name for name in HEAVY if name in sys.modules]

look("torch")
began = time.process_time()
import accel
accel.optimize
seconds = time.process_time() - began
look("imported")
"""

LOOP = """
from torch.utils.data import DataLoader, TensorDataset

def train(steps):
    while steps > 0:
        for x, y in loader:
            torch.nn.functional.mse_loss(model(x), y).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 1e-3 * parameter.grad
                    parameter.grad = None
            steps -= 1

model = torch.nn.Linear(8, 1)
loader = DataLoader(TensorDataset(torch.randn(64, 8), torch.randn(64, 1)), batch_size=8)
model, loader = accel.optimize(model, loader, disable=("loader_workers", "intraop_threads"))
look("optimized")
train(24)  # a loop without an optimizer is looked at from its 16th batch on, for 12 steps
look("observed")
train(48)
look("searched")
"""


def python(code: str) -> tuple[dict[str, list[str]], float]:
    command = [sys.executable, "-c", code + "\nprint(json.dumps([loaded, seconds]))"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    loaded, seconds = json.loads(done.stdout)
    return loaded, seconds


def test_nothing_of_a_strategy_is_imported_before_it_is_going_to_be_tried() -> None:
    loaded, _ = python(IMPORTED + LOOP)

    mine = {when: set(names) - set(loaded["torch"]) for when, names in loaded.items()}  # torch may bring some of these
    assert mine["imported"] == mine["optimized"] == mine["observed"] == set()
    assert mine["searched"] <= {"rich"}  # it prints what does not apply


@pytest.mark.slow
def test_the_first_use_of_accel_takes_at_most_three_tenths_of_a_second() -> None:
    """Measured on two shared cores: 0.14 s of CPU time after `import torch`."""
    assert min(python(IMPORTED)[1] for _ in range(3)) <= 0.3
