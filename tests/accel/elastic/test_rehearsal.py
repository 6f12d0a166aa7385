"""A larger batch is rehearsed before the loop takes one: what does not fit into memory never reaches the loop."""

from __future__ import annotations

import itertools
import mmap
from collections import UserList
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import accel
from accel.amp import DynamicLossScale, decorate
from accel.elastic.batch_size.rehearsal import BatchRehearsal, is_out_of_memory
from accel.profiler.host import ResidentMemory, resident_memory
from tests.accel.elastic.batch_loops import PLAIN, Clock, Numbered, batch_run, known_noise, nothing, train

CPU = torch.device("cpu")
GIB = 2**30
CALLS: UserList[int] = UserList()
"""Samples of each call; a list would be put back after a rehearsal."""


class _FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class Bounded(nn.Module):
    """Takes up to `most` samples; with more, its forward or its backward pass runs out of memory."""

    def __init__(self, most: int, where: str = "forward") -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.1)
        self.head = nn.Linear(8, 1)
        self.most, self.where = most, where

    def forward(self, x: Tensor) -> Tensor:
        CALLS.append(len(x))
        if len(x) > self.most:
            if self.where == "backward":
                x = _FailsBackward.apply(self.linear(x))  # type: ignore[no-untyped-call]
            elif self.where == "allocator":
                raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")
            elif self.where == "shape":
                raise ValueError("expected a batch of 16")
            else:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        y: Tensor = self.head(self.drop(self.norm(self.linear(x))))
        return y


def job(model: nn.Module) -> tuple[nn.Module, DataLoader[Any], torch.optim.Optimizer]:
    return model, DataLoader(Numbered(3000), batch_size=8, shuffle=True), torch.optim.SGD(model.parameters(), 0.001)


@pytest.fixture
def models() -> Iterator[list[nn.Module]]:
    torch.manual_seed(0)
    CALLS.clear()
    made: list[nn.Module] = []
    yield made
    for model in made:
        accel.undo(model)


@pytest.mark.parametrize(
    ("most", "where"),
    [
        (8, "forward"),
        (23, "backward"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((23, "forward"), (100, "forward"))),
        *(pytest.param(23, where, marks=pytest.mark.slow) for where in ("allocator", "shape")),
    ],
)
def test_the_loop_never_gets_a_batch_that_does_not_fit(
    models: list[nn.Module], clock: Clock, monkeypatch: pytest.MonkeyPatch, most: int, where: str
) -> None:
    known_noise(monkeypatch, 5000.0)
    model = Bounded(most, where)
    models.append(model)
    model, loader, optimizer = accel.optimize(*job(model), elastic=accel.Elastic(max_batch_size=256), **PLAIN)  # type: ignore[assignment]
    epochs = [train(model, loader, optimizer, clock, nothing) for _ in range(2)]

    taken = [len(batch) for batch in itertools.chain(*epochs)]
    sizes = batch_run(model).record.policy.batches.sizes  # type: ignore[union-attr]
    assert max(taken) == max(size for size in sizes if size <= most)
    for epoch in epochs:
        assert sorted(itertools.chain(*epoch)) == list(range(3000))
    rows = accel.explain(model).batch_rows
    assert any("samples are too many" in row.why for row in rows)
    assert batch_run(model).report.note == ""
    assert batch_run(model).record.policy.batches.fits == max(taken)  # type: ignore[union-attr]


