"""A run draws the same random numbers with accel and without: nothing is drawn by importing, searching or reporting."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from accel.report import quiet_rich
from tests.accel.frameworks import LET_TORCHVISION_IMPORT, need

ROOT = Path(__file__).resolve().parents[2]

STATES = """
import hashlib, random, sys
import numpy as np, torch

def states():
    numpys = np.random.get_state()
    parts = torch.get_rng_state().numpy().tobytes(), repr(random.getstate()).encode(), repr(numpys).encode()
    return [hashlib.sha256(part).hexdigest() for part in parts]
"""

LOOP = (
    STATES
    + """
import accel
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

plain, steps, folder = sys.argv[1] == "plain", int(sys.argv[2]), sys.argv[3]
torch.manual_seed(0), random.seed(0), np.random.seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))
loader = DataLoader(TensorDataset(torch.randn(512, 32), torch.randint(0, 4, (512,))), 16, shuffle=True)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
if not plain:
    model, loader, optimizer = accel.optimize(model, loader, optimizer, allow="exact", report=folder + "/report.html")
done, seen = 0, []
while done < steps:
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        random.random(), np.random.rand()
        done += 1
        if done % 50 == 0:
            seen.append(states())
if not plain:
    print(accel.explain(model), file=sys.stderr)
    accel.undo(model)
print(seen, states())
"""
)

EVERY_MODULE = (
    LET_TORCHVISION_IMPORT
    + STATES
    + """
import importlib
from accel.dataio.fetching import randomness
before = states()
for name in sys.argv[1:]:
    if name in ("accel.integrations.lightning", "accel.integrations.transformers"):
        importlib.import_module(name.rpartition(".")[2])  # a framework may draw
        before = states()
    importlib.import_module(name)
    now = states()
    if now != before:
        print(name, "draws")
    before = now
"""
)

TERMINAL = """
import random
random.seed(4)
before = random.getstate()
import accel.report.terminal
print(random.getstate() == before, random.getrandbits.__self__ is random.getstate.__self__)
"""


def python(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=550, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_what_a_report_needs_is_imported_without_a_draw() -> None:
    assert python(TERMINAL) == "True True"


def test_only_this_thread_draws_elsewhere_while_rich_is_imported() -> None:
    from concurrent.futures import ThreadPoolExecutor

    with quiet_rich._apart(), ThreadPoolExecutor(1) as pool:
        theirs = random.getrandbits
        random.seed(4)
        random.getrandbits(64)
        drawn = pool.submit(theirs, 64).result()
    random.seed(4)

    assert drawn == random.getrandbits(64)
    random.seed(4)
    assert theirs(64) == drawn  # kept by somebody, it is the real one afterwards


def test_rich_is_imported_in_one_place() -> None:
    imports = re.compile(r"^\s*(?:from|import) rich\b", re.MULTILINE)
    folders = [ROOT / name for name in ("accel", "profiler", "comm", "dataio", "kernels")]
    files = [path for folder in folders for path in folder.rglob("*.py") if not path.is_symlink()]
    assert {path.name for path in files if imports.search(path.read_text(encoding="utf-8"))} == {"quiet_rich.py"}


@pytest.mark.slow
def test_no_module_draws_when_it_is_imported() -> None:
    folders = {"accel": "", "profiler": "accel.", "comm": "accel.", "dataio": "accel."}
    names = [
        prefix + ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for folder, prefix in folders.items()
        for path in sorted((ROOT / folder).glob("*.py")) + sorted((ROOT / folder).glob("*/*.py"))
        if path.stem not in ("__main__", "__init__", "dali_graph") and path.resolve().is_relative_to(ROOT / folder)
    ]
    assert len(names) > 100
    for framework in ("lightning", "transformers"):
        need(framework)
    assert python(EVERY_MODULE, *names) == ""


@pytest.mark.slow
def test_an_optimized_loop_leaves_the_random_states_of_the_plain_one(tmp_path: Path) -> None:
    plain, optimized = (python(LOOP, kind, "600", str(tmp_path)) for kind in ("plain", "optimized"))

    assert (tmp_path / "report.html").exists()
    assert optimized == plain
