"""The terminal report of a profiled run: what it says first, what adds up, and that no text can break it."""

from __future__ import annotations

import itertools
import json
import unicodedata
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from accel.profiler.evidence import OpTime, Roofline
from accel.profiler.report import Node, ProfileReport, Saving, from_json
from accel.report import words
from accel.report.rendering import as_text as render
from tests.accel import profile_reports
from tests.accel.test_terminal import HOSTILE


def _lines(report: ProfileReport, width: int = 100) -> list[str]:
    return render(report, width=width, color=False).splitlines()


def _headings(report: ProfileReport) -> list[str]:
    lines = _lines(report)
    return [line.split(":")[0].split(" (")[0] for before, line in itertools.pairwise(lines) if not before]


def test_verdict_why_and_next_come_first() -> None:
    report = profile_reports.full()
    assert _lines(report)[:5] == [
        "accel profile: input-bound: reading files takes 67 % of the step (input.storage, confirmed)",
        "412 steps of 212 ms, 302 samples/s, 88.1 s in all, 2 ranks",
        "",
        "why",
        "1. the loop waits for files that are read one by one from slow storage",
    ]
    assert _headings(report) == [
        *("why", "next", "where a step's time goes", "experiments", "ranks", "source lines, by sampling"),
        *("operators, per step", "where the host waits for the device, per step", "GPUs, median over the run"),
        *("host", "what could not be seen", "where and how"),
    ]


def test_confirmed_finding_says_saving_evidence_remedy_and_strategy() -> None:
    lines = _lines(profile_reports.full())
    start = lines.index("1. the loop waits for files that are read one by one from slow storage")
    assert lines[start + 1 : start + 10] == [
        "   input.storage, 67 % of the step",
        "   saves 67 % [64, 70] of the step, confirmed by experiment (predicted 66 %)",
        "   - 143 of 212 ms per step pass waiting for the next batch",
        "   - both loader workers are asleep in read() for 84 % of that time, so more processor time would",
        "     not help",
        "   - the GPU ran a kernel in 31 % of the traced window",
        "   - experiment: trained on one batch that was held in memory",
        "   do: read ahead with more workers (4), or pack the files into shards",
        "   accel.optimize does it: strategy loader_workers",
    ]


def test_untried_finding_is_a_prediction() -> None:
    lines = _lines(profile_reports.full())
    assert "   predicted, not tried: saves 8 % [5, 10] of the step" in lines
    assert "   - no experiment: ranks can't trade their storage" in lines


@pytest.mark.parametrize(
    ("measured", "predicted", "confirmed", "text"),
    [
        (
            Saving(value=0.3, low=0.2, high=0.4),
            None,
            True,
            "saves 30 % [20, 40] of the step, confirmed by experiment",
        ),
        (
            Saving(value=0.3, low=0.2, high=0.4),
            Saving(value=0.5, low=0.4, high=0.6),
            False,
            "not confirmed: in the experiment it saved 30 % [20, 40] of the step (predicted 50 %)",
        ),
        (
            Saving(value=0.01, low=-0.02, high=0.04),
            None,
            False,
            "not confirmed: in the experiment it saved 1 % [-2, 4] of the step",
        ),
        (None, None, True, "the saving can't be estimated from what was observed"),
    ],
)
def test_only_a_shown_saving_is_called_confirmed(
    measured: Saving | None, predicted: Saving | None, confirmed: bool, text: str
) -> None:
    finding = replace(profile_reports.findings()[0], measured=measured, predicted=predicted, confirmed=confirmed)

    assert words.effect_text(finding) == text


@pytest.mark.parametrize(
    ("experiment", "effect"),
    [
        ("tried, too noisy to tell: it was off", "predicted, too noisy to measure: saves 8 % [5, 10] of the step"),
        ("could not be tried, it took no hold", "predicted, not tried: saves 8 % [5, 10] of the step"),
        ("tried, but both went", "predicted, tried only with another cause: saves 8 % [5, 10] of the step"),
    ],
)
def test_an_experiment_that_measured_nothing_is_no_measurement(experiment: str, effect: str) -> None:
    predicted = Saving(value=0.08, low=0.05, high=0.1)
    finding = replace(profile_reports.findings()[0], measured=None, predicted=predicted, experiment=experiment)

    assert words.effect_text(finding) == effect
    assert words.experiment_text(finding) == experiment


def test_an_experiment_that_switched_nothing_off_shows_no_saving() -> None:
    void = replace(profile_reports.full().experiments[0], verdict="void")

    assert (words.gave_text(void), words.outcome_text(void)) == ("-", "could not be tried")


def test_refused_verdict_says_why_and_what_was_seen_instead() -> None:
    assert " ".join(" ".join(_lines(profile_reports.refused())[:3]).split()) == (
        "accel profile: no verdict: only 6 steps were seen, at least 20 are needed; the largest part of the step is "
        "backward (60 %) the script raised ValueError: no more data; this is what was observed before"
    )


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"verdict": "no verdict: too short", "refused": "too short", "evidence": None}, "no verdict: too short"),
        ({"verdict": "it looks input-bound", "refused": "too noisy"}, "no verdict: too noisy; it looks input-bound"),
        (
            {"refused": "two causes overlap", "findings": profile_reports.findings()},
            "no verdict: two causes overlap",
        ),
        ({"verdict": "", "refused": "", "steps": 1}, "no verdict: 1 step seen"),
    ],
)
def test_refused_verdict_repeats_nothing(fields: dict[str, object], text: str) -> None:
    assert words.verdict_text(profile_reports.refused(**fields)) == text


