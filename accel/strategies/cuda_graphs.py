"""cuda_graphs: replay the model's forward and backward pass as one launch each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from accel.profiler.bottleneck import Bottleneck
from accel.run import Run
from accel.run.context import shapes_of
from accel.run.gate import Call
from accel.strategies.base import Exactness, NothingHelps, Strategy

if TYPE_CHECKING:
    from accel.graphs import ModelCalls

_WATCHED = 3
"""Calls that are watched before a capture: which outputs get gradients, and whether those are differentiated again."""


class CudaGraphs(Strategy):
    """Run the model's usual training call by CUDA graphs (`accel.graphs`); all other calls run as they are.

    Source: https://pytorch.org/blog/accelerating-pytorch-with-cuda-graphs/. Tested on a GPU; docs/gpu.md
    has captured steps.
    """

    name = "cuda_graphs"
    summary = "forward and backward pass as one launch each"
    treats = frozenset({Bottleneck.LAUNCH})
    exactness = Exactness.REORDERED  # libraries may choose other algorithms for a graph's own memory
    captures = True
    settle_steps = 2

    def __init__(self) -> None:
        self._calls: ModelCalls | None = None

    def refusal(self, run: Run) -> str:
        """Say why it does not apply: no CUDA, several ranks, graphs of the loop's own, inputs of many shapes."""
        if not run.cuda:
            return "it needs a CUDA device; the model is on the " + run.device.type.upper()
        if run.world_size > 1:
            return "capture the model before wrapping it in DistributedDataParallel (accel.graphs.capture)"
        if self._is_captured(run):
            return "the model is captured already"
        if run.gate.compiled_by_user or hasattr(run.model, "_orig_mod"):
            return 'the model is compiled already; torch.compile(mode="reduce-overhead") makes graphs'
        if run.observed.calls and run.observed.usual_shapes is None:
            return "the shapes of the model's inputs vary, and each would take a graph (accel.graphs.Buckets pads them)"
        return ""

    def waits(self, run: Run) -> str:
        """Watch some calls, and say so until they have been seen."""
        calls = self._calls_of(run)
        if calls.why_eager or calls.is_warm:
            return ""
        calls.may_capture = False
        self._wrap(run)
        return "the model's calls are watched"

    def enable(self, run: Run, setting: Any) -> None:
        """Capture in the next call, and replay in those that follow."""
        calls = self._calls_of(run)
        if calls.why_eager:
            raise NothingHelps(calls.why_eager[0])
        calls.may_capture = True
        self._wrap(run)

    def disable(self, run: Run) -> None:
        """Call the model as it is; the graphs are kept."""
        run.gate.remove(self.name)

    def failure(self, run: Run) -> str:
        """Return why calls run eagerly; '' if they don't."""
        return self._calls.why_eager[0] if self._calls is not None and self._calls.why_eager else ""

    def close(self, run: Run) -> None:
        """Give the graphs' memory back; what was watched stays known."""
        if self._calls is not None:
            self._calls.drop_graphs()

    def _calls_of(self, run: Run) -> ModelCalls:
        if self._calls is None:
            self._calls = self._new_calls(run)
        return self._calls

    def _new_calls(self, run: Run) -> ModelCalls:
        from accel.graphs import ModelCalls

        return ModelCalls(run.model, warmup=_WATCHED, say=lambda reason: None)

    def _is_captured(self, run: Run) -> bool:
        from accel.graphs import calls_of

        return calls_of(run.model) is not None

    def _wrap(self, run: Run) -> None:
        calls, usual = self._calls_of(run), run.observed.usual_shapes

        def wrap(call: Call) -> Call:
            by_graphs = calls.wrap(call, run.gate.within(self.name))

            def run_call(*args: Any, **kwargs: Any) -> Any:
                if not calls.may_capture and (calls.is_warm or calls.why_eager):
                    run.gate.remove(self.name)
                is_usual = torch.is_grad_enabled() and shapes_of(args, kwargs) == usual
                return by_graphs(*args, **kwargs) if is_usual else call(*args, **kwargs)

            return run_call

        run.gate.add(self.name, wrap)
