"""`accel profile` on several ranks: one report, and experiments that all of them make at the same steps."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.accel.loops import QUIET
from tests.accel.profiled import causes, in_an_interpreter_of_its_own, profile_ranks, report, script

DISTRIBUTED = """
import torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
model = nn.parallel.DistributedDataParallel(model)
"""


def test_ranks_make_one_report(tmp_path: Path) -> None:
    script(
        tmp_path,
        DISTRIBUTED
        + """
for epoch in range(3):
    for x, y in loader:
        if rank == 1:
            time.sleep(0.01)
        step(x, y)
dist.destroy_process_group()
""",
    )
    first, second = profile_ranks(tmp_path, 2, "--no-confirm", "train.py")

    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    found = report(tmp_path)
    assert [row.rank for row in found.ranks] == [0, 1]
    assert "straggler.rank" in causes(found)
    assert [row.straggler for row in found.ranks] == [False, True]
    straggler: Any = next(f for f in found.findings if f.cause == "straggler.rank")
    assert "rank 1" in straggler.why[0]
    assert "in host" in straggler.why[1]


def test_a_terminated_rank_does_not_wait_long_for_one_that_was_killed(tmp_path: Path) -> None:
    """torchrun kills it 30 s after SIGTERM, which is as long as it waited: there was no report."""
    script(
        tmp_path,
        """
import os, signal
for number in range(60):
    x, y = next(iter(loader))
    step(x, y)
    if number == 50:
        if os.environ["RANK"] == "1":
            os._exit(1)
        os.kill(os.getpid(), signal.SIGTERM)
""",
    )
    shorter = QUIET + "from accel.commands import profile\nprofile._TERMINATED_S = 0.5\n"
    command = ["-m", "accel", "profile", "--no-confirm", "train.py"]
    began = time.monotonic()
    first, _ = warm.run_ranks(2, command, cwd=tmp_path, before=shorter)

    assert time.monotonic() - began < 25
    assert first.returncode == 143, first.stderr
    assert report(tmp_path).ended == "terminated"


@pytest.mark.slow
def test_torchrun_starts_ranks_that_make_one_report(tmp_path: Path) -> None:
    script(tmp_path, DISTRIBUTED + "\nfor x, y in loader:\n    step(x, y)\ndist.destroy_process_group()\n")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = in_an_interpreter_of_its_own(tmp_path, *launcher, "-m", "accel", "profile", "--no-confirm", "train.py")

    assert done.returncode == 0, done.stderr
    assert [row.rank for row in report(tmp_path).ranks] == [0, 1]


def test_ranks_agree_between_epochs_while_the_exchange_is_tried(tmp_path: Path) -> None:
    """What is saved there is the same on all ranks; the first rank alone evaluates, in the midst of an epoch too."""
    script(
        tmp_path,
        """
model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)], nn.Linear(256, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = TensorDataset(torch.randn(1600, 256), torch.zeros(1600, dtype=torch.long))
torch.manual_seed(int(__import__("os").environ["RANK"]))
loader, validation = DataLoader(data, batch_size=2, shuffle=True), DataLoader(data, batch_size=800)
"""
        + DISTRIBUTED
        + """
def evaluate():
    for x, y in validation:
        with torch.no_grad():
            model.module(x)

agree = []
for epoch in range(20):
    for number, (x, y) in enumerate(loader):
        if rank == 0 and number == 5:
            evaluate()
        step(x, y)
        if number == 9:
            break
    total = torch.stack([p.detach().double().sum() for p in model.parameters()])
    totals = [torch.empty_like(total) for _ in range(2)]
    dist.all_gather(totals, total)
    agree.append(torch.equal(*totals))
if rank == 0:
    print("ranks agree:", agree.count(True))
dist.destroy_process_group()
""",
    )
    first, second = profile_ranks(tmp_path, 2, "train.py")

    assert first.stdout == "ranks agree: 20\n", first.stderr + second.stderr
    (tried,) = report(tmp_path).experiments
    assert (tried.name, tried.changes_learning) == ("no gradient exchange", True)


HABITS = """
model = nn.Sequential(*[nn.Linear(128, 128) for _ in range(24)], nn.Linear(128, 2))

class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 2)

    def forward(self, x):
        return self.layer(x)[:, None].expand(-1, 400_000, -1)

