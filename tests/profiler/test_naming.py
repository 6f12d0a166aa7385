"""From evidence to causes: each rule fires on its evidence, and none on a healthy run."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from accel.profiler import naming
from accel.profiler.conclusion.verdict import build_report
from accel.profiler.diagnose.causes import CAUSES
from accel.profiler.diagnose.findings import finding, saving
from accel.profiler.diagnose.rules import RULES
from accel.profiler.evidence import (
    Evidence,
    LineTime,
    LoaderFacts,
    OptimizerFacts,
    Roofline,
    SyncPoint,
    ThreadShare,
    TraceSummary,
    WorkerShare,
)
from accel.profiler.loop import facts
from accel.profiler.naming import WORTH_BESIDE, diagnose
from accel.profiler.phases import PHASES, Measurement
from accel.profiler.report import Saving

RUNNING = ThreadShare(run=0.98, wait=0.01, blocked=0.01)
ASLEEP = ThreadShare(run=0.04, wait=0.01, blocked=0.95)
LOADER = LoaderFacts(kind="DataLoader")
HEALTHY = {"data": 0.2, "forward": 3.0, "loss": 0.1, "backward": 6.0, "optimizer": 0.5, "outside": 0.1}


def steps(count: int = 100, noise: float = 0.02, stall_every: int = 0, stall: float = 0.0, **phases: float) -> Any:
    """Steps with these phases, ms."""
    dice = random.Random(1)
    made = []
    for number in range(count):
        held = {p: phases.get(p, 0.0) * 1e-3 * (1 + dice.gauss(0, noise)) for p in PHASES}
        if stall_every and number % stall_every == stall_every - 1:
            held["outside"] += stall * 1e-3
        made.append(Measurement(step=number, seconds=sum(held.values()), phases=held, samples=32))
    return made


def evidence(*, without: tuple[str, ...] = (), **given: Any) -> Evidence:
    phases = given.pop("phases", {})
    given.setdefault("steps", steps(**{**HEALTHY, **phases}))
    given.setdefault("loader", LOADER)
    given.setdefault("thread", RUNNING)
    return Evidence(cores=given.pop("cores", 8), threads=given.pop("threads", 8), **given)


def line(phase: str, seconds: float, *tags: str, source: str = "x", blocked: float = 0.0) -> LineTime:
    return LineTime(
        phase=phase,
        file="train.py",
        line=7,
        source=source,
        seconds=seconds,
        share=1.0,
        blocked=blocked,
        tags=list(tags),
    )


ITEM = SyncPoint(name="item", file="train.py", line=9, calls=1, ms=4)


def trace(**given: Any) -> TraceSummary:
    options: dict[str, Any] = {"small_share": 0.1, "matmul_share": 0.7, "elementwise_share": 0.2}
    return TraceSummary(steps=2, ops=[], ops_per_step=300, **{**options, **given})


COPY = replace(ITEM, name="to", copies=True)
LONG = trace(busy_ms=4.5, launch_ms=9, small_share=0.0)
EQUAL = Roofline(gflops={"float32": 100.0, "float64": 120.0}, gb_per_s=10.0)


def worker(share: ThreadShare) -> WorkerShare:
    return WorkerShare(pid=1, share=share)


def causes(found: Evidence) -> list[str]:
    return [finding.cause for finding in diagnose(found).findings]


def test_a_healthy_run_has_no_cause() -> None:
    found = diagnose(evidence(trace=trace()))

    assert (found.findings, found.refused) == ([], "")
    assert found.limits[0].value == "compute"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"phases": {"data": 20}, "data_thread": RUNNING}, "input.cpu"),
        ({"phases": {"data": 20}, "data_thread": ASLEEP}, "input.storage"),
        ({"phases": {"data": 20}, "data_thread": ThreadShare(run=0.52, wait=0.02, blocked=0.46)}, "input.storage"),
        ({"phases": {"data": 20}, "data_thread": RUNNING, "collate_share": 0.8}, "input.collate"),
        (
            {"phases": {"data": 20}, "loader": LoaderFacts(kind="DataLoader", workers=2), "workers": [worker(RUNNING)]},
            "input.workers",
        ),
        (
            {"phases": {"data": 20}, "loader": LoaderFacts(kind="DataLoader", workers=2), "workers": [worker(ASLEEP)]},
            "input.worker_storage",
        ),
        (
            {
                "phases": {"data": 20},
                "data_thread": RUNNING,
                "loader": LoaderFacts(kind="DataLoader", workers=2),
                "workers": [worker(ASLEEP)],
            },
            "input.handover",
        ),
        (
            {
                "phases": {"data": 0, "outside": 20},
                "loader": LoaderFacts(kind="own iterator"),
                "lines": [line("outside", 0.9, "next batch"), line("outside", 0.1)],
            },
            "input.iterator",
        ),
        ({"phases": {"outside": 15}, "lines": [line("outside", 1.0)]}, "outside.step"),
        ({"phases": {"evaluation": 15}}, "outside.evaluation"),
        ({"phases": {"optimizer": 8}, "optimizer": OptimizerFacts(name="Mine", tensors=3)}, "optimizer.update"),
        (
            {"phases": {"optimizer": 8}, "optimizer": OptimizerFacts(name="AdamW", tensors=300, multi_tensor=False)},
            "optimizer.per_parameter",
        ),
        ({"phases": {"host": 6}}, "host.step_code"),
        ({"phases": {"outside": 6}, "gc_share": 0.3}, "host.gc"),
        ({"anomaly_mode": True}, "compute.anomaly"),
        ({"dtype": "float64"}, "compute.float64"),
        ({"threads": 1}, "compute.threads"),
        ({"threads": 1, "cores": 2, "foreign_cores": 0.02}, "compute.threads"),
        ({"trace": trace(small_share=0.9)}, "launch.small_ops"),
        ({"trace": trace(elementwise_share=0.8)}, "memory.bound"),
        ({"world_size": 2, "ddp_wait_share": 0.4}, "communication.exposed"),
        ({"world_size": 2, "ddp_wait_share": 0.4, "exchanges": 4.0}, "communication.each_micro_step"),
        (
            {"world_size": 2, "ddp_wait_share": 0.4, "exchanges": 3.0, "leaves_out_last": True},
            "communication.inverted_no_sync",
        ),
        ({"world_size": 2, "ddp_wait_share": 0.4, "bucket_bytes": [2**18] * 8}, "communication.small_buckets"),
        ({"world_size": 2, "ddp_wait_share": 0.4, "bucket_bytes": [2**18] * 7}, "communication.exposed"),
        ({"world_size": 2, "ddp_wait_share": 0.4, "bucket_bytes": [2**20] * 99}, "communication.exposed"),
        ({"world_size": 2, "unused_search_share": 0.2}, "communication.unused_search"),
        ({"device": "cuda", "trace": trace(busy_ms=6, copy_ms=3)}, "transfer.pageable"),
        (
            {
                "device": "cuda",
                "trace": trace(busy_ms=6, read_ms=3, syncs=[ITEM]),
            },
            "sync.read",
        ),
        ({"device": "cuda", "trace": trace(busy_ms=6, launch_ms=5)}, "launch.small_ops"),
        ({"device": "cuda", "trace": LONG}, "launch.small_ops"),  # whatever its kernels take, of 15 µs each
    ],
)
def test_each_cause_is_named_from_its_evidence(given: dict[str, Any], expected: str) -> None:
    found = diagnose(evidence(**given))

    assert [finding.cause for finding in found.findings] == [expected]
    finding = found.findings[0]
    assert finding.title == CAUSES[expected].title
    assert finding.why
    assert finding.bottleneck == expected.split(".")[0]


@pytest.mark.parametrize(
    "given",
    [
        pytest.param({"trace": trace(busy_ms=9.8, read_ms=4, syncs=[ITEM])}, id="a read by a busy device is free"),
        pytest.param({"trace": trace(busy_ms=6, read_ms=3, syncs=[COPY])}, id="a wait of a copy is no read"),
        pytest.param({"trace": replace(LONG, ops_per_step=10)}, id="ten launches take no time"),
        pytest.param(
            {"dtype": "float64", "trace": trace(matmul_share=0.95), "roofline": EQUAL}, id="float64 that costs nothing"
        ),
    ],
)
def test_what_costs_a_gpu_nothing_is_no_cause(given: dict[str, Any]) -> None:
    assert causes(evidence(device="cuda", **given)) == []


def test_checkpoints_are_told_from_other_stalls() -> None:
    stalled = steps(**HEALTHY, stall_every=20, stall=200)

    assert causes(evidence(steps=stalled, lines=[line("outside", 1.0, "checkpoint")])) == ["outside.checkpoint"]
    assert causes(evidence(steps=stalled, lines=[line("outside", 1.0)])) == ["outside.periodic"]
    assert "every 20 steps" in diagnose(evidence(steps=stalled)).findings[0].why[0]


def test_a_start_of_epochs_is_not_the_ordinary_wait() -> None:
    slow = steps(**HEALTHY)
    for measured in slow[::10]:
        measured.first = True
        measured.phases["data"] += 0.2
        measured.seconds += 0.2

    assert causes(evidence(steps=slow, loader=LoaderFacts(kind="DataLoader", workers=2))) == ["input.epoch_start"]


@pytest.mark.parametrize(("every", "share"), [(1, 0.95), (10, 0.67)])
def test_without_workers_none_start_an_epoch(every: int, share: float) -> None:
    """One batch is the whole epoch, or the dataset fills a shuffle buffer first."""
    slow = steps(**HEALTHY)
    for measured in slow[::every]:
        measured.first = True
        measured.phases["data"] += 0.2
        measured.seconds += 0.2

    (found,) = diagnose(evidence(steps=slow, data_thread=RUNNING)).findings

    assert found.cause == "input.cpu"
    assert found.share == pytest.approx(share, abs=0.01)
    assert "workers" not in " ".join(found.why)


def test_a_device_idles_for_one_cause_at_a_time() -> None:
    """It has run dry by a read, and the loader is late then: that is the loader's, which stands in the phases."""
    seen = evidence(
        device="cuda",
        phases={"data": 4.0},
        data_thread=RUNNING,
        trace=trace(busy_ms=9, read_ms=4.2, launch_ms=1, syncs=[ITEM]),
    )
    found = diagnose(seen)
    assert ([f.cause for f in found.findings], found.refused) == (["input.cpu"], "")


