"""The summary of windows written by hand: GPUs, waits, interrupted calls. Times in µs."""

from __future__ import annotations

import pytest

from accel.profiler.evidence import SyncPoint, TraceSummary
from accel.profiler.trace.digest import call_groups, digest, located
from accel.profiler.trace.events import OperatorCall, Trace, Wait, Work

GEMM = "ampere_sgemm_128x64_nn"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>"


def mm(id: int, start: float, end: float, **more: object) -> OperatorCall:
    shapes, dtypes = [[512, 512], [512, 512]], ["float", "float"]
    return OperatorCall(name="aten::mm", id=id, start=start, end=end, shapes=shapes, dtypes=dtypes, **more)  # type: ignore[arg-type]


def test_a_gpus_window() -> None:
    """Two products, an addition that the host launched late, a copy half hidden by the second product."""
    calls = [mm(1, 0, 10), mm(2, 10, 20), OperatorCall(name="aten::add", id=3, start=290, end=300)]
    works = [
        Work(name=GEMM, start=20, end=120, launch=5, operator=1),
        Work(name=GEMM, start=130, end=230, launch=15, operator=2),
        Work(name="splitKreduce_kernel", start=230, end=240, launch=16, operator=2),
        Work(name=ADD, start=300, end=304, launch=295, operator=3),
        Work(name="Memcpy HtoD (Pinned -> Device)", start=220, end=280, launch=21, kind="copy in"),
    ]
    summary = digest(Trace(window=(0.0, 400.0), calls=calls, works=works), steps=2)

    assert summary.ops_per_step == 2.0  # four kernels in two steps
    assert summary.busy_ms == pytest.approx((100 + 100 + 10 + 4) / 2e3)
    assert summary.launch_ms == pytest.approx(20 / 2e3)  # from 280 to 300; what precedes all work is the window's
    assert summary.copy_ms == pytest.approx(40 / 2e3)  # from 240 to 280
    assert summary.read_ms == 0
    assert [row.name for row in summary.ops[:2]] == [GEMM, "Memcpy HtoD (Pinned -> Device)"]
    gemm = summary.ops[0]
    assert (gemm.calls, gemm.ms, gemm.kind, gemm.small) == (1.0, 0.1, "matmul", False)
    assert gemm.gflops == pytest.approx(2 * 512**3 / 100e-6 / 1e9)
    add = next(row for row in summary.ops if row.name == ADD)
    assert (add.kind, add.small) == ("elementwise", True)
    assert summary.matmul_share == pytest.approx(200 / 274)
    assert summary.small_share == pytest.approx(4 / 274)
    assert summary.dtypes == {"float32": 1.0}


def test_kernels_that_are_shorter_than_their_launch() -> None:
    works = [Work(name=ADD, start=10.0 * i, end=10.0 * i + 3, launch=10.0 * i - 5) for i in range(1, 31)]
    summary = digest(Trace(window=(0.0, 310.0), calls=[], works=works), steps=1)

    assert summary.small_share == 1.0
    assert summary.launch_ms == pytest.approx(29 * 7 / 1e3)


def test_work_is_clipped_to_the_window() -> None:
    works = [Work(name=GEMM, start=-50, end=50, launch=-60), Work(name=GEMM, start=90, end=150, launch=20)]
    summary = digest(Trace(window=(0.0, 100.0), calls=[], works=works), steps=1)

    assert summary.busy_ms == pytest.approx(0.06)
    assert summary.launch_ms == 0.0


def gaps(operator: int, wait: tuple[float, float]) -> TraceSummary:
    """A step whose device idles from 100 to 160, after a copy that belongs to operator 1 of `to`, and a read to 2."""
    calls = [OperatorCall(name="aten::to", id=n, start=start, end=start + 30) for n, start in ((1, 0), (2, 60))]
    works = [
        Work(name="Memcpy HtoD (Pageable -> Device)", start=10, end=50, launch=5, kind="copy in", operator=1),
        Work(name=GEMM, start=50, end=95, launch=20),
        Work(name="Memcpy DtoH (Device -> Pageable)", start=95, end=100, launch=60, kind="copy out", operator=2),
        Work(name=GEMM, start=160, end=200, launch=155),
        Work(name="ncclDevKernel_AllReduce_Sum_f32_RING_LL", start=200, end=400, launch=156),
    ]
    waits = [Wait(name="cudaStreamSynchronize", start=wait[0], end=wait[1], operator=operator)]
    return digest(Trace(window=(0.0, 400.0), calls=calls, works=works, waits=waits), steps=1)


