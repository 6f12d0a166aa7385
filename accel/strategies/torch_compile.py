"""torch_compile: compile the model in place, or the blocks that it repeats, once for all of them."""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._functorch import config as functorch_config
from torch.nn.parallel import DistributedDataParallel

from accel.guard.together import is_sharded, why_not_together
from accel.profiler.bottleneck import Bottleneck
from accel.profiler.loop import callslot
from accel.profiler.trees import copied
from accel.run import Run
from accel.run.context import shapes_of
from accel.run.gate import Call
from accel.strategies.base import Exactness, Strategy
from accel.strategies.trial_design import TrialDesign

if TYPE_CHECKING:
    from accel.compile.compile_ahead import CompileAhead, CoreUse
    from accel.compile.compiled_calls import CompiledCalls

BLOCKS, WHOLE = "blocks", "whole model"
# Fitted to eight models of benchmarks/suite on two cores: 9 to 113 s, all within a factor of two.
_START_S, _LAYER_S, _REPEATED_LAYER_S = 5.0, 1.2, 0.35
_ON_A_GPU = 0.5
"""Of that. ResNet-50, 102 s by these, took 28 s, or 56 s with empty caches (github.com/pytorch/benchmark/pull/1547)."""
REPEATED_SHARE = 0.3
"""Of what a helper process has compiled, the part that this one does again. With torch's cache a small convolutional
network took 2.8 s in place of 18.8 s; large models repeat more."""
_LEAST_IDLE = 0.75
"""Cores that nobody must be using where a helper process is to compile."""


