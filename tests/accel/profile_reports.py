"""Profile reports to render: a realistic one, a refused one, one with nothing in it, and one that means harm."""

from __future__ import annotations

import random
from typing import Any

from accel.profiler.evidence import GpuShare, LineTime, OpTime, Roofline, SyncPoint, ThreadShare
from accel.profiler.phases import PHASES
from accel.profiler.report import Experiment, Finding, HostFacts, Node, ProfileReport, RankRow, Saving, StepRow
from tests.accel.hostile import filled

PHASES_MS = {
    "data": 143.2,
    "copy": 1.9,
    "host": 0.8,
    "forward": 21.4,
    "loss": 1.1,
    "backward": 38.6,
    "optimizer": 4.2,
    "outside": 1.2,
}
"""Phase → ms of the full report; they add up to its step."""

HELD = "trained on one batch that was held in memory"
"""What the experiment did that belongs to the first finding."""

STEP_MS = sum(PHASES_MS.values())


def node(name: str, ms: float, *children: Node, note: str = "", whole: float = STEP_MS) -> Node:
    return Node(name=name, ms=ms, share=ms / whole, note=note, children=list(children))


def evidence() -> Node:
    return node(
        "step",
        STEP_MS,
        node(
            "data",
            143.2,
            node("storage reads", 120.1, note="workers asleep in read(), 84 % of the wait"),
            node("decoding", 18.3, note="workers on a core"),
            node("collate", 4.8),
            note="waiting for the next batch",
        ),
        node("copy", 1.9),
        node("host", 0.8),
        node("forward", 21.4, node("matmul", 14.9), node("elementwise", 5.2), node("launching", 1.3)),
        node("loss", 1.1),
        node("backward", 38.6, node("matmul", 28.0), node("elementwise", 10.6)),
        node("optimizer", 4.2, note="foreach"),
        node("outside", 1.2),
    )


def findings() -> list[Finding]:
    storage = Finding(
        cause="input.storage",
        bottleneck="input",
        title="the loop waits for files that are read one by one from slow storage",
        why=[
            "143 of 212 ms per step pass waiting for the next batch",
            "both loader workers are asleep in read() for 84 % of that time, so more processor time would not help",
            "the GPU ran a kernel in 31 % of the traced window",
        ],
        remedy="read ahead with more workers (4), or pack the files into shards",
        strategy="loader_workers",
        share=0.674,
        predicted=Saving(value=0.66, low=0.6, high=0.674),
        measured=Saving(value=0.67, low=0.64, high=0.7),
        confirmed=True,
        experiment=HELD,
    )
    straggler = Finding(
        cause="straggler.input",
        bottleneck="straggler",
        title="rank 1 holds rank 0 back",
        why=["rank 1 needs 14 % longer for its batches than rank 0"],
        remedy="move rank 1's part of the data to storage as fast as rank 0's",
        share=0.08,
        predicted=Saving(value=0.08, low=0.05, high=0.1),
        experiment="ranks can't trade their storage",
    )
    return [storage, straggler]


def experiments() -> list[Experiment]:
    return [
        Experiment(
            name="batch held",
            what=HELD,
            before_ms=212.6,
            after_ms=70.1,
            saving=Saving(value=0.67, low=0.64, high=0.7),
            pairs=8,
            verdict="keep",
            changes_learning=True,
        ),
        Experiment(
            name="bf16 autocast",
            what="ran forward under autocast",
            before_ms=212.1,
            after_ms=209.4,
            saving=Saving(value=0.013, low=-0.02, high=0.04),
            pairs=36,
            verdict="inconclusive",
        ),
        Experiment(
            name="fused optimizer",
            what="updated all tensors in one kernel",
            before_ms=211.9,
            after_ms=212.4,
            saving=Saving(value=-0.002, low=-0.006, high=0.002),
            pairs=5,
            verdict="drop",
        ),
    ]


