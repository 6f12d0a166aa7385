"""flush_denormal: let the CPU treat subnormal numbers as 0.

Numbers below 1.2e-38 (float32) are subnormal, and x86 takes some 150 cycles for each operation on one. Training makes
them where products shrink: gradients that vanish on their way through a recurrent network, or Adam's first moments of
an embedding's rows that do not occur, which shrink by 0.9 a step.
"""

from __future__ import annotations

import ctypes
import heapq
import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from accel.profiler.bottleneck import Bottleneck
from accel.profiler.trial_driver import Comparing, before_and_after
from accel.run import Run
from accel.strategies.base import Exactness, NothingHelps
from accel.strategies.process_setting import ProcessSetting, ProcessSwitch
from accel.strategies.trial_design import Terms, TrialDesign

_ENVIRONMENT_BYTES = 256
"""More than `fenv_t` has on any machine."""
_GRAIN = 32768
"""Elements from which on torch gives a thread a part of an elementwise operation."""
_TENSORS, _ELEMENTS = 8, 4096
"""The largest tensors of a state, and elements of each, that are looked at: it takes 0.2 ms."""
_DTYPES = (torch.float32, torch.float64, torch.bfloat16)
"""Those whose subnormal numbers are so in the CPU's arithmetic; float16's are normal in float32."""
_LEAST_SHARE = 0.01
"""Share of subnormal numbers in the state from which on steps before are compared with steps after."""
_BLOCKS = 10


def flushes(smallest: float = 2.0**-1022, half: float = 0.5) -> bool:
    """Return whether this thread treats subnormal numbers as 0; torch doesn't tell."""
    return smallest * half == 0.0


def _all_threads_flush() -> bool:
    tiny = torch.full((_GRAIN * torch.get_num_threads(),), torch.finfo(torch.float32).tiny)
    return not (tiny * 0.5).view(torch.int32).any()  # by bits: compared as numbers they are 0


def _flush(on: bool) -> None:
    """Set it for this thread, and for the OpenMP threads that compute for it.

    torch sets it for the calling thread alone. The others get its floating-point environment: each calls `fesetenv`.
    Those that OpenMP keeps beyond these end, as with any parallel region; later ones begin with that of this thread.
    """
    torch.set_flush_denormal(on)
    libm, openmp = ctypes.CDLL("libm.so.6"), ctypes.CDLL(None)
    environment = ctypes.create_string_buffer(_ENVIRONMENT_BYTES)
    libm.fegetenv(environment)
    set_environment = ctypes.cast(libm.fesetenv, ctypes.c_void_p)
    openmp.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint]
    openmp.GOMP_parallel(set_environment, environment, max(2, torch.get_num_threads()), 0)


def subnormal_share(optimizers: Iterable[Optimizer]) -> float:
    """Return which share of the optimizers' state is subnormal, by a sample of their largest tensors on the CPU."""
    states = (state for optimizer in optimizers for state in optimizer.state.values() if isinstance(state, Mapping))
    kept = (value for state in states for value in state.values() if _is_looked_at(value))
    samples = [_sample(value) for value in heapq.nlargest(_TENSORS, kept, key=Tensor.numel)]
    subnormal = sum(int(((each > 0) & (each < torch.finfo(each.dtype).tiny)).sum()) for each in samples)
    return subnormal / max(1, sum(map(Tensor.numel, samples)))


def _is_looked_at(value: Any) -> bool:
    is_dense = type(value) is Tensor and value.device.type == "cpu" and value.layout == torch.strided
    return is_dense and value.dtype in _DTYPES and value.is_contiguous()


def _sample(value: Tensor) -> Tensor:
    return value.detach().view(-1)[:: max(1, value.numel() // _ELEMENTS)].abs()


class FlushDenormal(ProcessSwitch):
    """Set `torch.set_flush_denormal` in all of torch's threads.

    Numbers below the smallest normal magnitude become 0: 1.2e-38 in float32, 2.2e-308 in float64, in everything that
    the threads compute.

    Source: Intel 64 and IA-32 Architectures Optimization Reference Manual, "Floating-Point Exceptions/Assists".
    """

    name = "flush_denormal"
    summary = "subnormal numbers treated as 0"
    treats = frozenset({Bottleneck.OPTIMIZER, Bottleneck.COMPUTE})
    exactness = Exactness.REORDERED
    touches = frozenset({"model", "optimizer"})
    switch = ProcessSetting(flushes, _flush)

    def refusal(self, run: Run) -> str:
        """Say why it does not apply: a GPU, set already, or threads or a CPU for which it can't be set."""
        if run.device.type != "cpu":
            return f"the model's numbers are not the CPU's but those of {run.device.type}"
        if self.switch.is_used_beside(self):
            return "it is on already, for another model of this process"
        if flushes():
            return "" if self.switch.is_used() else "torch.set_flush_denormal(True) is set already"
        return _refusal()

    def trial_design(self, run: Run) -> TrialDesign:
        """Judge it after all others, and again where steps become slower: such numbers come as training goes on."""
        return BySubnormals(may_grow=True, share_now=partial(subnormal_share, run.optimizers))

    def enable(self, run: Run, setting: Any) -> None:
        """Switch it on, and see that all threads follow."""
        super().enable(run, setting)
        if not _all_threads_flush():
            raise NothingHelps("torch's threads could not be made to flush subnormal numbers")


def _refusal() -> str:
    if platform.libc_ver()[0] != "glibc" or not hasattr(ctypes.CDLL(None), "GOMP_parallel"):
        return "torch's threads are reached by GNU's OpenMP and C library alone"
    return "" if torch.set_flush_denormal(False) else "the CPU can't treat subnormal numbers as 0"


@dataclass(frozen=True, kw_only=True)
class BySubnormals(TrialDesign):
    """Compare blocks in turns, or steps before with steps after where the optimizer's state has such numbers.

    The first step with it clears those, so that turns would compare nothing.

    Args:
        share_now: returns the share of the state that is subnormal.
    """

    share_now: Callable[[], float]

    order: ClassVar[int] = 1
    stands: ClassVar[bool] = True

    def trial(self, terms: Terms) -> Comparing:
        """Return the trial."""
        share = self.share_now()
        if share < _LEAST_SHARE:
            return (yield from super().trial(terms))
        result = yield from before_and_after(
            replace(terms.config, more_looks=()),
            before=(),
            steps=_BLOCKS * terms.config.block_steps,
            settle=terms.settle,
            reduce=terms.reduce,
            limit_s=terms.limit_s,
        )
        return result._replace(why=f"faster than the steps before it, when {share:.0%} of the state was subnormal")