def waiting(wait: SyncPoint, lines: list[LineTime]) -> list[str]:
    """Return why a loop is named that spends its time between two steps, and waits for the device there."""
    trace_of_it = trace(busy_ms=9, syncs=[wait])
    seen = evidence(device="cuda", phases={"outside": 5.0}, lines=lines, trace=trace_of_it, host_ms={"outside": 14.0})
    return diagnose(seen).findings[0].why


def test_lines_in_which_the_host_waits_for_a_gpu_are_not_where_the_time_goes() -> None:
    wait = SyncPoint(name="item", file="train.py", line=7, calls=1, ms=9)
    logs = replace(line("outside", 0.5, source="print"), line=8)
    why = waiting(wait, [line("outside", 0.9, source="loss.item()"), logs])
    assert "100% of it in train.py:8: print" in why


def test_a_wait_without_a_line_is_not_in_all_samples_without_one() -> None:
    wait = SyncPoint(name="item", file="", line=0, calls=1, ms=9)
    elsewhere = replace(line("outside", 0.5), file="", line=0)
    assert "50% of it in train.py:7: print" in waiting(wait, [line("outside", 0.5, source="print"), elsewhere])


@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize(("idle_ms", "share"), [(0.1, 0.0), (5.0, 0.33)])
def test_a_collection_that_a_gpu_hides_costs_nothing(traced: bool, idle_ms: float, share: float) -> None:
    """It took 10 of 60 ms of the host, which then waited for less long: 17 % were said to be saved without it."""
    seen = evidence(
        device="cuda",
        phases={"outside": idle_ms},
        gc_share=0.6,
        trace=trace(busy_ms=9.8) if traced else None,
        host_ms={"outside": 10.0},
    )
    named = {finding.cause: finding.share for finding in diagnose(seen).findings}
    assert named == ({"host.gc": pytest.approx(share, abs=0.04)} if share else {})


