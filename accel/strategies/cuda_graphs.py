"""cuda_graphs: replay the model's forward and backward pass as one launch each."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from accel.device_memory import available_memory, idle_in_graphs
from accel.profiler.bottleneck import Bottleneck
from accel.run import Run
from accel.run.context import Shapes, shapes_of
from accel.run.gate import Call
from accel.strategies.base import Exactness, NothingHelps, Strategy, needs_cuda
from accel.strategies.trial_design import Replay, TrialDesign

if TYPE_CHECKING:
    from accel.graphs import ModelCalls
    from accel.guard.guard import Comparison as Finding
    from accel.guard.guard import Recording

_SETS = 2
"""Of activations: the graph's own, which stay as long as it is kept, and those of an eager call beside it. The loop
makes such calls in the blocks of a trial without graphs, and whenever inputs are of another kind."""
_GIB = 2**30
_WATCHED = 3
"""Calls that are watched before a capture: which outputs get gradients, and whether those are differentiated again."""


def compared_with_eager(without: Replay, under: Replay, recording: Recording, exactness: Exactness) -> Finding:
    """Compare a call from the same random state: the one that captures, then one that replays what was captured.

    From the same state a graph draws what an eager call draws, unless a library takes another path while a stream is
    captured, as transformers does for attention masks. Such graphs are refused.
    """
    from accel.guard import guard

    expected, finding = without(recording), guard.Comparison()
    for _ in range(2):  # one is freed before the next is made
        finding = finding.merge(guard.compare(expected, under(recording), exactness))
        if finding.problem:
            break
    return finding


class CudaGraphs(Strategy):
    """Run the model's usual training call by CUDA graphs (`accel.graphs`); all other calls run as they are.

    Source: https://pytorch.org/blog/accelerating-pytorch-with-cuda-graphs/.
    """

    name = "cuda_graphs"
    summary = "forward and backward pass as one launch each"
    treats = frozenset({Bottleneck.LAUNCH})
    exactness = Exactness.REORDERED  # libraries may choose other algorithms for a graph's own memory

    def __init__(self) -> None:
        self._calls: ModelCalls | None = None
        self._step: tuple[Shapes | None, int] | None = None
        """The usual shapes, and the bytes that a step of such needs at most above what is always allocated."""

    def refusal(self, run: Run) -> str:
        """Say why it does not apply: no CUDA, several ranks, graphs of the loop's own, inputs of many shapes."""
        if why := needs_cuda(run):
            return why
        if run.world_size > 1:
            return "capture the model before wrapping it in DistributedDataParallel (accel.graphs.capture)"
        if self._is_captured(run):
            return "the model is captured already"
        if run.gate.compiled_by_user or hasattr(run.model, "_orig_mod"):
            return 'the model is compiled already; torch.compile(mode="reduce-overhead") makes graphs'
        if run.observed.calls and run.observed.usual_shapes is None:
            return "the shapes of the model's inputs vary, and each would take a graph (accel.graphs.Buckets pads them)"
        return ""

    def trial_design(self, run: Run) -> TrialDesign:
        """Watch some calls first; graphs run eagerly where the guard notes draws, so they are compared without that."""
        return TrialDesign(
            settle_steps=2, prepare=partial(self.waits, run), is_made_for_calls=True, further_check=compared_with_eager
        )

    def waits(self, run: Run) -> str:
        """Watch some calls, and say so until they have been seen."""
        calls = self._calls_of(run)
        if run.cuda:
            self._measure_step(run)
        if calls.why_eager or calls.seen.is_warm:
            return ""
        calls.may_capture = False
        self._wrap(run)
        return "the model's calls are watched"

    def enable(self, run: Run, setting: Any) -> None:
        """Capture in the next call, and replay in those that follow."""
        calls = self._calls_of(run)
        if calls.why_eager:
            raise NothingHelps(calls.why_eager[0])
        if (
            run.cuda
            and not calls.has_graphs
            and (why := why_no_room(memory_of(run.device).available, self._measure_step(run)))
        ):
            raise NothingHelps(why)
        calls.may_capture = True
        self._wrap(run)

    def disable(self, run: Run) -> None:
        """Call the model as it is; the graphs are kept for the next block of a trial.

        Not where they are of no use any more, or a step of the loop's own might not have room beside them. What a lost
        trial leaves otherwise is given back in `close`, at the end of the search.
        """
        run.gate.remove(self.name)
        if self._calls is not None and (self._calls.why_eager or self._are_in_the_way(run)):
            self._calls.drop_graphs(awaited=False)  # it may be switched off before a backward pass

    def failure(self, run: Run) -> str:
        """Return why calls run eagerly; '' if they don't."""
        return self._calls.why_eager[0] if self._calls is not None and self._calls.why_eager else ""

    def close(self, run: Run) -> None:
        """Give the graphs' memory back; what was watched stays known."""
        if self._calls is not None:
            self._calls.drop_graphs()

    def _measure_step(self, run: Run) -> int:
        """Return the bytes that a step needs at most, as was seen at boundaries: in the guard's, copies are beside."""
        shapes = run.observed.usual_shapes
        if self._step is None or self._step[0] != shapes:
            self._step = shapes, memory_of(run.device).of_a_step
        elif not self._calls_of(run).captures:  # later peaks have graphs in them
            self._step = shapes, max(self._step[1], memory_of(run.device).of_a_step)
        return self._step[1]

    def _are_in_the_way(self, run: Run) -> bool:
        if not run.cuda or self._step is None or self._calls is None or not self._calls.has_graphs:
            return False
        return memory_of(run.device).available - idle_in_graphs(run.device) < self._step[1]

    def _calls_of(self, run: Run) -> ModelCalls:
        from accel.graphs import ModelCalls

        if self._calls is None:
            self._calls = ModelCalls(run.model, warmup=_WATCHED, say=lambda reason: None)
        return self._calls

    def _is_captured(self, run: Run) -> bool:
        from accel.graphs import calls_of

        return calls_of(run.model) is not None

    def _wrap(self, run: Run) -> None:
        calls, usual = self._calls_of(run), run.observed.usual_shapes

        def wrap(call: Call) -> Call:
            by_graphs = calls.wrap(call, run.gate.within(self.name))

            def run_call(*args: Any, **kwargs: Any) -> Any:
                if not calls.may_capture and (calls.seen.is_warm or calls.why_eager):
                    run.gate.remove(self.name)
                is_usual = torch.is_grad_enabled() and shapes_of(args, kwargs) == usual
                return by_graphs(*args, **kwargs) if is_usual else call(*args, **kwargs)

            return run_call

        # Not of those whose backward pass may come: a step that has begun is finished with them.
        run.gate.add(self.name, wrap, make_room=partial(calls.drop_graphs, awaited=False))


class DeviceMemory(NamedTuple):
    """Memory of a device, bytes."""

    available: int
    """What tensors can still get, with what the caching allocator holds unused."""
    of_a_step: int
    """At a step boundary: what a step needs at most above what is always there."""


def memory_of(device: torch.device) -> DeviceMemory:
    """Return what a CUDA device has now; the user's peak statistics are read, and not reset."""
    peak = torch.cuda.memory_stats(device).get("allocated_bytes.all.peak", 0)
    return DeviceMemory(available_memory(device), max(0, peak - torch.cuda.memory_allocated(device)))


def why_no_room(available: int, step: int) -> str:
    """Say why graphs of a step that needs so many bytes should not be captured; '' if there is room for them."""
    if step == 0:
        return "what a step needs of memory is not known: the loop resets torch's peak statistics after each"
    needed = _SETS * step
    if available >= needed:
        return ""
    return (
        "there is no room for graphs beside a step of the loop's own: both need up to "
        f"{needed / _GIB:.1f} GiB, and {available / _GIB:.1f} GiB are left"
    )
