"""What to do after a report: for scripts and coding agents, in its JSON and as tools."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from click import Context

from accel import Report
from accel.commands import cli
from accel.commands import mcp as served
from accel.profiler.report import Finding, ProfileReport, Saving
from accel.report.next_step import after_profile, after_run
from accel.report.report import StrategyRow
from tests import warm
from tests.accel.profiled import script

SKILL = Path(__file__).parents[2] / "examples" / "skill" / "SKILL.md"


def profiled(**fields: Any) -> ProfileReport:
    return ProfileReport(command="accel profile 'my train.py' --lr 3", **fields)


def finding(strategy: str = "", saving: float | None = None) -> Finding:
    measured = None if saving is None else Saving(value=saving, low=saving - 0.1, high=saving + 0.1)
    return Finding(
        cause="input.collate", bottleneck="input", title="", why=[], remedy="collate less", share=0.5,
        strategy=strategy, measured=measured,
    )  # fmt: skip


def test_a_cause_that_a_strategy_treats_is_a_command_with_gain_and_risk() -> None:
    step = after_profile(profiled(findings=[finding("loader_workers", 0.5)]))
    assert step.command == "accel run 'my train.py' --lr 3"
    assert (step.gain, step.gain_low, step.gain_high) == pytest.approx((2.0, 1 / 0.6, 2.5))
    assert step.risk == "none: the same bits"
    assert "bfloat16" in after_profile(profiled(findings=[finding("autocast_bf16", 0.5)])).risk


def test_a_cause_that_takes_a_change_of_the_script_has_no_command() -> None:
    step = after_profile(profiled(findings=[finding(saving=1.0)]))
    assert (step.action, step.command, step.risk) == ("collate less", "", "that of changing the script")
    assert step.gain is None and step.gain_high is None and step.gain_low == pytest.approx(10)
    assert after_profile(profiled(findings=[finding()])).gain is None


def test_without_a_verdict_or_a_cause() -> None:
    assert after_profile(profiled(refused="too few steps")).command == "accel profile 'my train.py' --lr 3"
    assert after_profile(profiled()).command == "accel run 'my train.py' --lr 3"


def row(status: Any, exactness: str) -> StrategyRow:
    return StrategyRow(name="x", summary="", treats=[], exactness=exactness, status=status)


@pytest.mark.parametrize(
    ("report", "action", "risk"),
    [
        (Report(state="interrupted"), "let the search end", "only measures"),
        (Report(state="done", rows=[row("kept", "exact"), row("kept", "reduced")]), "keep the plan", "bfloat16"),
        (Report(state="done", rows=[row("not allowed", "reduced")]), 'allow="reduced"', "bfloat16"),
        (Report(state="done", allow="reduced", rows=[row("undone", "exact")]), "accel profile", "only measures"),
    ],
)
def test_after_a_run(report: Report, action: str, risk: str) -> None:
    step = after_run(report)
    assert action in step.action and risk in step.risk


def test_reports_on_disk_have_it_and_are_read_again(tmp_path: Path) -> None:
    report = Report(state="done", rows=[row("kept", "exact")], speedup=1.5, speedup_low=1.4, speedup_high=1.6)
    report.save(tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text())["next_step"]["gain"] == 1.5
    assert Report.load(tmp_path / "report.json").next_step == after_run(report)


def test_the_tools_of_a_coding_agent(tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    server = served.server()
    tools = {tool.name: tool for tool in asyncio.run(server.list_tools())}
    assert set(tools) == {"profile", "optimize", "explain", "compare"}
    assert all(tool.description for tool in tools.values())
    for name, ms in (("before", 4.0), ("after", 5.0)):
        Report(state="done", model="Net", plain_ms=8.0, accel_ms=ms).save(tmp_path / f"{name}.json")
    assert "Net" in served.explain(str(tmp_path / "before.json"))
    assert "slower" in served.compare(str(tmp_path / "before.json"), str(tmp_path / "after.json"))


def test_a_script_that_is_profiled_by_an_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path, "\nfor epoch in range(2):\n    for x, y in loader:\n        step(x, y)\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Exception, match=r"there is no report; the script printed: .*'gone.py'"):
        served.profile("gone.py", [])
    monkeypatch.setattr(served, "_accel", lambda arguments, timeout_s: accel(tmp_path, arguments).stderr)
    found = served.profile("train.py", [])
    assert found["steps"] > 0 and found["next_step"]["action"]
    assert "accel: wrote" in found["printed"]


def test_the_skill_file_has_a_head_and_names_commands_options_and_fields_that_there_are() -> None:
    text = SKILL.read_text(encoding="utf-8")
    assert re.match(r"---\nname: accel\ndescription: .{40,1024}\n---\n\n# ", text)
    lines = re.findall(r"`accel (\w+)([^`]*)`", text)
    assert {name for name, _ in lines} == {"profile", "compare", "run", "doctor", "report", "mcp"}
    for name, rest in lines:
        command = cli.main.get_command(Context(cli.main), name)
        assert command is not None
        known = {option for parameter in command.params for option in parameter.opts}
        assert set(re.findall(r"--[\w-]+", rest.partition(".py")[0])) <= known
    fields = set(re.findall(r"`(\w+)`", text)) - {"action", "command", "gain", "risk"}
    assert {"verdict", "next_step", "speedup_low", "rows"} <= fields
    assert fields <= vars(ProfileReport()).keys() | vars(Report()).keys()


def accel(folder: Path, arguments: list[str]) -> CompletedProcess[str]:
    """Run a command in a process that has imported torch, where a fresh interpreter takes seconds for it."""
    return warm.run(["-m", "accel", *arguments], cwd=folder)
