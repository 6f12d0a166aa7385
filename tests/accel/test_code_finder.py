"""Slow habits in source: what is found, what is left alone, and the command around it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from accel.code.finder import HABITS, find, search
from accel.commands.cli import main

ROOT = Path(__file__).parents[2]


def habits(body: str, file: str = "head.py") -> list[str]:
    return [finding.habit for finding in find(f"import torch\n{body}\n", file)]


@pytest.mark.parametrize(
    "body",
    [
        "t = bbox_targets[range(num_points), min_dist_inds]",
        "t = self.targets[range(n), idx]",
        "t = x[list(range(n)), idx]",
        "t = x[tuple(range(n)), idx]",
        "t = x[np.arange(n), idx]",
        "t = x[numpy.arange(n), idx]",
        "t = x[[i for i in range(n)], idx]",
        "t = x[:, range(n), idx]",
        "t = scores.sigmoid()[range(n), labels]",
        "def f(x, idx):\n    return x[range(len(x)), idx]",
    ],
)
def test_index_made_on_the_host_is_found(body: str) -> None:
    assert habits(body) == ["host-index"]


@pytest.mark.parametrize(
    "body",
    [
        "t = x[torch.arange(n), idx]",
        "t = x[rows, idx]",
        "t = x[range(n)]",  # one index alone: a slice that somebody wrote at length
        "t = x[range(n), :]",
        "t = x[range(n), 0]",
        "t = [range(3), 1][0]",
        "t = {'a': 1}['a']",
        "t = [x for x in range(3)]",
        "x[range(n), idx] = 0.0",
        "t = table.loc[range(n), columns]",
        "x = np.zeros((n, 3))\nt = x[np.arange(n), idx]",
        "idx = scores.cpu().numpy()\nt = x[np.arange(n), idx]",
        "t = x[np.arange(n), np.argmax(scores, 1)]",
        "def f(x: dict[range, int]) -> None: ...",
    ],
)
def test_ordinary_python_and_numpy_are_left_alone(body: str) -> None:
    assert habits(body) == []


@pytest.mark.parametrize(
    ("body", "habit"),
    [
        ("for gt in gts:\n    total += loss.item()", "item-in-loop"),
        ("while loss.item() > 1:\n    step()", "item-in-loop"),
        ("ks = [k.item() for k in dynamic_ks]", "item-in-loop"),
        ("for gt in gts:\n    k = int(ious.sum())", "sync-in-loop"),
        ("for gt in gts:\n    k = float(torch.max(ious))", "sync-in-loop"),
        ("for gt in gts:\n    if bool(mask.any()):\n        pass", "sync-in-loop"),
        ("for image in batch:\n    n = len(mask.nonzero())", "sync-in-loop"),
        ("for image in batch:\n    torch.cuda.empty_cache()", "empty-cache-in-loop"),
    ],
)
def test_wait_in_a_loop_is_found(body: str, habit: str) -> None:
    assert habits(body) == [habit]


@pytest.mark.parametrize(
    "body",
    [
        "total = loss.item()",
        "for x in range(int(mask.sum())):\n    pass",  # asked once
        "for k, v in table.items():\n    print(k)",
        "for name in names:\n    n = len(name)",
        "for x in xs:\n    n = int(x)",  # may be any number
        "for x in xs:\n    n = int(np.max(x))",
        "for x in xs:\n    def f(loss):\n        return loss.item()",
        "for x in xs:\n    if done:\n        return x.item()",  # the loop ends here
        "for x in xs:\n    raise ValueError(int(x.sum()))",
        "for x in xs:\n    y = registry.item(x)",
        "torch.cuda.empty_cache()",
    ],
)
def test_what_waits_once_or_not_at_all_is_left_alone(body: str) -> None:
    body = "def outer():\n    " + body.replace("\n", "\n    ")
    assert habits(body) == []


@pytest.mark.parametrize(
    "index",
    ["mask", "pos_mask", "self.mask", "~ignore_mask", "labels >= 0", "(a > 0) & (b < n)", "valid_mask & (a != b)"],
)
def test_mask_in_a_loss_is_a_candidate_for_compaction(index: str) -> None:
    assert habits(f"def loss_by_feat(self, x):\n    return x[{index}]") == ["mask-index"]
    assert habits(f"t = x[{index}]", file="focal_loss.py") == ["mask-index"]
    assert habits(f"t = x[{index}]") == []


@pytest.mark.parametrize(
    "index", ["pos_inds", "0", "mask_id", "i + 1", "'mask'", "a in b", "unmasked", "mask, 0", "~index"]
)
def test_what_may_be_any_index_is_no_candidate(index: str) -> None:
    assert habits(f"def loss(x):\n    return x[{index}]") == []


def test_writing_through_a_mask_is_no_candidate() -> None:
    assert habits("def loss(x):\n    x[mask] = 0") == []


@pytest.mark.parametrize("source", ["t = x[range(n), idx]", "from .torch import x\nt = x[range(n), idx]", ""])
def test_files_without_torch_are_left_alone(source: str) -> None:
    assert find(source, "a.py") == []


@pytest.mark.parametrize("line", ["import torch.nn as nn", "from torch import nn", "from torch.nn import functional"])
def test_torch_is_known_by_every_import(line: str) -> None:
    assert len(find(f"def f():\n    {line}\nt = x[range(n), idx]", "a.py")) == 1


def test_finding_says_where_what_it_costs_and_what_to_write() -> None:
    (found,) = find("import torch\n\nif True:\n    t = x[range(n), idx]  # pick\n", "heads/fcos.py")
    assert (found.file, found.line, found.source) == ("heads/fcos.py", 4, "t = x[range(n), idx]  # pick")
    assert "6.3 ms of host time at 30,929 rows" in found.costs
    assert "0.1 ms with a tensor index" in found.costs
    assert "gather_rows(t, index)" in found.instead


@pytest.mark.parametrize("odd", ["\f", "\x1c", "\x85", "\u2028"])
def test_a_character_that_ends_no_line_in_python_ends_none_in_a_finding(odd: str) -> None:
    (finding,) = find(f"import torch  # a{odd}b\r\nt = x[range(n), idx]  # pick\n", "a.py")
    assert (finding.line, finding.source) == (2, "t = x[range(n), idx]  # pick")


def test_findings_are_in_order_and_not_doubled() -> None:
    body = "for x in xs:\n    for y in ys:\n        a, b = y.item(), y.item()\nt = x[range(n), idx]"
    assert [(f.line, f.habit) for f in find(f"import torch\n{body}", "a.py")] == [
        (4, "item-in-loop"),
        (5, "host-index"),
    ]


# Folders and the command

SLOW = "import torch\nt = x[range(n), idx]\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name in ("a.py", "deep/b.py", ".venv/c.py", ".git/d.py", "lib/site-packages/e.py", "__pycache__/f.py", "g.txt"):
        file = tmp_path / "project" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(SLOW, encoding="utf-8")
    return tmp_path / "project"


def _run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["doctor", "code", *map(str, arguments)])


def test_folder_is_walked_without_other_peoples_code(project: Path) -> None:
    found = search(project)
    assert [Path(finding.file).relative_to(project).as_posix() for finding in found.findings] == ["a.py", "deep/b.py"]
    assert found.files == 2
    assert found.unread == []


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"def f(:\n", "line 1: invalid syntax"),
        (b"import torch\nx = '\xff'\n", "utf-8"),
        (b"x = 0\0\n", "null bytes"),
        (b"# coding: klingon\n", "klingon"),
    ],
    ids=["syntax", "encoding", "null", "coding"],
)
def test_what_is_no_python_is_named_and_skipped(project: Path, content: bytes, reason: str) -> None:
    (project / "bad.py").write_bytes(content)
    result = _run(project)
    assert result.exit_code == 0
    assert "2 slow habits in 2 files" in result.stdout
    ((file, why),) = search(project).unread
    assert file.endswith("bad.py")
    assert reason in why


def test_what_cannot_be_read_is_named_and_skipped(project: Path) -> None:
    (project / "gone.py").symlink_to(project / "nothing")
    assert search(project).unread == [(str(project / "gone.py"), "No such file or directory")]


def test_odd_escapes_are_parsed_without_a_word() -> None:
    assert habits("pattern = '\\d'\nt = x[range(n), idx]") == ["host-index"]


def test_endless_nesting_is_skipped(project: Path) -> None:
    (project / "deep.py").write_text("import torch\nx = " + "-" * 100_000 + "1\n", encoding="utf-8")
    assert len(search(project).unread) == 1


def test_nothing_is_run(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(f"import torch\nopen({str(tmp_path / 'ran')!r}, 'w')\n", encoding="utf-8")
    assert _run(tmp_path).exit_code == 0
    assert not (tmp_path / "ran").exists()


def test_text_names_habit_place_cost_and_remedy(project: Path) -> None:
    text = " ".join(_run(project / "a.py").stdout.split())
    assert text.startswith("accel: 1 slow habit in 1 file host-index (1) costs: Python makes a list")
    assert "write: accel.kernels.gather_rows.gather_rows(t, index)" in text
    assert "a.py:2:" in text
    assert "t = x[range(n), idx]" in text


def test_no_habit_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import torch\n", encoding="utf-8")
    assert _run(tmp_path, "--fail").exit_code == 0
    assert _run(tmp_path).stdout == "accel: no slow habits in 1 file\n"


def test_exit_status_is_1_only_when_asked_for(project: Path) -> None:
    assert _run(project).exit_code == 0
    assert _run(project, "--fail").exit_code == 1


def test_json_holds_every_finding(project: Path, tmp_path: Path) -> None:
    target = tmp_path / "code.json"
    result = _run(project, "--json", target)
    assert result.stderr == f"wrote {target}\n"
    written = json.loads(target.read_text(encoding="utf-8"))
    assert written["schema"] == 1
    assert [finding["line"] for finding in written["findings"]] == [2, 2]
    assert written["findings"][0]["costs"] == HABITS["host-index"].costs


def test_place_that_cannot_be_written_is_one_line(project: Path) -> None:
    (project / "folder").mkdir()
    assert "is a directory" in _run(project, "--json", project / "folder").stderr
    result = _run(project, "--json", project / "a.py" / "x.json")
    assert result.exit_code == 2
    assert "--json must lie in a directory that exists" in result.stderr


def test_path_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    result = _run(tmp_path / "nothing")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: PATH must be a Python file or a folder")


def test_path_of_which_nothing_can_be_told_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for place in (tmp_path / ("x" * 300), tmp_path / "loop" / "a.py"):
        result = _run(place)
        assert result.exit_code == 2
        assert result.stderr.startswith("error: PATH must be ")


def test_command_loads_no_torch(project: Path) -> None:
    code = (
        "import sys; from accel.commands.cli import main; main(sys.argv[1:], standalone_mode=False);"
        "print('torch' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-c", code, "doctor", "code", str(project)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("False\n")


def test_numbers_that_torch_draws_on_the_cpu_are_no_finding() -> None:
    text = """
