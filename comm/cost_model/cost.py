"""Time of a step with a given scheme for each bucket: a model of links, cores and the pipeline.

    step = max(rest + end, work/cores),
    end = max(end, bucket averaged) + bytes · copying, over the buckets, from the last one ready on

DDP waits for the buckets in turn and copies each into the gradients: on a slow network while the next is under way, on
a fast one after all of them. `rest` is what no communication overlaps: the optimizer, the forward pass, the backward
pass up to the first bucket. It was seen while ranks waited for the network in turn; on a fast one they want the cores
at the same time, so no step is shorter than all that it does on them.

A bucket passes through the stages of its scheme; a stage takes one bucket at a time, and is a series of segments: work
of a core, or a call of a collective. Segments under way share what they need:

* a link: the uplink of a host (`inter`), what the ranks of a host use among themselves (`intra`). n transfers at once
  take n times as long.
* the cores of a rank: backward pass, encoding, decoding, and the copying that TCP does, max-min fair. On a CPU,
  compression takes time from the backward pass; with a core to spare it does not.

Time of one call, with α per message and β per byte on a link, for N hosts of G ranks and S bytes:

    all-reduce   world    α_ring + 2 (NG − 1)/(NG) S β_world      within   α_ring + 2 (G − 1)/G S β_intra
                 across   α_ring + G · 2 (N − 1)/N S β_inter      (G channels at once, one for each slice)
    exchange     rounds of 1 MB · α_message + bytes to other hosts of all ranks of a host · β_inter
                 + bytes to ranks of the same host · β_intra

On a CPU what passes through shared memory within a host is no call but work of a core, timed by the dry run.

Pure functions: nothing here measures, see `accel.comm.cost_model.probe` and `accel.comm.cost_model.dry_run`.

Sources: α-β model (Hockney 1994); cost of all-reduce algorithms (Thakur et al. 2005).
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from accel.comm.ranks.channel import PIECE_BYTES

_EPSILON_S = 1e-12


class Link(NamedTuple):
    """A class of links."""

    ring_s: float
    """α of an all-reduce, seconds."""
    message_s: float
    """α of one round of messages, seconds."""
    byte_s: float
    """β, seconds per byte: sent by a host where hosts talk, by a rank within a host."""


@dataclass(frozen=True)
class Network:
    """Hosts, what joins them, and the cores behind it."""

    hosts: int
    ranks: int
    """On each host."""
    intra: Link
    inter: Link
    world: Link
    """As a ring over all ranks sees it: byte_s per byte that one rank sends to the next."""
    cores: float
    """For each rank."""
    core_byte_s: float = 0.0
    """Seconds of a core for each byte that a rank sends and receives."""
    burst_bytes: float = 0.0
    """Bytes between hosts (within the only one) that pass at once after a pause, as the token buckets of shaped links
    let them; saved up again in each step."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.hosts * self.ranks

    def slower(self, factor: float) -> Network:
        """Return the network with a ring's bytes between hosts (within the only one) taking `factor` times as long.

        So do the bytes of others there; but where a ring proves faster than the probe measured, the others are no
        faster than the ring, or stay as they are: the probe of the ring alone may have been disturbed.
        """
        name = "inter" if self.hosts > 1 else "intra"
        own, ring = getattr(self, name), self.world._replace(byte_s=self.world.byte_s * factor)
        byte_s = own.byte_s * factor if factor >= 1 else min(own.byte_s, ring.byte_s)
        return replace(self, world=ring, **{name: own._replace(byte_s=byte_s)})


class CollectiveCall(NamedTuple):
    """One call of a collective, as one rank makes it."""

    kind: str
    """`ring` or `exchange`."""
    scope: str
    """`within` a host, `across` hosts, or the `world`."""
    near_bytes: float
    """To ranks of the same host; all of S for a ring."""
    far_bytes: float = 0.0
    """To ranks of other hosts."""
    largest_bytes: float = 0.0
    """Largest single message."""


class StageSegment(NamedTuple):
    """A piece of a stage: work, then perhaps a call."""

    core_s: float
    call: CollectiveCall | None = None

    def times(self, factor: float) -> StageSegment:
        """Return the segment for a bucket `factor` times as large."""
        call = self.call
        if call is not None:
            sizes = (call.near_bytes * factor, call.far_bytes * factor, call.largest_bytes * factor)
            call = CollectiveCall(call.kind, call.scope, *sizes)
        return StageSegment(self.core_s * factor, call)


Stages = tuple[tuple[StageSegment, ...], ...]
"""What one bucket costs by one scheme: a series of segments for each stage."""


def scaled(stages: Stages, factor: float) -> Stages:
    """Return the cost of a bucket `factor` times as large."""
    return tuple(tuple(segment.times(factor) for segment in stage) for stage in stages)


