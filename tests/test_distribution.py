"""What is released: a wheel that holds the linked folders as packages, and works without the checkout."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import tomllib
from packaging.requirements import Requirement

import accel

ROOT = Path(__file__).resolve().parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
TRY = """
import torch, accel
from accel import ContinuousLoader, gather_rows, hook
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


def test_the_version_is_written_once_and_the_changelog_begins_with_it() -> None:
    assert re.search(r"^## \[(.+?)\]", text("CHANGELOG.md"), re.MULTILINE)[1] == accel.__version__  # type: ignore[index]
    assert not re.search(r"^version:", text("CITATION.cff"), re.MULTILINE)
    assert "version" in PROJECT["project"]["dynamic"]


@pytest.mark.parametrize("name", ["CITATION.cff", "SECURITY.md", "LICENSE"])
def test_nothing_in_it_is_left_to_fill_in_and_no_contact_is_invented(name: str) -> None:
    assert not re.search(r"TODO|TBD|FIXME|<[a-z ]+>|example\.(?:com|org)|\w@\w", text(name))


def test_extras_name_what_there_is() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    for requirements in extras.values():
        for requirement in map(Requirement, requirements):
            if requirement.name == "accel-train":
                assert requirement.extras <= extras.keys()


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")