@pytest.mark.sample(2)
@pytest.mark.parametrize("keeps_zeros", [False, True])
@pytest.mark.parametrize("half", [False, True])
def test_a_rehearsal_leaves_everything_as_it_was(
    models: list[nn.Module], clock: Clock, monkeypatch: pytest.MonkeyPatch, half: bool, keeps_zeros: bool
) -> None:
    """Random numbers, batch normalisation, gradients, loss scale: those of a loop that grows without rehearsals."""
    ends = []
    for rehearsed in (True, False):
        torch.manual_seed(0)
        known_noise(monkeypatch, 5000.0)
        if not rehearsed:
            monkeypatch.setattr(BatchRehearsal, "hear", lambda self, args, kwargs: None)
        model = Bounded(10_000)
        models.append(model)
        plain = job(model)
        if half:
            scale = DynamicLossScale(init_scale=2.0**18, growth_interval=20)
            decorate(model, plain[2], dtype=torch.float16, loss_scale=scale)
        if keeps_zeros:
            monkeypatch.setattr(plain[2], "zero_grad", partial(plain[2].zero_grad, set_to_none=False))
        model, loader, optimizer = accel.optimize(*plain, elastic=accel.Elastic(max_batch_size=256), **PLAIN)  # type: ignore[assignment]
        clock.now = 0.0
        for _ in range(3):
            train(model, loader, optimizer, clock, nothing)
        assert len(loader) == -(-3000 // 256)
        learnt = scale.state_dict() if half else {}
        ends.append([*model.state_dict().values(), torch.rand(3), torch.tensor([*learnt.values()])])

    for one, other in zip(*ends, strict=True):
        assert torch.equal(one, other)


def rehearsal(model: nn.Module, samples: int, *args: Any, **kwargs: Any) -> BatchRehearsal:
    made = BatchRehearsal(model, model, CPU)
    made.prepare(samples)
    made.hear(args, kwargs)
    return made


def test_the_samples_may_stand_in_any_dimension_of_any_input() -> None:
    seen: UserList[Any] = UserList()

    class Sequences(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, words: Tensor, *, state: dict[str, Tensor], scale: Tensor) -> Tensor:
            seen.append((words.shape, state["hidden"].shape, scale.shape))
            return (words @ self.weight + state["hidden"].sum(-1)) * scale

    words, hidden = torch.randn(5, 7, 3), torch.randn(5, 7, 4)
    made = rehearsal(Sequences(), 7, words, state={"hidden": hidden}, scale=torch.tensor(2.0))
    assert made.problem(20) == ""
    assert seen == [((5, 20, 3), (5, 20, 4), ())]


def test_a_call_without_the_samples_is_not_rehearsed() -> None:
    CALLS.clear()
    assert rehearsal(Bounded(1), 9, torch.randn(8, 8)).problem(18) == ""
    assert CALLS == []


def test_inputs_that_can_not_be_repeated_are_not_rehearsed() -> None:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, words: Tensor) -> Tensor:
            raise AssertionError("it was called")

    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
    assert rehearsal(Takes(), 2, nested).problem(4) == ""


def test_a_call_without_gradients_is_not_rehearsed() -> None:
    CALLS.clear()
    with torch.no_grad():
        made = rehearsal(Bounded(1), 8, torch.randn(8, 8))
    assert made.problem(16) == ""
    assert CALLS == []


