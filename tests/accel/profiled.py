"""Scripts to run under `accel profile`, and what they leave behind."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from subprocess import CompletedProcess

from accel.profiler import report as schema
from tests import warm
from tests.accel import agreement

ROOT = Path(__file__).resolve().parents[2]

TRAIN = """\
import sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = TensorDataset(torch.randn(320, 64), torch.zeros(320, dtype=torch.long))
loader = DataLoader(data, batch_size=8)

def step(x, y):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss
"""

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
"""That of an interpreter of its own."""

QUIET = "from accel.profiler import naming\nnaming._crowded = lambda evidence: None\n"
"""Code to run first: what else runs on the machine is no reason for the profiler to name nothing."""


def script(folder: Path, body: str) -> Path:
    """Write a script that has a model, an optimizer and a loader of 40 batches."""
    target = folder / "train.py"
    target.write_text(TRAIN + textwrap.dedent(body))
    return target


def accel_profile(folder: Path, *arguments: str, before: str = "") -> CompletedProcess[str]:
    return warm.run(["-m", "accel", "profile", *arguments], cwd=folder, before=QUIET + before)


def profile_ranks(folder: Path, count: int, *arguments: str) -> list[CompletedProcess[str]]:
    return warm.run_ranks(count, ["-m", "accel", "profile", *arguments], cwd=folder, before=QUIET)


def report(folder: Path, name: str = "accel-profile/report.json") -> schema.ProfileReport:
    """Read the report of a run, in which nothing may contradict anything else."""
    profile = schema.from_json((folder / name).read_text())
    assert agreement.of_profile(profile) == []
    return profile


def causes(profile: schema.ProfileReport) -> list[str]:
    return [finding.cause for finding in profile.findings]


def in_an_interpreter_of_its_own(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run what the other tests run in a forked process, as proof that it is alike."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
