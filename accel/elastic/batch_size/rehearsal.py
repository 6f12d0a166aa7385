"""Whether a larger batch fits into memory, found out before the loop takes one.

    a call of the model in the loop ──its inputs repeated to the larger batch──▶ forward, backward ──▶ all undone

A loop that runs out of memory in the midst of a step can't be helped: the exception is its own. So the model is called
once with the larger batch between two steps, and a gradient sent back through it. Beside that, memory for the loss is
held: twice that of the outputs, as log-softmax and its gradient take.

On a CPU nothing fails when memory runs out: the system kills the process. And ranks that exchange values within a call
can't rehearse one. There a batch is refused if in proportion to it the process would need more than is available.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from accel import device_memory
from accel.guard import guard
from accel.guard.alone import local, talks_within_calls
from accel.guard.guard import Recording
from accel.guard.snapshot import without_gradient
from accel.profiler.host import available_memory, resident_memory
from accel.profiler.interruptions import Tolerated, ours
from accel.profiler.trees import map_tensors, tensors

Call = Callable[..., Any]

_LOSS = 2
"""Times the outputs' memory that a loss may take."""
_MOST = 0.9
"""Share of the available memory that a batch may need."""
_TOO_MANY = "they do not fit into memory"
_MESSAGES = ("out of memory", "can't allocate memory", "not enough memory", "ALLOC_FAILED")
"""Of errors that have no class of their own: those of torch's CPU allocator, cuDNN and cuBLAS."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory has run out."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _MESSAGES)


class BatchRehearsal:
    """Rehearse a step of a larger batch, with the inputs of a call that the loop has made.

    A model in DistributedDataParallel is called within it: that would exchange buffers with ranks that may have refused
    the batch already. `call` makes a plain call of another one.
    """

    def __init__(self, model: nn.Module, call: Call, device: torch.device) -> None:
        self._model, self._device = model, device
        self._call: Call = model.module if isinstance(model, DistributedDataParallel) else call
        self._samples = 0
        self._recording: Recording | None = None
        self._resident_before = resident_memory()

    def prepare(self, samples: int) -> None:
        self._samples, self._recording = samples, None

    def hear(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record a call that is about to be made, if it is the first of as many samples as were named."""
        if self._recording is not None or not torch.is_grad_enabled():
            return
        if any(self._samples in tensor.shape for tensor in tensors((args, kwargs))):
            with Tolerated("a call can't be rehearsed"):  # inputs that can't be copied
                self._recording = guard.record(self._model, self._device, args, kwargs)

    def problem(
        self, samples: int, *, keeps_gradients: bool = False, agree: Callable[[str], str] = lambda reason: reason
    ) -> str:
        """Return why the loop can't take a batch of so many samples on this rank, '' if nothing speaks against it.

        Memory in proportion to the samples is all that does where no call was recorded, such as of a model whose inputs
        don't have a dimension of the samples, or where ranks exchange values within a call: one that ran out of memory
        there would leave the others waiting.

        Args:
            samples: of the larger batch.
            keeps_gradients: memory is held for two more gradients of each parameter: what was kept of batches before,
                and the sum that the last one's backward pass begins with.
            agree: with several ranks, gives all the reason of one of them against a call: all make it, or none.
        """
        recording, self._recording = self._recording, None
        held = 2 * self._trained() if keeps_gradients else []
        if reason := agree(self._exhausted(samples, sum(local(parameter).nbytes for parameter in held))):
            return reason
        if recording is None or talks_within_calls(self._model):
            return ""
        written = without_gradient(self._model)
        untouched = guard.untouched(self._model, self._device, recording.args, recording.kwargs, written=written)
        with untouched:
            reason = self._rehearsed(recording, samples, held)
        if reason:
            device_memory.give_memory_back()
        return reason

    def _rehearsed(self, recording: Recording, samples: int, held: list[nn.Parameter]) -> str:
        try:
            _gradients = [torch.zeros_like(parameter) for parameter in held]
            arguments = self._repeated(recording, samples)
        except ours() as error:  # sparse or nested tensors, say, which can't be repeated
            return _TOO_MANY if is_out_of_memory(error) else ""
        try:
            self._step(recording, *arguments)
        except ours() as error:
            if is_out_of_memory(error):
                return _TOO_MANY
            if "use_reentrant" in str(error):  # activation checkpoints of the old kind take `backward` alone
                return ""
            return f"the model does not take them: {type(error).__name__}: {error}"
        return ""

    def _repeated(self, recording: Recording, samples: int) -> tuple[Any, Any]:
        """Return the arguments, repeated along the first dimension that has the number of samples."""

        def larger(tensor: Tensor) -> Tensor:
            if self._samples not in tensor.shape:
                return tensor.detach().clone().requires_grad_(tensor.requires_grad)
            index = torch.arange(samples, device=tensor.device) % self._samples
            repeated = tensor.detach().index_select(tensor.shape.index(self._samples), index)
            return repeated.requires_grad_(tensor.requires_grad)

        return map_tensors(larger, recording.args), map_tensors(larger, recording.kwargs)

    def _step(self, recording: Recording, args: Any, kwargs: Any) -> None:
        outputs = guard.called(self._model, self._call, recording, args, kwargs)
        for_loss = [torch.zeros_like(output) + 1 for output in outputs for _ in range(_LOSS)]
        roots = [output for output in outputs if output.requires_grad]
        if roots and self._trained():
            ones = [torch.ones_like(root) for root in roots]
            torch.autograd.grad(roots, self._trained(), ones, allow_unused=True)
        del for_loss
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self._model.parameters() if parameter.requires_grad]

    def _exhausted(self, samples: int, held: int) -> str:
        """Return '' unless memory would not do for so many samples, and `held` bytes beside them.

        What the process took more since it began to train is what its samples need.
        """
        memory = self._on_host() if self._device.type == "cpu" else self._on_device()
        if memory is None:
            return ""
        before, now, most, available = memory
        needed = before + (most - before) * samples / self._samples - now + held
        if needed <= _MOST * available:
            return ""
        return (
            f"they may take {needed / 2**20:,.0f} MB more of memory, of which {available / 2**20:,.0f} MB are available"
        )

    def _on_host(self) -> tuple[int, int, int, int] | None:
        """Return the bytes that the process had before it trained, has now and had at most, and what it may take."""
        available, now, before = available_memory(), resident_memory(), self._resident_before
        if available is None or now is None or before is None:
            return None
        # What a script took most before it trained, while it loaded its data, says nothing of a step.
        most = now.most if now.most > before.most else max(now.now, before.now)
        # The ranks of a host rehearse together.
        return before.now, now.now, most, available // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def _on_device(self) -> tuple[int, int, int, int] | None:
        """Return the same of a GPU, where a call can't be rehearsed; between two steps there are weights and states."""
        if self._device.type != "cuda" or not talks_within_calls(self._model):
            return None
        now, most = torch.cuda.memory_allocated(self._device), torch.cuda.max_memory_allocated(self._device)
        return now, now, most, device_memory.available_memory(self._device)