@pytest.mark.parametrize(
    ("used", "now", "ranks", "available", "samples", "reason"),
    [
        # One GiB before, two while training on 8 samples: 4 GiB with 24, of which 2 are there.
        (1, 2, 1, 3, 24, ""),
        (1, 2, 1, 1, 24, "they may take 2,048 MB more of memory, of which 1,024 MB are available"),
        # 6 GiB while the script loaded its data say nothing of a step, which takes one with 8 samples.
        (6, 6, 1, 3, 16, ""),
        # The ranks of a host share its memory.
        (1, 2, 4, 2, 16, "they may take 1,024 MB more of memory, of which 512 MB are available"),
    ],
)
def test_a_cpu_is_asked_for_its_memory_first(
    monkeypatch: pytest.MonkeyPatch, used: int, now: int, ranks: int, available: int, samples: int, reason: str
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    readings = iter([ResidentMemory(GIB, used * GIB), ResidentMemory(2 * GIB, now * GIB)])
    monkeypatch.setattr("accel.elastic.batch_size.rehearsal.resident_memory", lambda: next(readings))
    monkeypatch.setattr("accel.elastic.batch_size.rehearsal.available_memory", lambda: available * GIB)
    CALLS.clear()
    assert rehearsal(Bounded(100), 8, torch.randn(8, 8)).problem(samples) == reason
    assert len(CALLS) == (not reason)


@pytest.mark.parametrize(("samples", "problem"), [(24, ""), (32, "they may take 12,288 MB more of memory, of which")])
def test_a_gpus_memory_is_asked_where_ranks_talk_within_a_call(
    samples: int, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of 20 GiB with weights of 4 and, in a step of 8 samples, 3 more."""
    readings = {"memory_allocated": 4, "max_memory_allocated": 7, "memory_reserved": 8}
    for name, gib in readings.items():
        monkeypatch.setattr(f"torch.cuda.{name}", lambda device, gib=gib: gib * GIB)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (8 * GIB, 20 * GIB))
    monkeypatch.setattr("accel.elastic.batch_size.rehearsal.talks_within_calls", lambda model: True)
    rehearsed = BatchRehearsal(Bounded(100), nothing, torch.device("cuda"))
    rehearsed.prepare(8)
    assert rehearsed.problem(samples)[: len(problem) or None] == problem


def test_memory_that_ran_out_is_told_from_other_errors() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"))
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("out of memory"))


def test_resident_memory_grows_with_what_is_used(tmp_path: Path) -> None:
    before = resident_memory()
    if before is None:
        pytest.skip("the system does not tell the resident memory")
    block = mmap.mmap(-1, 64 << 20)  # of its own: the heap may hold as much already
    block.write(bytes(64 << 20))
    after = resident_memory()
    assert after is not None
    assert after.now - before.now > 48 << 20
    assert 1 << 20 < after.private <= after.now
    assert after.most >= after.now
    block.close()
    assert resident_memory(tmp_path) is None


class Checkpointed(nn.Module):
    """Computes a layer once more in the backward pass, in a pass of its own."""

    def __init__(self, most: int = 100) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), Bounded(most)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.second, self.first(x), use_reentrant=True)
        return y


def test_reentrant_checkpoints_are_rehearsed_in_their_forward_pass_alone() -> None:
    model = Checkpointed()
    model(torch.randn(8, 8)).sum().backward()
    gradients = [p.grad for p in model.parameters()]
    assert rehearsal(model, 8, torch.randn(8, 8)).problem(16) == ""
    assert all(p.grad is before for p, before in zip(model.parameters(), gradients, strict=True))
    assert rehearsal(Checkpointed(8), 8, torch.randn(8, 8)).problem(16) == "they do not fit into memory"


def test_inputs_that_can_not_be_copied_are_no_error_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*args: Any) -> Any:
        raise TypeError("a list of another kind")

    monkeypatch.setattr("accel.elastic.batch_size.rehearsal.guard.record", failing)
    assert rehearsal(Bounded(1), 8, torch.randn(8, 8)).problem(16) == ""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_whose_calls_exchange_values_is_not_rehearsed(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    """One rank that ran out of memory within the call would leave the others waiting there."""
    CALLS.clear()
    model = nn.Sequential(Bounded(8), nn.SyncBatchNorm(1).eval())
    made = rehearsal(model, 8, torch.randn(8, 8))
    if ranks > 1:
        monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
        monkeypatch.setattr("torch.distributed.get_world_size", lambda: ranks)
    assert made.problem(16) == ("they do not fit into memory" if ranks == 1 else "")
    assert ([16] if ranks == 1 else []) == CALLS


def test_no_rank_makes_a_call_for_which_another_has_no_memory() -> None:
    CALLS.clear()
    made = rehearsal(Bounded(100), 8, torch.randn(8, 8))
    assert made.problem(16, agree=lambda reason: reason or "rank 1 has none") == "rank 1 has none"
    assert CALLS == []