def _shown_tenths(report: ProfileReport) -> list[tuple[int, int]]:
    """Return (depth, tenths of a percent as shown) for each row of the tree."""
    return [(row.depth, round(10 * float(row.percent.removesuffix(" %")))) for row in words.tree(report.evidence)]


def _check_sums(rows: list[tuple[int, int]]) -> None:
    for place, (depth, tenths) in enumerate(rows):
        children = []
        for below, part in rows[place + 1 :]:
            if below <= depth:
                break
            if below == depth + 1:
                children.append(part)
        assert not children or sum(children) == tenths


def test_tree_shows_parts_that_add_up_to_100_percent() -> None:
    rows = _shown_tenths(profile_reports.full())
    assert rows[0] == (0, 1000)
    _check_sums(rows)
    lines = [line.split() for line in _lines(profile_reports.full())]
    assert ["step", "212", "100.0", "%", "█" * 12] in lines
    assert ["data", "143", "67.4", "%", "█" * 8, "waiting", "for", "the", "next", "batch"] in lines
    assert "0.4 % of the wall time belongs to no phase" in _lines(profile_reports.full())


@given(parts=st.lists(st.lists(st.floats(0, 10), max_size=6), min_size=1, max_size=8))
def test_shares_that_add_up_are_shown_adding_up(parts: list[list[float]]) -> None:
    whole = sum(map(sum, parts))
    if whole <= 1e-6:
        return
    children = [
        Node(
            name="part", ms=sum(ms), share=sum(ms) / whole, children=[Node(name="x", ms=v, share=v / whole) for v in ms]
        )
        for ms in parts
    ]
    rows = _shown_tenths(ProfileReport(evidence=Node(name="step", ms=whole, share=1.0, children=children)))
    assert rows[0] == (0, 1000)
    _check_sums([row for row in rows if row[0] < 2])
    assert all(tenths >= 0 for _, tenths in rows)


def test_shares_that_do_not_add_up_are_shown_as_they_are() -> None:
    half = Node(name="half", ms=5.0, share=0.5)
    rows = words.tree(Node(name="step", ms=10.0, share=1.0, children=[half]))
    assert [(row.name, row.percent) for row in rows] == [("step", "100.0 %"), ("half", "50 %")]


def test_deep_tree_needs_no_deep_stack() -> None:
    root = Node(name="bottom", ms=1.0, share=1.0)
    for _ in range(1500):  # Python stops at 1,000 calls
        root = Node(name="part", ms=1.0, share=1.0, children=[root])
    assert [row.percent for row in words.tree(root)] == ["100.0 %"] * 1501
    assert render(ProfileReport(evidence=root), width=80, color=False)


def test_experiments_say_what_was_done_and_what_came_out() -> None:
    lines = _lines(profile_reports.full())
    row = next(line for line in lines if line.startswith("batch held"))
    assert row.split() == ["batch", "held", "213", "→", "70.1", "67", "%", "[64,", "70]", "8", "helps"]
    assert "trained on one batch that was held in memory" in " ".join(" ".join(lines).split())
    for outcome in ("too noisy to tell", "does not help"):
        assert any(line.endswith(outcome) for line in lines)


def test_ranks_name_the_straggler() -> None:
    lines = [line.split() for line in _lines(profile_reports.full())]
    assert ["0", "node-0", "212", "143", "21.4", "38.6", "9.2", "30/2/68"] in lines
    assert ["1", "straggler", "node-0", "232", "163", "21.4", "38.6", "9.2", "30/2/68"] in lines


def test_one_rank_needs_no_table_of_ranks() -> None:
    assert "ranks: ms per step" not in _lines(profile_reports.full(ranks=[profile_reports.rank(0)]))


def test_of_many_ranks_the_slowest_are_shown() -> None:
    lines = _lines(profile_reports.wide(ranks=64))
    assert "… 48 faster ranks are in the JSON report" in lines
    assert any(line.startswith("17 straggler") for line in lines)
    assert any(line.startswith("63 ") for line in lines)
    assert not any(line.startswith("0 ") and "node-0" in line for line in lines)


def test_lines_name_file_phase_and_source() -> None:
    lines = _lines(profile_reports.full())
    place = next(n for n, line in enumerate(lines) if "train.py:88" in line)
    assert lines[place].split() == ["data", "97", "%", "58.9", "99", "%", "train.py:88", "(next", "batch)"]
    assert lines[place + 1] == "    for images, labels in loader:"


