"""All engines keep one contract: the oldest job first, an error takes its job with it, Ctrl-C takes none."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from accel.dataio.engine.engine import BatchJob, Engine, InlineEngine, ThreadEngine
from accel.dataio.engine.processes import ProcessEngine
from accel.profiler.errors import InvalidState, InvalidType
from tests.dataio.engines import Draws, Squares, assert_made, expected, lists, loader_of, run
from tests.dataio.faults import ERRORS, GARBAGE, throw
from tests.sampling import examples

MAKERS: dict[str, Any] = {
    "inline": InlineEngine,
    "threads": lambda loader: ThreadEngine(loader, 2),
    "processes": lambda loader: ProcessEngine(loader, 2),
}


class Broken(Dataset[Any]):
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5:
            raise self.error
        return torch.tensor([index, index * index])


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest) -> Iterator[Any]:
    made: list[Engine] = []

    def build(dataset: Any = None, **options: Any) -> Any:
        made.append(MAKERS[request.param](loader_of(dataset or Squares(), **options)))
        return made[-1]

    build.kind = request.param  # type: ignore[attr-defined]
    yield build
    for engine in made:
        engine.close()


def test_the_oldest_job_first(make: Any) -> None:
    engine = make()

    assert_made(run(engine))
    assert engine.capacity >= 1


@pytest.mark.parametrize(
    "error", [ValueError("bad"), StopIteration(), TimeoutError("slow")], ids=lambda e: type(e).__name__
)
def test_an_error_takes_its_job_with_it(make: Any, error: Exception) -> None:
    made = run(make(Broken(error)))
    caught = made.pop(1)

    assert type(caught) is (InvalidState if isinstance(error, StopIteration) else type(error))
    assert_made(made, expected(indices=[each for each in lists() if 5 not in each]))


# The rest become a InvalidState, in one engine or the other.
KEPT = ["value", "key", "os", "impostor", "slots", "timeout", "end of file", "broken pipe"]
WHERE = {"inline": "the loop's own thread", "threads": "thread [01]", "processes": "worker process [01]"}


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", KEPT)
def test_an_error_says_who_was_making_which_sample(make: Any, kind: str) -> None:
    error, wanted, text = ERRORS[kind]
    made = run(make(Broken(error)))
    caught = made.pop(1)
    told = [str(caught.__cause__), *getattr(caught, "__notes__", ())]

    assert type(caught) in (type(error), wanted)
    assert text in str(caught)
    who = WHERE[make.kind]
    what = r"samples \[4, 5, 6, 7\]" if kind == "slots" else "sample 5"
    assert any(re.search(f"in {who} while fetching {what}", each) for each in told), told
    assert_made(made, expected(indices=[each for each in lists() if 5 not in each]))


@pytest.mark.parametrize("kind", GARBAGE)
def test_a_batch_of_any_kind_comes_out_where_it_need_not_be_sent(make: Any, kind: str) -> None:
    engine = make(collate_fn=GARBAGE[kind])
    made = run(engine, [[1, 2], [3]])

    if isinstance(engine, ProcessEngine):
        assert not engine.deaths
        assert all("can't be sent to another process" in str(each) for each in made)
        assert "samples [3]" in str(made[1].__cause__)
    assert all(isinstance(each, InvalidType) == isinstance(engine, ProcessEngine) for each in made)


def test_what_the_collate_function_raises_names_the_samples(make: Any) -> None:
    (caught,) = run(make(collate_fn=lambda _: throw(ValueError("uneven"))), [[7, 8]])
    told = str(caught.__cause__) + "".join(getattr(caught, "__notes__", ()))

    assert str(caught) == "uneven"
    assert "samples [7, 8]" in told


def test_discarded_jobs_never_come(make: Any) -> None:
    engine = make()
    for _ in range(5):
        for n in range(engine.capacity):
            engine.submit(BatchJob([n], None))
        engine.discard()
        assert_made(run(engine, [[9]]), expected(indices=[[9]]))


def test_closed_engines_begin_again(make: Any) -> None:
    engine = make()
    engine.submit(BatchJob([1], None))
    for _ in range(2):
        engine.close()
        engine.close()
        assert_made(run(engine, [[2], [3]]), expected(indices=[[2], [3]]))


def test_before_python_3_11_the_place_is_an_errors_cause() -> None:
    class Old(ValueError):
        def add_note(self, note: str) -> None:
            raise AttributeError("add_note")

    (caught,) = run(InlineEngine(loader_of(Broken(Old("bad")))), [[5]])

    assert type(caught) is Old
    assert str(caught.__cause__) == "in the loop's own thread while fetching sample 5"


# Inline


def test_an_exit_in_a_thread_is_an_error_of_its_batch() -> None:
    engine = ThreadEngine(loader_of(Broken(SystemExit(3))), 1)
    made = run(engine, [[4], [5], [6]])
    engine.close()

    assert type(made[1]) is InvalidState
    assert str(made[1]) == "SystemExit was raised in thread 0 while fetching sample 5: 3"
    assert_made(made[::2], expected(indices=[[4], [6]]))


def test_without_a_seed_the_loops_numbers_are_drawn() -> None:
    torch.manual_seed(3)
    plain = torch.cat(list(loader_of(Draws())))[:, 0]
    torch.manual_seed(3)
    next(iter(loader_of(Draws())))  # the base seed of an epoch
    torch.manual_seed(3)
    torch.empty((), dtype=torch.int64).random_()

    assert torch.equal(torch.cat(run(InlineEngine(loader_of(Draws()))))[:, 0], plain)


# Threads


def test_threads_work_side_by_side() -> None:
    barrier = threading.Barrier(2, timeout=100)

    class Meets(Squares):
        def __getitem__(self, index: int) -> torch.Tensor:
            if index:  # the first one is made while the others wait
                barrier.wait()
            return super().__getitem__(index)

    engine = ThreadEngine(loader_of(Meets()), 2)
    assert_made(run(engine, [[n] for n in range(9)]), expected(indices=[[n] for n in range(9)]))
    engine.close()


def test_the_loaders_timeout_is_kept_by_threads() -> None:
    late = threading.Event()

    class Waits(Squares):
        def __getitem__(self, index: int) -> torch.Tensor:
            if index == 5:
                late.wait(60)
            return super().__getitem__(index)

    engine = ThreadEngine(loader_of(Waits(), num_workers=1, timeout=0.2), 2)
    made = run(engine, [[4], [5], [6]])
    late.set()
    engine.close()

    assert str(made[1]) == "a thread has been fetching samples [5] for 0.2 s (timeout=0.2)"
    assert_made(made[::2], expected(indices=[[4], [6]]))


def test_threads_end_with_the_engine() -> None:
    engine = ThreadEngine(loader_of(Squares()), 3)
    run(engine)
    engine.close()
    until = time.monotonic() + 30
    while time.monotonic() < until and any(t.name.startswith("accel-loader") for t in threading.enumerate()):
        time.sleep(0.01)

    assert not any(thread.name.startswith("accel-loader") for thread in threading.enumerate())


class Modes(Dataset[Tensor]):
    """Samples tell their index, and under which modes of torch they are made."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        product = torch.ones(2, 2) @ torch.ones(2, 2)
        return index, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), product.dtype, product.device.type