class TorchCompile(Strategy):
    """Run the model's call through `torch.compile`: the blocks that it repeats, or all of it.

    In place: the model stays the same object and its `state_dict` keys get no `_orig_mod.` prefix. Blocks with the same
    code on parameters of the same shapes share one graph, which takes half of the compiler's time for a BERT of four.
    The compiled calls are made once and kept while a trial switches them on and off.

    Where cores are idle, a helper process compiles first, while training goes on: what it leaves in torch's cache on
    disk makes compiling here short. See `accel.compile.compile_ahead`.

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
        self._helper: CompileAhead | None = None
        self._helper_compiles = ""
        self._helped: dict[str, str] = {}
        """Setting → why the helper process gave no result, '' if it has compiled."""
        self._tried: set[str] = set()
        self._batch: object = None
        """What the helper process was asked for, and what has been tried, holds for batches of this shape."""
        self._core_use: CoreUse | None = None
        self._active = ""
        self._is_preparing = False

    def refusal(self, run: Run) -> str:
        """Say why it does not apply: compiled already, a wrapper, or a loop that uses its graphs otherwise."""
        if run.gate.compiled_by_user or hasattr(run.model, "_orig_mod"):
            return "the model is compiled already"
        if any(hasattr(module, "_orig_mod") or _is_compiled(module) for module in _inner(run)):
            return "a part of the model is compiled already"
        if run.world_size > 1 and (why := _not_in_parallel(run)):
            return why
        if is_sharded(run.model) and not self._blocks(run):
            alone = "no block of the sharded model can be compiled by itself; give each one to fully_shard"
            return why_not_together(run.model) or alone
        if is_sharded(run.model) and not hasattr(functorch_config, "force_non_lazy_backward_lowering"):
            return "this torch compiles backward passes within them, where a failure would leave one rank out of step"
        if run.observed.needs_graphs:
            return f"{run.observed.needs_graphs}, which a compiled one does not bear"
        return ""

    def settings(self, run: Run) -> list[Any]:
        """Return the repeated blocks, if there are any, and the whole model: what compiles faster comes first."""
        if is_sharded(run.model):
            return [BLOCKS]
        return [BLOCKS, WHOLE] if self._blocks(run) else [WHOLE]

    def trial_design(self, run: Run) -> TrialDesign:
        """Have a helper process compile first, if cores are idle; a graph is for calls as they are now."""
        return TrialDesign(
            cost_s=partial(self.compiling_s, run),
            settle_steps=2,
            describe=lambda setting: str(setting or WHOLE),  # a plan of an earlier version has None for that
            prepare=partial(self.waits, run),
            is_preparing=self._is_preparing,
            is_made_for_calls=True,
        )

    def compiling_s(self, run: Run, setting: Any) -> float:
        """Return seconds until it is compiled: so many for each layer in the graphs, fewer for one like another.

        The compiler finds most of the code for a repeated layer done, but captures and lowers each. What a helper
        process has compiled, or is going to, leaves the part that is done again.
        """
        from accel.compile.compiled_calls import layers

        groups = self._blocks(run) if setting == BLOCKS else []
        different, repeated = layers([group[0] for group in groups] or [run.model])
        graphs = 1 if run.observed.usual_shapes is not None else 2  # for the first sizes, and for all
        seconds = (_START_S + _LAYER_S * different + _REPEATED_LAYER_S * repeated) * graphs
        seconds *= _ON_A_GPU if run.cuda else 1.0
        problem = self._helped.get(setting) if setting in self._helped else _no_room(run)
        return seconds if problem else seconds * REPEATED_SHARE

    def waits(self, run: Run) -> str:
        """Have a helper process compile, if there is room for it, and say so until it has ended."""
        self._follow_batch(run)
        if self._helper is not None and self._helper.has_ended():
            self._helped[self._helper_compiles] = self._helper.problem
            self._dismiss_helper(run)
        setting = next((s for s in self.settings(run) if s not in self._tried), None)
        if self._helper is None and setting is not None and setting not in self._helped and not _no_room(run):
            from accel.compile.compile_ahead import CompileAhead, CoreUse

            self._core_use = self._core_use or CoreUse()
            busy = self._core_use.look()
            if busy is None:
                return "whether a core is idle is being measured"
            if _idle_cores(run) - busy < _LEAST_IDLE:
                self._helped[setting] = "other processes keep the cores busy"
            else:
                self._helper, self._helper_compiles = CompileAhead(torch.get_num_threads()), setting
                self._wrap_calls(run)
        self._is_preparing = self._helper is not None
        return f"a helper process compiles: {self._helper_compiles}" if self._is_preparing else ""

    def enable(self, run: Run, setting: Any) -> None:
        """Put the compiled calls in place; compilation happens at their first call."""
        self._follow_batch(run)
        setting = setting or WHOLE
        if self._helper is not None and self._helper_compiles == setting:
            self._dismiss_helper(run)
        earlier = self._calls.get(setting)
        if earlier is None or earlier.usual != run.observed.usual_shapes:
            if earlier is not None:
                earlier.forget()
            self._calls[setting] = self._new_calls(run, setting)
        self._calls[setting].put_on()
        self._active = setting
        self._tried.add(setting)
        self._wrap_calls(run)

    def disable(self, run: Run) -> None:
        """Call the model as it is; the compiled calls are kept."""
        if self._active:
            self._calls[self._active].take_off()
        self._active = ""
        self._wrap_calls(run)

    def failure(self, run: Run) -> str:
        """Return why nothing runs compiled any more; '' if it does."""
        return self._calls[self._active].stopped if self._active else ""

    def close(self, run: Run) -> None:
        """Forget what was compiled, and end the helper process."""
        self._dismiss_helper(run)
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

    def _wrap_calls(self, run: Run) -> None:
        helper, setting, usual = self._helper, self._helper_compiles, run.observed.usual_shapes
        active = self._calls[self._active] if self._active else None
        if active is None and helper is None:
            run.gate.remove(self.name)
            return

        def wrap(call: Call) -> Call:
            if run.gate.compiled_by_user:
                return call
            wrapped = call if active is None else active.wrap(call)

            def run_call(*args: Any, **kwargs: Any) -> Any:
                assert helper is not None
                # Only here the arguments are known.
                if helper.is_due and torch.is_grad_enabled() and usual in (None, shapes_of(args, kwargs)):
                    helper.start(lambda: compile_ahead(call, args, kwargs))
                return wrapped(*args, **kwargs)

            return wrapped if helper is None else run_call

        def compile_ahead(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            """Compile forward and backward; this runs in the helper process."""
            from accel.compile.compiled_calls import compile_once

            if active is not None:
                active.take_off()
            own_args, own_kwargs = copied((args, kwargs))  # a batch of a loader's workers lies in memory that is shared
            compile_once(self._new_calls(run, setting), run.model, call, own_args, own_kwargs)

        run.gate.add(self.name, wrap, None if active is None else active.leave, compiles=active is not None)

    def _follow_batch(self, run: Run) -> None:
        """After a change of the batch, forget what was compiled ahead for the one before."""
        if run.observed.batch != self._batch:
            self._batch = run.observed.batch
            self._dismiss_helper(run)
            self._helped.clear()
            self._tried.clear()

    def _dismiss_helper(self, run: Run) -> None:
        if self._helper is not None:
            self._helper.stop()
            self._helper, self._is_preparing = None, False
            self._wrap_calls(run)


def _no_room(run: Run) -> str:
    if _idle_cores(run) < 1:
        return "the loop uses all cores"
    if is_sharded(run.model):
        return "its calls gather weights from all ranks"
    if run.device.type != "cpu":
        return "the model is not on the CPU"
    held = chain(run.model.parameters(), run.model.buffers())
    plain = (t for t in held if type(t) in (torch.Tensor, torch.nn.Parameter) and t.layout == torch.strided)
    if any(tensor.is_shared() for tensor in plain):  # type: ignore[no-untyped-call]
        return "the model lies in shared memory, which a helper process would write to"
    from accel.compile.compile_ahead import unavailable

    return unavailable()


def _not_in_parallel(run: Run) -> str:
    if any(isinstance(module, DistributedDataParallel) for module in run.inner.modules()):
        return "a part of the model is in DistributedDataParallel; pass that one"
    if is_sharded(run.model):
        return ""
    first: int = dist._DEFAULT_FIRST_BUCKET_BYTES  # type: ignore[attr-defined]
    if not isinstance(run.model, DistributedDataParallel) or run.model.bucket_bytes_cap >= first:
        return ""
    return "torch.compile can't split graphs for buckets of less than 1 MB (bucket_cap_mb of DistributedDataParallel)"


def _idle_cores(run: Run) -> int:
    return run.cores - run.ranks_here * (torch.get_num_threads() + (getattr(run.loader, "num_workers", 0) or 0))


def _is_compiled(module: torch.nn.Module) -> bool:
    call = module._compiled_call_impl
    return call is not None and not isinstance(call, callslot.SlotCall)


def _inner(run: Run) -> list[torch.nn.Module]:
    return [module for module in run.model.modules() if module is not run.model]
