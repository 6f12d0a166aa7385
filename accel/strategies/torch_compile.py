"""torch_compile: compile the model in place, its compile time counted against its gain."""

from __future__ import annotations

from typing import Any

import torch

from accel.profiler.bottleneck import Bottleneck
from accel.run import Run
from accel.run.gate import Call
from accel.strategies.base import Exactness, Strategy


class TorchCompile(Strategy):
    """Run the model's call through `torch.compile`.

    In place: the model stays the same object and its `state_dict` keys get no `_orig_mod.` prefix. The compiled call is
    made once and kept while a trial switches it on and off.

    Source: Ansel et al., PyTorch 2, ASPLOS 2024.
    """

    name = "torch_compile"
    summary = "compiled graph of the model (TorchInductor)"
    treats = frozenset({Bottleneck.LAUNCH, Bottleneck.MEMORY, Bottleneck.COMPUTE})
    exactness = Exactness.REORDERED
    # A small convolutional network takes 20-40 s on two cores; large models take minutes. The budget waits for it.
    one_off_s = 30.0
    # With torch's cache a small convolutional network took 2.8 s in place of 18.8 s. Large models repeat more.
    repeated_share = 0.3
    settle_steps = 2
    compiles = True

    def __init__(self) -> None:
        self._compiled: dict[int, Call] = {}

    def refusal(self, run: Run) -> str:
        """Say why it does not apply: compiled already, or a wrapper that compiles badly from outside."""
        if run.gate.compiled_by_user or hasattr(run.model, "_orig_mod"):
            return "the model is compiled already"
        if any(hasattr(module, "_orig_mod") or module._compiled_call_impl for module in _inner(run)):
            return "a part of the model is compiled already"
        if run.world_size > 1:
            return "compile the model before wrapping it in DistributedDataParallel: ranks would compile at other times"
        return ""

    def enable(self, run: Run, setting: Any) -> None:
        """Put the compiled call innermost; compilation happens at its first call."""
        run.gate.add(self.name, self._compile)

    def disable(self, run: Run) -> None:
        """Call the model as it is; the compiled call is kept."""
        run.gate.remove(self.name)

    def close(self, run: Run) -> None:
        """Forget the compiled call."""
        self._compiled.clear()

    def _compile(self, call: Call) -> Call:
        # One compiled call per wrapped function; the innermost call is always the same bound method.
        key = hash(call)
        if key not in self._compiled:
            from accel.strategies.compiled_draws import compile_with_plain_draws

            self._compiled[key] = torch.compile(_framed(call), backend=compile_with_plain_draws)
        return self._compiled[key]


def _framed(call: Call) -> Call:
    """Return `call` in a frame of ours: torch doesn't compile frames of its own files, so nothing of a Sequential."""

    def run_call(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    return run_call


def _inner(run: Run) -> list[torch.nn.Module]:
    return [module for module in run.model.modules() if module is not run.model]