MODES: dict[str, Any] = {
    "none": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "device": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("mode", MODES)
def test_threads_fetch_under_the_modes_of_the_loop(mode: str) -> None:
    loader = DataLoader(Modes(), batch_size=None)
    threads, plain = ThreadEngine(loader, 1), InlineEngine(loader)
    with MODES[mode]():
        assert run(threads, [0, 1]) == run(plain, [0, 1])
    assert run(threads, [2]) == run(plain, [2])
    threads.close()


@settings(max_examples=examples(50), deadline=None)
@given(st.integers(1, 3), st.lists(st.tuples(st.booleans(), st.sampled_from(list(MODES))), max_size=30))
def test_batches_are_made_under_the_modes_in_which_the_loop_asks_for_them(
    workers: int, steps: list[tuple[bool, str]]
) -> None:
    """Made ahead at the end of a pass in inference mode, they could not be trained on."""
    loader = DataLoader(Modes(), batch_size=None)
    threads, plain = ThreadEngine(loader, workers), InlineEngine(loader)
    submitted = collected = 0
    for submits, mode in steps:
        with MODES[mode]():
            if submits:
                threads.submit(BatchJob(submitted, None))
                submitted += 1
            elif collected < submitted:
                assert threads.collect() == run(plain, [collected])[0]
                collected += 1
    threads.close()