import torch
for _ in range(3):
    a = torch.randint(9, (1,)).item()
    b = torch.randint(9, (1,), device=d).item()
rates = [x.item() for x in torch.linspace(0, 1, 9, device="cpu")]
"""
    assert [finding.line for finding in find(text, "x.py")] == [5]


# -- what a kernel replaces --------------------------------------------------------------------------------------------

WINDOWS = """
class WindowAttention(nn.Module):
    def __init__(self, dim, window_size, heads):
        self.window_size = window_size
        self.relative_position_bias_table = nn.Parameter(torch.zeros(169, heads))
        self.rates = [rate.item() for rate in torch.linspace(0, 1, heads)]

    def forward(self, x, mask=None):
        q, k, v = self.qkv(x).unbind(2)
        scores = q @ k.transpose(-2, -1) + self.relative_position_bias_table[self.index]
        return self.softmax(scores) @ v
"""
COSINE = WINDOWS.replace("relative_position_bias_table", "relative_coords_table")
SIMOTA = """
class Head(nn.Module):
    def get_losses(self, images):
        for image in images:
            self.get_assignments(image)

    @torch.no_grad()
    def get_assignments(self, image):
        cost = functional.binary_cross_entropy(image.scores, image.truth, reduction="none").sum(-1)
        return self.match(cost, image.ious)

    def match(self, cost, ious):
        ks = ious.topk(10, dim=1).values.sum(1).int().clamp(min=1)
        for truth in range(len(ks)):
            _, chosen = torch.topk(cost[truth], k=ks[truth], largest=False)
        return chosen