def test_operators_are_held_against_the_roof() -> None:
    lines = [line.split() for line in _lines(profile_reports.full())]
    # 57.8 FLOP a byte × 2,300 GB/s is below both matrix products; 2,210 of 2,300 GB/s.
    assert ["aten::convolution_backward", "matmul", "53", "18.4", "32", "%", "31,200", "-", "23", "%"] in lines
    assert ["aten::threshold_backward", "elementwise", "49", "3.1", "5", "%", "-", "2,210", "96", "%"] in lines
    text = " ".join(" ".join(_lines(profile_reports.full())).split())
    assert (
        "large matrix products reach float32 61,000 GFLOP/s, bfloat16 248,000 GFLOP/s; a large copy 2,300 GB/s" in text
    )
    assert "* a call is so short that launching it costs more than doing it" in _lines(profile_reports.full())


@pytest.mark.parametrize(
    ("gflops", "gb_per_s", "intensity", "share"),
    [
        (50.0, None, 100.0, 0.5),  # under the level roof
        (50.0, None, 5.0, 1.0),  # under the slope: 5 FLOP a byte × 10 GB/s
        (None, 5.0, None, 0.5),
        (50.0, None, None, None),
        (None, None, None, None),
        (50.0, None, 0.0, None),
    ],
)
def test_share_of_the_roof(
    gflops: float | None, gb_per_s: float | None, intensity: float | None, share: float | None
) -> None:
    op = OpTime(name="op", calls=1.0, ms=1.0, share=1.0, gflops=gflops, gb_per_s=gb_per_s, intensity=intensity)
    assert words.roof_share(op, Roofline(gflops={"float32": 100.0}, gb_per_s=10.0)) == share
    assert words.roof_share(op, None) is None


def test_kernel_name_of_a_whole_template_is_cut() -> None:
    op = replace(profile_reports.ops()[0], name="void at::native::vectorized_elementwise_kernel<4, at::native::" * 20)
    line = next(line for line in _lines(profile_reports.full(ops=[op])) if line.startswith("void at::"))
    assert line.split("  ")[0].endswith("…")


def test_gpus_host_unseen_and_origin_are_shown() -> None:
    text = " ".join(" ".join(_lines(profile_reports.full())).split())
    for words_ in (
        "0 NVIDIA A100-SXM4-80GB: busy 31 %, memory 11.4 of 79.3 GiB, power 141 of 400 W, clock 1,410 of 1,410 MHz",
        "throttled software thermal slowdown",
        "training thread: 31 % on a core, 2 % waiting for a core, 67 % asleep",
        "worker 2: 13 % on a core",
        "other processes: kept 0.4 cores busy",
        "- DDP's buckets: the run was shorter than their second rebuild",
        "machine: cuda (NVIDIA A100-SXM4-80GB), 16 cores, 8 threads",
        "command: accel profile train.py --epochs 1",
        "script: completed trace: profile.trace.json.gz",
    ):
        assert words_ in text


def test_report_without_anything_renders() -> None:
    assert _lines(ProfileReport()) == [
        "accel profile: no verdict: 0 steps seen",
        "0 steps",
        "",
        "where and how",
        "machine: device not known",
        "script: completed",
    ]


@pytest.mark.parametrize("width", [60, 80, 100])
def test_narrow_page_loses_no_number(width: int) -> None:
    shown = " ".join(" ".join(_lines(profile_reports.full(), width)).split())
    for number in ("67 % [64, 70]", "213 → 70.1", "67.4 %", "31,200", "23 %", "30/2/68", "58.9"):
        assert number in shown


def test_markup_is_shown_literally_and_escapes_are_stripped() -> None:
    text = render(profile_reports.hostile("[red]x[/]\x1b[31m"), width=100, color=False)
    assert text.startswith("accel profile: [red]x[/][31m\n")


@settings(deadline=None)  # the machine may be busy
@given(
    text=st.one_of(st.sampled_from(HOSTILE), st.text(st.characters(), max_size=80)),
    number=st.floats(),
    width=st.integers(20, 300),
)
@example(text="x", number=1e308, width=100)
@example(text="x", number=-0.0, width=60)
def test_no_text_and_no_number_breaks_the_width(text: str, number: float, width: int) -> None:
    page = render(profile_reports.hostile(text, number), width=width, color=False)
    assert "\x1b" not in page
    page.encode("utf-8")
    for line in page.split("\n"):
        assert cell_len(line) <= min(width, 100)
        assert not {unicodedata.category(char) for char in line} & {"Cc", "Cf", "Cs", "Zl", "Zp"}


@pytest.mark.parametrize("make", ["full", "refused", "hostile", "wide"])
def test_report_looks_the_same_after_its_json(make: str) -> None:
    report: ProfileReport = getattr(profile_reports, make)()
    assert json.loads(report.to_json())["kind"] == "profile"
    assert _lines(from_json(report.to_json())) == _lines(report)


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.674, "67 %"), (0.0, "0 %"), (0.004, "0.4 %"), (-0.002, "-0.2 %"), (0.0099, "1 %"), (1.0, "100 %"), (None, "-")],
)
def test_percent(share: float | None, text: str) -> None:
    assert words.percent_text(share) == text
    assert words.percent_text(float("nan")) == "-"
