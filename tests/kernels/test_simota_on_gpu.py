"""SimOTA on a GPU: the published result in every precision, captured in a graph, in little memory, compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accel.kernels.simota import simota_assign
from accel.kernels.simota.inputs import Assignment
from tests.kernels.simota_scenes import equal, excused, oracle_batch, scene

pytestmark = pytest.mark.gpu


def test_captured_in_a_graph_without_waiting() -> None:
    first, second = scene(0, 5), scene(1, 5)
    held = first.change(lambda t: t.cuda())
    held.assign()  # kernels are compiled, and caches filled, outside
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        held.assign()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = held.assign()
    finally:
        torch.cuda.set_sync_debug_mode(before)
    for batch in (first, second):
        for name, value in vars(batch).items():
            if value is not None:
                getattr(held, name).copy_(value)
        graph.replay()
        got = Assignment(*(t.cpu() for t in found))
        assert excused(batch, got, "yolox") <= 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_gpu_in_every_precision(dtype: torch.dtype, waits_for_nothing: Any) -> None:
    rounded = scene(3, 20, images=4, size=128).change(lambda t: t.to(dtype) if t.is_floating_point() else t)
    there = rounded.change(lambda t: t.cuda())
    there.assign()
    with waits_for_nothing():
        found = there.assign()
    same = rounded.change(lambda t: t.float() if t.is_floating_point() else t)
    assert excused(same, Assignment(*(t.cpu() for t in found)), "yolox") <= 1


def test_gpu_takes_a_thousand_boxes_an_image_in_little_memory() -> None:
    batch = scene(0, 1000, images=4, size=320)  # 2,100 anchors
    there = batch.change(lambda t: t.cuda())
    there.assign()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = there.assign()
    torch.cuda.synchronize()
    # Half of what one fp32 tensor [B, G, A] takes.
    assert torch.cuda.max_memory_allocated() - before < 4 * 1000 * 2100 * 4 / 2
    first = Assignment(*(t[:1].cpu() for t in found))
    one = batch.change(lambda t: t[:1] if len(t) == 4 else t)
    assert excused(one, first, "yolox") <= 1


@pytest.mark.filterwarnings("ignore")  # of the compiler's own
def test_gpu_compiled_under_autocast() -> None:
    batch = tuple(t.cuda() for t in oracle_batch())
    plain = simota_assign(*batch)
    with torch.autocast("cuda", torch.bfloat16):
        found = torch.compile(lambda *given: simota_assign(*given), fullgraph=True)(*batch)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, plain, strict=True))


def test_the_same_bits_every_time_on_a_gpu() -> None:
    batch = scene(0, 50, images=4, size=320).change(lambda t: t.cuda())
    first = batch.assign()
    assert all(equal(batch.assign(), first) for _ in range(10))