"""


def placed(source: str, file: str = "model.py") -> list[tuple[str, str]]:
    return [(finding.habit, finding.source) for finding in find("import torch\n" + source, file)]


@pytest.mark.parametrize("source", [WINDOWS, COSINE, WINDOWS.replace("WindowAttention", "MySwinAttention")])
def test_attention_within_windows_is_named_with_its_kernel(source: str) -> None:
    (found,) = find("import torch\n" + source, "swin.py")

    assert found.habit == "window-attention"
    assert found.source.startswith("class ")
    assert "fuse_window_attention(model)" in found.instead


@pytest.mark.parametrize(
    "change",
    [("relative_position_bias_table", "bias"), ("softmax", "mlp"), ("Window", "Global"), ("forward", "attend")],
)
def test_other_attention_is_left_alone(change: tuple[str, str]) -> None:
    source = WINDOWS.replace("class WindowAttention", "class MyWindowAttention").replace(*change)
    assert [habit for habit, _ in placed(source) if habit == "window-attention"] == []


def test_the_functions_of_simota_are_named_with_what_takes_their_place() -> None:
    named = ["def get_assignments(self, image):", "def match(self, cost, ious):"]

    assert [line for habit, line in placed(SIMOTA) if habit == "simota-loop"] == named
    assert "patch_yolox_head(head)" in HABITS["simota-loop"].instead


def test_one_function_that_does_both_is_named() -> None:
    """As in losses that assign, match and weigh in one."""
    source = (
        "def build_targets(self, p, boxes):\n"
        "    for image in p:\n"
        "        cost = F.binary_cross_entropy_with_logits(y, truth).sum(-1)\n"
        "        for g in range(len(boxes)):\n"
        "            _, chosen = torch.topk(cost[g], k=ks[g].item(), largest=False)\n"
    )
    assert [habit for habit, _ in placed(source)].count("simota-loop") == 1


@pytest.mark.parametrize(
    "change",
    [
        ("image.truth", "soft_label"),  # another cost, which the kernel does not compute
        ("functional.binary_cross_entropy", "distance"),
        ("k=ks[truth]", "k=10"),
        ("torch.topk(cost[truth]", "pick(cost[truth]"),
    ],
)
def test_other_matching_is_left_alone(change: tuple[str, str]) -> None:
    assert [habit for habit, _ in placed(SIMOTA.replace(*change)) if habit == "simota-loop"] == []


# -- what a training step runs -----------------------------------------------------------------------------------------

TRAINING = """
def train_epoch(model, loader, optimizer):
    for step, batch in enumerate(loader):
        loss = model(batch)
        optimizer.zero_grad()
        loss.backward()
        clip(model)
        optimizer.step()
        HERE
    AFTER