@pytest.mark.parametrize(
    ("operator", "wait", "read_us", "launch_us", "copies"),
    [
        (2, (60, 102), 60, 0, False),
        (1, (60, 102), 0, 0, True),
        (2, (60, 80), 0, 60, False),
        (0, (70, 101), 60, 0, False),
    ],
    ids=["a read", "a copy", "a launch that is late", "synchronize"],
)
def test_a_gap_is_told_by_what_the_host_did_when_the_device_ran_dry(
    operator: int, wait: tuple[float, float], read_us: float, launch_us: float, copies: bool
) -> None:
    """`cpu` is `to` as well: what is copied tells a read from a copy to the device."""
    summary = gaps(operator, wait)

    assert (summary.read_ms, summary.launch_ms) == (pytest.approx(read_us / 1e3), pytest.approx(launch_us / 1e3))
    assert summary.busy_ms == pytest.approx((45 + 40) / 1e3)  # NCCL's kernel waits for another rank
    assert [sync.copies for sync in summary.syncs] == [copies]


def test_lines_are_found_in_a_slower_window_and_times_are_not() -> None:
    found = [
        SyncPoint(name="item", file="", line=0, calls=2, ms=4),
        SyncPoint(name="to", file="", line=0, calls=1, ms=1),
    ]
    lines = [
        SyncPoint(name="item", file="train.py", line=7, calls=1, ms=90),
        SyncPoint(name="item", file="train.py", line=9, calls=1, ms=30),
        SyncPoint(name="nonzero", file="train.py", line=11, calls=1, ms=30),
    ]
    assert [(sync.name, sync.line, sync.calls, sync.ms) for sync in located(found, lines)] == [
        ("item", 7, 1.0, 3.0),
        ("item", 9, 1.0, 1.0),
        ("to", 0, 1, 1),
    ]


def test_waits_are_named_by_the_operator_that_the_line_calls() -> None:
    """`item` calls _local_scalar_dense, which copies and then synchronises: one wait of one call."""
    calls = [
        OperatorCall(name="aten::item", id=1, start=0, end=100),
        OperatorCall(name="aten::_local_scalar_dense", id=2, start=1, end=99),
        OperatorCall(name="aten::nonzero", id=3, start=200, end=300),
    ]
    waits = [
        Wait(name="cudaMemcpyAsync", start=10, end=20, operator=2, file="train.py", line=7),
        Wait(name="cudaStreamSynchronize", start=20, end=90, operator=2, file="train.py", line=7),
        Wait(name="cudaStreamSynchronize", start=210, end=230, operator=3, file="train.py", line=9),
        Wait(name="cudaDeviceSynchronize", start=400, end=410),
        Wait(name="cudaDeviceSynchronize", start=500, end=510),
    ]
    summary = digest(Trace(window=(0.0, 600.0), calls=calls, works=[], waits=waits), steps=2)

    told = [(sync.name, sync.file, sync.line, sync.calls, sync.ms) for sync in summary.syncs]
    assert told == [
        ("item", "train.py", 7, 0.5, pytest.approx(0.04)),
        ("nonzero", "train.py", 9, 0.5, pytest.approx(0.01)),
        ("cudaDeviceSynchronize", "", 0, 1.0, pytest.approx(0.01)),
    ]


def test_a_call_that_was_interrupted_does_not_count_as_slow() -> None:
    calls = [mm(i, 1000.0 * i, 1000.0 * i + 100) for i in range(4)] + [mm(9, 9000, 17000)]
    row = digest(Trace(window=(0.0, 2e4), calls=calls), steps=1).ops[0]

    assert (row.calls, row.ms) == (5.0, pytest.approx(0.5))


def test_what_does_little_work_is_small_on_a_slow_host_too() -> None:
    relu = OperatorCall(name="aten::clamp_min", start=0, end=500, shapes=[[8, 32]], dtypes=["float"])
    large = OperatorCall(name="aten::clamp_min", start=1000, end=1500, shapes=[[512, 512]], dtypes=["float"])
    unknown = OperatorCall(name="mine::op", start=2000, end=2500, shapes=[[8, 32]], dtypes=["float"])

    assert [group.small for group in call_groups([relu, large, unknown])] == [True, False, False]