def test_a_quota_that_holds_the_run_up_is_no_neighbour() -> None:
    held = ThreadShare(run=0.5, wait=0.45, blocked=0.05)

    found = diagnose(evidence(thread=held, throttled=0.8)).findings
    assert [f.cause for f in found] == ["host.own_processes"]
    assert "the quota of 8 cores held this run up in 80% of its periods" in found[0].why
    assert causes(evidence(thread=held)) == ["host.oversubscribed"]
    assert causes(evidence(throttled=0.8)) == []  # held up for the last moment of a period


def test_too_few_steps_are_refused() -> None:
    found = diagnose(evidence(steps=steps(count=19, data=20)))

    assert found.refused == "19 steps were seen, 20 are needed"
    assert found.findings == []


@pytest.mark.parametrize(("phase", "cause"), [("outside", "outside.step"), ("host", "host.step_code")])
@pytest.mark.parametrize(("share", "is_cause"), [(0.115, False), (0.125, True)])
def test_a_share_above_what_is_borderline_makes_a_cause(phase: str, cause: str, share: float, is_cause: bool) -> None:
    rest = sum(ms for name, ms in HEALTHY.items() if name != phase)
    assert causes(evidence(phases={phase: rest * share / (1 - share)})) == ([cause] if is_cause else [])