width = 128
if cause == "communication.unused_search":
    model = Wide()
    width = 64
elif cause != "communication.small_buckets":
    width = 512
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(6)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = TensorDataset(torch.randn(1600, width), torch.zeros(1600, dtype=torch.long))
loader = DataLoader(data, batch_size=8)
import torch.distributed as dist
dist.init_process_group("gloo")
options = {
    "communication.small_buckets": {"bucket_cap_mb": 0.01},
    "communication.unused_search": {"find_unused_parameters": True},
}
model = nn.parallel.DistributedDataParallel(model, **(options.get(cause, {}) if planted else {}))
for x, y in loader:
    micro_steps = 1 if cause in options or cause.startswith("straggler") else 3
    for micro in range(micro_steps):
        is_last = micro == micro_steps - 1
        model.require_backward_grad_sync = is_last
        if planted and cause == "communication.inverted_no_sync":
            model.require_backward_grad_sync = not is_last
        elif planted and cause == "communication.each_micro_step":
            model.require_backward_grad_sync = True
        outputs = model(x)
        (outputs.sum() / 400_000 if width == 64 else outputs.square().mean()).backward()
    optimizer.step()
    optimizer.zero_grad()
    if cause == "straggler.evaluation" and planted and dist.get_rank() == 0:
        model.eval()
        with torch.no_grad():
            for _ in range(10):
                model(x)
        model.train()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("planted", [True, False])
@pytest.mark.parametrize(
    ("cause", "experiment"),
    [
        ("communication.small_buckets", "larger buckets"),
        ("communication.unused_search", "no search"),
        ("communication.each_micro_step", "one exchange"),
        ("communication.inverted_no_sync", ""),
        ("straggler.evaluation", ""),
    ],
)
def test_habits_under_ddp_are_named_where_they_are(tmp_path: Path, cause: str, experiment: str, planted: bool) -> None:
    script(tmp_path, f"cause, planted = {cause!r}, {planted}\n" + HABITS)
    first, second = profile_ranks(tmp_path, 2, "train.py")

    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    found = report(tmp_path)
    tried = [each.name for each in found.experiments]
    if planted:
        assert cause in causes(found), found
        assert not experiment or experiment in tried
    else:
        assert cause not in [*causes(found), *(each.cause for each in found.borderline)], found
        assert not experiment or experiment not in tried


PUT_OFF = """
from tests.process_group import exchange, parallel

dist.init_process_group("gloo")
model = parallel(nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]), kind)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
updates = 0
for number, x in enumerate(DataLoader(torch.randn(1440, 64), batch_size=8)):
    is_last = number % 3 == 2
    exchange(model, kind, is_last)
    model(x).square().mean().backward()
    if is_last:
        optimizer.step()
        optimizer.zero_grad()
        updates += 1
print("updates:", updates)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("kind", ["fsdp2", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("ddp", "hsdp"))])
def test_micro_steps_whose_exchange_is_put_off_are_one_step(tmp_path: Path, kind: str) -> None:
    script(tmp_path, f"import torch.distributed as dist\nkind = {kind!r}\n" + PUT_OFF)
    first, second = profile_ranks(tmp_path, 2, "--no-confirm", "train.py")

    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    found = report(tmp_path)
    assert "updates: 60" in first.stdout
    assert 30 < found.steps <= 60
    named = [*causes(found), *(each.cause for each in found.borderline)]
    assert not {"communication.each_micro_step", "communication.inverted_no_sync"}.intersection(named)
