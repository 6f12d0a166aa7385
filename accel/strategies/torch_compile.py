"""torch_compile: compile the model in place, or the blocks that it repeats, once for all of them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from accel.guard.together import is_sharded, why_not_together
from accel.profiler.bottleneck import Bottleneck
from accel.profiler.loop import callslot
from accel.run import Run
from accel.run.gate import Call
from accel.strategies.base import Exactness, Strategy
from accel.strategies.trial_design import TrialDesign

if TYPE_CHECKING:
    from accel.compile.compiled_calls import CompiledCalls

BLOCKS, WHOLE = "blocks", "whole model"
# Fitted to eight models of benchmarks/suite on two cores: 9 to 113 s, all within a factor of two.
_START_S, _LAYER_S, _REPEATED_LAYER_S = 5.0, 1.2, 0.35


class TorchCompile(Strategy):
    """Run the model's call through `torch.compile`: the blocks that it repeats, or all of it.

    In place: the model stays the same object and its `state_dict` keys get no `_orig_mod.` prefix. Blocks with the same
    code on parameters of the same shapes share one graph, which takes half of the compiler's time for a BERT of four.
    The compiled calls are made once and kept while a trial switches them on and off.

    Source: Ansel et al., PyTorch 2, ASPLOS 2024.
    """

    name = "torch_compile"
    summary = "compiled graph of the model (TorchInductor)"
    treats = frozenset({Bottleneck.LAUNCH, Bottleneck.MEMORY, Bottleneck.COMPUTE})
    exactness = Exactness.REORDERED
    touches = frozenset({"model", "shards"})

    def __init__(self) -> None:
        self._calls: dict[str, CompiledCalls] = {}
        self._groups: list[list[torch.nn.Module]] | None = None
        self._active = ""

    def refusal(self, run: Run) -> str:
        """Say why it does not apply: compiled already, a wrapper, or a loop that uses its graphs otherwise."""
        if run.gate.compiled_by_user or hasattr(run.model, "_orig_mod"):
            return "the model is compiled already"
        inner = (module for module in run.model.modules() if module is not run.model)
        if any(hasattr(module, "_orig_mod") or _is_compiled(module) for module in inner):
            return "a part of the model is compiled already"
        if run.world_size > 1 and (why := _not_in_parallel(run)):
            return why
        if is_sharded(run.model) and not self._blocks(run):
            alone = "no block of the sharded model can be compiled by itself; give each one to fully_shard"
            return why_not_together(run.model) or alone
        if run.observed.needs_graphs:
            return f"{run.observed.needs_graphs}, which a compiled one does not bear"
        return ""

    def settings(self, run: Run) -> list[Any]:
        """Return the repeated blocks, if there are any, and the whole model: what compiles faster comes first."""
        if is_sharded(run.model):
            return [BLOCKS]
        return [BLOCKS, WHOLE] if self._blocks(run) else [WHOLE]

    def comparison(self, run: Run) -> TrialDesign:
        """Reckon with the compiler's time; a graph is for calls as they are now."""
        return TrialDesign(
            cost_s=partial(self.compiling_s, run),
            settle_steps=2,
            describe=lambda setting: str(setting or WHOLE),  # a plan of an earlier version has None for that
            is_made_for_calls=True,
        )

    def compiling_s(self, run: Run, setting: Any) -> float:
        """Return seconds until it is compiled: so many for each layer in the graphs, fewer for one like another.

        The compiler finds most of the code for a repeated layer done, but captures and lowers each.
        """
        from accel.compile.compiled_calls import layers

        groups = self._blocks(run) if setting == BLOCKS else []
        different, repeated = layers([group[0] for group in groups] or [run.model])
        graphs = 1 if run.observed.usual_shapes is not None else 2  # for the first sizes, and for all
        return (_START_S + _LAYER_S * different + _REPEATED_LAYER_S * repeated) * graphs

    def enable(self, run: Run, setting: Any) -> None:
        """Put the compiled calls in place; compilation happens at their first call."""
        setting = setting or WHOLE
        earlier = self._calls.get(setting)
        if earlier is None or earlier.usual != run.observed.usual_shapes:
            if earlier is not None:
                earlier.forget()
            self._calls[setting] = self._new_calls(run, setting)
        self._calls[setting].put_on()
        self._active, calls = setting, self._calls[setting]

        def wrap(call: Call) -> Call:
            return call if run.gate.compiled_by_user else calls.wrap(call)

        run.gate.add(self.name, wrap, calls.leave, compiles=True)

    def disable(self, run: Run) -> None:
        """Call the model as it is; the compiled calls are kept."""
        if self._active:
            self._calls[self._active].take_off()
        self._active = ""
        run.gate.remove(self.name)

    def failure(self, run: Run) -> str:
        """Return why nothing runs compiled any more; '' if it does."""
        return self._calls[self._active].stopped if self._active else ""

    def close(self, run: Run) -> None:
        """Forget what was compiled."""
        for calls in self._calls.values():
            calls.forget()
        self._calls.clear()
        self._groups = None

    def _blocks(self, run: Run) -> list[list[torch.nn.Module]]:
        if self._groups is None:
            from accel.compile.compiled_calls import repeated_blocks, sharded_blocks

            self._groups = (sharded_blocks if is_sharded(run.model) else repeated_blocks)(run.model)
        return self._groups

    def _new_calls(self, run: Run, setting: str) -> CompiledCalls:
        from accel.compile.compiled_calls import CompiledCalls
        from accel.compile.compiled_draws import compile_with_plain_draws

        groups = self._blocks(run) if setting == BLOCKS or is_sharded(run.model) else []
        if run.inner is not run.model:  # DistributedDataParallel's own call stays as it is, with its hooks around it
            groups = groups or [[run.inner]]
        return CompiledCalls(run.inner, groups, usual=run.observed.usual_shapes, compiler=compile_with_plain_draws)


def _not_in_parallel(run: Run) -> str:
    """Say why the model can't be compiled inside DistributedDataParallel, or beside one that is a part of it."""
    if any(isinstance(module, DistributedDataParallel) for module in run.inner.modules()):
        return "a part of the model is in DistributedDataParallel; pass that one"
    if is_sharded(run.model):
        return ""
    first: int = dist._DEFAULT_FIRST_BUCKET_BYTES  # type: ignore[attr-defined]
    if not isinstance(run.model, DistributedDataParallel) or run.model.bucket_bytes_cap >= first:
        return ""
    return "torch.compile can't split graphs for buckets of less than 1 MB (bucket_cap_mb of DistributedDataParallel)"


def _is_compiled(module: torch.nn.Module) -> bool:
    call = module._compiled_call_impl
    return call is not None and not isinstance(call, callslot.SlotCall)