"""
WAITS = "for p in things:\n        total += p.norm().item()"


def waits(source: str, file: str = "train.py") -> int:
    return sum(habit == "item-in-loop" for habit, _ in placed(source, file))


@pytest.mark.parametrize(
    ("here", "after", "found"),
    [
        ("total += loss.item()", "return total", 1),
        ("if step % 100 == 0:\n            print(loss.item())", "pass", 0),
        ("if step % 100 == 0:\n            pass\n        else:\n            total += loss.item()", "pass", 1),
        ("if done:\n            a = 1\n        elif step % 9 == 0:\n            print(loss.item())", "pass", 0),
        ("if step % 4 == 0:\n            optimizer.step()\n            total += loss.item()", "pass", 1),
        ("try:\n            go()\n        except RuntimeError:\n            print(loss.item())", "pass", 0),
        ("pass", "for batch in test_loader:\n        right += model(batch).sum().item()", 0),
    ],
)
def test_of_a_function_that_trains_its_steps_are_looked_at(here: str, after: str, found: int) -> None:
    assert waits(TRAINING.replace("HERE", here).replace("AFTER", after)) == found


@pytest.mark.parametrize(
    ("helper", "found"),
    [
        (f"def clip(model):\n    {WAITS}", 1),  # called in the step
        (f"def clip(model):\n    return clip_twice(model)\ndef clip_twice(model):\n    {WAITS}", 1),
        (f"def never_called(model):\n    {WAITS}", 0),
        (f"@torch.no_grad()\ndef clip(model):\n    {WAITS}", 1),  # no gradients, and a step runs it all the same
        (f"class Net(nn.Module):\n  def forward(self, x):\n    {WAITS}", 1),
        (f"class Net(nn.Module):\n  def __init__(self):\n    {WAITS}", 0),
        (
            f"class Net(nn.Module):\n  def forward(self, x):\n    self.head(x)\n  def head(self, x):\n    {WAITS}",
            1,
        ),
        (f"class MetricLogger:\n  def clip(self):\n    {WAITS}", 0),
        (f"class COCOEvaluator:\n  def clip(self):\n    {WAITS}", 0),
        (f"def clip(model):\n    model.eval()\n    {WAITS}", 0),
        (f"def validate(model):\n    {WAITS}", 0),
        (f"def box_loss(model):\n    {WAITS}", 1),
        (f"def log_likelihood_loss(model):\n    {WAITS}", 1),
    ],
)
def test_of_other_functions_those_that_a_step_runs_are_looked_at(helper: str, found: int) -> None:
    assert waits(TRAINING.replace("HERE", "pass").replace("AFTER", "pass") + helper) == found


def test_a_step_is_followed_from_file_to_file(tmp_path: Path) -> None:
    training = TRAINING.replace("HERE", "total += self.meter.update(loss)").replace("AFTER", "pass")
    (tmp_path / "engine.py").write_text("import torch\n" + training)
    (tmp_path / "tools.py").write_text(
        f"import torch\ndef clip(model):\n    {WAITS}\ndef export(model):\n    {WAITS}\n"
    )
    (tmp_path / "logger.py").write_text(f"import torch\nclass Board:\n  def update(self, loss):\n    {WAITS}\n")

    assert [(Path(f.file).name, f.line) for f in search(tmp_path).findings] == [("tools.py", 4)]
    # A file by itself shows no step: what no name rules out may be part of one.
    assert [f.line for f in search(tmp_path / "tools.py").findings] == [4]
    assert search(tmp_path / "logger.py").findings == []


@pytest.mark.parametrize("trains", ["loss.backward()", "optimizer.step()", "self.opt.step()", "scaler.step(optimizer)"])
@pytest.mark.parametrize("frame", ["for x in xs:\n    BODY", "while True:\n    for x in xs:\n        BODY"])
@pytest.mark.parametrize("kept_out", ["evaluate", "validate", "test_once", "predict", "log_images", "save", "Logger"])
def test_no_name_that_rules_out_hides_a_loop_that_trains(trains: str, frame: str, kept_out: str) -> None:
    """And each rules out a loop that does not: swept over ways to train, loops and names."""
    body = f"def {kept_out}(xs):\n    " + frame.replace("\n", "\n    ")
    indent = " " * (8 if frame.startswith("for") else 12)
    assert waits(body.replace("BODY", f"total += x.item()\n{indent}{trains}")) == 1
    assert waits(body.replace("BODY", "total += x.item()")) == 0
