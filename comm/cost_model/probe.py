"""The network parameters of the cost model: measured over gloo or NCCL at the start of a run, the same on every rank.

α and β come from `measure_links`. The bytes that a host sends are what counts between hosts, so β of an
all-reduce of S bytes is divided by 2 (n − 1)/n. The cores that a transfer keeps busy are the CPU time of all-reduces
over their bytes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from accel.comm.bandwidth import Bandwidth, Settings, measure_links
from accel.comm.cost_model.cost import Link, Network
from accel.comm.ranks import topology as hosts
from accel.comm.ranks.topology import Topology
from accel.profiler.host import own_cores, usable_cores

_OPERATIONS = ("all_reduce", "all_to_all")
_SIZES = (1 << 12, 1 << 19, 1 << 21, 1 << 23)
"""The largest is left out where it takes too long; elsewhere it shows what token buckets hide from smaller ones."""
_BYTES, _FEWER_BYTES = 1 << 22, 1 << 19
"""Of an all-reduce whose use of cores is measured; fewer where those would take long."""
_RUNS = 3
_LONG_S = 0.1
_PAUSE_S = 0.2
"""In which a token bucket fills; those of 256 KB do above 10 Mbit/s."""
_SLOW_BYTE_S = 1e-8
"""Of links at which a burst is looked for; on faster ones it saves next to nothing."""

_Key = tuple[tuple[tuple[int, ...], ...], tuple[str, ...], str]
_known: dict[_Key, Network] = {}
"""What this process has measured, by hosts, machines and device."""


def probe(topology: Topology, device: torch.device) -> Network:
    """Measure links and cores; all ranks of the default group call this together, and all get the same.

    Takes some 1.5 s, on links below 50 Mbit/s longer; what all ranks have measured before, for the same hosts, machines
    and device, is not measured again.

    Args:
        topology: hosts and ranks of the default group.
        device: of the gradients.

    Raises:
        accel.comm.bandwidth.PeerLost: if a rank has died.
        ValueError: if hosts have different numbers of ranks; the model has no such network.
    """
    topology.check_even()
    machines = tuple(_everyone(_machine()))
    key = (topology.hosts, machines, str(device.type))
    before: list[Network | None] = _everyone(_known.get(key))
    first = before[0]
    if first is not None and all(network == first for network in before):
        return first
    _known[key] = _measured(topology, device, machines)
    return _known[key]


def _measured(topology: Topology, device: torch.device, machines: tuple[str, ...]) -> Network:
    speed = measure_links(_OPERATIONS, _SIZES, device=device, settings=Settings(budget_s=1.0))
    # The link classes of `measure` are by network namespace, those here by torchrun's agent where there is one.
    measured = Topology(speed.nodes)
    network = network_of(speed, measured if measured.even else topology, 1.0)
    nbytes = _BYTES if network.world.byte_s * _RUNS * _BYTES < _LONG_S else _FEWER_BYTES
    by_rank = _everyone((usable_cores(), own_cores(), _core_byte_s(device, nbytes)))
    return replace(
        network,
        burst_bytes=_burst_bytes(network, device),
        hosts=len(topology.hosts),
        ranks=len(topology.hosts[0]),
        cores=min(cores_of_each(machines, [(usable, own) for usable, own, _ in by_rank])),
        core_byte_s=sum(byte_s for *_, byte_s in by_rank) / len(by_rank),
    )


def cores_of_each(machines: Sequence[str], cores: Sequence[tuple[int, frozenset[int]]]) -> list[float]:
    """Return the cores that each rank has where all work: those that several may use are shared out.

    Args:
        machines: of each rank.
        cores: how many each rank may use, which a quota of all may limit, and which.

    Example:
        >>> cores_of_each(["one", "one"], [(1, frozenset({0})), (1, frozenset({1}))])  # pinned
        [1.0, 1.0]
    """
    ranks, users = Counter(machines), Counter[tuple[str, int]]()
    for machine, (_, own) in zip(machines, cores, strict=True):
        users.update((machine, core) for core in own)
    shares = []
    for machine, (usable, own) in zip(machines, cores, strict=True):
        share = sum(1 / users[machine, core] for core in own)
        shares.append(min(share, usable / ranks[machine]) if usable < len(own) else share)
    return shares


def network_of(speed: Bandwidth, topology: Topology, cores: float) -> Network:
    """Return the network that a measurement gives.

    Args:
        speed: with `all_reduce` and `all_to_all`.
        topology: hosts and ranks that were measured.
        cores: for each rank.
    """
    count, ranks = len(topology.hosts), len(topology.hosts[0])
    sizes = {"intra": ranks, "inter": count, "world": topology.size}

    def link(name: str) -> Link:
        n = sizes[speed.link(name)]
        ring, message = speed.fit("all_reduce", name), speed.fit("all_to_all", name)
        return Link(ring.alpha_s, min(message.alpha_s, ring.alpha_s), ring.beta_s_per_byte / (2 * (n - 1) / n))

    intra, inter, world = link("intra"), link("inter"), link("world")
    # One rank of a host sends to the next host: a ring over all can't be faster than that, though a short probe may be.
    world = world._replace(byte_s=max(world.byte_s, inter.byte_s))
    return Network(count, ranks, intra, inter, world, cores)


def _core_byte_s(device: torch.device, nbytes: int) -> float:
    """Return seconds of a core for each byte of a ring that this rank sends; 0 on a GPU."""
    if device.type == "cuda":
        return 0.0
    values, size = torch.zeros(nbytes // 4), dist.get_world_size()
    dist.all_reduce(values)
    began = time.process_time()
    for _ in range(_RUNS):
        dist.all_reduce(values)
    return (time.process_time() - began) / (_RUNS * 2 * (size - 1) / size * nbytes)


def _burst_bytes(network: Network, device: torch.device) -> float:
    """Return the bytes that pass at once after a pause: by how much an all-reduce is faster then than in a row."""
    link, size = network.world, dist.get_world_size()
    if link.byte_s < _SLOW_BYTE_S or size == 1:
        return 0.0
    sent = 2 * (size - 1) / size
    values = torch.zeros(round(_LONG_S / link.byte_s / sent) // 4 + 1, device=device)
    estimates: list[float] = []
    for _ in range(2):
        dist.barrier()
        time.sleep(_PAUSE_S)
        began = time.perf_counter()
        dist.all_reduce(values)
        took = max(_everyone(time.perf_counter() - began))
        estimates.append((link.ring_s + sent * values.nbytes * link.byte_s - took) / link.byte_s)
    return max(min(estimates), 0.0)


def _machine() -> str:
    """Return what identifies a machine with cores of its own: network namespaces share them."""
    boot = hosts.identity({})["machine"].split("/")
    return boot[1] or boot[0]


def _everyone(own: Any) -> list[Any]:
    objects: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(objects, own)
    return objects