def test_two_causes_of_one_size_are_refused_and_both_told() -> None:
    both = evidence(phases={"data": 20, "outside": 20}, data_thread=RUNNING)
    both.steps = steps(**{**HEALTHY, "data": 20, "outside": 20.35}, noise=0.05)  # the means drawn are equal

    found = diagnose(both)

    assert {finding.cause for finding in found.findings} == {"input.cpu", "outside.step"}
    assert found.refused.startswith("two causes overlap within noise: ")


def test_two_causes_of_clearly_different_size_are_ordered() -> None:
    found = diagnose(evidence(phases={"data": 30, "outside": 10}, data_thread=RUNNING))

    assert [finding.cause for finding in found.findings] == ["input.cpu", "outside.step"]
    assert found.refused == ""


@pytest.mark.parametrize(
    ("device", "float64", "products", "saved"),
    [
        ("cpu", 40.0, 0.5, 0.5),
        ("cpu", 70.0, 0.5, 0.3),
        ("cuda", 3.0, 1.0, 0.97),
        ("cuda", 3.0, 0.5, 0.735),
        ("cuda", 120.0, 0.5, 0.25),  # an H100 multiplies both alike
    ],
)
def test_double_precision_is_predicted_from_the_measured_roof(
    device: str, float64: float, products: float, saved: float
) -> None:
    """On a CPU, whose vectors hold twice as many float32, no more than half is saved; so it is of work on memory."""
    roof = Roofline(gflops={"float32": 100.0, "float64": float64}, gb_per_s=10.0)

    seen = evidence(device=device, dtype="float64", roofline=roof, trace=trace(matmul_share=products))
    found = diagnose(seen).findings

    finding = next(one for one in found if one.cause == "compute.float64")
    assert finding.predicted is not None
    assert finding.predicted.value == pytest.approx(saved * finding.share)


def test_step_code_is_not_predicted_to_save_what_the_collector_takes() -> None:
    found = diagnose(evidence(phases={"host": 60}, gc_share=0.5)).findings

    finding = next(f for f in found if f.cause == "host.step_code")
    assert finding.share == pytest.approx(0.36, abs=0.02)
    assert finding.predicted is not None
    assert finding.predicted.value == pytest.approx(finding.share)


def test_a_saving_has_an_interval_that_holds_it() -> None:
    found = saving(steps(data=5, forward=5, noise=0.2), lambda m: m.phases["data"])

    assert isinstance(found, Saving)
    assert 0 <= found.low < found.value < found.high <= 1
    assert found.value == pytest.approx(0.5, abs=0.05)


def test_workers_are_no_remedy_for_batches_that_cost_less_than_a_handover() -> None:
    cheap = diagnose(
        evidence(phases={"data": 0.1, "forward": 0.05, "backward": 0.05, "optimizer": 0.02}, data_thread=RUNNING)
    )
    dear = diagnose(evidence(phases={"data": 20}, data_thread=RUNNING))
    for found, strategy in ((cheap, ""), (dear, "loader_workers")):
        finding = next(f for f in found.findings if f.cause == "input.cpu")
        assert finding.strategy == strategy
        assert ("whole batches at once" in finding.remedy) == (strategy == "")


@pytest.mark.parametrize(
    ("kind", "named"),
    [("Muon", "optimizer.update"), ("LBFGS", "optimizer.update"), ("AdamW", "optimizer.per_parameter")],
)
def test_only_an_optimizer_that_has_another_path_is_to_take_it(kind: str, named: str) -> None:
    if not hasattr(torch.optim, kind):
        pytest.skip(f"this torch has no {kind}")
    made = getattr(torch.optim, kind)([nn.Parameter(torch.zeros(2, 2)) for _ in range(40)])
    found = diagnose(evidence(phases={"optimizer": 8}, optimizer=facts.of_optimizers([made])))
    assert [finding.cause for finding in found.findings] == [named]
    assert ("foreach=True" in found.findings[0].remedy) == (kind == "AdamW")


