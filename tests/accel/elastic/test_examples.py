"""The examples of elastic training do what they say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import warm
from tests.forks import ROOT


def epochs(printed: str) -> list[int]:
    return [int(number) for number in re.findall(r"epoch (\d+): loss [\d.]+, \d+ samples a step", printed)]


def test_training_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    for wanted, expected in ((1, [1]), (1, []), (2, [2])):
        command = ["-m", "examples.elastic.train", str(tmp_path / "run"), f"--epochs={wanted}"]
        done = warm.run(command, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("workers: 1\n")
        assert epochs(done.stdout) == expected


@pytest.mark.slow
def test_a_node_joins_and_is_killed() -> None:
    done = warm.run(["-m", "examples.elastic.nodes"], cwd=ROOT, timeout_s=200)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if "workers: " in line or "node" in line.split(":")[0]]
    assert [line for line in said if "workers" in line][:3] == [
        "  node 1: workers: 1",
        *(line for line in said if "workers: 2" in line),
        "  node 1: workers: 1",
    ]
    assert done.stdout.rstrip().endswith("node 1 ended with status 0")
    assert epochs(done.stdout)[-1] == 6
