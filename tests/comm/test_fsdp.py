"""FSDP2 over two hosts of two ranks: against FSDP2's own all-reduce, and the laws of compressed averaging."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from accel.comm.compressor import Compressor, Exact
from accel.comm.dgc import DGC
from accel.comm.fsdp import FSDPComm
from accel.comm.half import Half
from accel.comm.int8 import Int8
from accel.comm.one_bit import OneBit
from accel.comm.powersgd import PowerSGD
from tests.comm.cases import SECONDS, lacks, message
from tests.comm.dgc_training import Scaler
from tests.comm.few import few
from tests.comm.ranks import on_ranks
from tests.comm.tcp_bytes import sent_to, sockets

COMPRESSORS: dict[str, Callable[[], Compressor]] = {
    "fp16": lambda: Half(torch.float16),
    "bf16": Half,
    "int8": lambda: Int8(64),
    "1-bit": lambda: OneBit(64),
    "PowerSGD": lambda: PowerSGD(2),
    "top 5 %": lambda: DGC(0.05, momentum=False, exact_below=16),
}


def mesh_of(world: int) -> DeviceMesh:
    return init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))


class Net(nn.Module):
    """Blocks of odd sizes: shards of two ranks are padded. One parameter is frozen."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.blocks = nn.ModuleList(nn.Linear(49, 49, dtype=dtype) for _ in range(2))
        self.out = nn.Linear(49, 6, dtype=dtype)
        self.frozen = nn.Parameter(torch.full((49,), 0.5, dtype=dtype), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x)) + x
        found: Tensor = self.out(x * self.frozen)
        return found


def shard(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def loss(model: nn.Module, rank: int, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(100 * (step % 6) + rank)
    x = torch.randn(8, 49, generator=generator, dtype=torch.float64).to(dtype)
    return (model(x) - torch.sin(2 * x[:, :6])).square().mean()


def local(tensor: Any) -> Tensor:
    found: Tensor = tensor.to_local()
    return found


def weights(model: nn.Module) -> Tensor:
    return torch.cat([local(one).detach().reshape(-1) for one in model.parameters()])


def same_on_replicas(values: Tensor, mesh: DeviceMesh) -> bool:
    parts: list[Any] = [None] * mesh.size(0)
    dist.all_gather_object(parts, values, group=mesh.get_group(0))
    return all(torch.equal(values, one) for one in parts)


def _second(parameter: nn.Parameter) -> Shard:
    return Shard(1) if parameter.dim() == 2 and parameter.shape[1] % 2 == 0 else Shard(0)


AS_FSDP2: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float32": (torch.float32, {}),
    "float64": (torch.float64, {}),
    "kept after forward": (torch.float32, {"reshard_after_forward": False}),
    "mixed precision": (
        torch.float32,
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    ),
    "second dimension": (torch.float32, {"shard_placement_fn": _second}),
    "accumulation": (torch.float32, {}),
    "accumulation of shards": (torch.float32, {}),
    "divide factor": (torch.float64, {}),
}
"""A dtype, and options of `fully_shard`."""


@few(AS_FSDP2, ("mixed precision", "accumulation", "accumulation of shards"))
@on_ranks(4, per_host=2)
def test_exact_averaging_is_fsdp2s(rank: int, world: int, names: tuple[str, ...]) -> None:
    """FSDP2 itself averages over replicas where it is sharded over both dimensions."""
    mesh = mesh_of(world)
    for name in names:
        dtype, options = AS_FSDP2[name]
        ours, theirs = shard(Net(dtype), mesh["shard"], **options), shard(Net(dtype), mesh, **options)
        comm = FSDPComm(ours, mesh, timeout=SECONDS)
        if name == "divide factor":
            for module in (*ours.modules(), *theirs.modules()):
                if isinstance(module, FSDPModule):
                    module.set_gradient_divide_factor(3.0)
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (ours, theirs)]
        for step in range(3):
            for model, optimizer in zip((ours, theirs), optimizers, strict=True):
                optimizer.zero_grad()
                if name.startswith("accumulation"):
                    put_off: Any = model.set_requires_gradient_sync
                    if name == "accumulation of shards":
                        put_off = model.set_requires_all_reduce
                    put_off(False)
                    loss(model, rank, step + 3, dtype).backward()
                    put_off(True)
                loss(model, rank, step, dtype).backward()
                optimizer.step()
            # Sums of four in another order, over three steps.
            assert lacks(weights(ours), weights(theirs)) < (1e-13 if dtype is torch.float64 else 2e-5), name
        assert same_on_replicas(weights(ours), mesh), name
        assert comm.step == 3
        comm.close()


# Laws, with gradients as given


