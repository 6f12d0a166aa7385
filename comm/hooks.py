"""DDP communication hooks: gradients averaged over ranks, compressed, and by hosts first if asked.

    state = CommState(ddp, Int8(), hierarchical=True)
    ddp.register_comm_hook(state, hook)

The rest is a matter of arguments: what is sent (`Exact`, `Half`, `Int8`, `OneBit`, …), between which ranks
(`hierarchical`), and whether what was lost is sent later (`error_feedback`).
"""

# No `from __future__ import annotations`: DDP compares the hook's annotations with the classes themselves.

import itertools
import secrets
import zlib
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.distributed_c10d import PrefixStore

from accel.comm.compressor import RESIDUAL, Compressor, Exact
from accel.comm.engine.pipeline import Pipeline, PipelineStage
from accel.comm.engine.reduction import BucketJob, Reduction
from accel.comm.layout import Layout
from accel.comm.memory import LossScale, Memory
from accel.comm.ranks import topology
from accel.comm.ranks.channel import Channel, GlooChannel, NcclChannel
from accel.comm.ranks.post_mortem import Address, CommError, PostMortem, neighbours
from accel.comm.ranks.rendezvous import Apart, Each, Rendezvous

_made: dict[str, "itertools.count[int]"] = {}


class CommState:
    """What a hook needs: configuration, groups, threads, and the memory of what was not sent yet.

    Every rank of the group makes one, with the same arguments, for each DDP module. Threads end with `close()`, or when
    the state is dropped. Saving: `state_dict()` on each rank; on another number of ranks `accel.comm.memory.reshard`
    first. A pickled state leaves groups and threads behind; `bind(model)` makes new ones.

    Args:
        model: the DDP module or the module that it wraps; names the parameters.
        compressor: what is sent; default `Exact()`. With `hierarchical`, between hosts only.
        hierarchical: sum within each host first. Hosts need equal numbers of ranks, which torchrun's GROUP_RANK or else
            host names and network namespaces tell.
        error_feedback: add what a step's encoding lost to the next step's gradients; default: as the compressor says.
            Two copies of the gradients (by hosts: of a slice), float32 or float64.
        process_group: the group that DDP reduces over, default the world.
        timeout: for each collective, default 5 minutes. A fault elsewhere is an error here by then.
        memory: where what was not sent is kept; states of one model whose buckets go different ways share one.
        scaler: the GradScaler in use, so that what was not sent yet follows its scale. Default None: at a change of the
            scale it counts by the old one.

    Raises:
        ValueError: if arguments or models differ between ranks, or don't fit the model or the hosts.
        CommError: if a rank makes no state within the timeout; from `loss.backward()`, if communication fails: the
            message names the rank and the cause, and the state can't be used any more.

    Example:
        >>> ddp = DistributedDataParallel(model)
        >>> state = CommState(ddp, OneBit(), hierarchical=True)
        >>> ddp.register_comm_hook(state, hook)
    """

    def __init__(
        self,
        model: nn.Module,
        compressor: Compressor | None = None,
        *,
        hierarchical: bool = False,
        error_feedback: bool | None = None,
        process_group: dist.ProcessGroup | None = None,
        timeout: timedelta = timedelta(minutes=5),
        memory: Memory | None = None,
        scaler: Any = None,
    ) -> None:
        compressor = Exact() if compressor is None else compressor
        if not isinstance(compressor, Compressor):
            raise ValueError(f"compressor must be a Compressor, got {compressor!r}; pass for example Int8()")
        if error_feedback and not compressor.takes_feedback:
            raise ValueError(
                f"error_feedback=True needs a compressor that uses it, got {compressor!r}; leave the argument out"
            )
        if scaler is not None and compressor.fields:
            raise ValueError(f"{compressor!r} takes the scaler from take_momentum; pass it there, not to CommState")
        if timeout <= timedelta():
            raise ValueError(f"timeout must be positive, got {timeout}")
        self.compressor, self.hierarchical, self.timeout = compressor, hierarchical, timeout
        self.error_feedback = compressor.feedback if error_feedback is None else error_feedback
        self.step = 0
        self.memory = Memory() if memory is None else memory
        self._scale = LossScale(scaler)
        self._pipeline: Pipeline | None = None
        self.bind(model, process_group)

    # -- groups and threads ------------------------------------------------------------------------------------------

    def bind(self, model: nn.Module, process_group: dist.ProcessGroup | None = None) -> None:
        """Make groups and threads for a model; every rank of the group takes part."""
        self.close()
        group = _group(process_group)
        rank, size, store = group.rank(), group.size(), group.get_group_store()
        self._names = _names(model)
        self._layouts: dict[tuple[int, ...], Layout] = {}
        self._held: list[BucketJob] = []
        self._size = size
        device = next(iter(model.parameters())).device
        prefix = f"accel-comm/{next(_made.setdefault(group.group_name, itertools.count()))}"
        store = PrefixStore(prefix, store)
        remedy = "every rank must make as many, in the same order"
        meeting = Rendezvous(PrefixStore("meeting", store), rank, size, self.timeout.total_seconds(), remedy)
        post_mortem = PostMortem(secrets.token_hex(8))
        try:
            told: _Told = meeting.meet(self._introduction(model, post_mortem), _introduced, "made no CommState")
            self.topology = topology.Topology(told.hosts)
            if self.hierarchical:
                self.topology.check_even()
            post_mortem.address = post_mortem.address._replace(token=told.token)
            heard = post_mortem.connect(rank, size, told.addresses)
            stages = self._stages(rank, size, store, device)
            # One that goes on, and perhaps closes at once, would cut off those that are still connecting.
            meeting.meet(None, lambda everyone: None, "made no CommState")
        except Apart as error:
            post_mortem.close()
            raise CommError(str(error)) from None
        except BaseException:
            post_mortem.close()
            raise
        if not heard:
            post_mortem.close()
        self._pipeline = Pipeline(stages, rank, post_mortem if heard else None, device)

    def _introduction(self, model: nn.Module, post_mortem: PostMortem) -> dict[str, Any]:
        parameters = [
            (name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in _bare(model).named_parameters()
        ]
        return {
            "identity": topology.identity(),
            "address": post_mortem.address,
            "settings": {
                "compressor": repr(self.compressor),
                "hierarchical": self.hierarchical,
                "error_feedback": self.error_feedback,
                "number of parameters": len(parameters),
                "parameters' names, shapes and dtypes": zlib.crc32(repr(parameters).encode()),
                "torch": torch.__version__,
            },
        }

    def _stages(self, rank: int, size: int, store: Any, device: torch.device) -> list[PipelineStage]:
        # No closure below may hold the state: it would never be dropped.
        timeout = self.timeout
        reduction = Reduction(self.compressor, self.fields, self.memory, size)
        kind: type[GlooChannel] | type[NcclChannel] = NcclChannel if device.type == "cuda" else GlooChannel
        everyone, within = tuple(range(size)), self.topology.within(rank)
        across = self.topology.across(rank) if self.hierarchical else everyone

        def channel(name: str, ranks: tuple[int, ...]) -> Channel:
            return kind(PrefixStore(f"{name}/{ranks[0]}", store), ranks, rank, timeout)

        return pipeline_stages(self.compressor, reduction, self.hierarchical, within, across, channel)

    @property
    def fields(self) -> tuple[str, ...]:
        """Return the own fields of the memory that this state uses."""
        return ((RESIDUAL,) if self.error_feedback else ()) + self.compressor.fields

    def close(self) -> None:
        """End the threads and free the groups; what is under way breaks off."""
        if self._pipeline is not None:
            self._pipeline.close()
            self._pipeline = None

    # -- buckets -----------------------------------------------------------------------------------------------------

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        """Average one bucket over the ranks; `hook` calls it."""
        if self._pipeline is None:
            raise ValueError("a CommState that was closed or unpickled must be bound first: state.bind(model)")
        buffer = bucket.buffer()
        layout = self._layout(bucket, buffer)
        if layout.index == 0:
            self.memory.settle()
            self._scale.follow(self.memory)
            self.step += 1
        # Raised at the end of backward, where it reaches the caller: DDP would make a cast error of it. A callback of a
        # callback comes after DDP's own, which then leaves the reducer in order.
        wait, failed = self._pipeline.wait, self._pipeline.failed
        engine = Variable._execution_engine
        # Within join() a rank that has no more data calls the hook for the others' backward passes, and waits itself.
        joined = torch._C._current_graph_task_id() == -1
        if not joined:
            engine.queue_callback(lambda: engine.queue_callback(wait))
        devices = [buffer.device] if buffer.device.type == "cuda" else []
        done: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        job = BucketJob(self.step, layout, buffer, self.memory.slot(layout), done)
        for one in self._ready(job):
            self._pipeline.submit(one)
        return done if joined else done.then(lambda future: buffer if failed() else future.value())

    def _ready(self, job: BucketJob) -> list[BucketJob]:
        """Return the buckets to be sent now: this one, or all after the last where the compressor asks for it."""
        if not self.compressor.needs_whole_step:
            return [job]
        self._held = [job] if job.layout.index == 0 else [*self._held, job]
        if not job.layout.is_last:
            return []
        held, self._held = self._held, []
        self.compressor.whole_step([one.buffer for one in held], self._size)
        return held

    def _layout(self, bucket: dist.GradBucket, buffer: Tensor) -> Layout:  # type: ignore[name-defined]
        parameters = bucket.parameters()
        key = (bucket.index(), bucket.is_last(), *map(id, parameters))
        if key not in self._layouts:
            self._layouts[key] = self._new_layout(bucket, buffer, parameters)
        return self._layouts[key]

    def _new_layout(self, bucket: dist.GradBucket, buffer: Tensor, parameters: list[Tensor]) -> Layout:  # type: ignore[name-defined]
        unknown = [tuple(one.shape) for one in parameters if id(one) not in self._names]
        if unknown:
            raise ValueError(
                f"a bucket must hold parameters of the model that CommState got, got one of shape {unknown[0]} that is "
                "not; pass the module that DDP wraps, and make one state for each DDP module"
            )
        names = tuple(self._names[id(one)] for one in parameters)
        if buffer.layout != torch.strided:
            raise ValueError(f"gradients must be dense, got a sparse one of {names[0]!r}; use Embedding(sparse=False)")
        if not buffer.dtype.is_floating_point:
            raise ValueError(f"gradients must be real floating point, got {buffer.dtype} of {names[0]!r}; use no hook")
        layout = Layout(bucket.index(), names, tuple(one.shape for one in parameters), buffer.dtype, bucket.is_last())
        assert layout.numel == buffer.numel()
        self.compressor.check(layout)
        return layout

    # -- saving ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's memory by parameter, and the step; save it on each rank, between steps."""
        return {**self.memory.state_dict(), "step": self.step, "scale": self._scale.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with a saved memory, on every rank.

        Args:
            state: what this rank saved, or this rank's part of `accel.comm.memory.reshard`.

        Raises:
            ValueError: if it is of another version; at the next step, if it is of another model.
        """
        self.memory.load_state_dict(state)
        self.step, self._scale.value = state["step"], state.get("scale", 1.0)

    def __getstate__(self) -> dict[str, Any]:
        plain = ("compressor", "hierarchical", "timeout", "error_feedback")
        return {**{name: getattr(self, name) for name in plain}, "saved": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        saved = state.pop("saved")
        self.__dict__.update(state, memory=Memory(), step=0, _pipeline=None, _scale=LossScale(None))
        self.load_state_dict(saved)


def pipeline_stages(
    compressor: Compressor,
    reduction: Reduction,
    hierarchical: bool,
    within: tuple[int, ...],
    across: tuple[int, ...],
    channel: Callable[[str, tuple[int, ...]], Channel],
) -> list[PipelineStage]:
    """Return the stages that a bucket passes through, each with a channel of its own.

    Args:
        compressor: what is sent between the ranks `across`.
        reduction: what happens around it.
        hierarchical: sum over the ranks `within` a host first, and gather there in the end.
        within: ranks of this host.
        across: all ranks, or by hosts those with the same slice.
        channel: makes a channel, from a name and its ranks.
    """
    stages: list[PipelineStage] = []
    inner = compressor.stages()
    if hierarchical:
        stages.append(PipelineStage("sum within the host", reduction.sum_within, channel("sum", within)))
    for number, one in enumerate(inner):

        def run(job: BucketJob, channel: Channel, number: int = number) -> None:
            if number == 0 and not hierarchical:
                reduction.open_flat(job)
            assert job.piece is not None
            inner[number].run(job.piece, channel)
            if number == len(inner) - 1 and not hierarchical:
                reduction.close_flat(job)

        stages.append(PipelineStage(one.name, run, channel(f"{number}", across)))
    if hierarchical:
        stages.append(PipelineStage("gather within the host", reduction.gather_within, channel("gather", within)))
    return stages


def hook(state: CommState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """Average a bucket of gradients as `state` says; for `DistributedDataParallel.register_comm_hook`.

    Args:
        state: a `CommState` of the same model.
        bucket: from DDP.

    Example:
        >>> ddp.register_comm_hook(CommState(ddp, Half()), hook)
    """
    if not isinstance(state, CommState):
        raise ValueError(f"the state of this hook must be a CommState, got {type(state).__name__}")
    return state.reduce(bucket)


def _group(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if not dist.is_initialized():
        raise ValueError("CommState needs a process group: call torch.distributed.init_process_group first")
    group = dist.group.WORLD if process_group is None else process_group
    if not isinstance(group, dist.ProcessGroup):  # what new_group returns to those outside is no group
        raise ValueError(f"rank {dist.get_rank()} is not in process_group; make CommState only on its members")
    return group


def _bare(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def _names(model: nn.Module) -> dict[int, str]:
    """Return names by the identity of parameters, those of the module that DDP wraps."""
    found = {id(parameter): name for name, parameter in _bare(model).named_parameters()}
    if not found:
        raise ValueError("the model must have parameters, got none")
    return found


class _Told(NamedTuple):
    """What a rank hears of the others when it makes a state."""

    hosts: tuple[tuple[int, ...], ...]
    token: str
    addresses: dict[int, Address]
    """Of the ranks that it asks when something fails."""


def _introduced(told: list[dict[str, Any]]) -> Each:
    """Return, on rank 0, what each rank should hear of what all ranks told."""
    _check_same(told)
    hosts = topology.from_identities([one["identity"] for one in told]).hosts
    token, size = told[0]["address"].token, len(told)
    near = [{peer: told[peer]["address"] for peer in neighbours(rank, size)} for rank in range(size)]
    return Each([_Told(hosts, token, addresses) for addresses in near])


def _check_same(told: list[dict[str, Any]]) -> None:
    """Raise ValueError unless all ranks told the same settings."""
    for other, one in enumerate(told):
        for name, value in one["settings"].items():
            first = told[0]["settings"][name]
            if value != first:
                raise ValueError(
                    f"all ranks must have the same {name}, got {first} on rank 0 and {value} on rank {other}; pass the "
                    "same to CommState everywhere"
                )