def test_an_operators_time_is_its_own() -> None:
    calls = [
        OperatorCall(name="aten::linear", start=0, end=100),
        OperatorCall(name="aten::addmm", start=10, end=90, shapes=[[4], [8, 2], [2, 4]], dtypes=["float"] * 3),
        OperatorCall(name="aten::copy_", start=20, end=25, shapes=[[8, 4], [4]], dtypes=["float"] * 2),
        OperatorCall(name="aten::linear", start=0, end=100, thread=2),  # of another thread, and nobody's child
    ]
    ms = {row.name: row.ms * 1e3 for row in digest(Trace(window=(0.0, 100.0), calls=calls), steps=1).ops}

    # The profiler's 0.25 µs for each call inside is no work of the caller. The two linear count at their median.
    assert ms == {"linear": pytest.approx(2 * (19.75 + 100) / 2), "addmm": 74.75, "copy_": 5.0}


def test_calls_in_which_another_process_took_the_core_make_no_operator_slow() -> None:
    """Beside a busy process two calls of three may be; an operator that ran alone and takes as long counts the same."""
    inputs = {"shapes": [[512, 512], [512, 512]], "dtypes": ["float"] * 2}
    lasting = {"aten::mm": [400, 3400, 3900], "aten::mul": [400, 400, 400]}
    calls, start = [], 0.0
    for name, times in lasting.items():
        for us in times:
            calls.append(OperatorCall(name=name, start=start, end=start + us, **inputs))  # type: ignore[arg-type]
            start += us + 10
    trace = Trace(window=(0.0, start), calls=calls)
    assert digest(trace, steps=3, shared=True).elementwise_share == pytest.approx(0.5)
    assert digest(trace, steps=3).elementwise_share < 0.2


def test_flops_count_where_the_product_is_done() -> None:
    shapes, dtypes = [[8, 2], [4, 2], [4]], ["float"] * 3
    calls = [
        OperatorCall(name="aten::linear", start=0, end=100, shapes=shapes, dtypes=dtypes),
        OperatorCall(name="aten::addmm", start=10, end=90, shapes=[[4], [8, 2], [2, 4]], dtypes=dtypes),
        OperatorCall(name="aten::linear", start=200, end=300, shapes=shapes, dtypes=dtypes),  # one that does it itself
    ]
    flops = [group.flops for group in call_groups(calls)]

    assert flops == [2 * 8 * 2 * 4, 2 * 8 * 2 * 4]


def test_bytes_count_where_the_work_is_done() -> None:
    inputs = {"shapes": [[512, 512]], "dtypes": ["float"]}
    calls = [
        OperatorCall(name="aten::relu", start=0, end=100, **inputs),  # type: ignore[arg-type]
        OperatorCall(name="aten::clamp_min", start=1, end=99, **inputs),  # type: ignore[arg-type]
        OperatorCall(name="aten::sum", start=200, end=300, **inputs),  # type: ignore[arg-type]
        OperatorCall(name="aten::fill_", start=201, end=202, shapes=[[1]], dtypes=["float"]),
    ]
    bytes = {group.name: group.bytes for group in call_groups(calls)}

    assert bytes == {"aten::relu": None, "aten::clamp_min": 2 * 4 * 512**2, "aten::sum": 4 * 512**2, "aten::fill_": 4}


def test_what_a_product_launches_beside_it_moves_none_of_its_bytes() -> None:
    works = [
        Work(name=GEMM, start=0, end=100, operator=1),
        Work(name="splitKreduce_kernel", start=100, end=110, operator=1),
        Work(name=ADD, start=120, end=125, operator=2),
        Work(name=ADD, start=125, end=145, operator=2),
    ]
    calls = [
        mm(1, 0, 10),
        OperatorCall(name="aten::add", id=2, start=10, end=20, shapes=[[1000]] * 2, dtypes=["float"] * 2),
    ]
    rows = {row.name: row for row in digest(Trace(window=(0.0, 200.0), calls=calls, works=works), steps=1).ops}

    assert rows["splitKreduce_kernel"].gb_per_s is None
    assert rows[ADD].gb_per_s == pytest.approx(12_000 / 25e-6 / 1e9)  # counted once, over both kernels
    assert rows[GEMM].intensity == pytest.approx(512 / 6)


def test_the_engines_call_and_its_gradient_function_are_one_row() -> None:
    calls = [
        OperatorCall(name="autograd::engine::evaluate_function: ReluBackward0", start=0, end=10),
        OperatorCall(name="ReluBackward0", start=1, end=9),
        OperatorCall(name="aten::threshold_backward", start=2, end=8),
    ]
    summary = digest(Trace(window=(0.0, 10.0), calls=calls), steps=1)

    assert {row.name: row.calls for row in summary.ops} == {"ReluBackward0": 2, "threshold_backward": 1}
    assert summary.ops_per_step == 1