def plain(bucket_bytes: float) -> Stages:
    """Return the cost of DDP's own all-reduce."""
    return ((StageSegment(0.0, CollectiveCall("ring", "world", bucket_bytes)),),)


class Transfer(NamedTuple):
    """What a call needs of one link."""

    link: str
    latency_s: float
    busy_s: float
    """Time on the link if it had it to itself."""
    core_s: float


def transfer(call: CollectiveCall, network: Network) -> Transfer:
    """Return what a call takes."""
    hosts, ranks, size = network.hosts, network.ranks, network.size
    outer = "inter" if hosts > 1 else "intra"
    if call.kind == "ring":
        if call.scope == "within":
            sent = 2 * (ranks - 1) / ranks * call.near_bytes
            return Transfer("intra", network.intra.ring_s, sent * network.intra.byte_s, sent * network.core_byte_s)
        if call.scope == "across":
            sent = 2 * (hosts - 1) / hosts * call.near_bytes
            busy = ranks * sent * network.inter.byte_s
            return Transfer("inter", network.inter.ring_s, busy, sent * network.core_byte_s)
        sent = 2 * (size - 1) / size * call.near_bytes
        return Transfer(outer, network.world.ring_s, sent * network.world.byte_s, sent * network.core_byte_s)
    rounds = max(-(-call.largest_bytes // PIECE_BYTES), 1.0) if call.near_bytes + call.far_bytes else 0.0
    link = network.intra if call.scope == "within" or hosts == 1 else network.inter
    busy = call.near_bytes * network.intra.byte_s + call.far_bytes * ranks * network.inter.byte_s
    sent = call.near_bytes + call.far_bytes
    name = "intra" if call.scope == "within" else outer
    return Transfer(name, rounds * link.message_s, busy, sent * network.core_byte_s)


class Profile(NamedTuple):
    """When the backward pass has the buckets ready."""

    bytes: tuple[int, ...]
    """Of each bucket, in DDP's order."""
    ready_s: tuple[float, ...]
    """Work of the backward pass after the first bucket is ready, until each is; the first is 0."""
    rest_s: float
    """From the end of averaging to the first bucket of the next step."""
    threads: float = 1.0
    """Cores that the backward pass uses."""
    copy_byte_s: float = 0.0
    """Seconds to copy a byte of an averaged bucket into the gradients; 0 where these are views of it."""
    core_s: float = 0.0
    """Seconds of cores that all of a step takes but communication; 0 where that is not known."""
    busy: float = 1.0
    """Of cores that bound a step, the share in use."""


def core_seconds(stages: Stages, network: Network, threads: float) -> float:
    """Return the seconds of cores that averaging a bucket takes on a rank."""
    moving = (
        transfer(segment.call, network).core_s for stage in stages for segment in stage if segment.call is not None
    )
    return threads * sum(segment.core_s for stage in stages for segment in stage) + sum(moving)


class Timeline(NamedTuple):
    """The predicted step; all seconds from the first bucket on, but `step_s`."""

    step_s: float
    ready_s: tuple[float, ...]
    """With communication taking some of the cores."""
    done_s: tuple[float, ...]
    """When each bucket is averaged."""

    @property
    def exposed_s(self) -> float:
        """Communication that the backward pass does not hide."""
        return max(max(self.done_s) - self.ready_s[-1], 0.0)


def simulate(profile: Profile, costs: Sequence[Stages], network: Network) -> Timeline:
    """Predict a step.

    Args:
        profile: of the backward pass.
        costs: of each bucket, in order.
        network: links and cores.

    Returns:
        When buckets are ready and averaged, and the length of the step.

    Example:
        >>> wide = Link(ring_s=0.0, message_s=0.0, byte_s=1e-6)
        >>> network = Network(2, 1, wide, wide, wide, cores=2.0)
        >>> profile = Profile((1000, 1000), (0.0, 0.001), rest_s=0.01)
        >>> round(simulate(profile, [plain(1000), plain(1000)], network).step_s, 6)
        0.012
    """
    return _Fluid(profile, costs, network).run()


class _Task:
    """A series of segments under way, of whatever job."""

    def __init__(self, segments: Sequence[_Need], ended: Callable[[float], None]) -> None:
        self.segments, self.ended, self.at = segments, ended, 0
        self.left = 1.0
        """Of the present segment."""

    @property
    def need(self) -> _Need:
        return self.segments[self.at]


class _Need(NamedTuple):
    """A segment as the simulation sees it: seconds if it had everything to itself, and what it takes meanwhile."""

    seconds: float
    cores: float
    link: str = ""


def _needs(segments: Sequence[StageSegment], network: Network, threads: float, saved: dict[str, float]) -> list[_Need]:
    """Return what a stage takes, and take off `saved` the seconds of each link that it is spared."""
    needs = []
    for segment in segments:
        if segment.core_s > 0:
            needs.append(_Need(segment.core_s, threads))
        if segment.call is not None:
            link, latency, busy, core = transfer(segment.call, network)
            if latency > 0:
                needs.append(_Need(latency, 0.0))
            spared = min(saved.get(link, 0.0), busy)
            saved[link] = saved.get(link, 0.0) - spared
            busy = max(busy - spared, core)
            if busy > 0:
                needs.append(_Need(busy, core / busy, link))
    return needs or [_Need(_EPSILON_S, 0.0)]


class _Fluid:
    """Tasks that advance at the rates that links and cores leave them, from event to event."""

    def __init__(self, profile: Profile, costs: Sequence[Stages], network: Network) -> None:
        self.profile, self.costs, self.network = profile, costs, network
        self.threads = min(profile.threads, max(network.cores, 1e-6))
        # What backward takes was seen among the other ranks. What one thread encodes is known as if it had a core.
        self.coding = self.threads if profile.threads > 1 else 1.0
        self.ready = [0.0] * len(costs)
        self.done = [0.0] * len(costs)
        self.active: list[_Task] = []
        self.waiting: defaultdict[int, deque[int]] = defaultdict(deque)
        """Stage → buckets that wait for it."""
        self.taken: set[int] = set()
        """Stages that a bucket is in."""
        outer = ("inter", network.inter) if network.hosts > 1 else ("intra", network.intra)
        self.saved = {outer[0]: network.burst_bytes * outer[1].byte_s}

    def run(self) -> Timeline:
        now = 0.0
        self._backward(0, now)
        while self.active:
            rates = self._rates()
            step = min(task.left * task.need.seconds / rate for task, rate in zip(self.active, rates, strict=True))
            now += step
            running, self.active = self.active, []
            for task, rate in zip(running, rates, strict=True):
                task.left -= step * rate / task.need.seconds
                if task.left > 1e-9:
                    self.active.append(task)
                elif task.at + 1 < len(task.segments):
                    task.at, task.left = task.at + 1, 1.0
                    self.active.append(task)
                else:
                    task.ended(now)
        end = self.ready[-1]
        for nbytes, done in zip(self.profile.bytes, self.done, strict=True):
            end = max(end, done) + nbytes * self.profile.copy_byte_s
        work = self.profile.core_s + sum(core_seconds(stages, self.network, self.coding) for stages in self.costs)
        step_s = max(self.profile.rest_s + end, work / max(self.profile.busy * self.network.cores, 1e-6))
        return Timeline(step_s, tuple(self.ready), tuple(self.done))

    def _backward(self, bucket: int, now: float) -> None:
        """Take note that a bucket is ready, and start the next."""
        self.ready[bucket] = now
        self._queue(bucket, 0, now)
        if bucket + 1 < len(self.costs):
            work = self.profile.ready_s[bucket + 1] - self.profile.ready_s[bucket]
            need = _Need(max(work, _EPSILON_S), self.threads)
            self.active.append(_Task([need], lambda then: self._backward(bucket + 1, then)))

    def _queue(self, bucket: int, stage: int, now: float) -> None:
        if stage == len(self.costs[bucket]):
            self.done[bucket] = now
            return
        self.waiting[stage].append(bucket)
        self._serve(stage)

    def _serve(self, stage: int) -> None:
        if stage in self.taken or not self.waiting[stage]:
            return
        self.taken.add(stage)
        bucket = self.waiting[stage].popleft()
        needs = _needs(self.costs[bucket][stage], self.network, self.coding, self.saved)

        def ended(now: float) -> None:
            self.taken.discard(stage)
            self._queue(bucket, stage + 1, now)
            self._serve(stage)

        self.active.append(_Task(needs, ended))

    def _rates(self) -> list[float]:
        sharing = Counter(task.need.link for task in self.active)
        most = [1.0 / sharing[task.need.link] if task.need.link else 1.0 for task in self.active]
        wanted = [rate * task.need.cores for rate, task in zip(most, self.active, strict=True)]
        given = fair_shares(wanted, self.network.cores)
        return [rate if want <= 0 else rate * got / want for rate, want, got in zip(most, wanted, given, strict=True)]


def fair_shares(wanted: Sequence[float], capacity: float) -> list[float]:
    """Share out a capacity max-min fair: who wants little gets it, the others get as much as each other.

    Example:
        >>> fair_shares([0.1, 1.0, 1.0], 1.5)
        [0.1, 0.7, 0.7]
    """
    given, left = [0.0] * len(wanted), capacity
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    for position, i in enumerate(order):
        given[i] = min(wanted[i], left / (len(order) - position))
        left -= given[i]
    return given