def held(run: float, wait: float, others: float, **given: Any) -> dict[str, Any]:
    thread = ThreadShare(run=run, wait=wait, blocked=1 - run - wait)
    return {"thread": thread, "foreign_cores": others, "cores": 2, "threads": 2, **given}


def ranks(number: int = 2, **given: Any) -> dict[str, Any]:
    return {"world_size": number, "local_world_size": number, **given}


STORED = {"phases": {"data": 60}, "data_thread": ASLEEP}
COMPUTED = {"phases": {"data": 60}, "data_thread": RUNNING}
WAITS = {"threads": 1, "ddp_wait_share": 0.6, **ranks()}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        # A script that seems input-bound on a machine that others hold is not blamed.
        (held(0.5, 0.45, 4.0, cores=8, threads=8, **COMPUTED), "host.oversubscribed"),
        (held(0.98, 0.01, 6.0, cores=8, threads=8, **COMPUTED), "host.oversubscribed"),
        (held(0.5, 0.45, 0.1, cores=8, threads=8), "host.own_processes"),
        # Crowded cores refuse a verdict only where they hold the run up.
        (held(0.04, 0.01, 1.3, **STORED), "input.storage"),
        (held(0.04, 0.01, 2.0, **STORED), "input.storage"),
        (held(0.04, 0.12, 1.3, **STORED), "host.oversubscribed"),
        (held(0.98, 0.01, 1.3, **STORED), "host.oversubscribed"),  # the pool's second thread has no core
        (held(0.98, 0.01, 0.9, **{**STORED, "threads": 1}), "input.storage"),
        # A rank that sleeps may wait for one whose core was taken: it said that the link was slow.
        (held(0.25, 0.05, 0.8, **WAITS), "host.oversubscribed"),
        (held(0.25, 0.05, 1.6, cores=4, **WAITS), "communication.exposed"),
        # Ranks that work need a core for each of their threads.
        (held(0.85, 0.05, 1.5, cores=4, **ranks()), "host.oversubscribed"),
        (held(0.85, 0.05, 1.5, cores=8, **ranks()), ""),
        # What a thread waits for neighbours hides less.
        (held(0.65, 0.35, 0.75, **COMPUTED), "input.cpu"),  # one busy process on two cores
        (held(0.58, 0.42, 0.75, **COMPUTED), "input.cpu"),  # the same, and own workers
        (held(0.6, 0.4, 1.1, **COMPUTED), "host.oversubscribed"),  # two
        (held(0.5, 0.5, 1.0, **COMPUTED), "host.oversubscribed"),
        (held(0.5, 0.5, 0.65, **COMPUTED), "host.oversubscribed"),  # so long that it is not only theirs
        (held(0.65, 0.35, 0.1, **COMPUTED), "host.own_processes"),
        (held(0.65, 0.35, 0.75, **COMPUTED, **ranks()), "host.oversubscribed"),  # the other rank may have been delayed
    ],
)
def test_who_holds_the_cores_is_the_finding_where_that_holds_the_run_up(given: dict[str, Any], named: str) -> None:
    assert causes(evidence(**given))[:1] == ([named] if named else [])


@pytest.mark.parametrize(("others", "is_told"), [(0.5, False), (0.7, True), (1.1, True)])
def test_a_neighbour_on_one_of_two_cores_changes_no_verdict_and_is_told(others: float, is_told: bool) -> None:
    """It did: beside one busy process every script was `host.oversubscribed`, whatever was wrong with it."""
    beside = evidence(
        phases={"data": 60}, thread=RUNNING, data_thread=RUNNING, foreign_cores=others, cores=2, threads=2
    )
    found = diagnose(beside)
    assert [finding.cause for finding in found.findings] == causes(replace(beside, foreign_cores=0.0))
    assert (found.crowd is not None) is is_told
    report = build_report(beside, found)
    assert report.verdict.startswith(found.findings[0].cause)
    assert (f"kept {others:.2g} of 2 cores busy" in report.beside) is is_told


WORKERS = LoaderFacts(kind="DataLoader", workers=8)