def rank(number: int, slower: float = 1.0, *, straggler: bool = False) -> RankRow:
    phases = {name: ms * (slower if name == "data" else 1.0) for name, ms in PHASES_MS.items()}
    return RankRow(
        rank=number,
        host=f"node-{number // 8}",
        steps=412,
        step_ms=sum(phases.values()),
        phases_ms=phases,
        thread=ThreadShare(run=0.3, wait=0.02, blocked=0.68),
        straggler=straggler,
    )


def timeline(steps: int = 120) -> list[StepRow]:
    """Make steps that vary as real ones do, with one checkpoint among them."""
    chance = random.Random(7)
    rows = []
    for step in range(steps):
        phases = {name: ms * chance.lognormvariate(0, 0.08) for name, ms in PHASES_MS.items()}
        if step % 8 == 0:
            phases["data"] *= 1.7
        if step == 77:
            phases["outside"] += 2600.0
        rows.append(StepRow(step=290 + step, ms=sum(phases.values()), phases_ms=phases))
    return rows


def lines() -> list[LineTime]:
    return [
        LineTime(
            phase="data",
            file="train.py",
            line=88,
            source="    for images, labels in loader:",
            seconds=58.9,
            share=0.97,
            blocked=0.99,
            tags=["next batch"],
        ),
        LineTime(
            phase="data",
            file="datasets/folder.py",
            line=41,
            source="        with open(path, 'rb') as file:",
            seconds=1.8,
            share=0.03,
            blocked=0.9,
            tags=["read"],
        ),
        LineTime(
            phase="outside",
            file="train.py",
            line=104,
            source="    torch.save(model.state_dict(), 'last.pt')",
            seconds=2.6,
            share=0.84,
            blocked=0.4,
            tags=["checkpoint"],
        ),
    ]


def ops() -> list[OpTime]:
    rows = [
        # name, calls, ms, share, kind, small, GFLOP/s, GB/s, FLOP per byte
        ("aten::convolution_backward", 53.0, 18.4, 0.32, "matmul", False, 31200.0, None, 57.8),
        ("aten::cudnn_convolution", 53.0, 11.6, 0.2, "matmul", False, 27800.0, None, 45.6),
        ("aten::cudnn_batch_norm", 53.0, 6.1, 0.105, "elementwise", False, 410.0, 1650.0, 0.25),
        ("aten::native_batch_norm_backward", 53.0, 5.9, 0.1, "elementwise", False, 520.0, 1580.0, 0.33),
        ("aten::threshold_backward", 49.0, 3.1, 0.053, "elementwise", False, None, 2210.0, None),
        ("aten::add_", 214.0, 1.4, 0.024, "elementwise", True, None, 148.0, None),
        ("aten::addmm", 1.0, 0.4, 0.007, "matmul", False, 9400.0, None, 117.0),
        ("aten::_foreach_addcdiv_", 12.0, 0.9, 0.015, "other", False, None, None, None),
    ]
    names = ("name", "calls", "ms", "share", "kind", "small", "gflops", "gb_per_s", "intensity")
    return [OpTime(**dict(zip(names, row, strict=True))) for row in rows]  # type: ignore[arg-type]


def gpus() -> list[GpuShare]:
    return [
        GpuShare(
            index=0,
            name="NVIDIA A100-SXM4-80GB",
            utilisation=0.31,
            memory_used_gib=11.4,
            memory_total_gib=79.3,
            power_w=141.0,
            power_limit_w=400.0,
            clock_mhz=1410.0,
            clock_max_mhz=1410.0,
            pcie_rx_mb_per_s=812.0,
            pcie_tx_mb_per_s=97.0,
        ),
        GpuShare(
            index=1,
            name="NVIDIA A100-SXM4-80GB",
            utilisation=0.28,
            memory_used_gib=11.4,
            memory_total_gib=79.3,
            power_w=139.0,
            power_limit_w=400.0,
            throttled=["software thermal slowdown"],
        ),
    ]


