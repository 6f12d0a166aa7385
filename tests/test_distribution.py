"""What is released: a wheel that holds the linked folders as packages, and works without the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TRY = """
import torch, accel
from accel.comm.hooks import hook
from accel.dataio.loader import ContinuousLoader
from accel.kernels.gather_rows import gather_rows
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(64, 4), torch.randint(2, (64,))), batch_size=8)
model, loader, optimizer = accel.optimize(model, loader, optimizer, cache=False)
for x, y in loader:
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
accel.explain(model).save("report.html")
print(accel.__file__)
"""


@pytest.mark.integration
def test_the_wheel_of_the_sdist_trains_without_the_checkout(tmp_path: Path) -> None:
    build = [sys.executable, "-c", "from setuptools.build_meta import *; import sys; print(eval(sys.argv[1]))"]
    made = tmp_path / "made"
    made.mkdir()
    clean = tmp_path / "source"
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, files.split("\0")):
        target = clean / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            target.symlink_to(os.readlink(ROOT / name))
        else:
            target.write_bytes((ROOT / name).read_bytes())
    subprocess.run([*build, f"build_sdist({str(made)!r})"], cwd=clean, check=True, capture_output=True)
    (sdist,) = made.glob("accel_train-*.tar.gz")
    unpacked = tmp_path / "unpacked"
    unpacked.mkdir()
    subprocess.run(["tar", "xzf", sdist, "--strip-components=1"], cwd=unpacked, check=True)
    subprocess.run([*build, f"build_wheel({str(made)!r})"], cwd=unpacked, check=True, capture_output=True)
    (wheel,) = made.glob("accel_train-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        assert not [info.filename for info in archive.infolist() if info.external_attr >> 28 == 0xA]  # links
        archive.extractall(tmp_path / "site")
    data = ("accel/py.typed", "accel/report/page.html.j2", "accel/search/recipes.json")
    assert {"accel/comm/hooks.py", "accel/dataio/loader.py", "accel/kernels/gather_rows.py", *data} <= names
    assert {name.split("/")[0] for name in names if not name.split("/")[0].endswith(".dist-info")} == {"accel"}

    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", TRY], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "site" / "accel" / "__init__.py")
    assert (tmp_path / "report.html").exists()