@pytest.mark.parametrize(
    ("given", "quiet", "beside"),
    [
        ({"data_thread": ThreadShare(run=0.32, wait=0.34, blocked=0.34)}, "input.cpu", "input.storage"),
        # eight workers on two cores wait for each other: the more of them, the less they run
        (
            {"loader": WORKERS, "workers": [worker(ThreadShare(run=0.25, wait=0.5, blocked=0.25))] * 8},
            "input.workers",
            "input.worker_storage",
        ),
        (
            {
                "loader": WORKERS,
                "workers": [worker(RUNNING)],
                "data_thread": ThreadShare(run=0.4, wait=0.4, blocked=0.2),
            },
            "input.workers",
            "input.handover",
        ),
        (
            {
                "loader": WORKERS,
                "workers": [worker(ASLEEP)],
                "data_thread": ThreadShare(run=0.36, wait=0.36, blocked=0.28),
            },
            "input.worker_storage",
            "input.worker_storage",
        ),
    ],
)
def test_waiting_for_cores_that_others_hold_is_left_out(given: dict[str, Any], quiet: str, beside: str) -> None:
    held = evidence(phases={"data": 20}, cores=2, threads=1, **given)
    assert causes(held)[0] == quiet
    assert causes(replace(held, foreign_cores=0.8))[0] == beside


@pytest.mark.parametrize("others", [0.99, 0.05])
def test_threads_that_were_fewer_for_a_neighbours_sake_are_told_and_no_fault(others: float) -> None:
    """Also where the others have left before the end."""
    beside = evidence(cores=2, threads=1, loop_threads=2, thread=RUNNING, foreign_cores=others)
    found = diagnose(beside)
    assert not found.findings
    report = build_report(beside, found)
    assert "with 1 thread in place of 2" in report.beside
    assert ("processes outside this run" in report.beside) is (others > 0.6)
    assert report.host.threads == 2


def test_a_cause_that_saves_little_is_not_told_beside_a_neighbour() -> None:
    """A healthy script's fused update took 16 % of the step there, of which less than half could have been saved."""
    update = OptimizerFacts(name="SGD", tensors=6, elements=500_000)
    roofline = Roofline(gflops={"float32": 200.0}, gb_per_s=14.0)
    quiet = evidence(phases={"optimizer": 2.2}, optimizer=update, roofline=roofline, cores=2, threads=2)
    assert causes(quiet) == ["optimizer.update"]
    (told,) = diagnose(quiet).findings
    assert told.predicted is not None
    assert told.predicted.value < WORTH_BESIDE < told.share
    assert not causes(replace(quiet, thread=RUNNING, foreign_cores=0.75))


@pytest.mark.parametrize(
    ("share", "named", "borderline"),
    [(0.05, [], []), (0.085, [], ["input.cpu"]), (0.115, [], ["input.cpu"]), (0.13, ["input.cpu"], [])],
)
def test_what_is_near_the_limit_is_borderline_and_no_cause(
    share: float, named: list[str], borderline: list[str]
) -> None:
    rest = sum(HEALTHY.values()) - HEALTHY.get("data", 0.0)
    held = evidence(
        phases={"data": rest * share / (1 - share)}, data_thread=ThreadShare(run=0.9, wait=0.0, blocked=0.1)
    )
    found = diagnose(held)
    assert [f.cause for f in found.findings] == named
    assert [f.cause for f in found.borderline] == borderline
    report = build_report(held, found)
    assert [f.cause for f in report.borderline] == borderline
    assert report.bottleneck == ("input" if named else "none")
    assert ("; borderline: input.cpu, " in report.verdict) is bool(borderline)


def test_an_update_is_named_beside_launches_that_are_borderline() -> None:
    """They hold it only where they are a cause themselves."""
    held = evidence(phases={"optimizer": 4.0}, optimizer=OptimizerFacts(name="SGD", tensors=6, elements=500_000))
    assert causes(held) == ["optimizer.update"]
    small = finding("launch.small_ops", 0.1, [], None)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(naming, "RULES", (*RULES, lambda evidence, anatomy: small))
        assert causes(held) == ["optimizer.update"]
        assert diagnose(held).borderline == [small]


def test_a_small_cause_is_not_told_beside_a_neighbour() -> None:
    quiet = evidence(phases={"data": 1.5}, data_thread=RUNNING, cores=2, threads=2)
    assert causes(quiet) == ["input.cpu"]
    beside = diagnose(replace(quiet, foreign_cores=0.75))
    assert (beside.findings, [f.cause for f in beside.borderline]) == ([], ["input.cpu"])
    assert causes(replace(quiet, foreign_cores=0.5)) == ["input.cpu"]
