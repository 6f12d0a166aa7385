"""DDP communication hooks: gradients averaged over ranks, compressed, and by hosts first if asked.

    state = CommState(ddp, Int8(), hierarchical=True)
    ddp.register_comm_hook(state, hook)

The rest is a matter of arguments: what is sent (`Exact`, `Half`, `Int8`, `OneBit`, …), between which ranks
(`hierarchical`), and whether what was lost is sent later (`error_feedback`).
"""

# No `from __future__ import annotations`: DDP compares the hook's annotations with the classes themselves.

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accel.comm.catalogue import Scheme, SchemeSettings
from accel.comm.compressor import Compressor, chosen
from accel.comm.engine.gradient_engine import GradientEngine
from accel.profiler.errors import InvalidArgument


def hook(state: GradientEngine, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """Average a bucket of gradients as `state` says; for `DistributedDataParallel.register_comm_hook`.

    On each of n ranks, with the bucket's gradients g and what its parameters have not sent yet, e:

        v ← g / n + e                   divide; e is there with error feedback alone
        ḡ ← Σ over ranks of sent(v)     the scheme's stages, bucket after bucket, each in a thread of its own
        e ← v − sent(v)                 kept by parameter, once the step is known to be finite
        bucket ← ḡ                      write back

    Args:
        state: a `CommState` or an `AutoComm` of the same model.
        bucket: from DDP.

    Example:
        >>> ddp.register_comm_hook(CommState(ddp, Half()), hook)
    """
    if not isinstance(state, GradientEngine):
        raise InvalidArgument(f"the state of this hook must be a CommState or an AutoComm, got {type(state).__name__}")
    return state.reduce(bucket)


class CommState(GradientEngine):
    """What a hook needs: configuration, groups, threads, and the memory of what was not sent yet.

    Every rank of the group makes one, with the same arguments, for each DDP module. Threads end with `close()`, or when
    the state is dropped. Saving: `state_dict()` on each rank; on another number of ranks `accel.reshard`
    first. A pickled state leaves groups, threads and the scaler behind; `bind(model, scaler=scaler)` gives it new ones.

    Args:
        model: the DDP module or the module that it wraps; names the parameters.
        compressor: what is sent; default `Exact()`. With `hierarchical`, between hosts only.
        hierarchical: sum within each host first. Hosts need equal numbers of ranks, identified by torchrun's GROUP_RANK
            or else by host names and network namespaces.
        error_feedback: add what a step's encoding lost to the next step's gradients; default: as the compressor says.
            Two copies of the gradients (by hosts: of a slice), float32 or float64.
        process_group: the group that DDP reduces over; default that of the DDP module, or the world.
        timeout: for each collective, default 5 minutes. A fault elsewhere is an error here by then.
        scaler: the GradScaler in use, so that what was not sent yet follows its scale.
            Default None: at a change of the scale it counts by the old one, and norms are those of scaled gradients.

    Raises:
        InvalidArgument: if arguments or models differ between ranks, or don't fit the model or the hosts.
        CommError: if a rank makes no state within the timeout; from `loss.backward()`, if communication fails: the
            message names the rank and the cause, and the state can't be used any more.

    Example:
        >>> ddp = DistributedDataParallel(model)
        >>> state = CommState(ddp, OneBit(), hierarchical=True)
        >>> ddp.register_comm_hook(state, hook)
    """

    kind = "CommState"
    pickled = (*GradientEngine.pickled, "compressor", "hierarchical", "error_feedback")

    def __init__(
        self,
        model: nn.Module,
        compressor: Compressor | None = None,
        *,
        hierarchical: bool = False,
        error_feedback: bool | None = None,
        process_group: dist.ProcessGroup | None = None,
        timeout: timedelta = timedelta(minutes=5),
        scaler: Any = None,
    ) -> None:
        self.compressor, self.error_feedback = chosen(compressor, error_feedback, timeout)
        self.hierarchical = hierarchical
        super().__init__(timeout=timeout)
        self.bind(model, process_group, scaler=scaler)

    def bind(self, model: nn.Module, process_group: dist.ProcessGroup | None = None, *, scaler: Any = None) -> None:
        """Make groups and threads for a model; every rank of the group takes part. See `GradientEngine.bind`."""
        if scaler is not None and self.compressor.fields:
            raise InvalidArgument(
                f"{self.compressor!r} takes the scaler from take_momentum; pass it there, not to CommState"
            )
        super().bind(model, process_group, scaler=scaler)
        self.use(Scheme(type(self.compressor).__name__, self.hierarchical))
        self.apply()

    def begin_step(self) -> None:
        """Begin as every engine does, unless the compressor can't take another backward pass yet."""
        self.compressor.begin_pass()
        super().begin_step()

    def settings_of(self, scheme: Scheme) -> SchemeSettings:
        """Return how all buckets are averaged."""
        return SchemeSettings(self.compressor, self.hierarchical, self.error_feedback)
