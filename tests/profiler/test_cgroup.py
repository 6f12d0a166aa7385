"""What the control group allows, from played files."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel.profiler.cgroup import Throttle, quota


def write(root: Path, own: str, **files: str) -> None:
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/self/cgroup").write_text(own)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        ("0::/\n", {"cpu.max": "400000 100000\n"}, 4.0),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/\n", {}, None),
        ("0::/slurm/job_7\n", {"slurm/cpu.max": "300000 100000\n", "slurm/job_7/cpu.max": "max 100000\n"}, 3.0),
        ("0::/slurm/job_7\n", {"slurm/cpu.max": "300000 100000\n", "slurm/job_7/cpu.max": "200000 100000\n"}, 2.0),
        ("0::/system.slice/docker-1.scope\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/../elsewhere\n", {"cpu.max": "150000 100000\n"}, 1.5),
        (
            "5:memory:/job\n4:cpu,cpuacct:/job\n",
            {"cpu/job/cpu.cfs_quota_us": "250000\n", "cpu/job/cpu.cfs_period_us": "100000\n"},
            2.5,
        ),
        (
            "4:cpu,cpuacct:/\n",
            {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
            None,
        ),
        ("0::/\n", {"cpu.max": "what\n"}, None),
    ],
    ids=["v2", "unlimited", "none", "above", "tightest", "namespace", "outside", "v1", "v1 unlimited", "odd"],
)
def test_quota_is_the_tightest_of_the_groups(
    tmp_path: Path, own: str, files: dict[str, str], cores: float | None
) -> None:
    write(tmp_path, own, **files)

    assert quota(tmp_path) == cores


def test_a_system_without_groups_has_no_quota(tmp_path: Path) -> None:
    assert quota(tmp_path) is None
    assert Throttle(tmp_path).share() is None


def test_throttled_is_the_share_of_the_periods_since_the_last_look(tmp_path: Path) -> None:
    files = {"cpu.max": "200000 100000\n", "cpu.stat": "usage_usec 1\nnr_periods 100\nnr_throttled 90\n"}
    write(tmp_path, "0::/\n", **files)
    meter = Throttle(tmp_path)
    write(tmp_path, "0::/\n", **{"cpu.stat": "usage_usec 2\nnr_periods 150\nnr_throttled 100\n"})

    assert meter.share() == pytest.approx(0.2)
    assert meter.share() is None  # no period has passed
