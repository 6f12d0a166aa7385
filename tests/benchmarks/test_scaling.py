"""Scaling curves: batches of ranks, turns of launches, efficiency, the plot, and real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import scaling
from benchmarks.render import Row
from benchmarks.scaling import RECORD, Launch, batch_of_a_rank, compare, default_shapes, draw, launched, with_efficiency

LAUNCH = Launch("ncf", "tiny", 64, False, "reordered", 5, 10.0)


class Launches:
    """Stands in for launches: plain steps take 0.2 s and accelerated ones half of that."""

    def __init__(self) -> None:
        self.accelerated: list[bool] = []

    def __call__(self, launch: Launch, hosts: int, ranks: int, rate: str, timeout_s: float) -> Row:
        self.accelerated.append(launch.accelerated)
        step_s = 0.2 * (1.0 + 0.25 * (hosts * ranks - 1))
        return {
            "step_s": step_s / (2 if launch.accelerated else 1),
            "kept": ["allocator"] if launch.accelerated else [],
        }


def curve() -> list[Row]:
    rows = [{**compare(LAUNCH, (hosts, 1), "1gbit", 2, Launches()), "kind": "weak"} for hosts in (1, 2, 4)]
    return with_efficiency(rows)


def test_strong_scaling_shares_the_batch_out() -> None:
    assert batch_of_a_rank(8, 4, "weak") == 8
    assert batch_of_a_rank(8, 4, "strong") == 2
    with pytest.raises(ValueError, match=r"must be a multiple of the ranks .* Found: 8 on 3 ranks"):
        batch_of_a_rank(8, 3, "strong")


def test_launches_take_turns() -> None:
    launches = Launches()
    row = compare(LAUNCH, (2, 1), "1gbit", 2, launches)
    assert launches.accelerated == [False, True, True, False]
    assert row["speedup"] == pytest.approx(2.0)
    assert row["plain_samples_s"] == pytest.approx(2 * 64 / 0.25)
    assert row["kept"] == ["allocator"]


def test_efficiency_is_over_ranks_that_each_train_alone() -> None:
    rows = curve()
    assert [row["plain_efficiency"] for row in rows] == pytest.approx([1.0, 0.8, 0.2 / 0.35])
    assert rows[0]["accel_efficiency"] == pytest.approx(2.0)
    assert {row["plain_efficiency"] for row in with_efficiency(rows[1:])} == {None}
    block = RECORD.block({"command": "c", "date": "d", "machine": "m", "torch": "t", "cores": 2, "rows": rows})
    assert "**ncf, weak, links of 1gbit**" in block
    assert "| 2x1 | 64 | 0.250 | 0.125 | 512.0 | 1024.0 | 2.00x [2.00, 2.00] | 80% | 160% | allocator |" in block


@pytest.mark.parametrize(
    ("gpus", "cores", "has_lab", "shapes"),
    [
        (0, 2, True, ["1x1", "2x1", "4x1"]),
        (0, 2, False, ["1x1", "1x2"]),
        (8, 64, False, ["1x1", "1x2", "1x4", "1x8"]),
        (0, 1, False, ["1x1"]),
        (6, 64, True, ["1x1", "1x2", "1x4"]),
    ],
)
def test_shapes_fit_the_machine(gpus: int, cores: int, has_lab: bool, shapes: list[str]) -> None:
    assert default_shapes(gpus, cores, has_lab) == shapes


def test_another_level_is_another_curve_from_the_same_plain_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    reordered = curve()
    lossy = {**reordered[1], "allow": "lossy"}
    monkeypatch.setattr(scaling.Record, "rows", lambda self: reordered)
    (alone,) = scaling._alone(LAUNCH, "weak", "1gbit")
    assert alone == reordered[0]
    assert with_efficiency([lossy, alone])[0]["plain_efficiency"] == pytest.approx(0.8)
    assert scaling._alone(LAUNCH, "weak", "") == []
    assert RECORD.title is not None
    assert (RECORD.title(lossy), RECORD.title(alone)) == (
        "ncf, weak, links of 1gbit, allow='lossy'",
        "ncf, weak, links of 1gbit",
    )


def test_a_plot_measures_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(scaling.Record, "rows", lambda self: curve())
    monkeypatch.setattr(scaling, "launched", lambda *arguments: pytest.fail("ranks were launched"))
    done = CliRunner().invoke(scaling.main, ["--plot", str(tmp_path / "curve.svg")])
    assert done.exit_code == 0 and (tmp_path / "curve.svg").exists()


@pytest.mark.parametrize("name", ["curve.svg", "curve.png"])
def test_curves_are_drawn(name: str, tmp_path: Path) -> None:
    draw(curve(), tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).stat().st_size > 5000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ncf", "--shape", "two"], "a shape must be hosts x ranks of each, such as 2x1. Found: two"),
        (["ncf", "--shape", "1x3", "--kind", "strong"], "must be a multiple of the ranks"),
        (["ncf", "--shape", "2x1"], "shapes with several hosts can't be had: no lab"),
    ],
)
def test_what_can_not_be_measured_is_said(arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "why_not", lambda: "no lab")
    done = CliRunner().invoke(scaling.main, arguments)
    assert done.exit_code != 0
    assert message in done.output


@pytest.mark.slow
@pytest.mark.parametrize("accelerated", [False, True])
def test_real_ranks(accelerated: bool) -> None:
    launch = Launch("ncf", "tiny", 1024, accelerated, "reordered", 5, 5.0)
    assert launched(launch, 1, 2, "", 300.0)["step_s"] > 0


@pytest.mark.slow
@pytest.mark.net
def test_real_hosts() -> None:
    assert launched(LAUNCH, 2, 1, "1gbit", 300.0)["step_s"] > 0