class Part(nn.Module):
    """Parameters whose gradients are what `forward` is given."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> None:
        super().__init__()
        self.p = nn.ParameterList(nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes)

    def forward(self, gradients: list[Tensor]) -> Tensor:
        return torch.stack([(p * g).sum() for p, g in zip(self.p, gradients, strict=False)]).sum()


class Given(nn.Module):
    """Three modules to be sharded, and nothing in the whole; backward comes to them in another order."""

    SHAPES = ((33, 5), (7,), (64, 40), (1, 3), (50, 51), (129,))

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part(self.SHAPES[i : i + 2], dtype) for i in (0, 2, 4))

    def forward(self, gradients: list[Tensor]) -> Tensor:
        return torch.stack([part(gradients[2 * i : 2 * i + 2]) for i, part in enumerate(self.parts)]).sum()


def given_model(mesh: DeviceMesh, dtype: torch.dtype) -> nn.Module:
    model = Given(dtype)
    for part in model.parts:
        fully_shard(part, mesh=mesh["shard"])
    return fully_shard(model, mesh=mesh["shard"])


def gradients(rank: int, step: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) * 10.0 ** (i % 3 - 1)
        for i, shape in enumerate(Given.SHAPES)
    ]


def own_part(whole: Tensor, place: int, shards: int) -> Tensor:
    """Return the rows of a tensor that a shard holds."""
    rows = -(-whole.shape[0] // shards)
    return whole[place * rows : (place + 1) * rows].reshape(-1)


def backward(model: nn.Module, given: list[Tensor]) -> Tensor:
    model.zero_grad()
    model(given).backward()
    return torch.cat([local(p.grad).reshape(-1) for p in model.parameters()]).clone()


def residual(comm: FSDPComm, mesh: DeviceMesh) -> Tensor:
    """Return the sum of the replicas' residuals of this rank's shard, without padding."""
    own = comm.state_dict()["own"]["residual"]
    total = []
    for i, shape in enumerate(Given.SHAPES):
        rows = -(-shape[0] // mesh.size(1))
        whole = torch.zeros(rows * torch.Size(shape[1:]).numel(), dtype=torch.float64)
        for skipped, values in own.get(f"parts.{i // 2}.p.{i % 2}", []):
            whole[skipped : skipped + values.numel()] += values
        numel = own_part(torch.empty(shape), mesh.get_local_rank(1), mesh.size(1)).numel()
        total.append(whole[:numel])
    found = torch.cat(total)
    dist.all_reduce(found, group=mesh.get_group(0))
    return found


def mean_shard(mesh: DeviceMesh, world: int, step: int) -> Tensor:
    """Return this rank's shard of the mean gradients over all ranks."""
    every = [gradients(rank, step, torch.float64) for rank in range(world)]
    means = [sum(several) / world for several in zip(*every, strict=True)]
    return torch.cat([own_part(one, mesh.get_local_rank(1), mesh.size(1)) for one in means])  # type: ignore[arg-type]


@few(COMPRESSORS, ("PowerSGD",))
@on_ranks(4, per_host=2)
def test_applied_and_residual_add_up_and_void_steps_change_neither(
    rank: int, world: int, names: tuple[str, ...]
) -> None:
    mesh = mesh_of(world)
    kinds = [(name, torch.float64) for name in names] + [("int8", torch.float32)] * ("int8" in names)
    for name, dtype in kinds:
        model = given_model(mesh, dtype)
        comm = FSDPComm(model, mesh, COMPRESSORS[name](), error_feedback=True, timeout=SECONDS)
        applied, wanted = torch.zeros(()).double(), torch.zeros(()).double()
        for step in range(4):
            got = backward(model, gradients(rank, step, dtype))
            applied, wanted = applied + got.double(), wanted + mean_shard(mesh, world, step)
            assert same_on_replicas(got, mesh), name
        left = residual(comm, mesh)
        # Roundings over four steps, in the dtype of the gradients.
        assert lacks(applied + left, wanted) < (1e-5 if dtype is torch.float32 else 1e-13), name
        assert left.norm() / wanted.norm() > 1e-6, name
        given = gradients(rank, 9, dtype)
        if rank == 1:
            given[2][1, 1] = float("inf")  # in a row of one shard
        arrived = not torch.isfinite(backward(model, given)).all().item()
        assert arrived == (mesh.get_local_rank(1) == 0), name
        assert torch.equal(left, residual(comm, mesh)), name
        assert torch.isfinite(backward(model, gradients(rank, 10, dtype))).all(), name
        assert comm.step == 6
        comm.close()


