"""The loop's own step as the reference of a comparison, where a plain call made once more would take too long.

A candidate that passes agrees, in the outputs and in all gradients, with what the step itself has computed: that call
need not be made again. One that does not agree is not judged by it, but compared as usual: a loop may have added a
penalty, or called the model twice, and then its gradients are not those of one call.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from accel.dataio.batches import tensors
from accel.guard import arguments
from accel.guard.guard import Recording, Replayed
from accel.guard.module_state import tensors_in_attributes
from accel.profiler.interruptions import ours


class OwnStep:
    """Collect the outputs and gradients of a call that the loop has just made.

    Args:
        model: that was called.
        recording: of the call.
        call: its arguments, as the loop has passed them.
        given: the tensors that were in these before the call.
        outputs: of the call.
    """

    def __init__(self, model: nn.Module, recording: Recording, call: Any, given: list[Tensor], outputs: Any) -> None:
        parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad and not is_lazy(p)]
        named: list[tuple[str, Tensor]] = [
            *parameters,
            *((f"input {i}", t) for i, t in enumerate(given) if t.requires_grad),
        ]
        self._recording, self._named = recording, named
        self._arrived: dict[int, Tensor] = {}
        self._is_spoilt = False
        """Something in the step says that its gradients can't be taken for those of one call."""
        self._hooks: list[RemovableHandle] = []
        made, (entries, added) = tensors(outputs), arguments.entries(call, given)
        left = arguments.written(tensors((recording.args, recording.kwargs)), given)
        self._made = Replayed(
            [each.detach() for each in made],
            [None] * len(named),
            [name for name, _ in named],
            inputs=left,
            entries=entries,
            added=added,
            attributes=tensors_in_attributes(model),
            coarsest=recording.coarsest(model, made),
        )
        # Not copied: a copy of a view lies otherwise in memory.
        kept = [*self._made.outputs, *added, *(each for each in left if each is not None)]
        self._versions = [(each, each._version) for each in kept]

    def listen(self) -> None:
        """Collect the gradients of the backward passes to come."""
        for number, (_, tensor) in enumerate(self._named):
            self._hooks.append(tensor.register_hook(partial(self._arrive, number)))  # type: ignore[no-untyped-call]

    def _arrive(self, number: int, gradient: Tensor | None) -> None:
        if gradient is None:  # a function of the user's has returned none
            return
        if torch.is_grad_enabled() or torch._C._autograd._get_current_graph_task_keep_graph():
            self._is_spoilt = True  # the loop goes through the graph once more, and a replay may write to what it holds
        try:
            # A loop may call backward twice; the gradients then add up.
            before = self._arrived.get(number)
            self._arrived[number] = gradient.detach() if before is None else before + gradient.detach()
        except ours():  # a sparse one and a dense one, say: nothing may fail in the loop's backward pass
            self._is_spoilt = True

    def close(self) -> None:
        """Listen no more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for _, tensor in self._named:
            if tensor.is_leaf and not tensor._backward_hooks:
                tensor._backward_hooks = None  # else each backward pass asks an empty table, 0.5 µs apiece

    def computed(self) -> Replayed | None:
        """Return what the step has computed so far; None if that can't be told, or no gradient has arrived."""
        is_written_to = any(each._version != version for each, version in self._versions)
        if self._is_spoilt or is_written_to or not self._recording.arrived:
            return None
        gradients = [self._arrived.get(number) for number in range(len(self._named))]
        return replace(self._made, gradients=gradients, is_cut_off=not self._arrived)
