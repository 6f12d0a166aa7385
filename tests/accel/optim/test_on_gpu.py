"""Optimizers on a GPU: every dtype, captured steps that follow what changes, huge tensors, nothing waited for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel.graphs import capture
from accel.optim import FusedAdamW, FusedLAMB, FusedLARS, FusedSGD
from tests.accel.optim.cases import OPTIONS, SHAPES, Pair, name_of

# torch warns of its own operators that don't repeat their bits, of a mode that is a prototype, and of empty graphs.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
KINDS: list[tuple[Any, dict[str, Any]]] = [
    (FusedSGD, {"lr": 0.1, "momentum": 0.9}),
    (FusedAdamW, {"lr": 0.1}),
    (FusedLAMB, {"lr": 0.1}),
    (FusedLARS, {"lr": 0.1, "weight_decay": 0.1}),
]
EACH = pytest.mark.parametrize(("kind", "options"), KINDS, ids=[kind.__name__ for kind, _ in KINDS])


@pytest.mark.parametrize("case", OPTIONS, ids=[name_of(case) for case in OPTIONS])
def test_steps_follow_the_formula(case: Any) -> None:
    pair = Pair(*case, dtypes=DTYPES, shapes=[*SHAPES, (70_001,)], device="cuda")
    for number in range(30):
        pair.step(number, scale=8.0)
    pair.check(30, k=4)


@EACH
def test_nothing_waits_for_the_device(kind: Any, options: Any, waits_for_nothing: Any) -> None:
    params = [nn.Parameter(torch.randn(1000, device="cuda")) for _ in range(3)]
    optimizer = kind(params, **options, max_grad_norm=1.0)
    scaler = torch.amp.GradScaler("cuda")
    for number in range(3):
        for p in params:
            p.grad = torch.randn(1000, device="cuda")
        scaler.scale(torch.zeros((), device="cuda"))
        if number == 0:  # kernels are compiled
            scaler.step(optimizer)
        else:
            with waits_for_nothing():
                scaler.step(optimizer)
        scaler.update()


def _captured(optimizer: Any, params: list[nn.Parameter]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
        optimizer.step()
    return graph


@EACH
def test_a_captured_step_follows_schedules_steps_and_overflow(kind: Any, options: Any) -> None:
    runs = []
    for captures in (True, False):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(n, device="cuda")) for n in (5, 9000)]
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer = kind(params, **options, max_grad_norm=1.0)
        optimizer.grad_scale = torch.full((1,), 2.0, device="cuda")
        optimizer.found_inf = torch.zeros(1, device="cuda")
        graph = _captured(optimizer, params) if captures else None
        if not captures:
            optimizer.step()
        for turn in range(4):
            optimizer.param_groups[0]["lr"] = 0.1 / (turn + 1)
            optimizer.found_inf.fill_(float(turn == 2))
            for p in params:
                assert p.grad is not None
                p.grad.copy_(torch.randn_like(p))
            if graph is None:
                optimizer.step()
                optimizer.step()
            else:
                optimizer.refresh()
                graph.replay()
        runs.append([p.detach().clone() for p in params])
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b)


def test_a_rate_on_the_device_needs_no_refresh() -> None:
    param = nn.Parameter(torch.zeros(4, device="cuda"))
    param.grad = torch.ones(4, device="cuda")
    rate = torch.full((), 1.0, device="cuda")
    optimizer = FusedSGD([param], lr=rate)
    graph = _captured(optimizer, [param])
    param.detach().zero_()
    for value in (1.0, 0.5):
        rate.fill_(value)
        graph.replay()
    assert torch.equal(param.detach(), torch.full((4,), -3.0, device="cuda"))


@EACH
def test_rates_that_come_back_are_followed_by_one_graph(kind: Any, options: Any) -> None:
    def outcome(captures: bool) -> list[Tensor]:
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(n, device="cuda")) for n in (5, 9000)]
        optimizer = kind(params, **options)

        def step(x: Tensor) -> None:
            for p in params:
                p.grad = (p - x).detach()
            optimizer.step()

        run: Any = capture(step, strict=True) if captures else step
        for turn in range(12):
            optimizer.param_groups[0]["lr"] = (0.1, 0.02)[turn % 2]
            run(torch.full((), float(turn), device="cuda"))
        assert not captures or (run.captures == 1 and run.replays > 3)
        return [p.detach().clone() for p in params]

    for a, b in zip(outcome(True), outcome(False), strict=True):
        assert torch.equal(a, b)


def test_a_graph_outlives_steps_of_another_kind() -> None:
    """Steps of other parameters lay out other tables; those that the graph reads must stay."""
    params = [nn.Parameter(torch.zeros(n, device="cuda")) for n in (5, 9000)]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer = FusedSGD(params, lr=1.0)
    graph = _captured(optimizer, params)
    kept = params[1].grad
    params[1].grad = None
    optimizer.step()
    torch.cuda.empty_cache()
    fill = [torch.full((1 << 16,), 7, dtype=torch.int64, device="cuda") for _ in range(64)]
    params[1].grad = kept
    before = params[1].detach().clone()
    graph.replay()
    assert torch.equal(params[1].detach(), before - 2)  # it holds two steps
    assert len(fill) == 64


def test_what_a_capture_cannot_do_is_said() -> None:
    param = nn.Parameter(torch.zeros(4, device="cuda"))
    param.grad = torch.ones(4, device="cuda")
    optimizer = FusedSGD([param], lr=0.1)
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(RuntimeError, match=r"refresh\(\) before the capture"):
        optimizer.step()
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(RuntimeError, match="takes no closure"):
        optimizer.step(lambda: None)


@EACH
def test_the_same_bits_every_time(kind: Any, options: Any) -> None:
    results = []
    for _ in range(5):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(n, device="cuda")) for n in (300_000, 17)]
        optimizer = kind(params, **options, max_grad_norm=0.1)
        for _ in range(3):
            for p in params:
                p.grad = torch.randn_like(p)
            optimizer.step()
        results.append([p.detach().clone() for p in params])
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def test_more_elements_than_32_bits_count() -> None:
    size = 2**31 + 5000
    if torch.cuda.get_device_properties().total_memory < 6 * 2 * size:
        pytest.skip("needs 26 GB of device memory")
    param = nn.Parameter(torch.zeros(size, dtype=torch.float16, device="cuda"))
    param.grad = torch.zeros(size, dtype=torch.float16, device="cuda")
    param.grad[-1] = param.grad[0] = 1.0
    optimizer = FusedSGD([param], lr=0.5, master_weights=False, max_grad_norm=100.0)
    optimizer.step()
    assert float(param.detach()[-1]) == float(param.detach()[0]) == -0.5
    assert not bool(param.detach()[1:-1].any())
    assert optimizer.grad_norm is not None
    torch.testing.assert_close(optimizer.grad_norm.cpu(), torch.tensor(2.0).sqrt())


def test_elements_at_strides_beyond_32_bits() -> None:
    if torch.cuda.get_device_properties().total_memory < 10 << 30:
        pytest.skip("needs 10 GB of device memory")
    far = torch.zeros(2**31 + 8, dtype=torch.float16, device="cuda")[:: 2**31 + 7]
    param = nn.Parameter(far)
    param.grad = torch.ones(2, dtype=torch.float16, device="cuda")
    FusedSGD([param], lr=0.5).step()
    assert param.tolist() == [-0.5, -0.5]


def test_torchs_fused_optimizer_goes_on_from_our_state() -> None:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(100, device="cuda"))]
    others = [nn.Parameter(params[0].detach().clone())]
    ours, theirs = FusedAdamW(params), torch.optim.AdamW(others, fused=True)
    for _ in range(3):
        for p, q in zip(params, others, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        ours.step()
        theirs.step()
    again = torch.optim.AdamW(params)
    again.load_state_dict(ours.state_dict())
    ours.load_state_dict(theirs.state_dict())
    again.step()
    theirs.step()
    torch.testing.assert_close(params[0], others[0], rtol=1e-5, atol=1e-6)