@on_ranks(4, per_host=2)
def test_residuals_follow_the_scale_and_lose_it_where_there_is_none(rank: int, world: int) -> None:
    mesh, scaler = mesh_of(world), Scaler()
    model = given_model(mesh, torch.float64)
    new = functools.partial(FSDPComm, model, mesh, Int8(64), error_feedback=True, timeout=SECONDS)
    comm = new(scaler=scaler)
    applied, wanted = torch.zeros(()).double(), torch.zeros(()).double()
    for step, scale in enumerate((2.0, 16.0, 8.0, 1.0, 1.0)):
        if step == 3:
            saved = pickle.loads(pickle.dumps(comm.state_dict()))
            assert saved["scale"] == 8.0
            comm.close()
            comm = new()
            comm.load_state_dict(saved)
        scaler.scale = scale
        got = backward(model, [scale * one for one in gradients(rank, step, torch.float64)])
        applied, wanted = applied + got / scale, wanted + mean_shard(mesh, world, step)
    left = residual(comm, mesh)
    assert lacks(applied + left, wanted) < 1e-13
    assert left.norm() / wanted.norm() > 1e-6
    comm.close()


@pytest.mark.slow
@on_ranks(4, per_host=2)
def test_bytes_between_hosts_are_those_of_the_encoding(rank: int, world: int) -> None:
    """Of what a rank sends to its peer on the other host in a step, per byte of its shard."""
    mesh = mesh_of(world)
    # With two replicas 2 (n − 1)/n = 1 of the shard, encoded; 4 bytes of scale for each block of 1024.
    for compressor, share in (
        (Exact(), 1.0),
        (Half(), 1 / 2),
        (Int8(1024), (1 + 4 / 1024) / 4),
        (OneBit(1024), (1 / 8 + 4 / 1024) / 4),
    ):
        torch.manual_seed(0)
        model = fully_shard(nn.Linear(512, 512, bias=False), mesh=mesh["shard"])
        comm = FSDPComm(model, mesh, compressor, timeout=SECONDS)
        model(torch.ones(1, 512)).sum().backward()
        dist.barrier()
        before = sockets()
        for _ in range(2):
            model(torch.ones(1, 512)).sum().backward()
        dist.barrier()  # on a busy machine some of it waits in the kernel until the peer reads
        both: list[Any] = [None] * world
        dist.all_gather_object(both, (before, sockets()))
        sent = sent_to(rank, [one[0] for one in both], [one[1] for one in both])
        assert sent[(rank + world // 2) % world] / 2 / (4 * 512 * 256) == pytest.approx(share, rel=0.03), compressor
        comm.close()


@on_ranks(4, per_host=2)
def test_what_cannot_work_is_refused(rank: int, world: int) -> None:
    mesh = mesh_of(world)
    both, one = shard(Net(), mesh), shard(Net(), mesh["shard"])
    other = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("shard", "replicate"))

    def refuses(text: str, model: nn.Module, *arguments: Any, mesh: Any = mesh, **options: Any) -> None:
        said = message(lambda: FSDPComm(model, mesh, *arguments, **{"timeout": SECONDS, **options}))
        assert said.startswith("InvalidArgument: "), said
        assert text in said, said

    apart = Net()
    if rank >= world // 2:
        with torch.no_grad():
            apart.out.weight += 1
    refuses("is sharded over two dimensions, where FSDP2 all-reduces between replicas by itself", both)
    refuses("all parameters must be sharded by fully_shard, got a plain 'blocks.0.weight'", Net())
    refuses("mesh must be a DeviceMesh of two dimensions, replicas and shards, got", one, mesh=mesh["shard"])
    second = "parameters must be sharded over the second dimension of the mesh, ranks ["
    refuses(second, shard(Net(), other["shard"]))
    refuses(second, shard(Net(), init_device_mesh("cpu", (world,))))
    refuses("the model must have FSDP2 modules with parameters to train, got none", nn.ReLU())
    refuses("compressor must be a Compressor, got 'int8'", one, "int8")
    refuses("error_feedback=True needs a compressor that uses it, got Exact()", one, Exact(), error_feedback=True)
    refuses("takes the optimizer's momentum, which shards don't have; with DGC, pass momentum=False", one, DGC())
    refuses("timeout must be positive, got 0:00:00", one, timeout=timedelta())
    refuses("all ranks must have the same compressor, got another on replica ", one, Half() if rank < 2 else Int8())
    refuses("all ranks must have the same weights, got another on replica ", shard(apart, mesh["shard"]))
    given = given_model(mesh, torch.float32)
    comm = FSDPComm(given, mesh, timeout=SECONDS)
    said = message(lambda: backward(given, gradients(rank, 0, torch.float32)[:-1]))
    assert "all parameters of parts.2 must take part in backward, got gradients of " in said
    comm.close()
    model = shard(Net(), mesh["shard"])
    FSDPComm(model, mesh, timeout=SECONDS).close()
    said = message(lambda: loss(model, rank, 0).backward())
    assert "an FSDPComm that was closed can't average over replicas any more" in said