def host() -> HostFacts:
    return HostFacts(
        cores=16,
        threads=8,
        device="cuda (NVIDIA A100-SXM4-80GB)",
        platform="Linux 6.1 x86_64",
        python="3.11.9",
        torch="2.13.0",
        accel="0.1.0",
        foreign_cores=0.4,
        thread=ThreadShare(run=0.31, wait=0.02, blocked=0.67),
        workers=[ThreadShare(run=0.14, wait=0.02, blocked=0.84), ThreadShare(run=0.13, wait=0.02, blocked=0.85)],
        loader="DataLoader, 2 workers, not pinned",
        optimizer="AdamW, 161 tensors, foreach",
        model="ResNet, 25,557,032 parameters",
    )


def full(**fields: Any) -> ProfileReport:
    """Make the report of a run that waits for its storage: confirmed by experiment, two ranks, two GPUs."""
    base: dict[str, Any] = {
        "verdict": "input-bound: reading files takes 67 % of the step (input.storage, confirmed)",
        "bottleneck": "input",
        "findings": findings(),
        "next": [
            "give the DataLoader 4 workers, or let accel.optimize choose: strategy loader_workers",
            "then profile again: the backward pass is next, 18 % of the step",
        ],
        "evidence": evidence(),
        "unattributed": 0.004,
        "steps": 412,
        "step_ms": STEP_MS,
        "samples_per_s": 302.0,
        "wall_s": 88.1,
        "experiments": experiments(),
        "ranks": [rank(0), rank(1, 1.14, straggler=True)],
        "timeline": timeline(),
        "lines": lines(),
        "ops": ops(),
        "syncs": [SyncPoint(name="aten::item", file="train.py", line=97, calls=1.0, ms=2.4)],
        "roofline": Roofline(gflops={"float32": 61000.0, "bfloat16": 248000.0}, gb_per_s=2300.0),
        "gpus": gpus(),
        "host": host(),
        "trace_file": "profile.trace.json.gz",
        "unseen": ["DDP's buckets: the run was shorter than their second rebuild"],
        "command": "accel profile train.py --epochs 1",
        "started": "2031-05-04T10:20:30+00:00",
    }
    return ProfileReport(**{**base, **fields})


def refused(**fields: Any) -> ProfileReport:
    """Make the report of a run that was too short to judge."""
    base: dict[str, Any] = {
        "refused": "only 6 steps were seen, at least 20 are needed",
        "evidence": node("step", 10.0, node("forward", 4.0, whole=10.0), node("backward", 6.0, whole=10.0), whole=10.0),
        "steps": 6,
        "step_ms": 10.0,
        "wall_s": 0.1,
        "next": ["let the script run for longer: accel profile train.py --steps 200"],
        "ended": "raised ValueError: no more data",
    }
    return ProfileReport(**{**base, **fields})


def hostile(*text_and_number: Any) -> ProfileReport:
    """Make a report that means harm; see `filled`."""
    return filled(ProfileReport, *text_and_number)


def wide(ranks: int = 64, steps: int = 120) -> ProfileReport:
    """Make a report of many ranks, every phase and very long names."""
    name = "a_very_long_name_of_something_" * 8
    phases = dict.fromkeys(PHASES, 3.0)
    return full(
        verdict=f"input.storage: rank 17 on {name} is late",
        ranks=[rank(n, 1.3 if n == 17 else 1.0 + n / 1000, straggler=n == 17) for n in range(ranks)],
        timeline=[StepRow(step=step, ms=30.0, phases_ms=phases) for step in range(steps)],
        ops=[OpTime(name=name, calls=1.0, ms=1.0, share=0.08, gflops=float(n + 1), intensity=2.0) for n in range(12)],
        lines=[LineTime(phase="data", file=name, line=1, source=name, seconds=1.0, share=1.0)],
    )
